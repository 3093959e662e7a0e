# ruff: noqa: E501 (source texts to be replaced)
"""Bugs planted in the sm90 family's backward: edits of header texts, as in mutants.py."""

from __future__ import annotations

from functools import partial

from .mutants import Bug

_bug = partial(Bug, arch="sm_90")
_RACE = r"RACE, (read after write|write after read|write after write): "

# ---- head_dim up to 128: one kernel ----
ONE_KERNEL = (
    _bug("no wait for the Q of a visit", "bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.q_full(stage), ring.phase);\n", "", "dense-d64", _RACE),
    _bug("no wait for the dO of a visit", "bwd_sm90.cuh", "        ptx::mbarrier_wait(smem.dout_full(stage), ring.phase);\n", "", "dense-d128", _RACE),
    _bug("dS read before it is complete", "bwd_sm90.cuh", "        ptx::bar_sync(kBarConsumers, kBwdConsumers);  // dS is complete\n", "", "dense-d64", _RACE),
    _bug("dS not shown to wgmma", "bwd_sm90.cuh", "        ptx::fence_proxy_async();\n        if (careful)", "        if (careful)", "dense-d128", r"RACE, fence\.proxy\.async is missing"),
    _bug("dQ not shown to the copy", "bwd_sm90.cuh", "        ptx::fence_proxy_async();\n        ptx::bar_arrive(kBarDqReady", "        ptx::bar_arrive(kBarDqReady", "dense-d64", r"RACE, fence\.proxy\.async is missing"),
    _bug("dQ overwritten before it has left", "bwd_sm90.cuh", "                ptx::cp_async_bulk_wait_group_read<0>();\n", "", "dense-d64", r"RACE, write after read"),
    _bug("Q released before dK is complete", "bwd_sm90.cuh", "        ptx::wgmma_wait_group<0>();\n        arrived(dK);\n", "", "dense-d64", r"RACE|changed|arrive"),
    _bug("turn of the deterministic mode not waited for", "bwd_sm90.cuh", "while (ptx::ld_acquire(turn) < 2 * rank) ptx::nanosleep();", ";", "deterministic", r"RACE, additions in no fixed order"),
    _bug("turn passed on by one half only", "bwd_sm90.cuh", "ptx::atomic_add_acq_rel(turn, 1);", "if (half == 0) ptx::atomic_add_acq_rel(turn, 1);", "deterministic", r"DEADLOCK"),
    _bug("half of dQ from the wrong columns of K", "bwd_sm90.cuh", "sK.from_chunk(group)", "sK.from_chunk(1 - group)", "dense-d128", ""),
    _bug("dS transposed into the wrong columns", "bwd_sm90.cuh", "stage_transposed(sdS, key0, rdS);", "stage_transposed(sdS, key0 ^ 16, rdS);", "dense-d64", ""),
    _bug("keys of the mask off by one", "bwd_sm90.cuh", "k0 + thread / 32 * 16 + lane / 4);", "k0 + thread / 32 * 16 + lane / 4 + 1);", "causal-d64", ""),
    _bug("NaN of hidden keys let through", "bwd_sm90.cuh", "careful = ptx::vote_any(ptx::bar_red_or(kBarVote, kBwdConsumers, !finite || !dS.finite()));", "careful = false;", "nan-in-hidden-key", ""),
)  # fmt: skip

# ---- beyond: dK and dV, then dQ ----
TWO_KERNELS = (
    _bug("P taken before it is handed over", "bwd_dkv_sm90.cuh", "            ptx::mbarrier_wait(smem.p_full(handed.stage), handed.phase);\n", "", "dense-d256", _RACE),
    _bug("P handed over before the last one is taken", "bwd_dkv_sm90.cuh", "            ptx::mbarrier_wait(smem.p_empty(handed.stage), handed.phase ^ 1);\n", "", "dense-d192", r"RACE|PHASE OVERRUN|more arrivals"),
    _bug("no wait for the other role's operand", "bwd_dkv_sm90.cuh", "                ptx::mbarrier_wait(smem.full(kOther, before.stage), before.phase);\n", "", "dense-d256", _RACE),
    _bug("operand released before its product is complete", "bwd_dkv_sm90.cuh", "                ptx::wgmma_wait_group<1>();\n                arrived(dKV);\n                arrive_warp(smem.empty(kOther, before.stage));",
         "                arrive_warp(smem.empty(kOther, before.stage));\n                ptx::wgmma_wait_group<1>();\n                arrived(dKV);", "dense-d256", r"RACE, write after read"),
    _bug("dK without its scale", "bwd_dkv_sm90.cuh", "if constexpr (kRole == kRoleDS) dKV.scale(score.scale);", ";", "dense-d256", ""),
    _bug("dV and dK changed places", "bwd_dkv_sm90.cuh", "kRole == kRoleP ? p.map_dv : p.map_dk", "kRole == kRoleP ? p.map_dk : p.map_dv", "dense-d256", ""),
    _bug("dK staged, not shown to the store", "bwd_dkv_sm90.cuh", "        ptx::fence_proxy_async();\n        ptx::bar_sync(1 + kRole, 128);", "        ptx::bar_sync(1 + kRole, 128);", "dense-d256", r"RACE, fence\.proxy\.async is missing"),
    _bug("K of the dQ kernel released too early", "bwd_dq_sm90.cuh", "            ptx::wgmma_wait_group<1>();\n            arrived(dQ);\n            arrive_warp(smem.empty(before.stage));",
         "            arrive_warp(smem.empty(before.stage));\n            ptx::wgmma_wait_group<1>();\n            arrived(dQ);", "dense-d256", r"RACE, write after read"),
    _bug("V of the wrong stage released", "bwd_dq_sm90.cuh", "(ring.stage ? ring.stage : V::kStages) - 1", "ring.stage", "dense-d256", r"RACE|PHASE OVERRUN|more arrivals|DEADLOCK"),
    _bug("blocks of the dQ kernel not masked", "bwd_dq_sm90.cuh", "if (!mask.full(q0, j * N)) {", "if (false) {", "causal-d200", ""),
    _bug("dQ without its scale", "bwd_dq_sm90.cuh", "        dQ.scale(score.scale);\n", "", "dense-d256", ""),
    _bug("first block of dQ left out", "bwd_dq_sm90.cuh", "for (int j = end - 2; j >= first; --j) {", "for (int j = end - 2; j > first; --j) {", "dense-d256", r"is in flight when its block exits|DEADLOCK"),
)  # fmt: skip

BACKWARD_SM90 = (*ONE_KERNEL, *TWO_KERNELS)
