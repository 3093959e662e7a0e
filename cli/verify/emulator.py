"""Without a GPU: the kernels themselves, compiled for the CPU and run there under a race detector.

Cases of the table, forward and backward, in each family of kernels, judged by the same rule as on a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cupyflash import emulator
from cupyflash.check import cases
from cupyflash.check.accuracy import Comparison, Oracle
from cupyflash.emulator import attention, build, compiler, launch
from cupyflash.emulator.cases import can_use_tma
from cupyflash.plan.variant import Variant

from .cases import CaseResult
from .needed import variants_of

ARCHS = {"sm80": "sm_80", "sm90": "sm_90"}  # for which a family's kernels are planned
DTYPES = {"sm80": ("bf16", "fp16", "fp32"), "sm90": ("bf16", "fp16")}  # those of a family
MODE = emulator.MODES["race"]
# A mask, groups, head_dim 128, NaN in memory that must not be read, sums in a fixed order, and packed sequences.
SMOKE = ("causal-d64", "dense-d128", "gqa", "nan-in-hidden-key", "deterministic", "packed-unequal")


@dataclass(frozen=True)
class Work:
    """One case in one dtype by the kernels of one family."""

    case: cases.Case
    dtype: str
    family: str

    def session(self, seed: int) -> attention.Session:
        device = attention.small_device(ARCHS[self.family])
        return attention.Session(device, MODE, seed, family=self.family, backward_family=self.family)

    def variants(self) -> Sequence[Variant]:
        """The kernels that it takes."""
        return variants_of(self.case, self.dtype, attention.small_device(ARCHS[self.family]), self.family)

    def judged(self, seed: int) -> list[Comparison]:
        """What the kernels make of the case, compared."""
        inputs, problem = attention.inputs_of(self.case, self.dtype, seed)
        session, oracle = self.session(seed), Oracle(problem, *inputs)
        out, lse = session.forward(inputs, problem)
        found = oracle.judge_forward(out, lse)
        if self.case.backward:
            found += oracle.judge_backward(*session.backward(inputs, out, lse, problem))
        return found


@dataclass
class EmulatorResult(CaseResult):
    """The verdict on one case in one family."""

    family: str = ""

    def document(self) -> dict[str, Any]:
        return {"family": self.family, **super().document()}


def missing() -> str | None:
    """Why the emulator cannot run here, with the way out; None once it is compiled and loaded."""
    if reason := emulator.missing_compiler():
        return reason
    try:
        launch.runtime()
    except (build.BuildError, OSError) as e:
        first = next((line for line in str(e).splitlines() if "error" in line), str(e))
        name = compiler.program()
        return f"{name} does not compile the emulator ({first}); it needs C++17 and the headers of the C++ library"
    return None


def choose(level: str, dtypes: tuple[str, ...], head_dims: tuple[int, ...], name: str | None) -> list[Work]:
    """What to run, by family: smoke: `SMOKE`; quick: the table's smoke cases; full: all that are small enough.

    Each case runs once in each family, with the dtypes in turn; one that was asked for by name with all of them.
    """
    table = [c for c in cases.select("full", tag="emulator") if "empty" not in c.tags]
    if name is not None:
        table = [c for c in table if c.name == name]
    else:
        wanted = SMOKE if level == "smoke" else [c.name for c in cases.select("smoke" if level == "quick" else "full")]
        table = [c for c in table if c.name in wanted and (not head_dims or c.head_dim in head_dims)]
    work = []
    for first, family in enumerate(ARCHS):
        able = [c for c in table if family != "sm90" or can_use_tma(c)]
        for i, case in enumerate(able, first):
            known = [d for d in DTYPES[family] if d in dtypes and d in case.dtypes]
            work += [Work(case, d, family) for d in (known if name else known[i % len(known) :][:1] if known else ())]
    return work


@contextmanager
def compiled_ahead(work: list[Work]) -> Iterator[Callable[[Work], None]]:
    """Compile the kernels of `work` side by side, in its order; gives what waits for those of one piece of it."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs: dict[tuple[Variant, str], Future[Any]] = {}
        for w in work:
            missing = [variant for variant in w.variants() if (variant, w.family) not in jobs]
            if missing:
                job = pool.submit(attention.kernels_of, missing, attention.small_device(ARCHS[w.family]))
                jobs |= {(variant, w.family): job for variant in missing}

        def wait(w: Work) -> None:
            for variant in w.variants():
                jobs[variant, w.family].result()

        try:
            yield wait
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_work(work: Work, wait: Callable[[Work], None], seed: int) -> EmulatorResult:
    """Run it; whatever it raises becomes part of the result."""
    result = EmulatorResult(work.case.name, work.dtype, family=work.family)
    start = time.perf_counter()
    try:
        wait(work)
        result.comparisons = work.judged(seed)
    except Exception as e:
        result.error = e
    result.seconds = time.perf_counter() - start
    return result
