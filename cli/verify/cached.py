"""Cases of attention over a cache: through the public API, and by the kernels in the emulator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import click

from cupyflash import kvcache
from cupyflash.check.accuracy import Comparison
from cupyflash.check.cache_case import CacheCase
from cupyflash.check.cache_cases import CACHE_CASES
from cupyflash.check.cache_reference import CacheOracle
from cupyflash.check.cases import CASES, LEVELS
from cupyflash.emulator import attention, decode
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import dtypes_over
from cupyflash.plan.variant import Variant

from ..frameworks import Framework
from .cases import CaseResult
from .emulator import ARCHS, DTYPES, MODE, Work
from .needed import variants_over_cache_of

BY_NAME = {case.name: case for case in CACHE_CASES}
SMOKE = ("cache-append", "cache-pages-of-16")  # in the emulator: rows that are new, and pages


def choose(level: str, head_dims: tuple[int, ...] = ()) -> list[CacheCase]:
    """The cases of a level and below."""
    wanted = LEVELS[: LEVELS.index(level) + 1]
    return [c for c in CACHE_CASES if c.level in wanted and (not head_dims or c.head_dim in head_dims)]


def chosen(
    level: str, dtypes: tuple[str, ...], head_dims: tuple[int, ...], name: str | None, gpu: Device | None = None
) -> list[tuple[CacheCase, str]]:
    """Cases and dtypes of a run of `verify`, or the one that it asks for; those that a GPU has kernels for."""
    found = choose(level, head_dims) if name is None else [BY_NAME[name]] if name in BY_NAME else []
    known = [c.dtypes if gpu is None else dtypes_over(c.stored, gpu) for c in found]
    return [(c, d) for c, own in zip(found, known, strict=True) for d in dtypes if d in c.dtypes and d in own]


def case_of(name: str | None, head_dims: tuple[int, ...]) -> Any:
    """The case of a name, which must have one of the head_dims that are asked for; None: there is none."""
    case = BY_NAME.get(str(name)) or next((c for c in CASES if c.name == name), None)
    if case is not None and head_dims and case.head_dim not in head_dims:
        raise click.BadParameter(f"{name} has head_dim {case.head_dim}", param_hint="--head-dim")
    return case


def run_case(case: CacheCase, dtype: str, framework: Framework, seed: int) -> CaseResult:
    """Run a case in poisoned memory; whatever it raises becomes part of the result."""
    result = CaseResult(case.name, dtype)
    start = time.perf_counter()
    try:
        arrays = case.inputs(dtype, seed)
        oracle = CacheOracle(case.problem_with(arrays), arrays)
        given = {name: framework.from_numpy(x) for name, x in arrays.items()}
        with framework.poisoned():
            out, lse, *written = kvcache.attention_with_cache(**case.call(given), return_lse=True)
        caches = written or (given["k_cache"], given["v_cache"])  # JAX's are results where rows are appended
        result.comparisons = oracle.judge(*map(framework.to_numpy, (out, lse, *caches)))
    except Exception as e:
        result.error = e
    result.seconds = time.perf_counter() - start
    return result


@dataclass(frozen=True)
class CacheWork(Work):
    """One case in one dtype by the kernels of one family, in the emulator."""

    case: CacheCase  # type: ignore[assignment]

    def variants(self) -> tuple[Variant, ...]:
        return variants_over_cache_of(self.case, self.dtype, attention.small_device(ARCHS[self.family]), None)

    def judged(self, seed: int) -> list[Comparison]:
        session = decode.CacheSession(attention.small_device(ARCHS[self.family]), MODE, seed)
        return session.judge(self.case, self.dtype, seed)


def work_of(level: str, dtypes: tuple[str, ...], head_dims: tuple[int, ...], name: str | None) -> list[CacheWork]:
    """What to run in the emulator, by family; the dtypes in turn, or all of a case that was asked for by name."""
    found = [c for c in choose("full", head_dims) if "emulator" in c.tags]
    if name is not None:
        found = [c for c in found if c.name == name]
    else:
        names = SMOKE if level == "smoke" else [c.name for c in choose("smoke" if level == "quick" else "full")]
        found = [c for c in found if c.name in names]
    work = []
    for first, family in enumerate(ARCHS):
        of_family, device = [d for d in DTYPES[family] if d in dtypes], Device.synthetic(ARCHS[family])
        for i, case in enumerate(found, first):
            known = [d for d in of_family if d in dtypes_over(case.stored, device)]
            own = known if name else known[i % max(1, len(known)) :][:1]
            work += [CacheWork(case, d, family) for d in own]
    return work
