# ruff: noqa: E501 (a bug a line)
"""Bugs that show only where two axes meet, as in mutants.py, each with a case of `tests/fuzz/covering.py`.

`EQUIVALENT` are edits that no result can show, with the reason.

By hand: ``python -m tests.planted_pairs`` plants all of them, ``--find`` looks for the cases again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from .markers import Edit, change, without
from .mutants import Bug


@dataclass(frozen=True)
class PairBug(Bug):
    """`case`: of the covering set. `backward`: whether it shows there. `finds`: as always; "" if the numbers are wrong."""

    backward: bool = True


def _bug(name: str, edit: Edit, case: str = "", *, backward: bool = True) -> PairBug:
    return PairBug(name, edit, case, backward=backward)


_forward = partial(_bug, backward=False)


def _batch(marker: str, params: str, sequence: str) -> Edit:
    """Sequences behind the second one are taken for it."""
    other = f"Sequence<V::kPacked>::of({params}, min({sequence}.index, 1))"
    return change(marker, f"{params}, {sequence}, ", f"{params}, {other}, ")


HEADS = (
    _bug("sm80: heads of q beyond the sixth of a group left out", change("visits-of-all-heads", "group * blocks", "min(group, 6) * blocks"), "pair-50"),
    _bug("sm80: first head of q of a group of five", change("first-head-of-the-group-sm80", "* group", "* (group - 1)"), "pair-106"),
    _bug("sm80: dQ of another batch", _batch("dq-added", "aside(p)", "sequence"), "features-0"),
    _bug("sm80: statistics of another batch", _batch("statistics-of-the-visit-sm80", "p", "sequence"), "features-4"),
    _bug("sm90: heads of q beyond the sixth of a group left out", change("visits-of-all-heads", "count = group", "count = min(group, 6)"), "pair-50"),
    _bug("sm90: first head of q of a group of five", change("first-head-of-the-group-sm90", "key_head * group", "key_head * (group - 1)"), "pair-81"),
    _bug("sm90: statistics of another batch", _batch("statistics-of-the-visit-sm90", "p.plain", "sequence"), "tiles-2"),
    _bug("dkv: statistics of another batch", _batch("statistics-of-the-visit-dkv", "p.plain", "sequence"), "tiles-3"),
    _bug("sm90: V of the head of q", change("v-of-its-head-bwd-sm90", "head_k", "visit.head"), "features-5"),
    _bug("dq: head of K wrong for groups beyond four", change("head-of-k-sm90", "p.heads_q / p.heads_k", "min(p.heads_q / p.heads_k, 4)"), "pair-17"),
    _bug("dq: statistics of another batch", _batch("statistics-of-the-rows-dq", "p.plain", "tile.sequence"), "tiles-3"),
    _bug("dQ's accumulator shared by batches", change("accumulator-of-its-sequence", "s.template", "Sequence<kPacked>::of(p, s.index % 2).template"), "features-0"),
    _bug("third batch taken for the second", change("sequence-of-the-tile", "number / heads", "min(number / heads, 1)"), "pair-90"),
    _bug("third batch at the first one's address", change("batches-lie-apart", "batch * s.batch", "(batch & 1) * s.batch"), "pair-90"),
    _bug("gradient of lse in the first batch only", change("dlse-of-every-sequence", "if (p.dlse)", "if (p.dlse && sequence.index == 0)"), "features-0"),
    _bug("gradient of lse of the other sign", change("delta-less-dlse", "sum - dlse[i]", "sum + dlse[i]"), "tiles-2"),
)  # fmt: skip
SCALE = (
    _bug("sm80: dK without the sign of the scale", change("dk-scaled-sm80", "score.scale", "fabsf(score.scale)"), "pair-76"),
    _bug("wide: dK without the sign of the scale", change("dk-scaled-wide", "score.scale", "fabsf(score.scale)"), "pair-36"),
    _bug("sm90: dK without the sign of the scale", change("dk-scaled-sm90", "score.scale", "fabsf(score.scale)"), "pair-81"),
    _bug("dkv: dK without the sign of the scale", change("dk-scaled-dkv", "score.scale", "fabsf(score.scale)"), "pair-57"),
    _bug("dq: dQ without the sign of the scale", change("dq-scaled-sm90", "score.scale", "fabsf(score.scale)"), "pair-57"),
    _bug("convert: dQ without the sign of the scale", change("dq-scaled-convert", "problem.scale", "fabsf(problem.scale)"), "pair-76"),
    _bug("scores without the sign of the scale", change("scaled-first", "s * scale", "s * fabsf(scale)"), "pair-72"),
    _bug("lse divided by a scale of zero", change("lse-in-units-of-scores", "unit > 0.f", "unit >= 0.f"), "pair-133"),
    _bug("lse in other powers for a scale below zero", change("lse-in-units-of-scores", ": kLog2e", ": 1.46f"), "pair-72"),
)  # fmt: skip
SOFTCAP = (
    _bug("softcap: dS without the derivative", change("softcap-derived", "* softcap.derivative(s)", ""), "softcap-1"),
    _bug("softcap: tanh without the sign of the scale", change("tanh-of-the-scaled-score", "p.scale /", "fabsf(p.scale) /"), "features-8"),
    _bug("softcap: lse in powers of the scale", change("lse-in-units-of-scores", "/ unit", "/ problem.scale"), "softcap-0"),
    _bug("softcap: dkv hands P over", change("weights-handed-over", "kHandsP ? W.x[k][0] : weights[k].x[0][0]", "W.x[k][0]"), "softcap-1"),
    _bug("softcap: dkv's weights from P instead of the score", change("weight-of-the-score", "score.weight(s, x)", "score.weight(x, x)"), "softcap-1"),
    _forward("softcap: forward with another cap", change("unit-of-scores", "? p.softcap", "? 1.f"), "softcap-2"),
)  # fmt: skip
ALIBI = (
    _bug("alibi: distance without its magnitude", change("alibi-of-the-distance", "fabsf(distance)", "distance"), "features-13", backward=False),
    _bug("alibi: distance from the top left", change("distance-from-the-diagonal", "query + diagonal - key", "query - key"), "alibi-13", backward=False),
    _bug("alibi: slopes of the first sequence for all", change("slopes-of-its-sequence", "? s.index :", "? 0 :"), "alibi-7", backward=False),
    _bug("alibi: slope of no sequence read", change("slopes-that-exist", "s.index < problem.batch ?", "true ?"), "alibi-11", backward=False),
    _bug("slopes: a lane's sum for the warp's", change("slopes-of-all-lanes", "sum += ptx::shfl_xor(sum, mask)", "(void)mask"), "features-17"),
    _bug("slopes: sums of one head kept for the next", without("slope-of-the-next-head"), "alibi-13"),
    _bug("slopes: another sequence's gradient not added", change("slopes-of-all-sequences", "b < end", "b < min(end, first + 1)"), "features-17"),
    _bug("slopes: last tile not added", change("tiles-with-slopes", "ceil_div(V::kOverKeys ? s.seqlen_k : s.seqlen_q, V::kBlockM)", "(V::kOverKeys ? s.seqlen_k : s.seqlen_q) / V::kBlockM"), "features-17"),
    _bug("slopes: sums read before they are written", without("sums-of-all-warps"), "features-0"),
    _bug("slopes: sm80 leaves nothing of keys that nobody sees", change("slopes-without-visits-sm80", "visits.count == 0", "visits.count < 0"), "unseen-sm80"),
    _bug("slopes: sm90 leaves nothing of keys that nobody sees", change("slopes-without-visits-sm90", "count == 0", "count < 0"), "unseen-sm90"),
    _bug("slopes: keys beyond the last leave theirs with the next head", change("slopes-of-keys-that-exist", "64 * block < visit.sequence.seqlen_k", "true"), "alibi-13"),
    _bug("slopes: dq sums rows beyond the last query", change("queries-that-exist-dq", "row < from_here.seqlen_q && ", ""), "unseen-wide"),
)  # fmt: skip
SINK = (
    _bug("sink: that of the first head for all", change("sink-that-exists", "p.sink[head]", "p.sink[0]"), "sink-6", backward=False),
    _bug("sink: read for rows of no sequence", change("sink-that-exists", "s.index < p.problem.batch ?", "true ?"), "sink-2", backward=False),
    _bug("sink: not in the sum of a row", change("sink-in-the-sum", "ptx::ex2((logit - base) * kLog2e)", "0.f"), "sink-0", backward=False),
    _bug("sink: not in the sum of a repaired row", change("sink-of-the-row", "end + Sink<V>::kAny", "end"), "features-8", backward=False),
    _bug("sinks: queries of the first sequence alone", change("sinks-of-all-queries", "blocks * S::count(problem)", "blocks"), "sink-9"),
    _bug("sinks: rows of no sequence added", without("sinks-of-sequences-alone"), "features-13"),
    _bug("sinks: a gradient of a sink that is none", change("sink-that-is-none", "logit == -ptx::infinity() ? 0.f :", ""), "sink-10"),
    _bug("sums: a lane's for the warp's", change("sum-of-all-lanes", "x += ptx::shfl_xor(x, mask)", "(void)mask"), "sink-9"),
)  # fmt: skip
STRIDES = (
    _bug("sm80: V read with the strides of K", change("strides-of-v-bwd-sm80", "p.v_stride", "p.k_stride"), "sink-6"),
    _bug("sm80: dK written with the strides of dV", change("strides-of-dk", "p.dk_stride", "p.dv_stride"), "sink-6"),
    _bug("sm80: dV written with the strides of dK", change("strides-of-dv", "p.dv_stride", "p.dk_stride"), "sink-6"),
    _bug("wide: V read with the strides of K", change("strides-of-v-wide", "p.v_stride", "p.k_stride"), "pair-77"),
    _bug("wide: dK written with the strides of dV", change("strides-of-dk-and-dv-wide", ": p.dk_stride", ": p.dv_stride"), "pair-77"),
    _bug("wide: dV written with the strides of dK", change("strides-of-dk-and-dv-wide", "? p.dv_stride", "? p.dk_stride"), "pair-77"),
    _bug("sm80: dO read with the strides of Q", change("strides-of-do-bwd-sm80", "p.dout_stride.row", "p.q_stride.row"), "pair-88"),
    _bug("sm80: heads of dO at those of Q", change("strides-of-do-bwd-sm80", "p.dout_stride, head", "p.q_stride, head"), "pair-88"),
    _bug("delta: dO read with the strides of O", change("rows-of-do-delta", "p.dout_stride", "p.o_stride"), "sink-6"),
    _bug("delta: heads of dO at those of O", change("heads-of-do-delta", "p.dout_stride", "p.o_stride"), "sink-6"),
    _bug("delta: O read with the strides of dO", change("rows-of-o-delta", "p.o_stride", "p.dout_stride"), "sink-6"),
    _bug("convert: dQ written with the strides of Q", change("strides-of-dq", "p.dq_stride.row", "p.q_stride.row"), "pair-91"),
    _bug("convert: heads of dQ at those of Q", change("strides-of-dq", "p.dq_stride, tile.head", "p.q_stride, tile.head"), "pair-127"),
)  # fmt: skip
COLUMNS = (
    _bug("columns beyond head_dim read", change("columns-that-exist", "(kValidCols == kCols || kPer * chunk < kValidCols)", "true"), "pair-122"),
    _bug("rows beyond the last one read where they are misaligned", change("rows-that-exist-unaligned", "valid ? load_chunk<true>(from) : ptx::U128{}", "load_chunk<true>(from)"), "sink-6"),
    _bug("columns beyond head_dim written", change("inside-the-array", "&& col < kValidCols", ""), "pair-122"),
)  # fmt: skip
ORDER = (
    _bug("sm80: order of the first three shares only", change("turn-awaited-sm80", "!= mine.rank", "< min(mine.rank, 3)"), "shares-sm80-d64"),
    _bug("sm90: order of the first three shares only", change("turn-awaited-sm90", "? rank :", "? min(rank, 3) :"), "shares-sm90-d64"),
    _bug("turns shared by batches", change("turn-of-its-sequence", "s.template", "Sequence<kPacked>::of(p, 0).template"), "pair-129"),
    _bug("sm80: rank counted from the first key", change("rank-in-the-query-tile-sm80", "- mask.first_key_block(v.m_block * V::kBlockM)", ""), "rank-sm80"),
    _bug("sm90: rank counted from the first key", change("rank-in-the-query-tile-sm90", "- Mask<V>(this->sequence, p.problem).first_key_block(this->q0())", ""), "unseen-sm90"),
)  # fmt: skip
SCHEDULE = (
    _bug("section before the last not cut", change("size-of-the-section", "min(p.section, last_start - section_start)", "p.section"), "pair-38"),
    _bug("last section begins one tile late", change("last-section-begins", ">=", ">"), "pair-127"),
    _bug("last section as large as the others", change("size-of-the-section", "p.last_section", "p.section"), "sink-6"),
    _bug("dkv: one follower of the queue forgotten", change("followers-dkv", "8 +", "7 +"), "tiles-3"),
    _bug("dkv: one follower of the queue too many", change("followers-dkv", "8 +", "9 +"), "tiles-3"),
    _bug("dq: one follower of the queue forgotten", change("followers-dq", "+ kGroups +", "+ kGroups - 1 +"), "tiles-3"),
    _bug("dq: Q brought before all lanes have waited", without("all-lanes-waited-dq"), "tiles-7"),
)  # fmt: skip
MASKS = (
    _bug("first block of a window left out where one key of it is seen", change("first-key", "qi + lower", "qi + lower + 1"), "left-sm90-d64"),
    _bug("blocks taken for whole by their first row", change("whole-block", "q0 + M - 1", "q0"), "pair-53"),
    _bug("last query of a window left out where it sees one key", change("end-query", "ki - lower + 1", "ki - lower"), "left-sm80-d64"),
    _bug("first query of a key left out", change("first-query", "ki - upper", "ki - upper + 1"), "causal-sm80-d64"),
    _bug("last key of a query left out", change("end-key", "qi + upper + 1", "qi + upper"), "causal-sm90-d200"),
    _forward("forward: first block of a window left out where one key of it is seen", change("first-key", "qi + lower", "qi + lower + 1"), "left-sm80-d64"),
    _forward("forward: last key of a query left out", change("end-key", "qi + upper + 1", "qi + upper"), "causal-sm80-d64"),
    _bug("dq: blocks before the window not passed", without("blocks-before-window-passed-dq"), "left-sm90-d200"),
)  # fmt: skip
REPAIR = (
    _bug("sm90: first batch repaired", change("repair-in-its-sequence-bwd-sm90", "sequence.index", "0"), "repair-sm90-d64-5"),
    _bug("dkv: first batch repaired", change("repair-in-its-sequence-dkv", "visit.sequence.index", "0"), "repair-sm90-d200-5"),
    _bug("dq: first batch repaired", change("repair-in-its-sequence-dq", "tile.sequence.index", "0"), "repair-sm90-d200-5"),
    _bug("convert: first batch repaired", change("repair-in-its-sequence-convert", "sequence.index", "0"), "repair-sm80-d64-5"),
    _bug("sm80: first batch repaired", change("repair-in-its-sequence-bwd-sm80", "here.sequence.index", "0"), "repair-sm80-d64-5"),
    _bug("wide: first batch repaired", change("repair-in-its-sequence-wide", "here.sequence.index", "0"), "repair-sm80-d200-5"),
    _bug("dkv: first head repaired", change("repair-of-its-head-dkv", "head_k", "0"), "repair-sm90-d200-5"),
    _bug("heads beyond the sixth of a group not repaired", change("repair-over-all-heads", "(head_k + 1) * group", "head_k * group + min(group, 6)"), "repair-sm80-d64-8"),
    _bug("dQ repaired with another head of K for groups beyond four", change("head-of-k-repair-of-dq", "/ group", "/ min(group, 4)"), "repair-sm80-d64-5"),
    _bug("repair of gradients reads K with the strides of V", change("strides-of-k-repair", "p.k_stride", "p.v_stride"), "repair-sm80-d64-5"),
    _bug("repair of gradients reads V with the strides of K", change("strides-of-do-and-v-repair", "p.v_stride", "p.k_stride"), "repair-sm80-d64-5"),
    _bug("repair of gradients reads dO with the strides of Q", change("strides-of-do-and-v-repair", "p.dout_stride", "p.q_stride"), "repair-sm80-d64-5"),
    _bug("repair of gradients takes queries before the window", change("queries-of-the-key", "mask.first_query(key)", "0"), "repair-sm80-d64-8"),
)  # fmt: skip
FORWARD_HEADS = (
    _forward("sm80 forward: head of K wrong for groups beyond four", change("head-of-k-fwd-sm80", "problem.heads_q / problem.heads_k", "min(problem.heads_q / problem.heads_k, 4)"), "pair-133"),
    _forward("sm80 forward: rows of V at those of K", change("rows-of-v-fwd-sm80", "kAhead % 2 ? p.v_stride : p.k_stride", "p.k_stride"), "sink-6"),
    _forward("sm80 forward: heads of V at those of K", change("v-of-its-head-fwd-sm80", "p.v_stride", "p.k_stride"), "pair-77"),
    _forward("sm80 forward: lse of another batch", change("lse-of-its-sequence", "index * p.heads_q", "min(index, 1) * p.heads_q"), "pair-90"),
    _forward("sm80 forward: O written with the strides of Q", change("strides-of-o", "p.o_stride.row", "p.q_stride.row"), "sink-6"),
    _forward("sm80 forward: first batch repaired", change("repair-in-its-sequence-fwd-sm80", "here.sequence.index", "0"), "repair-sm80-d64-5"),
    _forward("sm90 forward: head of K wrong for groups beyond four", change("head-of-k-sm90", "p.heads_q / p.heads_k", "min(p.heads_q / p.heads_k, 4)"), "pair-80"),
    _forward("sm90 forward: lse of another batch", change("lse-of-its-sequence", "index * p.heads_q", "min(index, 1) * p.heads_q"), "pair-90"),
    _forward("sm90 forward: V of the head of q", change("v-of-its-head-fwd-sm90", "row, head", "row, tile.head"), "pair-80"),
    _forward("sm90 forward: first batch repaired", change("repair-in-its-sequence-fwd-sm90", "tile.sequence.index", "0"), "repair-sm90-d64-5"),
    _forward("sm90 forward: Q brought before all lanes have waited", without("all-lanes-waited-fwd-sm90"), "tiles-6"),
)  # fmt: skip
FORWARD_REPAIR = (
    _forward("O repaired with another head of K for groups beyond four", change("head-of-k-repair-of-o", "problem.heads_q / problem.heads_k", "min(problem.heads_q / problem.heads_k, 4)"), "repair-sm80-d64-5"),
    _forward("O repaired with heads of V at those of K", change("heads-of-v-repair-of-o", "p.v_stride", "p.k_stride"), "repair-sm80-d64-5"),
    _forward("O repaired with rows of V at those of K", change("rows-of-v-repair-of-o", "v.step()", "k.step()"), "repair-sm80-d64-5"),
    _forward("O repaired from the first key on", change("keys-of-the-row", "mask.first_key(query0 + row)", "0"), "repair-sm80-d64-5"),
    _forward("O repaired without the scale where it is applied first", change("score-of-a-repaired-row", "score.value_or_hidden(raw, places(0, key))", "raw"), "repair-sm90-d64-8"),
)  # fmt: skip
# Up to 64 P need not be 1 where one key outweighs all others: what its rounding then costs is the rest of the row.
THRESHOLD = (
    *(
        _forward(
            f"maximum of a row raised beyond {limit} only, {dtype}",
            change("p-not-far-above-one", "64.f", f"{limit}.f"),
            f"dominated-{dtype}-d64",
        )
        for dtype in ("bf16", "fp16")
        for limit in (1024, 60000)
    ),
    _forward("maximum of P that is lowered not taken", without("m-follows-lowered"), "dominated-bf16-d64"),
)
EQUIVALENT = (
    # lse is inf there, so P is 0; 0 * inf of a K that is not finite is repaired.
    _bug("sm80: queries beyond the last one not hidden", change("queries-that-exist", "query >= from_here.seqlen_q ||", "")),
    # TMA writes nothing outside of the tensor.
    _bug("sm90: keys beyond the last one stored", change("keys-that-exist", "&& key0 < sequence.rows_k", "")),
    # More blocks are visited, and the mask hides all of them.
    _bug("last blocks by queries that do not exist", change("last-key-block", "min(q0 + M, seqlen_q)", "q0 + M")),
    _bug("last blocks by keys that do not exist", change("last-query-block", "min(k0 + N, end_k)", "k0 + N")),
)  # fmt: skip

PAIRS = (
    *HEADS,
    *SCALE,
    *SOFTCAP,
    *ALIBI,
    *SINK,
    *STRIDES,
    *COLUMNS,
    *ORDER,
    *SCHEDULE,
    *MASKS,
    *REPAIR,
    *FORWARD_HEADS,
    *FORWARD_REPAIR,
    *THRESHOLD,
)
