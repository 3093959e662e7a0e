# ruff: noqa: E501 (a bug a line)
"""Bugs planted in the sm90 family's backward, as in mutants.py."""

from __future__ import annotations

from functools import partial

from .markers import change, postpone, without
from .mutants import Bug

_bug = partial(Bug, arch="sm_90")
_RACE = r"RACE, (read after write|write after read|write after write): "
_NO_FENCE = r"RACE, fence\.proxy\.async is missing"

# ---- head_dim up to 128: one kernel ----
ONE_KERNEL = (
    _bug("no wait for the Q of a visit", without("visit-q-full"), "dense-d64", _RACE + "|PHASE UNDERRUN"),
    _bug("no wait for the dO of a visit", without("visit-do-full"), "dense-d128", _RACE + "|PHASE UNDERRUN"),
    _bug("hidden tile skipped without waiting for it", (without("skipped-q-full"), without("skipped-do-full")), "tile-multiples", r"PHASE (UNDERRUN|OVERRUN)|RACE"),
    _bug("dS of a hidden tile not handed over", without("zeros-handed-over"), "causal-d64", r"DEADLOCK|RACE|PHASE"),
    _bug("dS read before it is complete", without("ds-full"), "dense-d64", _RACE + "|PHASE"),
    _bug("dS overwritten before dQ has read it", without("ds-empty"), "dense-d64", _RACE + "|PHASE"),
    _bug("dS released before dQ is complete", postpone("dq-complete", behind="ds-released"), "dense-d64", r"RACE, write after read"),
    _bug("dS not shown to wgmma", without("ds-shown-to-wgmma"), "dense-d128", _NO_FENCE),
    _bug("dQ not shown to the copy", without("dq-shown-to-tma"), "dense-d64", _NO_FENCE),
    _bug("dQ overwritten before it has left", without("dq-has-left"), "dense-d64", r"RACE, write after read"),
    _bug("dQ overwritten without asking", without("dq-empty"), "dense-d64", _RACE + "|PHASE"),
    _bug("dQ added before it is there", without("dq-full"), "dense-d64", _RACE + "|PHASE"),
    _bug("S read before it is complete, backward", without("s-complete-bwd"), "dense-d64"),
    _bug("dP read before it is complete", without("dp-complete-bwd"), "dense-d64"),
    _bug("Q released before dK is complete", postpone("dk-and-dv-complete", behind="visit-released"), "dense-d64", r"RACE, write after read"),
    _bug("K given up before the last dQ is complete", without("k-read-for-dq"), "dense-d64", r"RACE, write after read"),
    _bug("K given up after the last dQ alone", change("last-two-dq", "before <= 2", "before <= 1"), "dense-d64", r"RACE, write after read"),
    _bug("turn of the deterministic mode not waited for", without("turn-awaited-sm90"), "deterministic", r"RACE, (additions in no fixed order|write after write): buffer 'dq_accum'"),
    _bug("turn not passed on", without("turn-passed-on-sm90"), "deterministic", r"DEADLOCK"),
    _bug("dQ added before the first share is stored", without("turn-awaited-sm90"), "causal-d64", r"RACE"),
    _bug("first share added to what was there", change("first-share-stored", "if (stores)", "if (false)"), "causal-d64"),
    _bug("visits of one thread added by the other, too", change("visits-of-the-thread", "odd", "0"), "dense-d64", r"DEADLOCK"),
    _bug("turns of dQ confused", change("turn-of-the-group", "!= group", "!= Smem::kGroups - 1"), "dense-d64", r"more arrivals|DEADLOCK|RACE|PHASE"),
    _bug("dS transposed into the wrong columns", change("columns-of-the-warp", "fresh_thread() / 32 % 4 * 16", "fresh_thread() / 32 % 4 * 16 ^ 16"), "dense-d64"),
    _bug("other warps' rows of V held", change("rows-of-v-held", "% 4 * 16", "% 4 * 16 ^ 16"), "dense-d128"),
    _bug("keys of the mask off by one", change("keys-of-the-lane", "8 * r", "8 * r + 1"), "causal-d64"),
    _bug("queries of the mask off by one", change("queries-of-the-lane", "min(max(0, query) % 8, 2)", "min(max(0, query) % 8, 1)"), "causal-d64"),
    _bug("NaN of hidden queries let through", change("dk-and-dv-finite-sm90", "ptx::vote_all(stage<T>(tile, row0, acc))", "stage<T>(tile, row0, acc) || true"), "nan-in-queries-d64"),
    _bug("NaN of hidden keys let through", change("dq-finite-convert", "!ptx::vote_all(stage_rows<T>(sdQ, row0, dQ, col0))", "stage_rows<T>(sdQ, row0, dQ, col0); false"), "nan-in-hidden-key"),
    _bug("dQ of queries that see no key not zero", without("unseen-queries-zero"), "more-queries-causal"),
    _bug("row_stats read while delta may still write them", without("row-stats-awaited"), "dense-d64", r"RACE, access before griddepcontrol.wait: buffer 'row_stats'"),
    _bug("row_stats read by a repair while delta may still write them", without("row-stats-awaited-again"), "nan-in-queries-d64", r"RACE, access before griddepcontrol.wait: buffer 'row_stats'"),
    _bug("dQ added while delta may still clear it", without("cleared-dq-awaited"), "dense-d64", r"RACE, access before griddepcontrol.wait: buffer 'dq_"),
    _bug("tiles taken from a list that delta may still write", without("tile-list-awaited"), "packed-unequal", r"RACE, access before griddepcontrol.wait: buffer 'key_tiles'"),
    _bug("dQ converted while it may still be added to", without("main-awaited"), "dense-d64", r"RACE, access before griddepcontrol.wait"),
)  # fmt: skip

# ---- beyond, where v is narrower: the same kernel, other visits ----
WIDE_VISITS = (
    _bug("no wait for the Q of a wide visit", without("visit-q-full-wide"), "v-narrow-mla-gqa", _RACE + "|PHASE UNDERRUN"),
    _bug("no wait for the dO of a wide visit", without("visit-do-full-wide"), "v-narrow-mla-gqa", _RACE + "|PHASE UNDERRUN"),
    _bug("S read before it is complete, wide visit", without("s-complete-wide"), "v-narrow-mla-gqa"),
    _bug("dP read before it is complete, wide visit", without("dp-complete-wide"), "v-narrow-mla-gqa"),
    _bug("Q released before a wide dK is complete", postpone("dk-and-dv-complete-wide", behind="visit-released-wide"), "v-narrow-mla-gqa", r"RACE, write after read"),
    _bug("hidden queries seen, wide visit", change("what-is-seen-wide", "!kMasked || visible(j, e)", "true"), "v-narrow-mla"),
    _bug("P of the neighbouring query", change("p-of-the-pair-wide", "e % 2 ?", "e % 2 == 0 ?"), "v-narrow-mla"),
    _bug("each part of dQ by the first columns of K", change("columns-of-k-for-dq", "from_chunk(c)", "from_chunk(0)"), "v-narrow-mla"),
    _bug("parts of dQ added in one place", change("part-of-dq-in-its-place", "kBytes / 4", "0"), "v-narrow-mla"),
    _bug("parts of dQ in turn, whoever computes them", change("place-of-the-part", "2 * (visit / 2 * kDqParts + c) + visit % 2", "visit * kDqParts + c"), "v-narrow-mla-gqa", r"DEADLOCK"),
    _bug("dS released after the first part of dQ", change("ds-released", "c + 1 == Smem::kDqParts", "c == 0"), "v-narrow-mla-gqa", r"RACE, write after read"),
)  # fmt: skip

# ---- beyond: dK and dV, then dQ ----
TWO_KERNELS = (
    _bug("row_stats read while delta may still write them, wide", without("delta-awaited-dkv"), "dense-d256", r"RACE, access before griddepcontrol.wait"),
    _bug("row_stats read by a repair while delta may still write them, wide", without("row-stats-awaited-again-dkv"), "nan-in-queries-d256", r"RACE, access before griddepcontrol.wait: buffer 'row_stats'"),
    _bug("bwd_dq started before delta has ended", postpone("delta-awaited-dkv", behind="dq-behind-delta"), "dense-d256", r"RACE, access before griddepcontrol.wait: buffer 'row_stats'"),
    _bug("P taken before it is handed over", without("p-full"), "dense-d256", _RACE),
    _bug("P handed over before the last one is taken", without("p-empty"), "dense-d192", r"RACE|PHASE OVERRUN|more arrivals"),
    _bug("no wait for the other role's operand", without("operand-of-the-other-full"), "dense-d256", _RACE),
    _bug("operand released before its product is complete", postpone("product-complete-dkv", behind="operand-of-the-other-released"), "dense-d256", r"RACE, write after read"),
    _bug("dK without its scale", without("dk-scaled-dkv"), "dense-d256"),
    _bug("dV and dK changed places", change("dv-and-dk-in-place", "p.map_dv : p.map_dk", "p.map_dk : p.map_dv"), "dense-d256"),
    _bug("dK staged, not shown to the store", without("dkv-shown-to-tma"), "dense-d256", _NO_FENCE),
    _bug("K of the dQ kernel released too early", postpone("product-complete-dq", behind="k-released-dq"), "dense-d256", r"RACE, write after read"),
    _bug("V of the wrong stage released", change("stage-of-v", "(ring.stage ? ring.stage : V::kStages) - 1", "ring.stage"), "dense-d256", r"RACE|PHASE OVERRUN|more arrivals|DEADLOCK"),
    _bug("blocks of the dQ kernel not masked", change("hidden-keys-masked-dq", "mask.full(q0, j * N)", "true"), "causal-d200"),
    _bug("dQ without its scale", without("dq-scaled-sm90"), "dense-d256"),
    _bug("first block of dQ left out", change("down-to-the-first-block", "j >= first", "j > first"), "dense-d256", r"is in flight when its block exits|DEADLOCK"),
)  # fmt: skip

BACKWARD_SM90 = (*ONE_KERNEL, *WIDE_VISITS, *TWO_KERNELS)
