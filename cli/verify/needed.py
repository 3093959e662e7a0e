"""The kernels that the calls of a case load, told from the case alone."""

from __future__ import annotations

from cupyflash.arrays.adapters import NUMPY
from cupyflash.check.cache_case import CacheCase
from cupyflash.check.cases import Case
from cupyflash.gpu.device import Device
from cupyflash.launch.alignment import known_of, known_of_cache, pairs_over_cache
from cupyflash.launch.passes import given_of
from cupyflash.operands import BACKWARD, FORWARD
from cupyflash.plan.decode import variants_over_cache
from cupyflash.plan.families import kernels_of
from cupyflash.plan.spec import Spec
from cupyflash.plan.variant import Variant


def variants_of(case: Case, dtype: str, device: Device, family: str | None) -> list[Variant]:
    """Of the forward, and of the backward with all gradients if there is one; `family`: that a call must take."""
    inputs, problem = case.inputs(dtype), case.problem(dtype)
    brought, found = inputs.arrays(), list[Variant]()
    for which in (FORWARD, BACKWARD)[: 1 + case.backward]:
        names = ("q", "k", "v", "dout")[: 3 + (which is BACKWARD)]  # out is new memory, which lies well
        arrays = {name: case.in_layout(getattr(inputs, name)) for name in names} | brought
        given = given_of(which, tuple(arrays), inputs.wanted if which is BACKWARD else ())
        spec = Spec.of(problem, **known_of(given, NUMPY, arrays.values()), family=family)
        found += kernels_of(spec, device).variants
    return found


def variants_over_cache_of(case: CacheCase, dtype: str, device: Device, family: str | None) -> tuple[Variant, ...]:
    """Of a call over a cache, on a GPU that holds all its clusters of blocks at the same time."""
    arrays = case.inputs(dtype)
    p = case.problem_with(arrays)
    known = known_of_cache(NUMPY, arrays, p.itemsize)
    return variants_over_cache(p, device, pairs_over_cache(NUMPY, arrays), **known, family=family)
