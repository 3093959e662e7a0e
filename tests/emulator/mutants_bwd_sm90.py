# ruff: noqa: E501 (source texts to be replaced)
"""Bugs planted in the sm90 family's backward: edits of header texts, as in mutants.py."""

from __future__ import annotations

from functools import partial

from .mutants import Bug

_bug = partial(Bug, arch="sm_90")
_RACE = r"RACE, (read after write|write after read|write after write): "

# ---- head_dim up to 128: one kernel ----
ONE_KERNEL = (
    _bug("no wait for the Q of a visit", "sm90/bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.q_full(stage), ring.phase);\n        AccTile", "        AccTile", "dense-d64", _RACE + "|PHASE UNDERRUN"),
    _bug("no wait for the dO of a visit", "sm90/bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.dout_full(stage), ring.phase);\n", "", "dense-d128", _RACE + "|PHASE UNDERRUN"),
    _bug("hidden tile skipped without waiting for it", "sm90/bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.q_full(ring.stage), ring.phase);  // nobody runs ahead of the loads\n        ptx::mbarrier_wait(smem.dout_full(ring.stage), ring.phase);\n", "", "tile-multiples", r"PHASE (UNDERRUN|OVERRUN)|RACE"),
    _bug("dS of a hidden tile not handed over", "sm90/bwd_sm90.cuh", "        hand_over(FragA<T, 16, M>{});\n", "", "causal-d64", r"DEADLOCK|RACE|PHASE"),
    _bug("dS read before it is complete", "sm90/bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.ds_full(at.stage), at.phase);\n", "", "dense-d64", _RACE + "|PHASE"),
    _bug("dS overwritten before dQ has read it", "sm90/bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.ds_empty(ds.stage), ds.phase ^ 1);\n", "", "dense-d64", _RACE + "|PHASE"),
    _bug("dS released before dQ is complete", "sm90/bwd_sm90.cuh", "        ptx::wgmma_wait_group<0>();\n        arrived(dQ);\n        arrive_warp(smem.ds_empty(at.stage));", "        arrive_warp(smem.ds_empty(at.stage));\n        ptx::wgmma_wait_group<0>();\n        arrived(dQ);", "dense-d64", r"RACE, write after read"),
    _bug("dS not shown to wgmma", "sm90/bwd_sm90.cuh", "        ptx::fence_proxy_async();\n        arrive_warp(smem.ds_full", "        arrive_warp(smem.ds_full", "dense-d128", r"RACE, fence\.proxy\.async is missing"),
    _bug("dQ not shown to the copy", "sm90/bwd_sm90.cuh", "        ptx::fence_proxy_async();\n        arrive_warp(smem.dq_full", "        arrive_warp(smem.dq_full", "dense-d64", r"RACE, fence\.proxy\.async is missing"),
    _bug("dQ overwritten before it has left", "sm90/bwd_sm90.cuh", "        ptx::cp_async_bulk_wait_group_read<0>();\n        ptx::mbarrier_arrive(smem.dq_empty", "        ptx::mbarrier_arrive(smem.dq_empty", "dense-d64", r"RACE, write after read"),
    _bug("dQ added before it is there", "sm90/bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.dq_full(at.stage), at.phase);\n", "", "dense-d64", _RACE + "|PHASE"),
    _bug("Q released before dK is complete", "sm90/bwd_sm90.cuh", "        ptx::wgmma_wait_group<0>();\n        arrived(dV), arrived(dK);\n        arrive_warp(smem.empty(stage));", "        arrive_warp(smem.empty(stage));\n        ptx::wgmma_wait_group<0>();\n        arrived(dV), arrived(dK);", "dense-d64", r"RACE, write after read"),
    _bug("K given up before the last dQ is complete", "sm90/bwd_sm90.cuh", "            if (i >= before) ptx::mbarrier_wait(smem.ds_empty(at.stage), at.phase);\n", "", "dense-d64", r"RACE, write after read"),
    _bug("K given up after the last dQ alone", "sm90/bwd_sm90.cuh", "before <= 2; ++before)", "before <= 1; ++before)", "dense-d64", r"RACE, write after read"),
    _bug("turn of the deterministic mode not waited for", "sm90/bwd_sm90.cuh", "            while (ptx::ld_acquire(turn) < (V::kDeterministic ? rank : min(rank, 1))) ptx::nanosleep();\n", "", "deterministic", r"RACE, (additions in no fixed order|write after write): buffer 'dq_accum'"),
    _bug("turn not passed on", "sm90/bwd_sm90.cuh", "            ptx::atomic_add_acq_rel(turn, 1);\n", "", "deterministic", r"DEADLOCK"),
    _bug("dQ added before the first share is stored", "sm90/bwd_sm90.cuh", "            while (ptx::ld_acquire(turn) < (V::kDeterministic ? rank : min(rank, 1))) ptx::nanosleep();\n", "", "causal-d64", r"RACE"),
    _bug("first share added to what was there", "sm90/bwd_sm90.cuh", "if (stores) ptx", "if (false) ptx", "causal-d64", ""),
    _bug("turns of dQ confused", "sm90/bwd_sm90.cuh", "visit % Smem::kGroups != group", "visit % Smem::kGroups != Smem::kGroups - 1", "dense-d64", r"more arrivals|DEADLOCK|RACE|PHASE"),
    _bug("dS transposed into the wrong columns", "sm90/bwd_sm90.cuh", "fresh_thread() / 32 % 4 * 16, dS);", "fresh_thread() / 32 % 4 * 16 ^ 16, dS);", "dense-d64", ""),
    _bug("keys of the mask off by one", "sm90/bwd_sm90.cuh", "thread / 32 * 16 + lane / 4 + 8 * r;", "thread / 32 * 16 + lane / 4 + 8 * r + 1;", "causal-d64", ""),
    _bug("queries of the mask off by one", "sm90/bwd_sm90.cuh", "min(max(0, query) % 8, 2)", "min(max(0, query) % 8, 1)", "causal-d64", ""),
    _bug("NaN of hidden queries let through", "sm90/bwd_sm90.cuh", "if (ptx::vote_all(stage<T>(tile, row0, acc))) return;", "if (stage<T>(tile, row0, acc) || true) return;", "nan-in-queries-d64", ""),
    _bug("NaN of hidden keys let through", "any/bwd_convert.cuh", "if (!ptx::vote_all(stage_rows<T>(sdQ, row0, dQ, col0)))", "if (stage_rows<T>(sdQ, row0, dQ, col0); false)", "nan-in-hidden-key", ""),
    _bug("dQ of queries that see no key not zero", "any/bwd_convert.cuh", "if (p.schedule.first_stores && *dq_turn<V>(p, sequence, tile.block) == 0) dQ.zero();", ";", "more-queries-causal", ""),
)  # fmt: skip

# ---- beyond: dK and dV, then dQ ----
TWO_KERNELS = (
    _bug("P taken before it is handed over", "sm90/bwd_dkv_sm90.cuh", "            ptx::mbarrier_wait(smem.p_full(handed.stage), handed.phase);\n", "", "dense-d256", _RACE),
    _bug("P handed over before the last one is taken", "sm90/bwd_dkv_sm90.cuh", "            ptx::mbarrier_wait(smem.p_empty(handed.stage), handed.phase ^ 1);\n", "", "dense-d192", r"RACE|PHASE OVERRUN|more arrivals"),
    _bug("no wait for the other role's operand", "sm90/bwd_dkv_sm90.cuh", "                ptx::mbarrier_wait(smem.full(kOther, before.stage), before.phase);\n", "", "dense-d256", _RACE),
    _bug("operand released before its product is complete", "sm90/bwd_dkv_sm90.cuh", "                ptx::wgmma_wait_group<1>();\n                arrived(dKV);\n                arrive_warp(smem.empty(kOther, before.stage));",
         "                arrive_warp(smem.empty(kOther, before.stage));\n                ptx::wgmma_wait_group<1>();\n                arrived(dKV);", "dense-d256", r"RACE, write after read"),
    _bug("dK without its scale", "sm90/bwd_dkv_sm90.cuh", "if constexpr (kRole == kRoleDS) dKV.scale(score.scale);", ";", "dense-d256", ""),
    _bug("dV and dK changed places", "sm90/bwd_dkv_sm90.cuh", "kRole == kRoleP ? p.map_dv : p.map_dk", "kRole == kRoleP ? p.map_dk : p.map_dv", "dense-d256", ""),
    _bug("dK staged, not shown to the store", "sm90/bwd_dkv_sm90.cuh", "        ptx::fence_proxy_async();\n        ptx::bar_sync(1 + kRole, 128);", "        ptx::bar_sync(1 + kRole, 128);", "dense-d256", r"RACE, fence\.proxy\.async is missing"),
    _bug("K of the dQ kernel released too early", "sm90/bwd_dq_sm90.cuh", "            ptx::wgmma_wait_group<1>();\n            arrived(dQ);\n            arrive_warp(smem.empty(before.stage));",
         "            arrive_warp(smem.empty(before.stage));\n            ptx::wgmma_wait_group<1>();\n            arrived(dQ);", "dense-d256", r"RACE, write after read"),
    _bug("V of the wrong stage released", "sm90/bwd_dq_sm90.cuh", "(ring.stage ? ring.stage : V::kStages) - 1", "ring.stage", "dense-d256", r"RACE|PHASE OVERRUN|more arrivals|DEADLOCK"),
    _bug("blocks of the dQ kernel not masked", "sm90/bwd_dq_sm90.cuh", "if (!mask.full(q0, j * N)) {", "if (false) {", "causal-d200", ""),
    _bug("dQ without its scale", "sm90/bwd_dq_sm90.cuh", "        dQ.scale(score.scale);\n", "", "dense-d256", ""),
    _bug("first block of dQ left out", "sm90/bwd_dq_sm90.cuh", "for (int j = end - 2; j >= first; --j) {", "for (int j = end - 2; j > first; --j) {", "dense-d256", r"is in flight when its block exits|DEADLOCK"),
)  # fmt: skip

BACKWARD_SM90 = (*ONE_KERNEL, *TWO_KERNELS)
