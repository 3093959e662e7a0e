# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what a bias brings, with cases of `tests/kernels/test_emulator_bias.py`."""

from __future__ import annotations

from .markers import change, without
from .mutants import Bug

_HIDDEN = "!place(head, query, key).hides()"

FORWARD_BIAS = (
    Bug("bias: NaN behind -inf seen", change("bias-that-hides", "hides() ? bias : s + bias", "s + bias"), "nan-hidden"),
    Bug("bias: read behind the last key", change("bias-that-exists", "i >= queries || (kPairs ? j & ~1 : j) >= keys", "i >= queries"), "turned", r"buffer|load|beyond|outside"),
    Bug("bias: read behind the last query", change("bias-that-exists", "i >= queries || (kPairs ? j & ~1 : j) >= keys", "(kPairs ? j & ~1 : j) >= keys"), "pairs", r"buffer|load|beyond|outside"),
    Bug("mask: beside a bias it hides nothing", change("mask-beside-a-bias", "shown.hides() ? shown : numbers(i, j)", "(void)shown, numbers(i, j)"), "both"),
    Bug("mask: beside a bias the bias is left out", change("mask-beside-a-bias", "shown : numbers(i, j)", "shown : shown"), "both"),
    Bug("mask: what is hidden is seen", change("shown-or-hidden", "is_shown ? 0.f", "!is_shown ? 0.f"), "packed-mask"),
    Bug("bias: queries in the stride of keys", change("strides-of-bias", "i * row", "i * key"), "turned", r"buffer"),
    Bug("bias: of the first sequence", change("bias-of-its-head", "s.index * stride.batch", "0 * stride.batch"), "pairs"),
    Bug("bias: of the first head", change("bias-of-its-head", "head * stride.head", "0 * stride.head"), "pairs"),
    Bug("bias: fetched behind the last query", change("whole-tile-of-bias", "query + kQueries <= seqlen_q &&", ""), "pairs", r"buffer", "sm_90"),
    Bug("bias: fetched behind the last key", change("whole-tile-of-bias", "key0 + kKeys <= seqlen_k", "true"), "turned", r"buffer", "sm_90"),
    Bug("bias: pairs fetched behind the last query", change("bias-that-exists-fetched", "i >= queries || j >= keys", "j >= keys"), "pairs", r"buffer", "sm_90"),
    Bug("bias: fetched one by one behind the last key", change("single-bias-that-exists-fetched", "i >= queries || j >= keys", "i >= queries"), "turned", r"buffer", "sm_90"),
    Bug("bias: fetched queries in the stride of keys", change("stride-of-fetched-queries", "8 * first.row", "8 * first.key"), "turned", r"buffer", "sm_90"),
    Bug("bias: fetched keys in the stride of queries", change("stride-of-fetched-keys", "j * key", "j * row"), "turned", "", "sm_90"),
    Bug("bias: read beyond short arrays of packed sequences", change("bias-of-short-arrays", "min(s.seqlen_q, p.max_seqlen_q)", "s.seqlen_q"), "short", r"buffer"),
    Bug("bias: heads of sequences that share one mixed up", change("sequences-that-share-a-bias", "all / sequences", "all % sequences"), "wide", r"RACE"),
    Bug("bias: the second block's is the first one's", change("bias-of-the-second-block", "fetch(places, q0, first + 1)", "fetch(places, q0, first)"), "wide", "", "sm_90"),
    Bug("bias: the next block's is this one's", change("bias-of-the-next-block", "fetch(places, q0, j + 1)", "fetch(places, q0, j)"), "wide", "", "sm_90"),
    Bug("interleaved keys: of a lane those of keys in order", change("first-of-eight-keys", "8 * (lane % 4)", "2 * (lane % 4)"), "chunks", r"align", "sm_90"),
    Bug("interleaved keys: the pairs of eight in another order", change("key-of-an-interleaved-column", "col / (N / 4) * 2", "(3 - col / (N / 4)) * 2"), "chunks", "", "sm_90"),
    Bug("interleaved keys: those of a lane's columns in order", change("key-of-an-interleaved-column", "col % (N / 4) / 8 * 32 + col / (N / 4) * 2 + col % 8", "col"), "chunks-alibi", "", "sm_90"),
    Bug("interleaved keys: the first two of eight brought four times", change("two-rows-of-every-eight", "2 * i", "0"), "chunks", "", "sm_90"),
    Bug("interleaved keys: eight rows further on a row", change("two-rows-of-every-eight", "row / 8", "row"), "chunks", "", "sm_90"),
    Bug("interleaved keys: used before all four copies are here", change("bytes-of-the-interleaved-tile", "kBytes", "kBytes / 4"), "chunks", r"RACE|bytes|phase", "sm_90"),
    Bug("bias: eight keys behind the last query read", change("run-of-bias-that-exists", "i >= queries || j >= keys", "j >= keys"), "chunks", r"buffer", "sm_90"),
    Bug("bias: eight keys behind the last key read", change("run-of-bias-that-exists", "i >= queries || j >= keys", "i >= queries"), "chunks-wide", r"buffer", "sm_90"),
    Bug("bias: lse of a row without keys repaired, without its sink", change("lse-repaired", "first < end", "true"), "no-keys"),
    Bug("bias: lse of a row with a hidden NaN left NaN", without("lse-repaired"), "nan-hidden"),
    Bug("bias: O repaired with keys that it hides", change("hidden-by-bias-repair-of-o", "places(0, key).hides()", "false"), "nan-hidden"),
)  # fmt: skip
BACKWARD_BIAS = (
    Bug("bias: one query for two", change("next-query-fetched", "there + row", "there"), "turned", "", "sm_90"),
    Bug("bias: gradients repaired with keys that it hides", change("hidden-by-bias-repair", _HIDDEN, "true"), "nan-hidden"),
    Bug("bias: P of a row of -inf", change("lse-of-nothing", "lse[i] == -ptx::infinity() ? kLseOfNothing : lse[i]", "lse[i]"), "scores-of--inf"),
    Bug("dbias: of all queries where a sequence has fewer", change("dbias-of-its-room", "V::kPacked && to.row != 0 ? p.max_seqlen_q : problem.seqlen_q", "problem.seqlen_q"), "packed", r"buffer"),
    Bug("dbias: of one sequence", change("dbias-of-all-sequences", "++at.batch >= batches.end", "true"), "keys"),
    Bug("dbias: of one head", change("dbias-of-all-heads", "++at.head < heads.end", "false"), "keys"),
    Bug("dbias: last block of keys left out", change("dbias-of-blocks-that-are-seen", "mask.end_key_block(at.m * M)", "mask.end_full_block(at.m * M)"), "pairs"),
    Bug("dbias: K of another head", change("head-of-k-dbias", "head / (problem.heads_q / problem.heads_k)", "head % problem.heads_k"), "pairs"),
    Bug("dbias: tiles overwritten while they are read", without("dbias-tiles-free"), "keys", r"RACE"),
    Bug("dbias: Q and K used before they are copied", without("dbias-q-and-k-copied"), "keys", r"RACE"),
    Bug("dbias: Q and K used before all are copied", without("dbias-q-and-k-landed"), "keys", r"RACE"),
    Bug("dbias: dO and V used before they are copied", without("dbias-do-and-v-copied"), "keys", r"RACE"),
    Bug("dbias: dO and V used before all are copied", without("dbias-do-and-v-landed"), "keys", r"RACE"),
    Bug("dbias: statistics of the first query", change("statistics-of-the-rows-dbias", "exists ? query + 8 * r : 0", "0"), "pairs"),
    Bug("dbias: hidden keys counted", change("dbias-of-what-is-seen", "counts ? dS : 0.f", "dS"), "nan-hidden"),
    Bug("dbias: a row of 16 stored eight further", change("dbias-stored", "mine + row * to.row", "mine + (row ^ 8) * to.row"), "pairs", r"|store|buffer"),
    Bug("dbias: one key of a row for all", change("sum-of-a-row", "quad_reduce(total, [](float x, float y) { return x + y; })", "total"), "queries"),
    Bug("dbias: one query of a column for all", change("sum-of-a-column", "total += ptx::shfl_xor(total, mask)", "(void)mask"), "keys"),
    Bug("dbias: sums read before they are written", without("column-sums-of-all-warps"), "keys", r"RACE"),
    Bug("dbias on Hopper: K of another head", change("head-of-k-dbias-sm90", "at.head / (problem.heads_q / problem.heads_k)", "at.head % problem.heads_k"), "pairs", "", "sm_90"),
    Bug("dbias on Hopper: pairs overwritten while they are read", without("pair-free-dbias"), "many", r"RACE|arrivals", "sm_90"),
    Bug("dbias on Hopper: sums overwritten while they are read", without("sums-read-dbias"), "columns", r"RACE", "sm_90"),
    Bug("dbias on Hopper: Q and K used before they are here", without("q-and-k-here-dbias"), "keys", r"RACE", "sm_90"),
    Bug("dbias on Hopper: dO and V used before they are here", without("do-and-v-here-dbias"), "keys", r"RACE", "sm_90"),
    Bug("dbias on Hopper: products used before they are complete", without("products-complete-dbias"), "pairs", r"wgmma|RACE", "sm_90"),
    Bug("dbias on Hopper: both parts in the first", change("part-of-the-sum", "Part::kBlockN / 8 * part + col / 8", "col / 8"), "pairs", "", "sm_90"),
    Bug("dbias on Hopper: bias of the first part for all", change("bias-of-its-part", "kept.part[part]", "kept.part[0]"), "pairs", "", "sm_90"),
    Bug("dbias on Hopper: packed, bias of the first sequence for all", change("bias-is-kept", "!V::kPacked &&", ""), "packed-shared", "", "sm_90"),
    Bug("dbias: pairs written where they are not aligned", change("pairs-of-dbias", "reinterpret_cast<unsigned long long>(mine) % (2 * sizeof(Element)) == 0", "true"), "odd", r"align", "sm_90"),
)  # fmt: skip
# Where the bias comes through shared memory.
FIXED_BIAS = (
    Bug("copied bias: taken before it is here", without("copy-of-bias-landed"), "chunks", r"RACE", "sm_90"),
    Bug(
        "copied bias: taken before that of other lanes is here",
        without("copy-of-bias-of-all-lanes"),
        "chunks",
        r"RACE",
        "sm_90",
    ),
    Bug(
        "copied bias: overwritten before all lanes have taken it",
        without("copy-of-bias-taken"),
        "chunks",
        r"RACE",
        "sm_90",
    ),
    Bug(
        "copied bias: keys beyond the last one",
        change("copied-bias-that-exists", "key < bias.seqlen_k", "true"),
        "chunks",
        r"buffer",
        "sm_90",
    ),
    Bug(
        "copied bias: the first queries for all",
        change("queries-of-the-copy", "query * kRowBytes", "(query - first) * kRowBytes"),
        "chunks",
        "",
        "sm_90",
    ),
    Bug(
        "copied bias: that of this visit for the next one",
        change("bias-of-the-next-visit", "ask_for(next, key0)", "ask_for(visit, key0)"),
        "chunks",
        "",
        "sm_90",
    ),
    Bug("copied bias: that of a skipped visit for the next one", without("skipped-bias"), "chunks", "", "sm_90"),
)
