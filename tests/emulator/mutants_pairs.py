# ruff: noqa: E501 (source texts to be replaced)
"""Bugs that show only where two axes meet: edits of header texts, each with a case of `tests/fuzz/covering.py`.

`EQUIVALENT` are edits that no result can show, with the reason.

By hand: ``python -m tests.planted_pairs`` plants all of them, ``--find`` looks for the cases again.
"""

from __future__ import annotations

from dataclasses import dataclass

from .mutants import Bug


@dataclass(frozen=True)
class PairBug(Bug):
    """`case`: of the covering set. `backward`: whether it shows there. `finds`: as always; "" if the numbers are wrong."""

    finds: str = ""
    backward: bool = True


def _bug(name: str, file: str, old: str, new: str, case: str = "", *, backward: bool = True) -> PairBug:
    return PairBug(name, file, old, new, case, backward=backward)


HEADS = (
    _bug("sm80: heads of q beyond the sixth of a group left out", "sm80/bwd_sm80.cuh", "const int visits = group * blocks;", "const int visits = min(group, 6) * blocks;", "pair-75"),
    _bug("sm80: first head of q of a group of five", "sm80/bwd_sm80.cuh", "Visit now{tile.head * group, first + blocks - 1};", "Visit now{tile.head * min(group, 4), first + blocks - 1};", "pair-127"),
    _bug("sm80: dQ of another batch", "sm80/bwd_sm80.cuh", "const int sequence = tile.batch * problem.heads_q + now.head;", "const int sequence = min(tile.batch, 1) * problem.heads_q + now.head;", "pair-129"),
    _bug("sm80: statistics of another batch", "sm80/bwd_sm80.cuh", "sequence = tile.batch * problem.heads_q + head;", "sequence = min(tile.batch, 1) * problem.heads_q + head;", "pair-129"),
    _bug("sm90: heads of q beyond the sixth of a group left out", "attention/visits.cuh", "count = group * blocks,", "count = min(group, 6) * blocks,", "pair-96"),
    _bug("sm90: first head of q of a group of five", "attention/visits.cuh", "head = tile.head * group,", "head = tile.head * min(group, 4),", "pair-80"),
    _bug("sm90: statistics of another batch", "attention/visits.cuh", "return tile.batch * problem.heads_q + head;", "return min(tile.batch, 1) * problem.heads_q + head;", "pair-83"),
    _bug("sm90: V of the head of q", "sm90/bwd_sm90.cuh", "smem.v().load(p.map_v, smem.v_full(), visit.k0, visit.tile.head, batch", "smem.v().load(p.map_v, smem.v_full(), visit.k0, visit.head, batch", "pair-80"),
    _bug("dq: head of K wrong for groups beyond four", "sm90/bwd_dq_sm90.cuh", "head_k(index.head / (p.heads_q / p.heads_k))", "head_k(index.head / min(p.heads_q / p.heads_k, 4))", "pair-17"),
    _bug("dq: statistics of another batch", "sm90/bwd_dq_sm90.cuh", "row_stats_at<64>(p.plain, tile.index.batch * problem.heads_q", "row_stats_at<64>(p.plain, min(tile.index.batch, 1) * problem.heads_q", "tiles-3"),
    _bug("dQ's accumulator shared by batches", "attention/dq_accum.cuh", "(static_cast<long long>(sequence) * m_blocks + m_block)", "(static_cast<long long>(sequence % (2 * p.problem.heads_q)) * m_blocks + m_block)", "pair-129"),
    _bug("third batch taken for the second", "attention/schedule.cuh", "sequence % heads, sequence / heads}", "sequence % heads, min(sequence / heads, 1)}", "pair-130"),
    _bug("third batch at the first one's address", "attention/schedule.cuh", "return batch * s.batch + head * s.head;", "return (batch & 1) * s.batch + head * s.head;", "pair-129"),
    _bug("gradient of lse in the first batch only", "any/bwd_delta.cuh", "if (p.dlse) dlse[i] = p.dlse[at];", "if (p.dlse && tile.batch == 0) dlse[i] = p.dlse[at];", "pair-80"),
    _bug("gradient of lse of the other sign", "any/bwd_delta.cuh", "sum - dlse[i]", "sum + dlse[i]", "tiles-2"),
)  # fmt: skip
SCALE = (
    _bug("sm80: dK without the sign of the scale", "sm80/bwd_sm80.cuh", "dK.scale(score.scale);", "dK.scale(fabsf(score.scale));", "pair-76"),
    _bug("sm90: dK without the sign of the scale", "sm90/bwd_sm90.cuh", "dK.scale(score.scale);", "dK.scale(fabsf(score.scale));", "pair-80"),
    _bug("dkv: dK without the sign of the scale", "sm90/bwd_dkv_sm90.cuh", "dKV.scale(score.scale);", "dKV.scale(fabsf(score.scale));", "pair-57"),
    _bug("dq: dQ without the sign of the scale", "sm90/bwd_dq_sm90.cuh", "dQ.scale(score.scale);", "dQ.scale(fabsf(score.scale));", "pair-57"),
    _bug("convert: dQ without the sign of the scale", "any/bwd_convert.cuh", "dQ.scale(problem.scale);", "dQ.scale(fabsf(problem.scale));", "pair-76"),
    _bug("scores without the sign of the scale", "attention/score.cuh", "return V::kScaleFirst ? s * scale : s;", "return V::kScaleFirst ? s * fabsf(scale) : s;", "pair-130"),
    _bug("lse divided by a scale of zero", "any/bwd_delta.cuh", "unit > 0.f ?", "unit >= 0.f ?", "pair-122"),
    _bug("lse in other powers for a scale below zero", "any/bwd_delta.cuh", "/ unit : kLog2e;", "/ unit : 1.46f;", "pair-50"),
)  # fmt: skip
SOFTCAP = (
    _bug("softcap: dS without the derivative", "attention/score.cuh", "return P * softcap.derivative(s);", "return P;", "softcap-1"),
    _bug("softcap: tanh without the sign of the scale", "attention/score.cuh", "(p.scale / p.softcap)", "(fabsf(p.scale) / p.softcap)", "softcap-9"),
    _bug("softcap: lse in powers of the scale", "any/bwd_delta.cuh", "/ unit : kLog2e;", "/ problem.scale : kLog2e;", "softcap-0"),
    _bug("softcap: dkv hands P over", "sm90/bwd_dkv_sm90.cuh", "Score<V>::kWeightIsP ? W.x[k][0] : weights[k].x[0][0];", "W.x[k][0];", "softcap-9"),
    _bug("softcap: dkv's weights from P instead of the score", "sm90/bwd_dkv_sm90.cuh", "= score.weight(s, x);", "= score.weight(x, x);", "softcap-9"),
    _bug("softcap: forward with another cap", "attention/score.cuh", "? p.softcap", "? 1.f", "softcap-2", backward=False),
)  # fmt: skip
STRIDES = (
    _bug("sm80: V read with the strides of K", "sm80/bwd_sm80.cuh", "load_keys<V>(sV, p.v, p.v_stride, problem, tile);", "load_keys<V>(sV, p.v, p.k_stride, problem, tile);", "pair-77"),
    _bug("sm80: dK written with the strides of dV", "sm80/bwd_sm80.cuh", "leave(sK, dK, p.dk, p.dk_stride,", "leave(sK, dK, p.dk, p.dv_stride,", "pair-77"),
    _bug("sm80: dV written with the strides of dK", "sm80/bwd_sm80.cuh", "leave(sV, dV, p.dv, p.dv_stride,", "leave(sV, dV, p.dv, p.dk_stride,", "pair-77"),
    _bug("sm80: dO read with the strides of Q", "sm80/bwd_sm80.cuh", "head_offset(p.dout_stride, tile.batch, head), p.dout_stride.row", "head_offset(p.dout_stride, tile.batch, head), p.q_stride.row", "pair-88"),
    _bug("sm80: heads of dO at those of Q", "sm80/bwd_sm80.cuh", "head_offset(p.dout_stride, tile.batch, head), p.dout_stride.row", "head_offset(p.q_stride, tile.batch, head), p.dout_stride.row", "pair-88"),
    _bug("delta: dO read with the strides of O", "any/bwd_delta.cuh", "dout + qi * p.dout_stride.row", "dout + qi * p.o_stride.row", "pair-88"),
    _bug("delta: heads of dO at those of O", "any/bwd_delta.cuh", "head_offset(p.dout_stride, tile.batch, tile.head)", "head_offset(p.o_stride, tile.batch, tile.head)", "pair-88"),
    _bug("delta: O read with the strides of dO", "any/bwd_delta.cuh", "o + qi * p.o_stride.row", "o + qi * p.dout_stride.row", "pair-94"),
    _bug("convert: dQ written with the strides of Q", "any/bwd_convert.cuh", "p.dq_stride.row, q0 + row0", "p.q_stride.row, q0 + row0", "pair-91"),
    _bug("convert: heads of dQ at those of Q", "any/bwd_convert.cuh", "head_offset(p.dq_stride, tile.batch, tile.head)", "head_offset(p.q_stride, tile.batch, tile.head)", "pair-127"),
)  # fmt: skip
COLUMNS = (
    _bug("columns beyond head_dim read", "tile/tile.cuh", "(kValidCols == kCols || 8 * chunk < kValidCols)", "true", "pair-122"),
    _bug("rows beyond the last one read where they are misaligned", "tile/tile.cuh", "valid ? load8<true>(from) : ptx::U128{}", "load8<true>(from)", "pair-127"),
    _bug("columns beyond head_dim written", "tile/epilogue.cuh", "if (dst_row + row < n_rows && col < kValidCols)", "if (dst_row + row < n_rows)", "pair-122"),
)  # fmt: skip
ORDER = (
    _bug("sm80: order of the first three shares only", "attention/dq_accum.cuh", "!= rank) ptx::nanosleep();", "< min(rank, 3)) ptx::nanosleep();", "shares-sm80-d64"),
    _bug("sm90: order of the first three shares only", "sm90/bwd_sm90.cuh", "(V::kDeterministic ? rank : min(rank, 1))", "(V::kDeterministic ? min(rank, 3) : min(rank, 1))", "shares-sm90-d64"),
    _bug("turns shared by batches", "attention/dq_accum.cuh", "static_cast<long long>(sequence) * ceil_div", "static_cast<long long>(sequence % p.problem.heads_q) * ceil_div", "pair-129"),
    _bug("sm80: rank counted from the first key", "sm80/bwd_sm80.cuh", "const int rank = tile.block - mask.first_key_block(q0);", "const int rank = tile.block;", "pair-75"),
    _bug("sm90: rank counted from the first key", "sm90/bwd_sm90.cuh", "const int rank = visit.tile.block - Mask<V>(problem).first_key_block(visit.q0());", "const int rank = visit.tile.block;", "pair-81"),
)  # fmt: skip
SCHEDULE = (
    _bug("section before the last not cut", "attention/schedule.cuh", "min(p.section, last_start - section_start);", "p.section;", "pair-88"),
    _bug("last section begins one tile late", "attention/schedule.cuh", "index >= last_start * blocks;", "index > last_start * blocks;", "pair-127"),
    _bug("last section as large as the others", "attention/schedule.cuh", "is_last ? p.last_section : min", "is_last ? p.section : min", "pair-127"),
    _bug("dkv: one follower of the queue forgotten", "sm90/bwd_dkv_sm90.cuh", "WorkQueue::init(bar(kBarriers), 8);", "WorkQueue::init(bar(kBarriers), 7);", "tiles-3"),
    _bug("dkv: one follower of the queue too many", "sm90/bwd_dkv_sm90.cuh", "WorkQueue::init(bar(kBarriers), 8);", "WorkQueue::init(bar(kBarriers), 9);", "tiles-3"),
    _bug("dq: one follower of the queue forgotten", "sm90/bwd_dq_sm90.cuh", "4 * kGroups + kGroups);", "4 * kGroups + kGroups - 1);", "tiles-3"),
    _bug("dq: Q brought before all lanes have waited", "sm90/bwd_dq_sm90.cuh", "            ptx::mbarrier_wait(empty, tiles.phase ^ 1);\n            ptx::bar_warp_sync();\n", "            ptx::mbarrier_wait(empty, tiles.phase ^ 1);\n", "tiles-7"),
)  # fmt: skip
MASKS = (
    _bug("first block of a window left out where one key of it is seen", "attention/mask.cuh", "return V::kWindow ? max(0, qi + lower) : 0;", "return V::kWindow ? max(0, qi + lower + 1) : 0;", "left-sm90-d64"),
    _bug("blocks taken for whole by their first row", "attention/mask.cuh", "return k0 >= first_key(q0 + M - 1) &&", "return k0 >= first_key(q0) &&", "pair-21"),
    _bug("last query of a window left out where it sees one key", "attention/mask.cuh", "min(seqlen_q, ki - lower + 1)", "min(seqlen_q, ki - lower)", "left-sm80-d64"),
    _bug("first query of a key left out", "attention/mask.cuh", "return kHides ? max(0, ki - upper) : 0;", "return kHides ? max(0, ki - upper + 1) : 0;", "causal-sm80-d64"),
    _bug("last key of a query left out", "attention/mask.cuh", "min(seqlen_k, qi + upper + 1)", "min(seqlen_k, qi + upper)", "causal-sm90-d200"),
    _bug("forward: first block of a window left out where one key of it is seen", "attention/mask.cuh", "return V::kWindow ? max(0, qi + lower) : 0;", "return V::kWindow ? max(0, qi + lower + 1) : 0;", "left-sm80-d64", backward=False),
    _bug("forward: last key of a query left out", "attention/mask.cuh", "min(seqlen_k, qi + upper + 1)", "min(seqlen_k, qi + upper)", "causal-sm80-d64", backward=False),
    _bug("dq: blocks before the window not passed", "sm90/bwd_dq_sm90.cuh", "if constexpr (V::kWindow) pass(first - tile.first);", ";", "left-sm90-d200"),
)  # fmt: skip
REPAIR = (
    _bug("sm90: first batch repaired", "sm90/bwd_sm90.cuh", "again(p.plain, visits.tile.batch);", "again(p.plain, 0);", "repair-sm90-d64-5"),
    _bug("dkv: first batch repaired", "sm90/bwd_dkv_sm90.cuh", "again(p.plain, visit.tile.batch);", "again(p.plain, 0);", "repair-sm90-d200-5"),
    _bug("dq: first batch repaired", "sm90/bwd_dq_sm90.cuh", "again(p.plain, tile.index.batch);", "again(p.plain, 0);", "repair-sm90-d200-5"),
    _bug("convert: first batch repaired", "any/bwd_convert.cuh", "again(p, tile.batch);", "again(p, 0);", "repair-sm80-d64-5"),
    _bug("sm80: first batch repaired", "sm80/bwd_sm80.cuh", "again(aside(p), here.batch);", "again(aside(p), 0);", "repair-sm80-d64-5"),
    _bug("dkv: first head repaired", "sm90/bwd_dkv_sm90.cuh", "else again.dv(visit.tile.head,", "else again.dv(0,", "repair-sm90-d200-5"),
    _bug("heads beyond the sixth of a group not repaired", "attention/repair_gradients.cuh", "head < (head_k + 1) * group; ++head", "head < head_k * group + min(group, 6); ++head", "repair-sm80-d64-8"),
    _bug("dQ repaired with another head of K for groups beyond four", "attention/repair_gradients.cuh", "const int head_k = head / group;", "const int head_k = head / min(group, 4);", "repair-sm80-d64-5"),
    _bug("repair of gradients reads K with the strides of V", "attention/repair_gradients.cuh", "at(p.k, p.k_stride, head_k, key)", "at(p.k, p.v_stride, head_k, key)", "repair-sm80-d64-5"),
    _bug("repair of gradients reads V with the strides of K", "attention/repair_gradients.cuh", "at(p.v, p.v_stride, head_k, key)", "at(p.v, p.k_stride, head_k, key)", "repair-sm80-d64-5"),
    _bug("repair of gradients reads dO with the strides of Q", "attention/repair_gradients.cuh", "at(p.dout, p.dout_stride, head, query)", "at(p.dout, p.q_stride, head, query)", "repair-sm80-d64-5"),
    _bug("repair of gradients takes queries before the window", "attention/repair_gradients.cuh", "mask.first_query(key), mask.end_query(key)", "0, mask.end_query(key)", "repair-sm80-d64-8"),
)  # fmt: skip
FORWARD_HEADS = (
    _bug("sm80 forward: head of K wrong for groups beyond four", "sm80/fwd_sm80.cuh", "head_k = tile.head / (problem.heads_q / problem.heads_k);", "head_k = tile.head / min(problem.heads_q / problem.heads_k, 4);", "pair-85", backward=False),
    _bug("sm80 forward: rows of V at those of K", "sm80/fwd_sm80.cuh", "kAhead % 2 ? p.v_stride.row : p.k_stride.row", "p.k_stride.row", "pair-73", backward=False),
    _bug("sm80 forward: heads of V at those of K", "sm80/fwd_sm80.cuh", "head_offset(p.v_stride, tile.batch, head_k)", "head_offset(p.k_stride, tile.batch, head_k)", "pair-77", backward=False),
    _bug("sm80 forward: lse of another batch", "sm80/fwd_sm80.cuh", "(tile.batch * problem.heads_q + tile.head) * problem.seqlen_q", "(min(tile.batch, 1) * problem.heads_q + tile.head) * problem.seqlen_q", "pair-129", backward=False),
    _bug("sm80 forward: O written with the strides of Q", "sm80/fwd_sm80.cuh", "p.o_stride.row, q0 + row0", "p.q_stride.row, q0 + row0", "pair-91", backward=False),
    _bug("sm80 forward: first batch repaired", "sm80/fwd_sm80.cuh", "(aside(p), tile.batch, tile.head,", "(aside(p), 0, tile.head,", "repair-sm80-d64-5", backward=False),
    _bug("sm90 forward: head of K wrong for groups beyond four", "sm90/fwd_load_sm90.cuh", "return head / (p.heads_q / p.heads_k);", "return head / min(p.heads_q / p.heads_k, 4);", "pair-80", backward=False),
    _bug("sm90 forward: lse of another batch", "sm90/fwd_sm90.cuh", "(tile.batch * problem.heads_q + tile.head) * problem.seqlen_q", "(min(tile.batch, 1) * problem.heads_q + tile.head) * problem.seqlen_q", "pair-130", backward=False),
    _bug("sm90 forward: V of the head of q", "sm90/fwd_load_sm90.cuh", ".load(p.map_v, smem.v_full(ring.stage), j * V::kBlockN, head,", ".load(p.map_v, smem.v_full(ring.stage), j * V::kBlockN, tile.head,", "pair-80", backward=False),
    _bug("sm90 forward: first batch repaired", "sm90/fwd_sm90.cuh", "(p.plain, tile.batch, tile.head,", "(p.plain, 0, tile.head,", "repair-sm90-d64-5", backward=False),
    _bug("sm90 forward: Q brought before all lanes have waited", "sm90/fwd_load_sm90.cuh", "            ptx::bar_warp_sync();\n            if (lane() == 0)", "            if (lane() == 0)", "tiles-6", backward=False),
)  # fmt: skip
FORWARD_REPAIR = (
    _bug("O repaired with another head of K for groups beyond four", "attention/repair_output.cuh", "head / (problem.heads_q / problem.heads_k);", "head / min(problem.heads_q / problem.heads_k, 4);", "repair-sm80-d64-5", backward=False),
    _bug("O repaired with heads of V at those of K", "attention/repair_output.cuh", "head_offset(p.v_stride, batch, head_k)", "head_offset(p.k_stride, batch, head_k)", "repair-sm80-d64-5", backward=False),
    _bug("O repaired with rows of V at those of K", "attention/repair_output.cuh", "v, p.v_stride.row, first, end,", "v, p.k_stride.row, first, end,", "repair-sm80-d64-5", backward=False),
    _bug("O repaired from the first key on", "attention/repair_output.cuh", "const int first = mask.first_key(query0 + row),", "const int first = 0,", "repair-sm80-d64-5", backward=False),
    _bug("O repaired without the scale where it is applied first", "attention/repair_output.cuh", "return score.value(dot_rows<T, D, kUnaligned>(q, k + key * p.k_stride.row)) *", "return dot_rows<T, D, kUnaligned>(q, k + key * p.k_stride.row) *", "repair-sm90-d64-8", backward=False),
)  # fmt: skip
# Up to 64 P need not be 1 where one key outweighs all others: what its rounding then costs is the rest of the row.
THRESHOLD = tuple(
    _bug(
        f"maximum of a row raised beyond {limit} only, {dtype}",
        "attention/softmax.cuh",
        "kMaxP = 64.f;",
        f"kMaxP = {limit}.f;",
        f"dominated-{dtype}-d64",
        backward=False,
    )
    for dtype in ("bf16", "fp16")
    for limit in (1024, 60000)
)
EQUIVALENT = (
    # lse is inf there, so P is 0; 0 * inf of a K that is not finite is repaired.
    _bug("sm80: queries beyond the last one not hidden", "sm80/bwd_sm80.cuh", "if (query >= from_here.seqlen_q || !from_here.sees(query, key)) x = 0.f;", "if (!from_here.sees(query, key)) x = 0.f;"),
    # TMA writes nothing outside of the tensor.
    _bug("sm90: keys beyond the last one stored", "sm90/bwd_sm90.cuh", "if (ptx::thread_index() % 128 == 0 && key0 < problem.seqlen_k) {", "if (ptx::thread_index() % 128 == 0) {"),
    # More blocks are visited, and the mask hides all of them.
    _bug("last blocks by queries that do not exist", "attention/mask.cuh", "end_key(min(q0 + M, seqlen_q) - 1)", "end_key(q0 + M - 1)"),
    _bug("last blocks by keys that do not exist", "attention/mask.cuh", "end_query(min(k0 + N, seqlen_k) - 1)", "end_query(k0 + N - 1)"),
)  # fmt: skip

PAIRS = (
    *HEADS,
    *SCALE,
    *SOFTCAP,
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
