"""The finite list of kernels that tests and precompiled layers cover."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from ..cache.problem import CacheProblem
from ..gpu.device import Device
from ..problem import Bias, Problem
from .families import kernels_of, variants_of_calls
from .key_ranges import KEY_RANGES
from .spec import CHUNKS, LEARNED, Spec
from .variant import Variant

AnyProblem = TypeVar("AnyProblem", Problem, CacheProblem)


def shipped_problems() -> Iterator[tuple[Problem, bool]]:
    """(problem, aligned) of what is compiled for every architecture in tests and by ``cupyflash compile``."""

    def problem(dtype: str, head_dim: int, **options: object) -> Problem:
        sizes = {"heads_q": 1, "heads_k": 1, "scale": 1.0}
        return Problem(dtype, 1, 1, 1, head_dim=head_dim, **{**sizes, **options})  # type: ignore[arg-type]

    for dtype in ("bf16", "fp16"):
        for head_dim in (64, 128, 256):
            for window in ((None, None), (None, 0)):
                if (dtype, head_dim, window) != ("fp16", 256, (None, None)):  # as bf16, but for the type of mma
                    yield problem(dtype, head_dim, window=window), True
    for head_dim in (8, 72, 96, 200):  # sizes that the padding, the ring and the split treat differently
        yield problem("bf16", head_dim, window=(None, 0)), True
    for head_dim in (64, 128):
        yield problem("fp32", head_dim, window=(None, 0)), True
    for dtype, window in (("bf16", (None, 0)), ("fp16", (None, None))):  # DeepSeek's MLA
        yield problem(dtype, 192, window=window, head_dim_v=128), True
    for head_dim in (64, 128, 200, 256):
        yield problem("bf16", head_dim, window=(None, 0), heads_q=2), True
    yield problem("bf16", 128, window=(64, 0), deterministic=True), True
    yield problem("fp16", 64, window=(64, 64), scale=-1.0), False
    for head_dim in (64, 128, 256):
        yield problem("bf16", head_dim, window=(None, 0), softcap=50.0), True
    for head_dim in (64, 128):
        yield problem("bf16", head_dim, window=(None, 0), packed=True), True
    yield problem("bf16", 128, window=(None, 0), bias=Bias("bool")), True
    yield problem("bf16", 128, packed=True, bias=Bias("bool", (False, False, False, True))), True
    for head_dim in (64, 128, 256):
        yield problem("bf16", head_dim, window=(None, 0), alibi=1), True
        yield problem("bf16", head_dim, window=(None, 0), kv_range=True), True
        yield problem("bf16", head_dim, window=(None, 0), sink=True), True
        yield problem("bf16", head_dim, window=(None, 0), bias=Bias("bf16")), True
        yield problem("bf16", head_dim, window=(None, 0), dropout_p=0.1, dropout=1), True
        yield problem("bf16", head_dim, window=(None, 0), block_mask=4), True


def in_its_dtype(device: Device, problem: AnyProblem) -> AnyProblem:
    """The same in a dtype that the device has; a bias of q's dtype follows."""
    if problem.dtype in device.dtypes:
        return problem
    dtype, bias = device.dtypes[0], problem.bias
    if bias and bias.dtype == problem.dtype:
        bias = bias._replace(dtype=dtype)
    return replace(problem, dtype=dtype, bias=bias)


@functools.cache
def shipped(device: Device) -> tuple[Variant, ...]:
    """The finite list of variants that tests and precompiled layers cover on one architecture; at most 200."""
    variants: dict[Variant, None] = {}
    for each, aligned in shipped_problems():
        problem = in_its_dtype(device, each)
        known = {"aligned": aligned, "paired_bias": CHUNKS if problem.bias else 0}
        variants.update(dict.fromkeys(variants_of_calls(problem, device, **known)))
        if problem.alibi or problem.sink or problem.bias:  # that are learned
            known |= dict.fromkeys(LEARNED, True)
            variants.update(dict.fromkeys(variants_of_calls(problem, device, **known)))
        is_usual = (each.dtype, each.head_dim, each.causal, each.packed) == ("bf16", 64, True, False)
        if is_usual:  # where TMA cannot read on Hopper
            spec = Spec.of(problem, tma=False, paired_bias=known["paired_bias"])
            variants.update(dict.fromkeys(kernels_of(spec, device).variants))
    return *variants, KEY_RANGES
