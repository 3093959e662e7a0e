"""The door to the plan of attention over a cache: which kernels a call takes, and how blocks share out the work.

Lengths live on the device, so no plan depends on them: the blocks find what is theirs (kernels_cu/decode/shares.cuh).
"""

from __future__ import annotations

from math import gcd, inf
from typing import Any

from ..bias import flags_of_added
from ..cache.problem import CacheProblem
from ..errors import UnsupportedError
from ..gpu.device import Device
from ..problem import ITEMSIZE
from .decode_elements import HALVES, Elements
from .decode_fp32 import FP32
from .decode_kernels import SLICE, Append, AppendTile, DecodeSm80, DecodeSm90, DecodeTile, Dequantize, DequantizeTile
from .decode_shares import DecodePlan, rows_of, shared_out, splits_of
from .decode_stored import STORED
from .families import check_device, check_dtype, kernels_of, one_of
from .prefill import Lie, dequantized, spec_of, way_of
from .spec import LEAST_UNIT
from .variant import Variant

MAX_GROUP = 512  # quick_divide (shares.cuh)
_RING_BYTES = 192 << 10  # in flight on a multiprocessor: more made no difference on an H200
_PAIRS_RING_BYTES = 128 << 10  # of pairs of heads: 3 % faster than with 192 KiB
_LARGE_BYTES = 200 << 20  # of K and V: from there on rows of the cache are read two heads at a time
# (blocks of a cluster, how many of them an H200 holds at a time, bytes of K and V up to which they are faster where
# they leave multiprocessors without work); the second differs from chip to chip (launch/decode.py asks). Larger ones
# are better, if they keep the memory busy.
_CLUSTERS: tuple[tuple[int, int, float], ...] = (8, 15, inf), (4, 30, inf), (2, 66, 96 << 20)
_ENOUGH_BLOCKS, _FEW_ROWS, _FILLED = 56, 16, 0.9  # the last one: of the multiprocessors
_ELEMENTS = {"": HALVES, "int8": STORED, "e4m3": STORED}  # of a cache, by what is stored in it, where q has 16 bits


def plan_decode(
    p: CacheProblem, device: Device, *, aligned: bool, tma: bool, family: str | None = None, clusters: bool = True
) -> DecodePlan:
    """The plan of a call.

    Args:
        aligned: whether all rows of q and of the caches start at multiples of 16 bytes.
        tma: whether TMA can read the caches.
        family: that the user insists on.
        clusters: whether clusters may be used.

    Raises:
        UnsupportedError: no kernel of this device can do it.
    """
    _check(p, device)
    aligned = aligned and not any(d * p.itemsize % 16 for d in p.widths)
    if family == "sm90" and device.capability != (9, 0):
        has = f"{device.capability[0]}.{device.capability[1]}"
        raise UnsupportedError(
            f"CUPYFLASH_FAMILY=sm90: it needs compute capability 9.0 exactly, {device.name} has {has}"
        )
    # What TMA cannot read Hopper reads like any other GPU.
    hopper = device.capability == (9, 0) and family != "sm80" and tma and why_not_tma(p, aligned) is None
    elements, splits = _elements(p), splits_of(p)
    team = elements.team(p, hopper)
    cluster = _cluster(p, team.warps * team.rows, device) if hopper and clusters and not splits else 0
    if cluster:
        team = elements.in_cluster(p, team)
    wide = not (cluster or splits) and team.warps == 1 and _wide(p, device)
    box = _boxes(p) if hopper else SLICE
    tile = _with_stages(elements.shape(p, device, hopper, team, wide, cluster, box), p, device, hopper)
    kind = DecodeSm90 if hopper else DecodeSm80
    variant = kind(p.dtype, p.head_dim, tile, **_flags(p, aligned))
    return shared_out(p, device, variant)


def why_not_tma(p: CacheProblem, aligned: bool) -> str | None:
    """Why Hopper reads these caches by cp.async, as any other GPU does; None if by TMA."""
    if not aligned:
        return "rows do not start at multiples of 16 bytes"
    return None if _boxes(p) else f"TMA brings {_elements(p).tma_columns} and keys of a page by 8"


def _elements(p: CacheProblem) -> Elements:
    return FP32 if p.dtype == "fp32" else _ELEMENTS[p.stored]


def dtypes_over(stored: str, device: Device) -> tuple[str, ...]:
    """Of q, those that the device has kernels for: over a cache of the same dtype, or of 8 bits (`stored`)."""
    return device.halves if stored else device.dtypes


def _check(p: CacheProblem, device: Device) -> None:
    check_device(device)
    check_dtype(p.dtype, device, "q and the caches")
    if p.dtype not in (known := dtypes_over(p.stored, device)):
        raise UnsupportedError(
            f"q: {p.dtype} has no GPU kernel over a cache of 8 bits, expected {one_of(known)}; cast q, or pass "
            "arrays that live on the CPU"
        )
    if p.group > MAX_GROUP:
        raise UnsupportedError(f"q: expected at most {MAX_GROUP} heads for each head of k_cache, got {p.group}")


def _boxes(p: CacheProblem) -> int:
    """Keys of a TMA box; 0 if TMA cannot bring slices of this cache."""
    elements = _elements(p)
    if not all(elements.by_tma(d * p.itemsize) for d in p.widths) or 0 in (p.slots, p.capacity):
        return 0
    box = gcd(p.page_size, SLICE) if p.page_size else SLICE
    return box if box >= 8 else 0


def _kv_bytes(p: CacheProblem) -> int:
    return p.itemsize * p.batch * p.capacity * p.heads_k * sum(p.widths)


def _cluster(p: CacheProblem, block_m: int, device: Device) -> int:
    """Blocks of a cluster where there are few tiles; else 0."""
    if p.packed:
        return 0
    tiles = p.batch * p.heads_k * -(-rows_of(p) // block_m)
    for size, most, most_bytes in _CLUSTERS:
        grid = tiles * size
        filled, small = grid >= _FILLED * device.sm_count, _kv_bytes(p) < grid << 20
        # Half of the multiprocessors keep the memory busy, but do not multiply fast enough for many rows.
        enough = filled or small or (grid >= _ENOUGH_BLOCKS and rows_of(p) <= _FEW_ROWS)
        if tiles <= most and enough and (filled or _kv_bytes(p) <= most_bytes):
            return size
    return 0


def _wide(p: CacheProblem, device: Device) -> bool:
    """Whether blocks read two heads: where K and V are large, and tiles are not cut into many parts."""
    if device.is_tiny:
        return False
    if p.by_element and p.widest > 192:  # wide rows of O leave no registers for that
        return False
    return p.heads_k % 2 == 0 and _kv_bytes(p) > _LARGE_BYTES and p.batch * p.heads_k >= device.sm_count


def _with_stages(shape: DecodeTile, p: CacheProblem, device: Device, hopper: bool) -> DecodeTile:
    """As many as fit, with their mbarriers on Hopper."""
    blocks, teams = shape.blocks_per_sm, shape.warps // shape.team
    own = shape.stage_bytes(*p.widths) * teams
    ring = _PAIRS_RING_BYTES if shape.pair == 2 else _RING_BYTES
    fixed = shape.fixed_bytes(p.head_dim, ITEMSIZE[p.dtype])
    room = min(device.smem_bytes, device.smem_per_sm_bytes // blocks - 1024) - fixed
    stages = min(min(ring // blocks, room - 1024) // own, (room - 8) // (own + 16 * teams * hopper))
    least = shape.least_columns(ITEMSIZE[p.dtype] * p.head_dim_v)
    if stages < 2 and shape.columns > least:
        return _with_room(shape.with_columns(least), p, room + fixed, own)
    return shape.with_stages(max(1, stages))


def _with_room(less: DecodeTile, p: CacheProblem, room: int, own: int) -> DecodeTile:
    """With fewer columns a merge, where rings would be too small."""
    room -= less.fixed_bytes(p.head_dim, ITEMSIZE[p.dtype])
    return less.with_stages(max(1, (room - 1024) // own))


def _flags(p: CacheProblem, aligned: bool) -> dict[str, Any]:
    least = LEAST_UNIT if p.alibi else 0
    left, right = p.window
    causal = (left, right) == (None, 0)
    return {
        # One query sees all keys anyway.
        "causal": causal and not p.kv_range and (p.packed or p.seqlen_q > 1),
        "window": p.kv_range or not (causal or (left, right) == (None, None)),
        "scale_first": p.scale <= least and p.softcap is None,
        "softcap": p.softcap is not None,
        "alibi": p.alibi > 0,
        "kv_range": p.kv_range,
        "sink": p.sink,
        "unaligned": not aligned,
        **_added(p),
        "mods": p.mods,
        **_lies(p),
    }


def _added(p: CacheProblem) -> dict[str, bool]:
    """What is added element by element: a bias, a mask, mods; and what a block mask hides."""
    found = flags_of_added(p.bias, p.mods != "")
    if p.block_mask:
        found |= {"tile_mask": True, "bias": True, "bias_beside_mods": p.bias is not None}
    return found


def _lies(p: CacheProblem) -> dict[str, Any]:
    """What all kernels know of queries and caches: how they lie, and what a cache of 8 bits holds."""
    stored = {name: p.stored == name for name in _ELEMENTS if name}
    return {"head_dim_v": p.own_v, "packed": p.packed, "paged": p.page_size is not None, **stored}


def plan_append(p: CacheProblem, device: Device) -> tuple[Append, int] | None:
    """The kernel that writes new rows into the cache and turns queries, and its grid; None without new rows.

    Raises:
        UnsupportedError: as `plan_decode`.
    """
    _check(p, device)
    if not p.seqlen_new or 0 in (p.batch, p.heads_k):
        return None
    variant = Append(p.dtype, p.head_dim, AppendTile(device.capability == (9, 0)), **_lies(p))
    heads = 2 * p.heads_k + (p.heads_q if p.rotary_dim else 0)
    rows = p.seqlen_new * heads * (1 if p.packed else p.batch)
    return variant, -(-rows // variant.tile.warps)


def plan_dequantize(p: CacheProblem) -> tuple[Dequantize, int]:
    """The kernel that writes a cache of 8 bits as rows of q's dtype, and its grid."""
    tile = DequantizeTile()
    variant = Dequantize(p.dtype, p.head_dim, tile, **_lies(p))
    return variant, dequantized(p).slots * -(-p.capacity // tile.block_m)


def variants_over_cache(p: CacheProblem, device: Device, paired_bias: int = 0, **known: Any) -> tuple[Variant, ...]:
    """The kernels of a call, in launch order; `known`: what `plan_decode` may be told, paired_bias: as of `Spec.of`."""
    append = plan_append(p, device)
    found: list[Variant] = [append[0]] if append else []
    if 0 in p.rows:
        return tuple(found)
    lie, family = Lie(aligned=known["aligned"], tma=known["aligned"] and known["tma"]), known.get("family")
    way = way_of(p, device, lie, family)
    if way is not None and way.dequantized:
        found.append(plan_dequantize(p)[0])
    if way is None or way.beside:
        plan = plan_decode(p if way is None else way.left(p), device, **known)
        found += [plan.variant] if plan.combine is None else [plan.variant, plan.combine]
    if way is not None:
        found += kernels_of(spec_of(p, way, lie, family, paired_bias), device).variants
    return tuple(found)
