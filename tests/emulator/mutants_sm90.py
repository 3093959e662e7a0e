# ruff: noqa: E501 (source texts to be replaced)
"""Bugs planted in the sm90 family's forward: edits of header texts, as in mutants.py."""

from __future__ import annotations

from functools import partial

from .mutants import Bug

_bug = partial(Bug, arch="sm_90")

# ---- Barriers, rings and copies ----
SYNCHRONISATION = (
    _bug("no wait for K", "sm90/fwd_sm90.cuh", "            ring.next();\n            ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);", "            ring.next();",
         "dense-d64", r"RACE, read after write: .*tile_sm90\.cuh:\d+(.|\n)*fwd_sm90\.cuh:\d+"),
    _bug("no wait for V", "sm90/fwd_sm90.cuh", "            wait_v(before);\n", "",
         "dense-d128", r"RACE, read after write: .*tile_sm90\.cuh:\d+(.|\n)*fwd_sm90\.cuh:\d+"),
    _bug("no wait for Q", "sm90/fwd_sm90.cuh", "        ptx::mbarrier_wait(smem.q_full(q_ring.stage), q_ring.phase);\n", "",
         "dense-d64", r"RACE, read after write: .*tile_sm90\.cuh:\d+(.|\n)*fwd_sm90\.cuh:\d+"),
    _bug("wrong initial parity", "sm90/fwd_load_sm90.cuh", "ptx::mbarrier_wait(smem.k_empty(ring.stage), ring.phase ^ 1);", "ptx::mbarrier_wait(smem.k_empty(ring.stage), ring.phase);",
         "dense-d64", r"DEADLOCK(.|\n)*mbarrier\.try_wait at kernels_cu/sm90/fwd_(load_)?sm90\.cuh:\d+"),
    _bug("K brought too early", "sm90/fwd_load_sm90.cuh", "            ptx::mbarrier_wait(smem.k_empty(ring.stage), ring.phase ^ 1);\n", "",
         "dense-d64", r"more arrivals than the count(.|\n)*fwd_load_sm90\.cuh:\d+|RACE|PHASE OVERRUN"),
    _bug("Q brought too early", "sm90/fwd_load_sm90.cuh", "            ptx::mbarrier_wait(smem.q_empty(ring.stage), ring.phase ^ 1);\n", "",
         "many-tiles", r"RACE, write after (read|write): .*(tile|fwd)_sm90\.cuh:\d+|PHASE OVERRUN|more arrivals"),
    _bug("slot of Q taken over from the other group unseen", "sm90/fwd_sm90.cuh", "        if (smem.kSlots % smem.kGroups) ptx::mbarrier_wait(smem.q_empty(q_ring.stage), q_ring.phase ^ 1);\n", "",
         "short-tiles-d256", r"PHASE UNDERRUN: .*fwd_sm90\.cuh:\d+"),
    _bug("V released before its wgmma is complete", "sm90/fwd_sm90.cuh", "            ptx::wgmma_wait_group<0>();\n            arrived(O);\n            release_v(before);",
         "            release_v(before);\n            ptx::wgmma_wait_group<0>();\n            arrived(O);",
         "dense-d64", r"RACE, write after read: .*(tile|fwd)_sm90\.cuh:\d+"),
    _bug("K released before the fallback has read it", "sm90/fwd_sm90.cuh", "            P.from(S);\n            if (!good) {\n", "            P.from(S);\n            arrive_warp(smem.k_empty(ring.stage));\n            if (!good) {\n",
         "growing-maxima-window", r"more arrivals|RACE, (write after read|read after write): .*tile_sm90\.cuh:\d+"),
    _bug("V of the wrong stage", "sm90/fwd_sm90.cuh", "issue_nn<T, N>(O, P, smem.v(before.stage), started);", "issue_nn<T, N>(O, P, smem.v(ring.stage), started);",
         "dense-d128", r"RACE, read after write: .*tile_sm90\.cuh:\d+(.|\n)*fwd_sm90\.cuh:\d+"),
    _bug("stage released by too few warps", "sm90/fwd_load_sm90.cuh", "ptx::mbarrier_init(k_empty(i), 4 * kGroups);", "ptx::mbarrier_init(k_empty(i), 4 * kGroups - 1);",
         "dense-d64", r"RACE, write after read|PHASE OVERRUN|more arrivals"),
    _bug("passed blocks released before they are full", "sm90/fwd_sm90.cuh", "            ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);\n            release_k(ring);",
         "            release_k(ring);", "causal-d128", r"PHASE OVERRUN|more arrivals|RACE"),
    _bug("blocks behind the window not passed", "sm90/fwd_sm90.cuh", "        if constexpr (V::kWindow) pass(first_of(tile) - tile.first);\n", "",
         "window-left-causal", ""),
    _bug("blocks that other rows see not passed", "sm90/fwd_sm90.cuh", "        const int rest = Mask<V>::kHides ? tile.end - end : 0;\n", "        const int rest = 0;\n",
         "many-tiles-causal", r"DEADLOCK"),
    _bug("Q of rows that do not exist released by one warp's word", "sm90/fwd_sm90.cuh", "        sync();  // all warps have seen this phase of q_full before it can end\n", "",
         "many-tiles-d256", r"PHASE OVERRUN: .*fwd_sm90\.cuh:\d+"),
    _bug("wrong number of bytes expected", "tile/tile_sm90.cuh", "ptx::mbarrier_arrive_expect_tx(full, kBytes + more_bytes);", "ptx::mbarrier_arrive_expect_tx(full, kBytes + more_bytes + 16);",
         "dense-d64", r"DEADLOCK"),
    _bug("no wgmma.fence", "tile/tile_sm90.cuh", "    ptx::wgmma_fence();\n    #pragma unroll\n    for (int k = 0; k < kDepth / 16; ++k) wgmma<0>", "    #pragma unroll\n    for (int k = 0; k < kDepth / 16; ++k) wgmma<0>",
         "dense-d64", r"no wgmma\.fence"),
    _bug("scores read before they are complete", "sm90/fwd_sm90.cuh", "            ptx::wgmma_wait_group<1>();\n            arrived(S);\n            apply_score", "            arrived(S);\n            apply_score", "causal-d128", ""),
    _bug("P changed while wgmma reads it", "sm90/fwd_sm90.cuh", "            ptx::wgmma_wait_group<0>();\n            arrived(O);\n            release_v(before);",
         "            release_v(before);", "dense-d64", r"the A registers of lane \d+ changed"),
)  # fmt: skip

# ---- The way of O, and the queue of tiles ----
TILES = (
    _bug("no proxy fence before the store", "sm90/fwd_sm90.cuh", "        ptx::fence_proxy_async();\n", "", "dense-d64",
         r"RACE, fence\.proxy\.async is missing.*(tile|fwd)_sm90\.cuh:\d+"),
    _bug("no barrier before the store", "sm90/fwd_sm90.cuh", "            sync();\n            if (leads()) sQ.store", "            if (leads()) sQ.store", "dense-d64",
         r"RACE, read after write: .*(tile|fwd)_sm90\.cuh:\d+"),
    _bug("O's tile released before it has left", "sm90/fwd_sm90.cuh", "            ptx::cp_async_bulk_wait_group_read<0>();\n", "", "many-tiles",
         r"RACE, write after read: .*(tile|fwd)_sm90\.cuh:\d+|without waiting for the bulk copy"),
    _bug("O's tile never released", "sm90/fwd_sm90.cuh", "            ptx::mbarrier_arrive(smem.q_empty(leaving));\n", "", "many-tiles",
         r"DEADLOCK(.|\n)*mbarrier\.try_wait at kernels_cu/sm90/fwd_sm90\.cuh:\d+"),
    _bug("shared memory left to itself", "sm90/fwd_sm90.cuh", "        release_leaving();  // shared memory must outlive the store\n", "", "dense-d64",
         r"without waiting for the bulk copy that it issued at kernels_cu/tile/tile_sm90\.cuh:\d+"),
    _bug("O's tile kept while the next Q waits for it", "sm90/fwd_sm90.cuh", "            if (smem.kSlots == smem.kGroups) release_leaving();  // the next tile's Q is waiting for it\n", "", "many-tiles-d160",
         r"DEADLOCK(.|\n)*mbarrier\.try_wait at kernels_cu/sm90/fwd_sm90\.cuh:\d+"),
    _bug("counter not cleared", "tile/pipeline_sm90.cuh", "            ptx::st_release(counter, 0);\n", "", "many-tiles", r"the counter is left as"),
    _bug("last block not recognised", "tile/pipeline_sm90.cuh", "== ptx::grid_size() - 1)", "== ptx::grid_size())", "many-tiles", r"the counter is left as"),
    _bug("counter cleared before all blocks have drawn", "tile/pipeline_sm90.cuh", "ptx::atomic_add_acq_rel(counter + 1, 1)", "ptx::atomic_add(counter + 1, 1)", "many-tiles",
         r"RACE, store not ordered after an addition: buffer 'counter'.*pipeline_sm90\.cuh:\d+"),
    _bug("a tile drawn twice", "tile/pipeline_sm90.cuh", "ptx::grid_size() + ptx::atomic_add(counter, 1)", "ptx::grid_size() - 1 + ptx::atomic_add(counter, 1)", "many-tiles", r"RACE, write after write: buffer '(o|lse)'"),
    _bug("number overwritten before all have read it", "tile/pipeline_sm90.cuh", "        ptx::mbarrier_wait(empty(), at.phase ^ 1);\n", "", "many-tiles",
         r"RACE, write after read: .*pipeline_sm90\.cuh:\d+|PHASE OVERRUN"),
    _bug("number read before it is there", "tile/pipeline_sm90.cuh", "        ptx::mbarrier_wait(full(), at.phase);\n", "", "many-tiles",
         r"RACE, read after write: .*pipeline_sm90\.cuh:\d+"),
    _bug("one follower of the queue forgotten", "sm90/fwd_load_sm90.cuh", "4 * kGroups + 1);", "4 * kGroups);", "many-tiles", r"DEADLOCK|RACE, write after read: .*pipeline_sm90\.cuh|PHASE OVERRUN|more arrivals"),
)  # fmt: skip

# ---- Numbers ----
NUMBERS = (
    _bug("O staged without the swizzle", "tile/tile_sm90.cuh", "(col / 8 % 8 ^ row % 8) * 16", "(col / 8 % 8) * 16", "dense-d64", ""),
    _bug("wrong leading byte offset", "tile/tile_sm90.cuh", "descriptor(kChunkBytes)", "descriptor(16)", "dense-d128", ""),
    _bug("wrong stride byte offset", "tile/tile_sm90.cuh", "static_cast<ptx::u64>(1024 >> 4) << 32", "static_cast<ptx::u64>(512 >> 4) << 32", "dense-d64", r"RACE, .*tile_sm90\.cuh:\d+"),
    _bug("depth steps beyond the first 64 columns", "tile/tile_sm90.cuh", "(k / 4 * kChunkBytes + k % 4 * 32) >> 4", "(k * 32) >> 4", "dense-d128", r"RACE, .*tile_sm90\.cuh:\d+"),
    _bug("mask of the sm90 forward off by one", "sm90/fwd_sm90.cuh", "j * N + 2 * (lane % 4));", "j * N + 2 * (lane % 4) - 1);", "causal-d64", ""),
    _bug("blocks that hide keys taken for whole ones", "sm90/fwd_sm90.cuh", "mask.end_key(q0)) / N;", "mask.end_key(q0)) / N + 1;", "causal-d128", ""),
    _bug("window's left side ignored", "sm90/fwd_sm90.cuh", "ceil_div(mask.first_key(q0 + 63), N)", "ceil_div(mask.first_key(q0), N)", "falling-maxima-window", ""),
    _bug("last block of the range left out", "sm90/fwd_sm90.cuh", "for (; j < end; ++j)", "for (; j < end - 1; ++j)", "dense-d64", ""),
    _bug("rows that a NaN leaked into not repaired", "sm90/fwd_sm90.cuh", "if (!ptx::vote_all(stage<T>(sQ, warp_row, O))) {", "if (stage<T>(sQ, warp_row, O); false) {",
         "nan-in-visible-key-causal", ""),
    _bug("repair begins before all lanes have staged", "sm90/fwd_sm90.cuh", "                ptx::bar_warp_sync();  // the other lanes' stage() wrote parts of these rows\n", "",
         "nan-in-visible-key-causal", r"RACE, read after write: .*(tile_sm90|repair)\.cuh:\d+"),
    _bug("optimism never disappointed", "sm90/fwd_sm90.cuh", "good = softmax.exponentiate_optimistically(S);", "softmax.exponentiate_optimistically(S);", "growing-maxima", ""),
    _bug("O does not follow the maximum of the scores formed again", "sm90/fwd_sm90.cuh", "softmax.step(S, O);", "typename Softmax::Rows by;\n                softmax.raise_maximum(S, by);\n                softmax.exponentiate(S);", "growing-maxima", ""),
    _bug("first block not masked", "sm90/fwd_sm90.cuh", "        if (first < whole || first >= cut) apply_mask(S, q0, first);\n", "", "causal-d64", ""),
    _bug("scores not formed again", "sm90/fwd_sm90.cuh", "                multiply_nt<T, kDepth>(S, sQ, warp_row, smem.k(ring.stage));\n", "", "growing-maxima", ""),
    _bug("sum taken twice", "attention/softmax.cuh", "        if (good) {\n", "        {\n", "growing-maxima", ""),
    _bug("O does not follow the maximum", "sm90/fwd_sm90.cuh", "if (grows) softmax.multiply_rows(O, rescale);", ";", "growing-maxima-window", ""),
    _bug("wrong head of K", "sm90/fwd_load_sm90.cuh", "return head / (p.heads_q / p.heads_k);", "return head % p.heads_k;", "gqa", ""),
)  # fmt: skip

FORWARD_SM90 = (*SYNCHRONISATION, *TILES, *NUMBERS)
