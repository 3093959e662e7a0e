# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what the forward over a cache brings: cases are those of tests/kernels/test_emulator_prefill.py."""

from __future__ import annotations

from functools import partial

from .markers import change, without
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")

PAGES = (
    _sm90("pages in their own order", change("page-of-the-row", "p.block_table[entry]", "entry"), "pages"),
    _sm90("new keys do not count", change("keys-with-the-new-ones-paged", "used + max(0, edge(b + 1) - edge(b))", "used"), "pages"),
    _sm90("pages are whole columns of the next", change("chunks-of-a-page", "rows.from_chunk(c).base", "rows.base"), "pages-of-48-d128"),
    _sm90("as many bytes of V as of K in pages", change("bytes-of-a-page", "TileKV::kBytes", "Smem::TileK::kBytes"), "mla", "DEADLOCK|RACE|bytes"),
    _sm90("stage of pages filled while it is read", without("stage-empty-paged"), "chosen-d256", "more arrivals|RACE"),
    _sm90("rows of the table behind the keys that count", change("keys-that-count-paged", "key < tile.sequence.seqlen_k", "true"), "pages", r"load at .*block_table|buffer"),
    _sm90("tiles of whole rows counted as the rest", change("whole-tiles-first", "is_whole ? index.block : index.block - whole", "index.block"), "chosen-d256", "RACE|FAILED|NaN"),
    _sm90("tiles of 32 sequences counted again", without("tiles-of-32-sequences"), "mixed-many"),
    _sm90("few queries computed twice", change("few-queries-left-out", "rows < V::kLeastQueries ? 0 : rows", "rows"), "mixed", "written twice"),
    _sm90("many queries computed twice", without("many-queries-left-out"), "mixed", "written twice"),
    Bug("few queries computed twice by the sm80 family", change("few-queries-left-out-sm80", "s.seqlen_q < V::kLeastQueries || s.index >= p.problem.batch", "false"), "mixed", "written twice"),
    Bug("table read behind the keys that count", change("units-that-exist", "unit < Tile::kRows && row0 + unit < n_rows", "true"), "pages", r"load at .*block_table|buffer"),
    Bug("rows of another page", change("page-of-the-unit", "row / kUnit", "0"), "pages"),
    Bug("rows of a page behind the keys that count", change("rows-of-a-page-that-exist", "row0 + row < n_rows && kPer * chunk < kColumns", "true"), "pages-of-some-new-d72", "buffer|copy|cp.async|bytes"),
)  # fmt: skip

# Beside a block mask.
BLOCKS = (
    _sm90("mask's rows counted from its first one", change("mask-rows-of-the-queries", "s.seqlen_k - s.seqlen_q", "0"), "blocks-d128"),
    Bug("rows above the first one see what it sees", without("kind-above-the-first-row"), "blocks-above-d256", r"load at|FAILED|^$"),
    _sm90("all rows of a warp see what the first one sees", change("query-of-the-row", "query + lane / 4 + 8 * r", "query"), "blocks-d128"),
    Bug("rows of two tiles of a mask see what those of one see", change("tile-of-the-last-row", "block_mask.kind(end_query - 1, k0)", "kind"), "blocks-nonfinite"),
    _sm90("all queries by the mask's first row", change("kind-of-the-tile", "static_cast<long long>(q) * k_tiles + k", "k"), "mask-of-heads"),
    _sm90("blocks in order, not those of the list", change("keys-of-the-listed-block", "tile.key_block(j)", "j"), "blocks-nonfinite"),
    _sm90("block behind the end of the list", change("end-of-the-list", "j == tile.end", "false"), "blocks-d128", r"load at"),
)  # fmt: skip

# Where keys are divided.
PARTS = (
    _sm90("all parts are the first one", change("head-and-part", "number % p.key_splits", "0"), "one-long-d128", "RACE|NaN|FAILED|^$"),
    _sm90("keys between two parts left out", change("keys-of-the-part", "part * keys, (part + 1) * keys", "part * keys + 1, (part + 1) * keys"), "one-long-d128"),
    Bug("keys of a part and of the next one", change("keys-of-the-part", "(part + 1) * keys", "(part + 1) * keys + 1"), "one-long-d128"),
    Bug("parts of all heads in one place", change("rows-of-the-part", "static_cast<long long>(head) * p.key_splits + part", "static_cast<long long>(part)"), "one-long-d128", r"RACE, write after write"),
    _sm90("rows of a part behind the last query", change("float-rows-that-exist", "i >= rows", "false"), "mixed-long", r"RACE|outside|out of bounds|in no buffer"),
    _sm90("every other column of a part", change("part-left", "{x, y}", "{x, 0.f}"), "one-long-d128"),
    _sm90("one part left out", change("all-parts", "i < p.key_splits", "i < p.key_splits - 1"), "one-long-d128"),
    _sm90("weights without a base", change("weight-of-the-part", "weight_of(r, i, lse[r])", "weight_of(r, i, 0.f)"), "one-long-d128"),
    _sm90("parts without keys count", change("part-without-keys", "x == -ptx::infinity() ? 0.f : ", ""), "unseen"),
    _sm90("NaN of hidden keys let through to a sum of parts", change("o-is-finite-parts", "!ptx::vote_all(stage_rows<T>(rows, 0, O, col0))", "stage_rows<T>(rows, 0, O, col0); false"), "pages-nonfinite"),
    _sm90("sum of parts written before all lanes have repaired it", without("o-repaired-by-the-warp-parts"), "pages-nonfinite", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    _sm90("lse of a row repaired by each of its warps", change("lse-repaired", "kCols >= kDimV || col0 == 0", "true"), "bias-d128", r"RACE, write after write: buffer 'lse'"),
    _sm90("block of a list in two parts", change("blocks-of-the-part", "(part + 1) * all / p.key_splits - first", "(part + 1) * all / p.key_splits - first + (part == 0)"), "blocks-nonfinite"),
    Bug("block of a list in no part", change("blocks-of-the-part", "(part + 1) * all / p.key_splits - first", "(part + 1) * all / p.key_splits - first - (part == 0)"), "blocks-of-each-mixed"),
    Bug("keys of the part's first block alone", change("keys-of-the-listed-part", "start(count)", "start(1)"), "blocks-of-each-mixed"),
    _sm90("part of no blocks computes the first one", change("part-of-no-blocks", "0x55 * kInPart", "0x55 * kWhole"), "blocks-nothing-window"),
    _sm90("Q handed back while warps multiply by it", without("q-read-by-all"), "one-long-d128", r"RACE|arrivals"),
)  # fmt: skip

OUTWEIGHED = (
    Bug("parts without weight left out", change("nothing-is-dropped", "O.x[0][j][c] = fmaf(", "if (weight[c / 2] != 0.f) O.x[0][j][c] = fmaf("), ""),
)  # fmt: skip

CLAMPED_PAGES = (
    _sm90("page that is none", change("page-within-the-array", "max(0, min(at.page, p.pages - 1))", "at.page"), "", r"load at|memory fault"),
    Bug("page that is none in the sm80 family", change("page-within-the-array-sm80", "max(0, min(at.page, p.pages - 1))", "at.page"), "", r"cp.async at|memory fault|buffer"),
)  # fmt: skip

LENGTHS = (
    _sm90("lengths beyond the capacity", change("used-within-the-capacity", "min(p.seqused_k[b], capacity)", "p.seqused_k[b]"), ""),
    _sm90("negative lengths", change("used-within-the-capacity", "max(0, min(p.seqused_k[b], capacity))", "min(p.seqused_k[b], capacity)"), ""),
    _sm90("more new keys than rows", change("edges-of-new-keys", "min(p.cu_seqlens_k[i], end)", "p.cu_seqlens_k[i]"), ""),
    _sm90("new keys from the first edge on", change("edges-of-new-keys", "i ? max(0, min(p.cu_seqlens_k[i], end)) : 0", "max(0, min(p.cu_seqlens_k[i], end))"), ""),
)  # fmt: skip

BACK = (Bug("rows before their sequence appended", without("rows-before-their-sequence"), "", "out of bounds"),)

# In the kernel that dequantizes; cases are those of tests/kernels/test_emulator_dequantize.py.
DEQUANTIZE = (
    Bug("new keys are no rows", change("keys-with-the-new-ones-dequantized", "+ appended", ""), "int8"),
    Bug("slots from the next 32 sequences on", without("slots-of-32-sequences"), "int8-many"),
    Bug("no slot told", without("slot-of-the-sequence"), "e4m3-mixed"),
    Bug("keys of few queries dequantized", change("few-queries-left-out-of-rows", "V::kLeastQueries", "1"), "e4m3-mixed"),
    Bug("nothing behind the keys", change("zeros-behind-the-keys", "keys + kBehind", "keys"), "int8"),
    Bug("rows dequantized by the first scale", change("scale-of-its-place-in-rows", "place * p.scale_stride + head", "head"), "int8-pages"),
    Bug("columns of wider rows in narrower ones", without("columns-of-the-narrower-rows"), "int8-v-narrow", "RACE, write after write"),
    Bug("what fp16 has no number for becomes inf", change("finite-in-fp16", "fabsf(y) <= kInfinite", "false"), "int8-large"),
)  # fmt: skip
