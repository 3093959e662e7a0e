# ruff: noqa: E501 (a bug a line)
"""Bugs planted in the sm80 family's backward of wide heads, with two stages (sm_100) and with one: what becomes of marked
statements."""

from __future__ import annotations

from functools import partial

from .markers import change, postpone, without
from .mutants import Bug

_two = partial(Bug, arch="sm_100")
_READ = r"RACE, read after write: .*(tile|gemm|operands)\.cuh:\d+"
_COPIED = r"RACE, access to the destination of cp\.async"

BACKWARD_WIDE = (
    _two("wide: no wait for Q and dO", without("q-and-do-copied-wide"), "dense-d256", _COPIED),
    Bug("wide: no wait for Q and dO of the only stage", without("q-and-do-copied-wide"), "dense-d256", _COPIED),
    _two("wide: nobody waits for stages and groups", without("q-and-do-landed-wide"), "causal-d256", r"RACE, "),
    Bug("wide: nobody waits for the only stage", without("q-and-do-landed-wide"), "causal-d256", r"RACE, "),
    _two("wide: ring slot of the wrong step", change("slot-of-the-step-wide", "+ i % kStages * Stage::kBytes", ""), "dense-d256", r"RACE, "),
    _two("wide: P read before it is complete", without("p-complete-wide"), "dense-d256", _READ),
    Bug("wide: P of one stage read before it is complete", without("p-complete-wide"), "dense-d256", _READ),
    _two("wide: P of other queries", change("p-of-the-same-scores", "query0", "0"), "dense-d256"),
    _two("wide: P of other keys", change("p-of-the-same-scores", "key0", "0"), "dense-d256"),
    _two("wide: weights that know no derivative", change("weights-of-the-derivative", "score.weight(S, P, places(query, key))", "P"), "softcap-gqa-dlse-d256"),
    Bug("wide: weights that know no derivative, one stage", change("weights-of-the-derivative", "score.weight(S, P, places(query, key))", "P"), "softcap-gqa-dlse-d256"),
    _two("wide: the first weight of a pair twice", change("pairs-of-weights", "T::pack(even, W)", "T::pack(even, even)"), "softcap-gqa-dlse-d256"),
    _two("wide: weights in the place of P", change("place-of-the-weights", "sP.base + TileP::kBytes", "sP.base"), "softcap-gqa-dlse-d256"),
    _two("wide: P of what is dropped", change("dropped-p-wide", "Dropout<V>::of_kept(kept(key, query), P)", "P"), "dropout-gqa-dlse-d256"),
    _two("wide: dP of what is dropped", change("dropped-dp-wide", "Dropout<V>::of_kept(kept(key, query), dP)", "dP"), "dropout-gqa-dlse-d256"),
    Bug("wide: dP of what is dropped, one stage", change("dropped-dp-wide", "Dropout<V>::of_kept(kept(key, query), dP)", "dP"), "dropout-gqa-dlse-d256"),
    _two("wide: dS read before its group has written it", without("ds-of-the-group"), "dense-d192", _READ),
    _two("wide: dS read before the other group has written it", change("ds-complete-wide", "ptx::bar_sync(kDSComplete, kThreads)", "ptx::bar_warp_sync()"), "dense-d256", _READ),
    Bug("wide: one stage: dS read before the other group has written it", change("ds-complete-wide", "ptx::bar_sync(kDSComplete, kThreads)", "ptx::bar_warp_sync()"), "dense-d256", r"RACE, "),
    _two("wide: dS handed over before it is written", (without("ds-handed-over"), change("p-of-the-same-scores", "rX.load(", "if constexpr (kStaggered) ptx::bar_arrive(kDSComplete, kThreads); rX.load(")), "dense-d256", _READ),
    _two("wide: dS never handed over", without("ds-handed-over"), "dense-d256", r"DEADLOCK"),
    _two("wide: a group multiplies by its own weights", change("weights-of-the-group", "other_group", "own_group"), "dense-d256", r"RACE, "),
    _two("wide: P times Q, dS times dO", change("rows-of-the-group", "other_group", "own_group"), "causal-d256"),
    _two("wide: stage requested before the other group is done with it", postpone("stage-released-wide", behind="stage-requested-wide"), "causal-d256", r"RACE, write after read: .*tile\.cuh:\d+(.|\n)*bwd_load_sm80"),
    _two("wide: stage of the next step requested again", change("stage-requested-wide", "visits.after(visits.after(now))", "visits.after(now)"), "causal-d256"),
    _two("wide: first columns of dQ alone", change("all-columns-of-dq", "col < Dq::kCols", "col < kPart"), "causal-d256"),
    _two("wide: columns of dQ in the place of others", change("columns-of-dq-in-their-place", "add, col", "add, 0"), "causal-d256"),
    _two("wide: dQ added to that of the step before", change("dq-of-the-visit-wide", "now.m_block", "max(now.m_block - 1, 0)"), "causal-d256"),
    _two("wide: dQ stored, not added", change("dq-added-wide", "ptx::red_add(to, x);", "for (int i = 0; i < ptx::kRedWidth; ++i) to[i] += x[i];"), "dense-d256", r"RACE, .*buffer 'dq_accum'"),
    _two("wide: query mask off by one", change("mask-from-the-lane-wide", "q0 + first_query", "q0 + first_query + 1"), "causal-d256"),
    Bug("wide: staging where K and V may still arrive", without("keys-copied-wide"), "range-none-causal-d256", r"RACE, .*cp\.async"),
    _two("wide: staging before all warps are done", without("keys-read-by-all-wide"), "dense-d256", r"RACE, write after read: .*(epilogue|element)\.cuh:\d+"),
    _two("wide: NaN of hidden queries let through to dK and dV", change("dk-and-dv-finite-wide", "!ptx::vote_all(stage_rows<T>(staging, row0, dKV, col0))", "stage_rows<T>(staging, row0, dKV, col0); false"), "nan-in-queries-d256"),
    _two("wide: dK written before all lanes have repaired it", without("dk-repaired-by-the-warp-wide"), "nan-in-queries-d256", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    _two("wide: gradients of unused keys not written", change("tiles-of-unused-keys-wide", "rows_k", "seqlen_k"), "packed-used-dlse-d256"),
    _two("wide: last unused keys of a tile not written", change("unused-keys-written-wide", "rows_k", "seqlen_k"), "packed-used-dlse-d256"),
    _two("wide: sums of the first half of the keys alone", change("keys-of-the-sum-wide", "own_warp % 4 / V::kSplitD * kKeys", "0"), "causal-d96"),
    _two("wide: sums of keys written in the place of others", change("keys-of-the-warp-wide", "+ row0", ""), "causal-d96", r"RACE, write after write: buffer 'd[kv]'"),
    _two("wide: half of the repaired keys in the place of the others", change("rows-of-the-repair-wide", "row0 + row", "row"), "nan-in-queries-d96", r"RACE, write after write: shared memory"),
    _two("wide: key head of the wrong group", change("first-head-of-the-group-wide", "* group", "* 1"), "many-tiles-d192"),
)  # fmt: skip
