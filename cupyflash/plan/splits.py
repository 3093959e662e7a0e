"""The keys of a sequence over a cache, divided among blocks of the forward (key_parts.cuh)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..gpu.device import Device
from .kernels import Main, round_up, row_bytes
from .params import FWD_PARAMS
from .spec import Spec
from .variant import Tile, Variant

# What a tile costs besides its keys, and each part of it once more when they are put together, in keys (measured on an
# H100: docs/performance.md).
_TILE_COST, _PART_COST = 192, 96
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

    def smem_bytes(self, head_dim: int) -> int:
        """The rows."""
        return self.block_m * row_bytes(round_up(head_dim, 64))


@dataclass(frozen=True)
class Parts(Main):
    """fwd_parts.cuh: O and lse from those of parts of the keys."""

    folder, header, function, params_name, params = "any", "fwd_parts", "fwd_parts", "FwdParams", FWD_PARAMS

    sink: bool = False


def beside(spec: Spec, kind: type[Main], tile: Tile) -> tuple[Variant, ...]:
    """The kernels that come in place of a forward's where keys are divided; none where they never are. A range of keys,
    of which each part is one, has no slot for another, and a sink counts once."""
    if not spec.paged or spec.alibi or spec.kv_range or spec.sink:
        return ()
    part = spec._replace(causal=False, window=True, kv_range=True, split_keys=True)
    whole = spec._replace(causal=False, window=True)
    return kind.of(part, tile), Parts.of(whole, PartsTile(round_up(spec.head_dim, 64) // 64))


@functools.lru_cache(maxsize=4096)
def key_splits(
    device: Device, head_dim: int, rows: int, heads_q: int, keys: int, block_m: int, blocks_per_sm: int
) -> int:
    """Into how many parts `keys` of a sequence are divided: what takes the least time, in keys that a block visits.

    There is a block for each part of a tile. Where all run at a time, the call takes as long as one; else half of one
    longer than all of them shared out evenly.

    Args:
        rows: queries of all sequences.
        block_m: of a tile.
    """
    room = device.sm_count * blocks_per_sm
    tiles, work = -(-rows // block_m) * heads_q, rows / block_m * heads_q
    most = max(1, _MOST_BYTES // max(1, 4 * rows * heads_q * head_dim))

    def time(splits: int) -> float:
        one = keys / splits + _TILE_COST
        at_once = one if tiles * splits <= room else one * (work * splits / room + 0.5)
        return at_once + (splits > 1) * (splits + 1) * _PART_COST

    return min(range(1, min(_MOST_SPLITS, most) + 1), key=time)
