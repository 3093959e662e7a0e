"""What the emulator runs of attention over a cache: the table's cases, one a shipped variant, and tiles that small
problems would not get."""

from __future__ import annotations

from dataclasses import replace

from cupyflash.cache.problem import CacheProblem
from cupyflash.check.cache_case import CacheCase
from cupyflash.check.cache_cases import CACHE_CASES
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import plan_decode
from cupyflash.plan.decode_shares import DecodePlan, shared_out
from cupyflash.plan.shipped_cache import shipped_calls

EXTRA = {
    case.name: case
    for case in (
        CacheCase("cache-nonfinite-one-split", "full", (70, 33), 4, nonfinite=True, num_splits=1),
        CacheCase("cache-many-units", "full", (1700,), heads_q=2, heads_k=1, head_dim=128, num_splits=1),
        CacheCase("cache-many-units-of-teams", "full", (1700,), 9, 128, heads_k=1, num_splits=1),
        CacheCase("cache-equal", "full", (64,) * 6),
        CacheCase("cache-equal-many", "full", (33,) * 70),
        CacheCase("cache-int8-many", "full", tuple(7 * b % 41 for b in range(70)), stored="int8"),
        CacheCase("cache-e4m3-mqa-32", "full", (99, 41), 1, 128, heads_q=32, heads_k=1, stored="e4m3"),
        CacheCase("cache-int8-33-rows", "full", (99, 41), 11, 128, heads_q=6, heads_k=2, stored="int8", window=(50, 0)),
        CacheCase("cache-e4m3-128-rows", "full", (104, 3), 16, heads_q=8, heads_k=1, page_size=1, stored="e4m3"),
        CacheCase("cache-int8-16-rows", "full", (150, 70, 33), 4, heads_q=8, heads_k=2, stored="int8"),
        CacheCase("cache-int8-64-rows-d256", "full", (170,), 33, 256, heads_q=2, heads_k=2, stored="int8"),
        CacheCase("cache-int8-one-mqa", "full", (700,), 1, 128, heads_q=32, heads_k=1, stored="int8"),
        CacheCase(
            "cache-int8-pages-of-8",
            "full",
            (99, 41),
            2,
            128,
            page_size=8,
            stored="int8",
            scale_dims=2,
            scale_spread=5.0,
        ),
        CacheCase("cache-e4m3-many-units", "full", (1700,), 1, 256, heads_q=2, heads_k=1, stored="e4m3", num_splits=1),
        CacheCase(
            "cache-v-narrow-many-units", "full", (900,), 1, 192, heads_q=2, heads_k=1, num_splits=1, head_dim_v=128
        ),
        CacheCase("cache-blocks-many", "full", tuple(37 * b % 191 for b in range(40)), blocks="tiles_of_batch"),
        CacheCase("cache-blocks-many-units-of-teams", "full", (1700,), 9, 128, heads_k=1, num_splits=1, blocks="tiles"),
        CacheCase("cache-many", "full", tuple(7 * b % 41 for b in range(70))),
    )
}
ALL = {case.name: case for case in CACHE_CASES} | EXTRA
TABLE = {case.name: case for case in CACHE_CASES if "emulator" in case.tags} | EXTRA
# Tiles by their fields that differ from those of the plan: two heads a block, pairs of heads, gangs.
TILES: dict[str, tuple[CacheCase, dict[str, int]]] = {
    case.name: (case, facts)
    for case, facts in (
        (CacheCase("cache-two-heads", "full", (150, 3, 77), heads_q=16, heads_k=8, head_dim=128),
         {"warps": 4, "heads": 2, "stages": 2}),
        (CacheCase("cache-two-heads-equal", "full", (96,) * 4, 2, heads_q=8, heads_k=4), {"warps": 4, "heads": 2}),
        (CacheCase("cache-pairs", "full", (150, 250, 77), heads_q=8, heads_k=4), {"heads": 2, "pair": 2, "stages": 3}),
        (CacheCase("cache-two-pairs", "full", (150, 2, 77), 3, heads_q=8, heads_k=8),
         {"warps": 4, "heads": 4, "pair": 2, "stages": 2}),
        (CacheCase("cache-two-heads-d256", "full", (150, 77), 2, 256, heads_q=4, heads_k=2),
         {"warps": 4, "heads": 2, "stages": 2}),
        (CacheCase("cache-pairs-blocks", "full", (150, 250, 77), heads_q=8, heads_k=4, blocks="tiles_of_heads"),
         {"heads": 2, "pair": 2, "stages": 3}),
    )
}  # fmt: skip


def tiled(p: CacheProblem, device: Device, facts: dict[str, int], aligned: bool = True) -> DecodePlan:
    """The plan with a tile that has these fields."""
    variant = plan_decode(p, device, aligned=aligned, tma=aligned, clusters=False).variant
    return shared_out(p, device, replace(variant, tile=replace(variant.tile, **facts)))


_WORDS = {"bf16": "hqk hides", "fp32": "hqk fp32 masks", "bool": "bqk bool"}  # biases by their dtypes


def shipped_case(call: CacheProblem, aligned: bool) -> CacheCase:
    """Small shapes for one shipped call."""
    lengths = (331,) if call.batch == 1 else (150, 0, 77)
    name = f"shipped-{call.dtype}-d{call.head_dim}-b{call.batch}-n{call.capacity}-q{call.seqlen_q}-p{call.page_size}"
    name += "-packed" * call.packed + "-softcap" * (call.softcap is not None) + "-alibi" * call.alibi
    name += "-range" * call.kv_range + "-window" * (call.window[0] is not None) + "-append" * (call.seqlen_new > 0)
    name += f"-{call.stored}" * (call.stored != "") + f"-v{call.head_dim_v}" * (call.own_v > 0)
    bias = "" if call.bias is None else _WORDS[call.bias.dtype] + " + bk bool" * call.bias.masked
    name += f"-{bias}".replace(" ", "-") * (bias != "") + f"-blocks{call.block_mask}" * (call.block_mask > 0)
    name += "-negative" * (call.scale < 0) + "-invariant" * call.batch_invariant + "-unaligned" * (not aligned)
    return CacheCase(
        name, "full", lengths, (5, 17, 1) if call.packed else min(call.seqlen_q, 33), call.head_dim, heads_q=8,
        heads_k=2, page_size=call.page_size, append=call.seqlen_new > 0, scale=None if call.scale > 0 else call.scale,
        window=(40, 0) if call.window[0] is not None else None, softcap=call.softcap, alibi=call.alibi,
        ranges=((17, 150), (0, 9), (33, 70)) if call.kv_range else None, batch_invariant=call.batch_invariant,
        memory="contiguous" if aligned else "misaligned", dtypes=(call.dtype,), stored=call.stored,
        scale_dims=max(1, call.scale_dims), bias=bias, head_dim_v=call.own_v or None,
        blocks="tiles_of_heads" if call.block_mask == 4 else "tiles" if call.block_mask else "",
    )  # fmt: skip


SHIPPED = {
    f"{case.name}{'' if known['tma'] else '-async'}": (case, call, known)
    for case, call, known in ((shipped_case(call, known["aligned"]), call, known) for call, known in shipped_calls())
}
