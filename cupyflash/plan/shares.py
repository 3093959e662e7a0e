"""The heads of q of a group, divided among blocks of the backward (shares.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..gpu.device import Device
from .kernels import Convert, round_up, row_bytes
from .spec import Spec
from .variant import Variant

# What a block costs besides its visits to query tiles, and adding up shares besides, in visits (fitted on an H200:
# docs/performance.md).
_BLOCK_COST, _SUM_COST = 8, 5
_MOST_BYTES = 128 << 20  # of all shares; or as many as q has, if it has more


@dataclass(frozen=True)
class SharesTile:
    """A block takes `block_m` keys, a warp 64 columns of dK or of dV, as many for either; row_stats is padded to
    `stats_rows`."""

    stats_rows: int
    warps: int
    block_m: int = 16
    blocks_per_sm = 1
    name = ""

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """Rows of both results."""
        return 2 * self.block_m * row_bytes(round_up(max(head_dim, head_dim_v), 64), itemsize)


@dataclass(frozen=True)
class Shares(Convert):
    """bwd_shares.cuh: dK and dV from the shares of a group's query heads."""

    header, function = "bwd_shares", "bwd_shares"
    over, dependent = "k", False

    tile: SharesTile  # type: ignore[assignment]
    sink: bool = False

    @classmethod
    def after(cls, spec: Spec, stats_rows: int) -> tuple[Shares, ...]:
        """What comes behind a backward's other kernels: nothing where each head of q has its own of k."""
        warps = 2 * round_up(spec.widest, 64) // 64
        return (cls.of(spec, SharesTile(stats_rows, warps)),) if spec.grouped else ()


def divide(
    variants: Sequence[Variant], device: Device, spec: Spec, extents: Sequence[int], visits: int, tiles: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """Into how many shares a group of heads is divided, and the tiles that each launch then has.

    Args:
        extents: as `Extents` has them.
        visits: to query tiles, that a block of keys makes for a head of q, if it sees all.
        tiles: of each launch of one share.
    """
    main = next(i for i, variant in enumerate(variants) if getattr(variant, "grouped", False))
    batch, seqlen_q, seqlen_k, heads_q, heads_k, _, _ = extents
    sequences = 1 if spec.packed else batch
    of_q = 2 * sequences * heads_q * seqlen_q * spec.head_dim
    of_share = 4 * sequences * heads_k * seqlen_k * (spec.head_dim + spec.width_v)
    room = device.sm_count * variants[main].tile.blocks_per_sm
    most = max(_MOST_BYTES, of_q) // max(1, of_share)
    uneven = spec.uneven and (spec.kv_range or not spec.window)  # in a window nearly all blocks see as much
    shares = 1 if spec.is_empty else _cheapest(heads_q // heads_k, tiles[main], room, visits, uneven, most)
    found = list(tiles)
    found[main] *= shares
    if shares == 1:
        found = [0 if isinstance(variant, Shares) else n for variant, n in zip(variants, found, strict=True)]
    return shares, tuple(found)


@functools.lru_cache(maxsize=4096)
def _cheapest(group: int, blocks: int, room: int, visits: int, uneven: bool, most: int) -> int:
    """The number of shares, `most` of them, that takes the least time, in visits.

    Of all blocks, `blocks` for each share, so many run at a time as have `room`.
    Those that are alike come in rounds. Of others, which make half of the visits on average, each begins when one
    ends, the longest first, and the last ones leave half of the room empty.
    """

    def time(shares: int) -> float:
        visited, count = visits * (group // shares), blocks * shares
        longest, sums = visited + _BLOCK_COST, _SUM_COST * (shares > 1)
        if not uneven:
            return -(-count // room) * longest + sums
        return max(longest, count / room * (visited / 2 + _BLOCK_COST) + longest / 2) + sums

    return min((n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n <= most)), key=time)
