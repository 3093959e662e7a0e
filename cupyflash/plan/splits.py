"""The keys of a sequence over a cache, divided among blocks of the forward (key_parts.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.problem import CacheProblem
from ..gpu.device import Device
from .kernels import Main, round_up, row_bytes
from .numbers import Chosen, Extents, Workspace
from .params import FWD_PARAMS
from .spec import Spec
from .variant import Tile, Variant

# In keys that a block visits, whatever one takes: what a tile costs besides its keys; what putting parts together costs
# and how many numbers cost as much as a key there; how much more the keys of a part cost, which end at both sides
# (fitted on an H100: docs/performance.md).
_TILE_COST, _SUM_COST, _NUMBERS_A_KEY, _PART_FACTOR = 200, 700, 3000, 1.06
_MOST_SPLITS = 16
_MOST_BYTES = 128 << 20  # of all parts


@dataclass(frozen=True)
class PartsTile:
    """A block takes `block_m` queries of a head, a warp 64 columns; rows that are not finite go by `block_n` keys."""

    warps: int
    block_m: int = 16
    block_n: int = 64
    blocks_per_sm = 1
    name = ""

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """The rows."""
        return self.block_m * row_bytes(round_up(head_dim_v or head_dim, 64), itemsize)


@dataclass(frozen=True)
class Parts(Main):
    """fwd_parts.cuh: O and lse from those of parts of the keys."""

    folder, header, function, params_name, params = "any", "fwd_parts", "fwd_parts", "FwdParams", FWD_PARAMS

    sink: bool = False


def may_divide(call: Spec | CacheProblem) -> bool:
    """Whether features let the keys of a call over a cache be divided: a part is a range of keys, so not beside
    `kv_range`; a sink counts once; beside ALiBi it has not been tried."""
    return not (call.alibi or call.kv_range or call.sink)


def forward_kernels(spec: Spec, kind: type[Main], tile: Tile, tile_of_parts: Tile | None = None) -> tuple[Variant, ...]:
    """A forward's main kernel, of a kind; and over a cache that of parts of the keys and the one behind it."""
    main = kind.of(spec, tile)
    if not (spec.paged and may_divide(spec)):
        return (main,)
    whole = spec._replace(causal=False, window=True)
    of_parts = kind.of(whole._replace(kv_range=True, split_keys=True), tile_of_parts or tile)
    return main, of_parts, Parts.of(whole, PartsTile(round_up(spec.width_v, 64) // 64))


@functools.lru_cache(maxsize=4096)
def key_splits(room: int, tiles: int, work: float, keys: int, numbers: int) -> int:
    """Into how many parts `keys` of a sequence are divided: what takes the least time.

    Args:
        room: how many blocks run at a time.
        tiles: of queries; there is a block for each part of one.
        work: as many whole tiles take as long as these, of which some have fewer rows.
        numbers: that all queries have in O.
    """

    def time(splits: int) -> float:
        rounds: float = -(-tiles * splits // room)
        if splits == 1:
            return rounds * (keys + _TILE_COST)
        rounds = max(1, (rounds + work * splits / room) / 2)  # blocks begin as others end
        return rounds * (keys * _PART_FACTOR / splits + _TILE_COST) + _SUM_COST + splits * numbers / _NUMBERS_A_KEY

    most = min(_MOST_SPLITS, _MOST_BYTES // max(1, 4 * numbers))
    return min(range(1, max(1, most) + 1), key=time)


def in_parts(kernels: Sequence[Variant], device: Device, extents: Extents, tiles: int, *found: Any) -> Chosen:
    """What is chosen for a forward that may divide its keys, by its kernels: main, that of parts, the one behind it.

    Args:
        tiles: that the first one has room for.
        found: what else is chosen.
    """
    whole_keys, main, behind = kernels
    assert whole_keys.block_m == main.block_m
    batch, rows, keys, heads_q, *_ = extents
    # Nobody here knows how many queries a sequence has, nor how many keys of those that there is room for.
    sequences = max(1, min(batch, rows // main.constants["least_queries"]))
    whole, left = divmod(rows / sequences / main.block_m, 1)
    blocks, work = whole + (left > 0), whole + (left > 0) * (1 + left) / 2  # the last one waits as long for K and V
    width_v = main.head_dims[-1]
    heads, numbers = sequences * heads_q, rows * heads_q * width_v
    room = device.sm_count * main.tile.blocks_per_sm
    splits = key_splits(room, int(blocks) * heads, work * heads, keys // max(1, batch), numbers)
    if splits == 1:
        return (tiles, 0, 0), {}, *found, 1
    of_rows = heads_q, splits, rows
    workspace: Workspace = {"o_parts": ((*of_rows, width_v), "fp32"), "lse_parts": (of_rows, "fp32")}
    pieces = (rows // behind.rows + batch + 1) * heads_q
    return (0, tiles * splits, pieces), workspace, *found, splits
