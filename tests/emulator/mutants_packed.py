# ruff: noqa: E501 (source texts to be replaced)
"""Bugs planted in what packed sequences bring: edits of header texts, as in mutants.py."""

from __future__ import annotations

from functools import partial

from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")
_FILE = "attention/sequence.cuh"
_SHARED = r"RACE, (write after write|read after write): buffer '{}'"

FORWARD_PACKED = (
    Bug("first row of a sequence one too late", _FILE, "return row * s.row + head * s.head;", "return (row + 1) * s.row + head * s.head;", "packed-unequal", r"(cp\.async|load|store) at .*(bytes|out of bounds|buffer)"),
    Bug("lse written where the first sequence lies", _FILE, "static_cast<long long>(head_q) * p.seqlen_q + row_q;", "static_cast<long long>(head_q) * p.seqlen_q;", "packed-unequal", r"RACE, write after write: buffer 'lse'"),
    Bug("seqused ignored", _FILE, "if (p.seqused_k && index < p.problem.batch) used", "if (false) used", "packed-used", ""),
    Bug("rows behind the last sequence left out", _FILE, "rows / kRows + p.batch + 1 :", "rows / kRows + p.batch :", "packed-outside", r"RACE, write after write: buffer 'lse'"),
    Bug("rows behind the last sequence see its keys", _FILE, "int used = index < p.problem.batch ? rows_k : 0;", "int used = rows_k;", "packed-outside", ""),
    Bug("keys begin where queries do", _FILE, "const int edge_k = edge_of(p.cu_seqlens_k,", "const int edge_k = edge_of(p.cu_seqlens_q,", "packed-unequal-d128", ""),
    Bug("search takes a round too few", _FILE, "while (count > 31) {", "while (count > 64) {", "packed-forty-short", ""),
    Bug("search goes one part too far", _FILE, "ptx::popc(ptx::vote_ballot(i < count && starts(edge, b))) - 1);", "ptx::popc(ptx::vote_ballot(i < count && starts(edge, b))));", "packed-forty-short", r"RACE, write after write: buffer 'lse'"),
    _sm90("TMA writes a neighbour's rows of O", "sm90/fwd_sm90.cuh", "V::kPacked && q0 + 64 > tile.sequence.seqlen_q;", "false;", "packed-unequal", _SHARED.format("out")),
    _sm90("TMA counts packed sequences as batches", _FILE, "return kPacked ? 0 : index;", "return index;", "packed-unequal", ""),
    _sm90("length of the sequence lost in the queue", "attention/work_sm90.cuh", "{x(2), x(5), x(6), x(3), x(4), x(7)}", "{x(2), x(5), x(7), x(3), x(4), x(7)}", "packed-used", ""),
    _sm90("K of the sequence before", "sm90/fwd_load_sm90.cuh", "const int row = tile.sequence.row_k + j * V::kBlockN;", "const int row = j * V::kBlockN;", "packed-unequal", ""),
)  # fmt: skip

BACKWARD_PACKED = (
    Bug("gradients of unused keys not written", "sm80/bwd_sm80.cuh", "    if (V::kPacked && k0 >= sequence.rows_k) return;\n", "    if (V::kPacked && k0 >= sequence.seqlen_k) return;\n", "packed-used", ""),
    Bug("last unused keys of a tile not written", "sm80/bwd_sm80.cuh", "stride.row, first_key + row0, here.sequence.rows_k, first_col);", "stride.row, first_key + row0, here.sequence.seqlen_k, first_col);", "packed-used", ""),
    Bug("dQ of the next sequence's tile", _FILE, "(row_q / kRows + index);", "(row_q / kRows);", "packed-unequal", r"RACE, write after write: buffer 'dq_accum'"),
    _sm90("TMA writes a neighbour's rows of dK and dV", "sm90/bwd_sm90.cuh", "            key0 + 64 > sequence.rows_k) {", "            false) {", "packed-unequal", _SHARED.format("d[kv]")),
    _sm90("TMA writes a neighbour's rows of wide dK and dV", "sm90/bwd_dkv_sm90.cuh", "V::kPacked && visit.k0 + N > sequence.rows_k;", "false;", "packed-gqa-softcap-d256", _SHARED.format("d[kv]")),
    _sm90("TMA writes a neighbour's rows of wide dQ", "sm90/bwd_dq_sm90.cuh", "V::kPacked && q0 + 64 > sequence.seqlen_q;", "false;", "packed-gqa-softcap-d256", _SHARED.format("dq")),
    _sm90("gradients of unused wide keys not written", "sm90/bwd_dkv_sm90.cuh", "visit.k0 + key0, sequence.rows_k);", "visit.k0 + key0, sequence.seqlen_k);", "packed-used-dlse-d256", ""),
)  # fmt: skip

# With lengths that reach beyond the arrays, by their name in `tests/packed_lengths.py`.
CLAMPS = (
    Bug("edges not clamped to the total", _FILE, "max(0, min(cu_seqlens[b], total))", "max(0, cu_seqlens[b])", "beyond", r"buffer|out of bounds"),
    Bug("edges below 0", _FILE, "max(0, min(cu_seqlens[b], total))", "min(cu_seqlens[b], total)", "negative", r"buffer|out of bounds"),
    Bug("used keys not clamped to those there are", _FILE, "max(0, min(used, p.seqused_k[index]))", "max(0, p.seqused_k[index])", "used-beyond", r"buffer|out of bounds"),
)  # fmt: skip
