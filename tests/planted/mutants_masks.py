# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what block masks bring; and in what makes one of a mask, with cases of
`tests/kernels/test_emulator_mask_tiles.py`.
"""

from __future__ import annotations

from functools import partial

from .markers import change, without
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")

FORWARD_MASKS = (
    Bug("mask of the first head for all", change("mask-of-its-head", "(heads ? head : 0)", "0"), "block-mask-blocks", r"RACE"),
    Bug("lists of the first sequence for all", change("list-of-its-head", "s.index, head)", "0, head)"), "block-mask-d256", r"RACE"),
    Bug("packed: lists of the first sequence for all", change("list-of-its-sequence", "first + block", "block"), "packed-block-mask", r"RACE"),
    _sm90("packed: a mask for rows behind the last sequence", change("mask-of-rows-outside", "min(sequence, problem.batch - 1)", "sequence"), "packed-block-mask", r"buffer"),
    Bug("tile of the first row of tiles", change("kind-of-the-tile", "static_cast<long long>(q) * k_tiles + k", "k"), "block-mask"),
    Bug("bits of the first row", change("bits-of-the-row", "2 * row + i", "i"), "block-mask"),
    Bug("bits not counted from the lane", change("bits-from-the-lane", "(col0 % 32 + Keys::of_lane(lane))", "col0 % 32"), "block-mask"),
    _sm90("copied bits: of a block's first tile for all of it", change("kind-of-each-tile", "tile % kAlong", "0"), "block-mask-causal-d128"),
    Bug("sight of the first group for all", change("sight-of-the-group", "entry >> 2 * group & 3", "entry & 3"), "block-mask-stripes-d128", arch="sm_90"),
    Bug("whole for the mask, not for the bounds", change("whole-in-mask-and-bounds", "mask.full(q0, k0)", "true"), "block-mask-everything"),
    _sm90("a block of which nothing is seen for a whole one", change("block-of-nothing", "kInPart", "kWhole"), "block-mask-nothing"),
    _sm90("more blocks passed than there are stages", change("hidden-block-passed-fwd", "passed < smem.kPassedInARow", "true"), "block-mask-stripes-d256", r"RACE|PHASE OVERRUN|DEADLOCK"),
    _sm90("first block of a list dropped as the first of all keys", change("first-block-of-a-list-dropped", "tile.key_block(first)", "first"), "block-mask-dropout-d128"),
    _sm90("copied bits: a block's before it is free", without("bits-empty"), "block-mask-d128", r"RACE|more arrivals|PHASE OVERRUN"),
    _sm90("copied bits: handed back before they are read", (change("k-released-at-once", "if constexpr (!kCopiesBits) ", ""), without("bits-of-the-first-block-read")), "block-mask-d128", r"RACE|more arrivals|PHASE OVERRUN"),
    _sm90("copied bits: of the first group for all", change("tile-of-the-group", "group * kAlong + i", "i"), "block-mask"),
    _sm90("copied bits: not counted from the lane", change("copied-bits-from-the-lane", "Keys::of_lane(lane)", "0"), "block-mask"),
    _sm90("copied bits: causal bounds left out", without("bits-within-bounds"), "block-mask-everything"),
    _sm90("copied bits: of the first tile with bits for all", change("bits-of-the-tile", "kind - kFirstBits", "0"), "block-mask"),
    _sm90("copied bits: no mask where scores are formed again", without("mask-again"), "block-mask-large-scores"),
    Bug("hidden keys in the sum of a repaired row", without("hidden-key-of-the-sum"), "block-mask-nan-visible"),
    Bug("hidden keys in a repaired row", without("hidden-key-of-the-output"), "block-mask-holes"),
)  # fmt: skip

BACKWARD_MASKS = (
    Bug("next head begins where the last one ended", change("next-head-with-visits", ", i = 0", ""), "block-mask-d128", r"row_stats|RACE|buffer"),
    Bug("visits of the first head alone", change("visits-of-all-lists", "n < group", "n < 1"), "block-mask-d128"),
    Bug("ranks of another block", change("rank-in-the-list", "at.block)", "at.block + 1)"), "block-mask-deterministic", r"DEADLOCK"),
    _sm90("ranks of another block on Hopper", change("rank-in-the-list", "at.block)", "at.block + 1)"), "block-mask-deterministic", r"DEADLOCK"),
    _sm90("bits of neighbours", change("two-of-every-eight", "8 * i", "0"), "block-mask"),
    _sm90("copied bits: a visit's before those of the last one are taken", without("bits-taken"), "block-mask", r"RACE|more arrivals|PHASE OVERRUN|DEADLOCK"),
    _sm90("copied bits: taken before they are there", without("bits-full"), "block-mask", r"RACE|uninitialised|PHASE OVERRUN"),
    _sm90("copied bits: their place is not handed back", without("bits-released"), "block-mask", r"DEADLOCK"),
    _sm90("copied bits: of another tile of queries", change("kind-of-the-visit", "visit.q0()", "0"), "block-mask"),
    _sm90("copied bits: of the first group's keys", change("kind-of-the-visit", "visit.k0 + group * kMaskTile", "visit.k0"), "block-mask"),
    _sm90("copied bits: keys of the first warp for all", change("bits-of-the-key", "thread / 32 * 16 + ", ""), "block-mask"),
    Bug("dbias of what the block mask hides", change("dbias-by-the-block-mask", "counts && seen(row, col)", "counts"), "block-mask-bias"),
    Bug("hidden keys in a repaired dq", without("hidden-key-of-dq"), "block-mask-holes"),
    _sm90("hidden block of dQ passed without its K", change("hidden-block-passed-dq", "passed < kPassedInARow", "true"), "block-mask-stripes-d256", r"DEADLOCK"),
)  # fmt: skip

FORWARD_MASK_TILES = (
    Bug("mask tiles: keys of the first query for all", change("query-of-the-lane", "offset_of(lane())", "offset_of(0)"), "chunks"),
    Bug("mask tiles: queries read behind the last one", change("last-query-behind-it", "min(first + i, queries - 1)", "(first + i)"), "ragged", r"buffer"),
    Bug("mask tiles: keys read behind the last one", change("last-key-behind-it", "min(32 * (n % 2) + lane(), keys - 1)", "32 * (n % 2) + lane()"), "ragged", r"buffer"),
    Bug("mask tiles: lowest bit of a byte alone", change("any-byte-but-0", "x | ((x & 0x7f7f7f7fu) + 0x7f7f7f7fu)", "x << 7"), "bytes"),
    Bug("mask tiles: of the first sequence", change("mask-of-its-tile", "sequence * to.batch", "0 * to.batch"), "chunks"),
    Bug("mask tiles: of the first head", change("mask-of-its-tile", "head * to.head", "0 * to.head"), "ragged"),
    Bug("mask tiles: of the first queries", change("mask-of-its-tile", "q0 * to.row", "0 * to.row"), "chunks"),
    Bug("mask tiles: of the first keys", change("mask-of-its-tile", "k0 * to.key", "0 * to.key"), "keys"),
    Bug("mask tiles: the first of those that are one", change("all-tiles-that-are-one", "i < count", "i < 1"), "keys"),
    Bug("mask tiles: seen by the first warp", without("seen-by-either-warp"), "chunks"),
    Bug("mask tiles: hidden from the first warp", without("hidden-from-either-warp"), "chunks"),
    Bug("mask tiles: a mod of the first sequence", change("tile-by-mask-mod", "sequence, head", "0 * sequence, head"), "documents"),
    Bug("mask tiles: a mod of the first head", change("tile-by-mask-mod", "head, {query", "0 * head, {query"), "rows"),
    Bug("mask tiles: a mod of the next query", change("tile-by-mask-mod", "n / 2}", "n / 2 + 1}"), "rows"),
    Bug("mask tiles: a mod of the first keys", change("tile-by-mask-mod", "keys[n % 2]", "keys[0]"), "padded"),
    Bug("mask tiles: bits of the first tile for all", change("kind-of-a-tile", "kFirstBits + number", "kFirstBits"), "chunks"),
)  # fmt: skip

BACKWARD_MASK_TILES = (
    Bug("mask tiles: bits by keys as by queries", change("bits-transposed", "(other & low) << n", "(other & low)"), "chunks"),
)  # fmt: skip

# In the kernel that makes ranges of padding masks; cases are those of tests/kernels/test_emulator_key_ranges.py.
KEY_RANGES = (
    Bug("keys of the first warp alone", without("found-by-all-warps"), "left", r"RACE"),
    Bug("keys behind the row", change("keys-of-the-mask", "j < keys && shown[j] != 0", "shown[j] != 0"), "left", r"buffer|FAILED|equal"),
    Bug("row of the first sequence for all", change("row-of-the-mask", "sequence * p.shown_stride", "0 * p.shown_stride"), "left"),
    Bug("the last key that begins", change("keys-found-added", "min(first, other.first)", "max(first, other.first)"), "left"),
    Bug("keys between others let through", change("keys-between-others", "found.begins > 1", "false"), "holes far apart"),
    Bug("window from the first key on", change("keys-in-the-window", "place - p.left", "0LL"), "window"),
    Bug("window to the last key", change("keys-in-the-window", "place + p.right + 1", "place + p.used"), "both sides"),
)  # fmt: skip
