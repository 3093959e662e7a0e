"""How the blocks of a call over a cache share out the work (kernels_cu/decode/shares.cuh), and what comes behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cache.problem import CacheProblem
from ..gpu.device import Device
from .decode_kernels import COMBINE_WARPS, SLICE, Combine, CombineTile, Decode, DecodeTile

SPLIT_KEYS = 1024  # of batch_invariant, times the tiles of a sequence's rows: else its parts would take too much memory
# Of a cache with room for no more keys, a block for each tile wins what the kernel behind costs, where lengths are
# equal: 1.7 us of 14 with room for 512 keys, 0.8 of 20 for 1024 (docs/performance.md). Else it may lose as much.
_SHORT_KEYS = 1024
_PARTS_AT_ONCE = 4  # that a thread of the kernel behind reads: kAtOnce (parts.cuh)


@dataclass(frozen=True)
class DecodePlan:
    """One call.

    Attributes:
        variant, grid: the main kernel.
        combine, combine_grid: the kernel behind it; None where no partial results can be left.
        shares: the fields of `Shares` (params_decode.py).
    """

    variant: Decode
    grid: int
    combine: Combine | None
    combine_grid: int
    shares: dict[str, Any]

    @property
    def places(self) -> int:
        """Rows of partial results."""
        if self.combine is None:
            return 0
        tile = self.variant.tile
        return self.grid * (1 if self.shares["splits"] else 2) * tile.heads * tile.block_m


def rows_of(p: CacheProblem) -> int:
    """Packed rows of a sequence; where nobody knows how many queries each has, of one with as many as others. What is
    independent of the batch is to be so of this number too. Where sequences of many are left to the forward, others
    decode one token each, unless the numbers suggest that all have as many.
    """
    if not p.packed:
        return p.seqlen_q * p.group
    of_each, rest = divmod(p.seqlen_q, max(1, p.batch))
    if p.batch_invariant:
        return 4 * p.group
    return (1 if p.most_queries is not None and rest else of_each + (rest > 0)) * p.group


def splits_of(p: CacheProblem, row_tiles: int = 1) -> tuple[int, int] | None:
    """(splits of a tile at most, slices of each; 0: shared out evenly), where ranges are not wanted.

    Args:
        row_tiles: of a sequence's rows.
    """
    if p.num_splits is not None:
        return p.num_splits, 0
    if p.batch_invariant:
        each = SPLIT_KEYS * (1 if p.packed else row_tiles)  # packed, the device knows how many (shares.cuh)
        return max(1, -(-p.capacity // each)), each // SLICE
    return None


def _packed_tiles(p: CacheProblem, block_m: int) -> int:
    """Tiles of all rows and one head, at most: each sequence may have one that is not full, and so may the rows behind
    the last."""
    return (p.seqlen_q * p.group + (block_m - 1) * (p.batch + 1)) // block_m


def _packed_parts(p: CacheProblem, block_m: int, splits: tuple[int, int]) -> int:
    """Parts of these tiles, at most. A part of one of n tiles of a sequence has n times split_slices: those of all n
    are fewer than `splits` and n together. Where edges go back, this holds for the tiles that are combined.
    """
    tiles, (most, slices) = _packed_tiles(p, block_m), splits
    return (p.batch + 1) * (most - 1) + tiles if slices else tiles * most


def _one_each(p: CacheProblem, tile: DecodeTile, tiles: int, device: Device) -> bool:
    """Whether every tile has a block of its own, so that nothing is left to combine: short ones, as many as blocks."""
    blocks = device.sm_count * tile.blocks_per_sm
    return not (tile.cluster or p.packed) and p.capacity <= _SHORT_KEYS and 0.9 * blocks <= tiles <= blocks


def _are_equal(p: CacheProblem) -> bool:
    """Whether the plan knows that all sequences have the same units."""
    return not p.packed and (p.batch == 1 or (p.one_length and not p.kv_range))


def _largest_divisor(n: int, limit: int) -> int:
    return max(i for i in range(1, limit + 1) if n % i == 0)


def shared_out(p: CacheProblem, device: Device, variant: Decode) -> DecodePlan:
    """The plan with this main kernel."""
    tile, rows = variant.tile, rows_of(p)
    most = p.seqlen_q if p.most_queries is None else min(p.most_queries, p.seqlen_q)
    all_rows = most * p.group  # packed: as many as any sequence can have
    row_tiles = max(1, -(-all_rows // tile.block_m))
    splits = splits_of(p, row_tiles)
    if splits is None and _one_each(p, tile, p.batch * p.heads_k // tile.heads * row_tiles, device):
        splits = 1, 0
    gang = 1 if tile.cluster or splits else _largest_divisor(p.heads_k // tile.heads, 4 if tile.heads > 1 else 8)
    head_turns = p.heads_k // (tile.heads * gang)
    tiles = head_turns * (_packed_tiles(p, tile.block_m) if p.packed else p.batch * row_tiles)
    cuts = False  # whether blocks share tiles of equal sequences, and another kernel combines what they leave
    shares: dict[str, Any] = {"gang": gang, "clusters": tile.cluster, "splits": 0, "split_slices": 0, "even_ranges": 0}
    if tile.cluster:
        ranges = grid = tiles * tile.cluster
        parts = tile.cluster
    elif splits:
        shares["splits"], shares["split_slices"] = splits
        ranges = head_turns * _packed_parts(p, tile.block_m, splits) if p.packed else tiles * splits[0]
        grid, parts = ranges, splits[0]
        cuts = splits != (1, 0)
    else:
        turns = p.batch * head_turns * (max(1, -(-rows // tile.block_m)) if p.packed else row_tiles)
        ranges = max(1, device.sm_count * tile.blocks_per_sm // gang)
        grid, parts = ranges * gang, -(-ranges // max(1, turns))
        even = shares["even_ranges"] = 0 if p.packed else _even(turns, ranges)
        cuts = not even or turns % even > 0
    shares |= {"ranges": ranges, "row_tiles": row_tiles, "head_turns": head_turns}
    combined_rows = tile.block_m if p.packed else min(tile.block_m, all_rows)
    cut, of_tile = (tiles if splits else ranges - 1) * gang, tile.heads * combined_rows * (p.head_dim_v // 4)
    at_once = CombineTile.behind(variant).blocks_per_sm * device.sm_count
    shares["combine_elements"] = (
        _invariant_elements(of_tile) if p.batch_invariant else _combine_elements(cut, of_tile, parts, at_once)
    )
    shares |= _numbers(p, variant, all_rows, gang, row_tiles * head_turns)
    if not cuts and (splits or _are_equal(p)):
        return DecodePlan(variant, grid, None, 0, shares)
    combine = Combine.behind(variant)
    return DecodePlan(variant, grid, combine, cut * -(-of_tile // shares["combine_elements"]), shares)


def _combine_elements(tiles: int, of_tile: int, parts: int, blocks: int) -> int:
    """Of a block that combines: so many that its threads read all parts at once, or more, up to one a thread, where
    else not all blocks are there at the same time."""
    threads = 32 * COMBINE_WARPS
    elements = min(threads, max(16, 1 << max(1, threads * _PARTS_AT_ONCE // parts).bit_length() - 1))
    while elements < threads and tiles * -(-of_tile // elements) > blocks:
        elements *= 2
    return elements


def _invariant_elements(of_tile: int) -> int:
    """The same where it must not follow from the batch, nor from the width of a block table, which its longest sequence
    may decide: in which order parts are added follows from it. An eighth of a tile."""
    return min(32 * COMBINE_WARPS, max(16, 1 << max(1, of_tile // 8).bit_length() - 1))


def _numbers(p: CacheProblem, variant: Decode, all_rows: int, gang: int, turns: int) -> dict[str, Any]:
    """What follows for the kernels, so that they need not divide; `turns`: of a sequence."""
    block_m = variant.tile.block_m
    return {
        "group": p.group,
        "unit": _unit(p, variant),
        "log_rows": (max(4, block_m if p.packed else min(block_m, all_rows)) - 1).bit_length(),
        "by_group": -(-(1 << 20) // p.group),
        "by_gang": -(-(1 << 20) // gang),
        "by_turns": -(-(1 << 20) // turns) if variant.tile.cluster else 0,
    }


def _unit(p: CacheProblem, variant: Decode) -> float:
    """That of scores (kernels_cu/attention/score.cuh)."""
    if variant.bias:
        return 1.0
    return p.softcap if p.softcap is not None else 1.0 if variant.scale_first else p.scale


def _even(turns: int, most: int) -> int:
    """Ranges that end where tiles do, so that equal sequences leave no partial results, or few; 0 if those would be
    much fewer."""
    if turns == 0:
        return 0
    even = turns // -(-turns // most) if turns >= most else most // turns * turns
    return even if (turns % even == 0 or even % turns == 0) and even >= 0.9 * most else 0
