"""What numbers alone do not show: streams, CUDA graphs, threads, repetition, poisoned memory.

Every check runs a case of the table in two ways that must agree bit for bit. Which checks there are depends on what the
framework can do (`Framework.can`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash import api
from cupyflash.check.cases import Case, case

from ..frameworks import Framework
from .cases import Results, call

REPEATS = 5
COPY_BYTES = 64 << 20  # 128 MiB read and written: some 40 us at an H200's 4.8 TB/s, and the host queues one in 5
ATTEMPTS = 9  # each with twice the copies: 16 to 4096, 0.2 s there


@dataclass
class Context:
    """Where a check runs."""

    framework: Framework
    dtype: str
    seed: int

    def call(self, of: Case, **options: Any) -> Results:
        return call(of, of.inputs(self.dtype, self.seed), self.framework, of.options() | options)


@dataclass
class CheckResult:
    """The verdict of one check; `detail` says what differed or was raised, or why nothing could be `shown`."""

    name: str
    passed: bool
    detail: str
    seconds: float
    shown: bool = True

    def document(self) -> dict[str, Any]:
        facts = {"check": self.name, "passed": self.passed, "shown": self.shown}
        return {**facts, "detail": self.detail, "seconds": round(self.seconds, 4)}


class NotShownError(Exception):
    """A check could not have failed here, so that it passed means nothing; the message says why."""


def differs(a: Results, b: Results) -> str:
    """Which of the results are not bitwise equal, as text; empty if all are."""
    pairs = zip((*Results._fields[:5], "learned"), (*a[:5], *a.learned), (*b[:5], *b.learned), strict=False)
    names = [n for n, x, y in pairs if x is not None and y is not None and x.tobytes() != y.tobytes()]
    return f"{', '.join(names)} differ" if names else ""


def repeated_forward(c: Context) -> str:
    """The forward is bitwise reproducible."""
    runs = [c.call(replace(case("gqa"), backward=False)) for _ in range(REPEATS)]
    return next(filter(None, (differs(runs[0], other) for other in runs[1:])), "")


def repeated_backward(c: Context) -> str:
    """So is the backward with deterministic=True."""
    runs = [c.call(case("deterministic")) for _ in range(REPEATS)]
    return next(filter(None, (differs(runs[0], other) for other in runs[1:])), "")


def poisoned_outputs(c: Context) -> str:
    """Results do not depend on what their memory held, nor on that of workspaces."""
    clean = c.call(case("deterministic"))
    with c.framework.poisoned():
        return differs(clean, c.call(case("deterministic")))


def unchanged_inputs(c: Context) -> str:
    """Inputs are never written."""
    of, framework = case("causal-d64"), c.framework
    inputs = of.inputs(c.dtype, c.seed)
    q, k, v, dout = arrays = [framework.from_numpy(x) for x in inputs[:4]]
    before = [framework.to_numpy(x).tobytes() for x in arrays]
    out, lse = api.attention(q, k, v, **of.options(), return_lse=True)
    api.attention_backward(dout, q, k, v, out, lse, **of.options())
    changed = [name for name, x, old in zip(("q", "k", "v", "dout"), arrays, before, strict=True)
               if framework.to_numpy(x).tobytes() != old]  # fmt: skip
    return f"{', '.join(changed)} changed" if changed else ""


def two_threads(c: Context) -> str:
    """Threads that call at the same time, each on a stream of its own where there are streams."""
    work = [case("deterministic"), case("tile-multiples")]
    expected = [c.call(w, deterministic=True) for w in work]
    problems: list[str] = []

    def run(of: Case, right: Results) -> None:
        try:
            for _ in range(REPEATS):
                with c.framework.own_stream():
                    problems.extend(filter(None, [differs(right, c.call(of, deterministic=True))]))
        except Exception as e:
            problems.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=run, args=pair) for pair in zip(work, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "; ".join(problems)


class Operands:
    """The arrays of a case on the device, and a second set to overwrite them with."""

    def __init__(self, c: Context, of: Case) -> None:
        self.framework, self.options = c.framework, of.options() | {"deterministic": True}
        self.first, self.second = (
            [c.framework.from_numpy(np.ascontiguousarray(x)) for x in of.inputs(c.dtype, seed)[:4]]
            for seed in (c.seed, c.seed + 1)
        )

    def run(self, arrays: list[Any]) -> list[Any]:
        q, k, v, dout = arrays
        out, lse = api.attention(q, k, v, **self.options, return_lse=True)
        return [out, lse, *api.attention_backward(dout, q, k, v, out, lse, **self.options)]

    def overwrite(self, sources: list[Any] | None = None) -> None:
        """Copy `sources`, else the second set, into the first."""
        for target, source in zip(self.first, sources or self.second, strict=True):
            self.framework.write(target, source)

    def read(self, results: list[Any]) -> Results:
        """After all that is queued, on whatever stream."""
        self.framework.synchronize()
        return Results(*(self.framework.to_numpy(x) for x in results))


def other_stream(c: Context) -> str:
    """Work is queued on the caller's current stream: behind copies that take a while, the last of which bring inputs.

    A call that did not wait for them would read what the inputs held before. That it could is shown each time: the
    copies are not done when all has been queued, and the same call on a stream of its own does read the old inputs.
    """
    operands, copies = Operands(c, case("causal-d128")), 16
    old, new = operands.read(operands.run(operands.first)), operands.read(operands.run(operands.second))
    before = [c.framework.from_numpy(c.framework.to_numpy(x)) for x in operands.first]
    source, target = (c.framework.from_numpy(np.zeros(COPY_BYTES // 2, np.float16)) for _ in range(2))
    with c.framework.own_stream():
        aside = c.framework.stream()
        for _ in range(ATTEMPTS):
            operands.overwrite(before)
            c.framework.synchronize()
            for _ in range(copies):
                c.framework.write(target, source)
            operands.overwrite()
            arrived = c.framework.mark()
            with aside:
                early = operands.run(operands.first)
            results = operands.run(operands.first)
            outlasts = not arrived()
            if problem := differs(new, operands.read(results)):
                return problem
            if outlasts and not differs(old, operands.read(early)):
                return ""
            copies *= 2
    raise NotShownError(f"{copies // 2} copies of {COPY_BYTES >> 20} MiB did not hold up the inputs for long enough")


def cuda_graph(c: Context) -> str:
    """A warm call is captured in a CUDA graph; its replay computes with what the inputs hold then."""
    operands = Operands(c, case("causal-d128"))
    expected = operands.read(operands.run(operands.second))
    with c.framework.own_stream():
        operands.run(operands.first)
        c.framework.synchronize()
        replay, results = c.framework.graph(lambda: operands.run(operands.first))
        operands.overwrite()
        replay()
        c.framework.synchronize()
        return differs(expected, operands.read(results))


def torch_autograd(c: Context) -> str:
    """Torch's autograd gives what `attention_backward` gives."""
    operands = Operands(c, case("causal-d64"))
    expected = operands.read(operands.run(operands.first))
    q, k, v, dout = operands.first
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = api.attention(*leaves, **operands.options)
    out.backward(dout)
    got = [out, expected.lse, *(x.grad for x in leaves)]
    return differs(expected, Results(*(x if isinstance(x, np.ndarray) else c.framework.to_numpy(x) for x in got)))


# name, check, what the framework must be able to do
CHECKS: tuple[tuple[str, Callable[[Context], str], str | None], ...] = (
    ("repeated-forward", repeated_forward, None),
    ("repeated-deterministic-backward", repeated_backward, None),
    ("unchanged-inputs", unchanged_inputs, None),
    ("two-threads", two_threads, None),
    ("poisoned-outputs", poisoned_outputs, "poison"),
    ("torch-autograd", torch_autograd, "autograd"),
    ("non-default-stream", other_stream, "stream"),
    ("cuda-graph", cuda_graph, "graph"),
)
NAMES = tuple(name for name, _, _ in CHECKS)


def available(framework: Framework) -> list[str]:
    """The checks that make sense with this framework."""
    return [name for name, _, needs in CHECKS if needs is None or needs in framework.can]


def run_check(name: str, context: Context) -> CheckResult:
    """Run one check; whatever it raises is a failure."""
    check = next(f for n, f, _ in CHECKS if n == name)
    start = time.perf_counter()
    try:
        detail = check(context)
    except NotShownError as e:
        return CheckResult(name, False, str(e), time.perf_counter() - start, shown=False)
    except Exception as e:
        detail = f"{type(e).__name__}: {e}"
    return CheckResult(name, not detail, detail, time.perf_counter() - start)
