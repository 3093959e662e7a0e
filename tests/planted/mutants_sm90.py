# ruff: noqa: E501 (a bug a line)
"""Bugs planted in the sm90 family's forward, as in mutants.py."""

from __future__ import annotations

from functools import partial

from .markers import change, postpone, without
from .mutants import Bug

_bug = partial(Bug, arch="sm_90")
_UNREAD = r"RACE, read after write: .*tile_sm90\.cuh:\d+(.|\n)*fwd_sm90\.cuh:\d+"
_AGAIN = "typename Softmax::Rows by; softmax.raise_maximum(S, by); softmax.exponentiate(S);"

# ---- Barriers, rings and copies ----
SYNCHRONISATION = (
    _bug("no wait for K", without("k-full"), "dense-d64", _UNREAD),
    _bug("no wait for V", without("v-full"), "dense-d128", _UNREAD),
    _bug("no wait for Q", without("q-full"), "dense-d64", _UNREAD),
    _bug("wrong initial parity", change("k-empty", "ring.phase ^ 1", "ring.phase"), "dense-d64", r"DEADLOCK(.|\n)*mbarrier\.try_wait at kernels_cu/sm90/fwd_(load_)?sm90\.cuh:\d+"),
    _bug("K brought too early", without("k-empty"), "dense-d64", r"more arrivals than the count(.|\n)*fwd_load_sm90\.cuh:\d+|RACE|PHASE OVERRUN"),
    _bug("Q brought too early", without("q-empty"), "many-tiles", r"RACE, write after (read|write): .*(tile|fwd)_sm90\.cuh:\d+|PHASE OVERRUN|more arrivals"),
    _bug("slot of Q taken over from the other group unseen", without("other-group-done-with-q"), "short-tiles-d256", r"PHASE UNDERRUN: .*fwd_sm90\.cuh:\d+"),
    _bug("V released before its wgmma is complete", postpone("pv-complete", behind="v-released"), "dense-d64", r"RACE, write after read: .*(tile|fwd)_sm90\.cuh:\d+"),
    _bug("K released before the fallback has read it", change("k-kept-until-now", "if (!softmax", "arrive_warp(smem.k_empty(ring.stage)); if (!softmax"), "scores-in-the-hundreds", r"more arrivals|RACE, (write after read|read after write): .*tile_sm90\.cuh:\d+"),
    _bug("V of the wrong stage", change("v-of-the-block-before", "before.stage", "ring.stage"), "dense-d128", _UNREAD),
    _bug("stage released by too few warps", change("k-released-by-all-warps", "4 * kGroups", "4 * kGroups - 1"), "dense-d64", r"RACE, write after read|PHASE OVERRUN|more arrivals"),
    _bug("passed blocks released before they are full", without("passed-block-full"), "causal-d128", r"PHASE OVERRUN|more arrivals|RACE"),
    _bug("blocks behind the window not passed", without("blocks-before-window-passed-fwd"), "window-left-causal"),
    _bug("blocks that other rows see not passed", change("blocks-of-other-rows-passed", "Mask<V>::kHides ? tile.end - end : 0", "0"), "many-tiles-causal", r"DEADLOCK"),
    _bug("Q of rows that do not exist released by one warp's word", without("q-full-seen-by-all"), "many-tiles-d256", r"PHASE OVERRUN: .*fwd_sm90\.cuh:\d+"),
    _bug("wrong number of bytes expected", change("bytes-of-the-tile", "kBytes + more_bytes", "kBytes + more_bytes + 16"), "dense-d64", r"DEADLOCK"),
    _bug("no wgmma.fence", without("registers-settled-nt"), "dense-d64", r"no wgmma\.fence"),
    _bug("scores read before they are complete", without("s-complete"), "causal-d128"),
    _bug("P changed while wgmma reads it", without("pv-complete"), "dense-d64", r"the A registers of lane \d+ changed"),
)  # fmt: skip

# ---- The way of O, and the queue of tiles ----
TILES = (
    _bug("no proxy fence before the store", without("o-shown-to-tma"), "dense-d64", r"RACE, fence\.proxy\.async is missing.*(tile|fwd)_sm90\.cuh:\d+"),
    _bug("no barrier before the store", without("o-staged-by-the-group"), "dense-d64", r"RACE, read after write: .*(tile|fwd)_sm90\.cuh:\d+"),
    _bug("O's tile released before it has left", without("o-has-left"), "many-tiles", r"RACE, write after read: .*(tile|fwd)_sm90\.cuh:\d+|without waiting for the bulk copy"),
    _bug("O's tile never released", without("tile-of-o-released"), "many-tiles", r"DEADLOCK(.|\n)*mbarrier\.try_wait at kernels_cu/sm90/fwd_sm90\.cuh:\d+"),
    _bug("shared memory left to itself", without("memory-outlives-o"), "dense-d64", r"without waiting for the bulk copy that it issued at kernels_cu/tile/tile_sm90\.cuh:\d+"),
    _bug("O's tile kept while the next Q waits for it", without("tile-of-o-free-for-q"), "many-tiles-d160", r"DEADLOCK(.|\n)*mbarrier\.try_wait at kernels_cu/sm90/fwd_sm90\.cuh:\d+"),
    _bug("counter not cleared", without("counter-cleared"), "many-tiles", r"the counter is left as"),
    _bug("last block not recognised", change("last-block-done", "ptx::grid_size() - 1", "ptx::grid_size()"), "many-tiles", r"the counter is left as"),
    _bug("counter cleared before all blocks have drawn", change("last-block-done", "ptx::atomic_add_acq_rel", "ptx::atomic_add"), "many-tiles", r"RACE, store not ordered after an addition: buffer 'counter'.*work_sm90\.cuh:\d+"),
    _bug("a tile drawn twice", change("numbers-differ", "ptx::grid_size() + ptx::atomic_add", "ptx::grid_size() - 1 + ptx::atomic_add"), "many-tiles", r"RACE, write after write: buffer '(o|lse)'"),
    _bug("number overwritten before all have read it", without("slot-of-queue-empty"), "many-tiles", r"RACE, write after read: .*pipeline_sm90\.cuh:\d+|PHASE OVERRUN"),
    _bug("number read before it is there", without("slot-of-queue-full"), "many-tiles", r"RACE, read after write: .*pipeline_sm90\.cuh:\d+"),
    _bug("one follower of the queue forgotten", change("followers-fwd-sm90", "4 * kGroups + 1", "4 * kGroups"), "many-tiles", r"DEADLOCK|RACE, write after read: .*pipeline_sm90\.cuh|PHASE OVERRUN|more arrivals"),
)  # fmt: skip

# ---- Numbers ----
NUMBERS = (
    _bug("O staged without the swizzle", change("swizzled", "(col / 8 % 8 ^ row % 8)", "(col / 8 % 8)"), "dense-d64"),
    _bug("wrong leading byte offset", change("leading-bytes", "kChunkBytes", "16"), "dense-d128"),
    _bug("wrong stride byte offset", change("stride-bytes", "1024 >> 4", "512 >> 4"), "dense-d64", r"RACE, .*tile_sm90\.cuh:\d+"),
    _bug("depth steps beyond the first 64 columns", change("depth-steps-across-chunks", "k / 4 * kChunkBytes + k % 4 * 32", "k * 32"), "dense-d128", r"RACE, .*tile_sm90\.cuh:\d+"),
    _bug("mask of the sm90 forward off by one", change("mask-from-the-lane-fwd-sm90", "Keys::of_lane(lane)", "Keys::of_lane(lane) - 1"), "causal-d64"),
    _bug("blocks that hide keys taken for whole ones", change("first-cut-block", "/ N", "/ N + 1"), "causal-d128"),
    _bug("window's left side ignored", change("first-whole-block", "q0 + M - 1", "q0"), "falling-maxima-window"),
    _bug("last block of the range left out", change("up-to-the-last-block", "j < end", "j < end - 1"), "dense-d64"),
    _bug("rows that a NaN leaked into not repaired", change("o-is-finite-sm90", "!ptx::vote_all(stage<T>(sO, warp_row, O))", "stage<T>(sO, warp_row, O); false"), "nan-in-visible-key-causal"),
    _bug("repair begins before all lanes have staged", without("o-staged-by-the-warp"), "nan-in-visible-key-causal", r"RACE, read after write: .*(tile_sm90|repair)\.cuh:\d+"),
    _bug("optimism never disappointed", change("hope-checked", "good =", ""), "growing-maxima"),
    _bug("O does not follow the maximum of the scores formed again", change("o-follows-scores-again", "softmax.step(S, O);", _AGAIN), "scores-in-the-hundreds"),
    _bug("O does not follow the maximum of P that is lowered", without("o-follows-lowered"), "growing-maxima"),
    _bug("P that is lowered not summed", without("sums-of-lowered"), "growing-maxima"),
    _bug("first block not masked", without("first-block-masked"), "causal-d64"),
    _bug("scores not formed again", without("scores-again"), "scores-in-the-hundreds"),
    _bug("sum taken twice", change("sums-of-good-blocks", "if (good)", ""), "growing-maxima"),
    _bug("O does not follow the maximum", without("o-follows"), "growing-maxima-window"),
    _bug("wrong head of K", change("head-of-k-sm90", "head / (p.heads_q / p.heads_k)", "head % p.heads_k"), "gqa"),
)  # fmt: skip

FORWARD_SM90 = (*SYNCHRONISATION, *TILES, *NUMBERS)
