# ruff: noqa: E501 (a bug a line)
"""Bugs planted in attention over a cache: cases are those of `cupyflash/check/cache_cases.py`."""

from __future__ import annotations

from functools import partial

from .markers import change, without
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")
_ONE, _ROWS, _TEAMS = "cache-one-query", "cache-300-queries", "cache-many-units-of-teams"

DECODE = (
    # who has which keys
    _sm90("new rows are no keys", change("keys-with-the-new-ones", "+ more", ""), "cache-append"),
    _sm90("slices of a window begin one late", change("first-slice-of-the-window", "/ kSlice", "/ kSlice + 1"), "cache-window"),
    _sm90("nobody writes an empty sequence", change("slice-of-an-empty-sequence", "max(1,", "max(0,"), _ONE),
    _sm90("every row is of the first tile", change("row-of-its-tile", "shares.row_tile(tile) * V::kBlockM", "0"), _ROWS, "RACE|FAILED"),
    _sm90("more rows than there are", change("rows-that-exist-decode", "- first", ""), _ROWS, "buffer|out of"),
    _sm90("a row sees one key more", change("keys-of-a-packed-row", "mask.end_key(rows.query(row))", "mask.end_key(rows.query(row)) + 1"), _ONE),
    _sm90("a slice cut by the end is whole", change("slice-seen-by-all", "key + kSlice <= end_whole", "key < end_whole"), _ONE),
    _sm90("slope of the first head", change("slope-of-a-packed-row", "rows.head_q(head_of(i), row)", "rows.head_k"), "cache-alibi"),
    _sm90("pages of the first sequence", change("page-of-its-sequence", "b * p.table_stride", "0"), "cache-pages-of-16"),
    _sm90("units of the sequence before", change("sequence-of-a-unit", "before = b * of_each", "before = 0"), "cache-equal-many", "RACE|FAILED|buffer|DEADLOCK"),
    _sm90("a row of tiles counts parts", change("parts-or-tiles", "kTiles ? 1 : parts(c)", "parts(c)"), "cache-packed-splits", "RACE|FAILED"),
    _sm90("every part is the first of its tile", change("part-of-its-tile", "number - tile.begin", "0"), "cache-packed-splits", "RACE|FAILED"),
    _sm90("one length for all not taken", change("one-length-for-all", "p.one_length", "p.problem.seqlen_k"), "cache-one-length"),
    # loads
    _sm90("pieces as they come", change("pieces-swizzled", "piece ^ line % 8", "piece"), _ONE),
    _sm90("mbarriers not shown to TMA", without("barriers-shown-to-tma"), _ONE, "fence|RACE"),
    _sm90("Q and mbarriers not waited for", without("q-and-barriers-are-there"), _ONE, "RACE|mbarrier"),
    _sm90("no wait for the Q of a tile", without("q-has-arrived"), _ONE, "RACE"),
    _sm90("no wait for a unit", without("unit-has-arrived"), _ONE, "RACE"),
    _sm90("stage asked for while lanes read it", without("stage-read-by-the-warp"), "cache-many-units", "RACE"),
    _sm90("a warp does not say that it has read", without("stage-read-by-a-warp"), _TEAMS, "DEADLOCK|RACE"),
    _sm90("stage asked for while warps read it", without("stage-is-empty"), _TEAMS, "RACE|phase"),
    Bug("wait one unit too lax", change("unit-has-been-copied", "kStages - 1", "kStages"), _ONE, "RACE, access to the destination of cp.async"),
    Bug("copies of other lanes not waited for", without("unit-seen-by-the-team"), _ONE, "RACE"),
    Bug("stage filled while lanes read it", without("stage-read-by-the-team"), "cache-many-units", "RACE"),
    # the end of a tile
    _sm90("scratch written while it is read", without("scratch-is-free"), "cache-many", "RACE"),
    _sm90("teams added up before they are there", without("teams-have-left-theirs"), _ONE, "RACE"),
    _sm90("a tile combined at every border", change("tiles-that-a-border-cuts-first", "shares.begin(index) <= tile.begin", "true"), "cache-one-query-d128", "RACE"),
    _sm90("shares of an element not waited for", without("shares-of-an-element-are-there"), "cache-five-splits", "RACE"),
    _sm90("cluster does not wait for its parts", without("parts-of-the-cluster-are-there"), "cache-one-sequence", "RACE|cluster"),
    _sm90("no sink", change("sink-joins-once", "sum != 0.f", "false"), "cache-sink"),
    # NaN and inf
    _sm90("no repair of whole tiles", change("written-and-finite", "!finite", "false"), "cache-nonfinite-one-split"),
    _sm90("no repair of what is combined", change("combined-and-finite", "!finite", "false"), "cache-nonfinite-four-d128"),
    _sm90("repair from the first head", change("rows-of-the-cache-repair", "head * s.head", "0"), "cache-nonfinite-four-d128"),
    _sm90("repair with other scores", change("scores-as-in-the-kernel", "score.log2_factor", "0.1f"), "cache-nonfinite-four-d128"),
    # 8 bits
    _sm90("a row sees one key more, 8 bits", change("keys-of-a-packed-row-stored", "its >= end", "its > end"), "cache-int8"),
    _sm90("a slice cut by the end is whole, 8 bits", change("slice-seen-by-all", "key + kSlice <= end_whole", "key < end_whole"), "cache-int8"),
    _sm90("slope of the first head, 8 bits", change("slope-of-a-packed-row-stored", "rows.head_q(head(), row)", "rows.head_k"), "cache-e4m3-chosen"),
    _sm90("pieces of 64 bytes as they come", change("pieces-swizzled-in-halves", "piece ^ row / 2 % 4", "piece"), "cache-int8"),
    _sm90("a row of Q written while it is read", without("row-of-q-read"), "cache-int8", "RACE"),
    _sm90("Q read before all of it is prepared", without("q-is-prepared"), "cache-int8", "RACE"),
    _sm90("prepared Q not shown to TMA", change("prepared-q-shown-to-tma", "ptx::fence_proxy_async();", ""), "cache-int8-many", "RACE|fence"),
    _sm90("the maximum of a lane", change("maximum-of-a-column", "fmaxf(a, b)", "a"), "cache-int8"),
    _sm90("maxima stay behind", change("maxima-and-unit-by-one-vote", "softmax.exceeded_by(S, factor) || largest > unit_of_v.unit", "false"), "cache-int8"),
    _sm90("scales of the first page, by TMA", change("scale-of-its-place-in-time", "place[r % kBoxes] * p.scale_stride", "0"), "cache-int8-pages"),
    Bug("scales of the first page", change("scale-of-its-place", "place * p.scale_stride", "0"), "cache-int8-pages"),
    Bug("O stays in the old unit", without("unit-follows-the-scales"), "cache-int8-pages"),
    Bug("new rows without their scale", change("quotient-by-the-scale", "exact / scale", "exact"), "cache-int8-pages"),
    Bug("new rows cut off", change("nearest-e4m3", "0x7ffff", "0"), "cache-e4m3-packed"),
    # v of another head_dim
    _sm90("V within K", change("v-behind-k", "V::kPair * TileK::kBytes", "V::kPair * TileV::kBytes"), "cache-v-narrow-mla", "RACE|FAILED"),
    _sm90("boxes of V as large as those of K", change("boxes-of-v", "V::kHeadDimV", "V::kHeadDim"), "cache-v-narrow-mla-paged", "RACE|FAILED|NaN"),
    Bug("pieces of V as wide as K", without("pieces-of-the-narrower-row"), "cache-v-narrow-many-units", "RACE|FAILED"),
    Bug("pieces of V as wide as K, 8 bits", change("pieces-of-the-narrower-row-stored", "piece >= ceil_div(columns.value, 16)", "piece >= kPieces"), "cache-e4m3-v-narrow-mla", "RACE|FAILED"),
    _sm90("V read where K lies in its rows", change("place-in-rows-of-v", "TileV{0}", "TileK{0}"), "cache-int8-v-narrow-paged", "RACE|FAILED"),
    _sm90("as many columns of O as of K", change("columns-of-o-left", "kDimV / 8", "D / 8"), "cache-v-wide-packed-splits", "RACE|FAILED"),
    Bug("as many columns of v appended as of k", change("columns-of-v-appended", "V::kHeadDimV", "V::kHeadDim"), "cache-v-wide-packed-splits"),
    # biases and masks
    _sm90("a wide row sees one key more", change("keys-of-a-row-found-again", "mask.end_key(query)", "mask.end_key(query) + 1"), "cache-bias-sink-window-d256"),
    _sm90("addends of the first head", change("places-of-a-packed-row", "rows.head_q(head, row)", "rows.head_k"), "cache-bias-of-heads-paged"),
    _sm90("addends of the first head, 8 bits", change("places-of-a-packed-row", "rows.head_q(head, row)", "rows.head_k"), "cache-int8-bias"),
    _sm90("addends of the second half are those of the first", change("addends-of-a-slice", "8 * i + j", "j"), "cache-mask"),
    _sm90("addends of the keys before", change("addends-of-a-slice", "8 * i + j", "8 * i"), "cache-bias"),
    Bug("hidden keys are repaired with", change("hidden-by-bias-repair-decode", "places(0, key).hides()", "false"), "cache-mask-nonfinite-five-splits"),
    _sm90("the maximum times its factor, 8 bits", change("difference-before-its-factor", "(S[n][e] - finite_or_zero(m[n][e % 2])) * factor[n][e % 2]", "S[n][e] * factor[n][e % 2] - finite_or_zero(m[n][e % 2]) * factor[n][e % 2]"), "cache-int8-bias"),
    _sm90("repair with the factor before the maximum", change("factor-behind-the-maximum", "largest_or_zero(first, end, value)", "0.f"), "cache-bias-masks-nonfinite"),
    # block masks
    _sm90("queries count from the call's first", change("tile-mask-of-its-rows", "s.seqlen_k - s.seqlen_q", "0"), "cache-blocks"),
    _sm90("block mask of the first head", change("mask-of-its-head", "(heads ? head : 0)", "0"), "cache-blocks-d128-each-head"),
    _sm90("bits from the first key of 32", change("bits-from-the-key", ">> key % 32", ""), "cache-blocks"),
    _sm90("a slice is seen as its first row's", change("seen-of-a-slice", "rows.query(row), key)", "0, key)"), "cache-blocks"),
    _sm90("hidden keys count", change("hidden-by-tiles", "shown ? added.biased(s) : -ptx::infinity()", "added.biased(s)"), "cache-blocks"),
    _sm90("rows above the first see what it sees", change("bits-above-the-first-row", "row < 0", "false"), "cache-blocks-more-queries", "FAILED|buffer"),
    _sm90("repair sees rows above the first", change("rows-above-the-first", "at >= 0 && ", ""), "cache-blocks-above-nonfinite", "FAILED|buffer"),
    _sm90("a unit that others see", change("seen-by-a-row", "!= kEmptyTile", "== kFullTile"), "cache-blocks"),
    _sm90("a unit whose first row sees all is shown to all", change("shown-to-all-rows", "found.all_full && kind", "kind"), "cache-blocks-d128-each-head"),
    _sm90("a unit is shown above the first row", change("no-keys-above-the-first-row", "first < 0", "false"), "cache-blocks-more-queries"),
    _sm90("a unit by its first head", change("heads-of-a-unit", "i < heads * each", "i < 1"), "cache-blocks-d128-each-head"),
    _sm90("the first unit is loaded though it is hidden", without("first-seen-unit"), "cache-blocks-nothing", "has exited|RACE"),
    _sm90("hidden units are loaded", without("next-seen-unit"), "cache-blocks-many", "FAILED|RACE|DEADLOCK|mbarrier"),
    Bug("the first unit is copied though it is hidden", without("first-seen-unit-copied"), "cache-blocks-many", "FAILED|RACE"),
    Bug("hidden units are copied", without("next-seen-unit-copied"), "cache-blocks-many", "FAILED|RACE"),
    _sm90("a unit left is one further", change("behind-the-unit-got", "seen >> passed >> 1, full", "seen >> passed >> 2, full"), "cache-blocks-many-units-of-teams", "FAILED|RACE|DEADLOCK"),
    _sm90("units of the next tile passed by", change("units-of-one-tile", "min(unit + 32 * kTeams, tile.end)", "unit + 32 * kTeams"), "cache-blocks-many", "FAILED|RACE|DEADLOCK"),
    _sm90("a seen unit passed by", change("next-unit-seen", "passed * kTeams", "(passed + 1) * kTeams"), "cache-blocks", "FAILED|RACE|DEADLOCK"),
    _sm90("scales of the unit before", change("scales-of-a-seen-unit", "look_up(key), read()", "look_up(key + kSlice), read()"), "cache-int8-blocks"),
    # mods
    _sm90("mods of the first head", change("places-of-a-packed-row", "rows.head_q(head, row)", "rows.head_k"), "cache-mods-relative"),
    _sm90("NaN is seen though a mod hides it", change("hidden-though-nan", "at.hides()", "false"), "cache-mods-adds-nonfinite"),
    Bug("what mods hide is repaired with", change("hidden-by-bias-repair-decode", "places(0, key).hides()", "false"), "cache-mods-nonfinite"),
    # append
    _sm90("new rows not waited for", without("appended-rows-awaited"), "cache-append", r"RACE, access before griddepcontrol.wait"),
    Bug("new rows of the sequence before", change("sequences-that-start-before", "vote_ballot(starts)", "vote_ballot(starts && edge != 1)"), "cache-packed"),
    Bug("another column of the pair", change("other-of-the-pair", "c ^ 1", "c ^ 2"), "cache-rotary-pairs-d128"),
    Bug("turned the other way", change("turned", "own * cos - its * sin", "own * cos + its * sin"), "cache-rotary"),
)  # fmt: skip

# With lengths and tables that say anything, as tests/kernels/test_emulator_decode.py has them.
CLAMPED_CACHE = (
    Bug("lengths as they are", change("length-within-the-cache", "max(0, min(used, p.problem.seqlen_k))", "used"), "contiguous", "buffer|out of|outside"),
    Bug("pages as they are", change("place-within-the-cache", "max(0, min(place, p.places - 1))", "place"), "paged", "buffer|out of|outside"),
    _sm90("rows of the cache as they are", change("place-within-the-cache", "max(0, min(place, p.places - 1))", "place"), "chosen"),
    Bug("rows written behind the capacity", without("room-in-the-cache"), "contiguous"),
)  # fmt: skip
