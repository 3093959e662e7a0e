"""The finite list of kernels of attention over a cache that tests and precompiled layers cover."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ..bias import WHOLE, Bias
from ..cache.problem import CacheProblem
from ..gpu.device import Device
from .decode import variants_over_cache
from .shipped import in_its_dtype
from .variant import Variant

_TMA, _ASYNC, _UNALIGNED = ({"aligned": a, "tma": t} for a, t in ((True, True), (True, False), (False, False)))
_CAUSAL = (None, 0)


def problem(
    dtype: str,
    head_dim: int,
    batch: int = 64,
    heads_q: int = 32,
    page_size: int | None = None,
    capacity: int = 8192,
    **options: Any,
) -> CacheProblem:
    """Of 8 heads."""
    slots = batch if page_size is None else batch * capacity // page_size
    given: dict[str, Any] = {"seqlen_q": 1, "heads_k": 8, "scale": 1.0, "window": _CAUSAL, "head_dim_v": head_dim}
    given |= options
    return CacheProblem(
        dtype=dtype, batch=batch, heads_q=heads_q, head_dim=head_dim, slots=slots, page_size=page_size,
        capacity=capacity, **given,
    )  # fmt: skip


def usual(
    dtypes: Iterable[str], sizes: Collection[tuple[int, int]], stored: str = "", block_mask: int = 0
) -> Iterator[CacheProblem]:
    """One query a sequence, new rows appended, contiguous and in pages: one sequence, few, many.

    Args:
        sizes: head_dims of q and k, each with that of v.
    """
    of_cache: dict[str, Any] = {"stored": stored, "scale_dims": int(bool(stored)), "block_mask": block_mask}
    for dtype in dtypes:
        for head_dim, of_v in sizes:
            for page_size in (None, 16):
                for batch, capacity in ((1, 8192), (4, 4096), (4, 8192), (64, 8192)):
                    known: dict[str, Any] = {"page_size": page_size, "capacity": capacity, "seqlen_new": 1}
                    yield problem(dtype, head_dim, batch, head_dim_v=of_v, **known, **of_cache)


def shipped_calls() -> Iterator[tuple[CacheProblem, dict[str, bool]]]:
    """(problem, what `plan_decode` is told)."""
    for call in usual(("bf16",), [(128, 128)]):
        yield call, _TMA
    for head_dim in (64, 256):
        yield problem("bf16", head_dim), _TMA
        yield problem("bf16", head_dim, 1), _TMA
    yield problem("fp16", 128, seqlen_new=1), _TMA
    for rows in (4, 8, 16, 32):  # as teams of 1, 2, 4 and 8 warps
        yield problem("bf16", 128, seqlen_q=rows), _TMA
    yield problem("bf16", 256, seqlen_q=32), _TMA
    yield problem("bf16", 128, seqlen_q=64, packed=True, seqlen_new=64), _TMA
    yield problem("bf16", 128, page_size=16, seqlen_q=319, packed=True, seqlen_new=319), _TMA  # one of many queries
    yield problem("bf16", 128, page_size=8), _TMA
    yield problem("bf16", 128, page_size=1), _TMA
    for options in ({"window": (4096, 0)}, {"softcap": 50.0}, {"scale": -1.0}, {"alibi": 1}, {"kv_range": True}):
        yield problem("bf16", 128, **options), _TMA
    for bias in (Bias("bf16"), Bias("fp32", beside=WHOLE)):
        yield problem("bf16", 128, bias=bias), _TMA
    yield problem("bf16", 64, seqlen_q=4, page_size=16, bias=Bias("bool")), _TMA
    yield problem("bf16", 128, stored="int8", scale_dims=1, bias=Bias("bf16")), _TMA
    yield problem("bf16", 128, block_mask=4), _TMA
    yield problem("bf16", 64, seqlen_q=4, page_size=16, block_mask=1, bias=Bias("bf16")), _TMA
    yield problem("bf16", 128, batch_invariant=True), _TMA
    for head_dim in (72, 96, 192, 200):
        yield problem("bf16", head_dim), _TMA
    for dtype, head_dim, stored, more in (  # 8 bits
        ("bf16", 128, "int8", {"seqlen_new": 1}), ("bf16", 128, "e4m3", {"seqlen_q": 4, "seqlen_new": 4}),
        ("fp16", 64, "e4m3", {"page_size": 16}), ("bf16", 256, "int8", {}), ("bf16", 128, "int8", {"batch": 1}),
        ("bf16", 128, "e4m3", {"heads_q": 256}),
    ):  # fmt: skip
        yield problem(dtype, head_dim, stored=stored, scale_dims=2 if more.get("page_size") else 1, **more), _TMA
    yield problem("fp16", 64), _ASYNC
    yield problem("bf16", 128, seqlen_q=4), _UNALIGNED
    yield problem("bf16", 192, head_dim_v=128, seqlen_new=1), _TMA  # MLA


@functools.cache
def shipped_over_cache(device: Device) -> tuple[Variant, ...]:
    """The finite list of variants that tests and precompiled layers cover on one architecture."""
    variants: dict[Variant, None] = {}
    for call, known in shipped_calls():
        variants.update(dict.fromkeys(variants_over_cache(in_its_dtype(device, call), device, **known)))
    return tuple(variants)
