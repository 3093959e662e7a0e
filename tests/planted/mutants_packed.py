# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what packed sequences bring."""

from __future__ import annotations

from functools import partial

from .markers import change, without
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")
_SHARED = r"RACE, (write after write|read after write): buffer '{}'"

FORWARD_PACKED = (
    Bug("first row of a sequence one too late", change("rows-of-its-sequence", "row * s.row", "(row + 1) * s.row"), "packed-unequal", r"(cp\.async|load|store) at .*(bytes|out of bounds|buffer)"),
    Bug("lse written where the first sequence lies", change("lse-of-its-rows", "+ row_q", ""), "packed-unequal", r"RACE, write after write: buffer 'lse'"),
    Bug("seqused ignored", without("keys-that-count"), "packed-used"),
    Bug("rows behind the last sequence left out", change("tiles-of-rows-outside", "+ 1", ""), "packed-outside", r"RACE, write after write: buffer 'lse'"),
    Bug("rows behind the last sequence see its keys", change("no-keys-outside", "index < p.problem.batch ? rows_k : 0", "rows_k"), "packed-outside"),
    Bug("keys begin where queries do", change("edges-of-the-keys", "start_k(p, b)", "start_q(p, b)"), "packed-unequal-d128"),
    Bug("search takes a round too few", change("last-round-has-its-edges", "31", "64"), "packed-forty-short"),
    Bug("search goes one part too far", change("last-part-that-starts-before", "- 1", ""), "packed-forty-short", r"RACE, write after write: buffer 'lse'"),
    _sm90("search takes a round too few for a block that schedules", change("last-round-has-its-edges", "31", "64"), "packed-forty-short"),
    _sm90("kept tiles of rows outside counted from the first sequence on", change("kept-tile-of-rows-outside", "- ptx::shfl_index(end, 31)", ""), "packed-outside"),
    _sm90("TMA writes a neighbour's rows of O", change("o-beside-its-neighbour", "V::kPacked && q0 + 64 > tile.sequence.seqlen_q", "false"), "packed-unequal", _SHARED.format("out")),
    _sm90("TMA counts packed sequences as batches", change("packed-is-one-batch", "kPacked ? 0 : index", "index"), "packed-unequal"),
    _sm90("length of the sequence lost in the queue", change("sequence-in-the-queue", "x(6)", "x(7)"), "packed-used"),
    _sm90("K of the sequence before", change("keys-of-its-sequence", "tile.sequence.row_k +", ""), "packed-unequal"),
)  # fmt: skip

BACKWARD_PACKED = (
    Bug("gradients of unused keys not written", change("tiles-of-unused-keys", "rows_k", "seqlen_k"), "packed-range-used-d128"),
    Bug("last unused keys of a tile not written", change("unused-keys-written-sm80", "rows_k", "seqlen_k"), "packed-range-used-d128"),
    Bug("dQ of the next sequence's tile", change("query-tiles-of-its-sequence", "first_tile<kRows>(row_q, index)", "row_q / kRows"), "packed-unequal", r"RACE, write after write: buffer 'dq_accum'"),
    _sm90("TMA writes a neighbour's rows of dK and dV", change("dkv-beside-its-neighbour", "V::kPacked && key0 + 64 > sequence.rows_k", "false"), "packed-unequal", _SHARED.format("d[kv]")),
    _sm90("TMA writes a neighbour's rows of wide dK and dV", change("wide-dkv-beside-its-neighbour", "V::kPacked && visit.k0 + N > sequence.rows_k", "false"), "packed-gqa-softcap-d256", _SHARED.format("d[kv]")),
    _sm90("TMA writes a neighbour's rows of wide dQ", change("wide-dq-beside-its-neighbour", "V::kPacked && q0 + 64 > sequence.seqlen_q", "false"), "packed-gqa-softcap-d256", _SHARED.format("dq")),
    _sm90("all blocks list the first 32 sequences", change("sequences-of-the-block", "32 * ptx::block_index()", "0 * ptx::block_index()"), "packed-forty-short", "buffer 'key_tiles'"),
    _sm90("listed tiles begin again with each 32 sequences", change("tiles-of-the-lanes-before", "own, before", "own"), "packed-forty-short", "buffer 'key_tiles'"),
    _sm90("listed tiles that are not there have no end", change("no-rows-behind-the-last-tile", "first + 32 >= sequences", "false"), "packed-unequal-d128", "out of bounds|buffer|wgmma|RACE|cu_seqlens|load|store"),
    _sm90("every tile of a kept sequence is its first", change("kept-tile-of-its-sequence", "ceil_div(Rows::rows(found), kRows) - 1 - left", "0"), "packed-gqa-softcap-d256", r"RACE, write after write: buffer 'd[kv]'"),
    _sm90("gradients of unused wide keys not written", change("unused-keys-written-dkv", "rows_k", "seqlen_k"), "packed-used-dlse-d256"),
)  # fmt: skip

# With lengths that reach beyond the arrays, by their name in `tests/packed_lengths.py`.
CLAMPS = (
    Bug("edges not clamped to the total", change("edges-within-the-rows", "max(0, min(cu_seqlens[b], total))", "max(0, cu_seqlens[b])"), "beyond", r"buffer|out of bounds"),
    Bug("edges below 0", change("edges-within-the-rows", "max(0, min(cu_seqlens[b], total))", "min(cu_seqlens[b], total)"), "negative", r"buffer|out of bounds"),
    Bug("used keys not clamped to those there are", change("keys-that-count", "min(used, p.seqused_k[index])", "p.seqused_k[index]"), "used-beyond", r"buffer|out of bounds"),
)  # fmt: skip

# With sequences that lie over each other.
MANY_TILES = (
    Bug("room in the list of tiles", change("room-in-the-list", "u(i) >= u(size(p))", "false"), "", "key_tiles"),
)

# With lanes that run by themselves.
LANES = (
    Bug("next tile asked for again before all lanes have seen it asked for", without("all-lanes-asked"), "packed-zero-queries-or-keys", "PHASE OVERRUN", "sm_90"),
)  # fmt: skip
