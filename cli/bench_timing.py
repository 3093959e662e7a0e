"""How `bench` measures: sustained, interleaved, medians; and the peak of memory.

A GPU slows down as it warms up, so each function runs until the clock is steady and is then timed for a quarter of a
second; all functions of a cell take turns, and the better of the rounds' medians counts.
"""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Work = Callable[[], Any]
BATCH_MS = 10.0  # calls between two events take at least this long: what the first one costs the host vanishes
MIN_BATCH, MAX_BATCH = 4, 1000


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds over all functions, seconds to warm up and to measure each."""

    rounds: int = 2
    warm_s: float = 0.1
    run_s: float = 0.25


QUICK = Effort(rounds=1, warm_s=0.05, run_s=0.1)
SUSTAINED = Effort()


class Clock:
    """The CPU's; calls are over when they return."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def batch_ms(self, work: Work, calls: int) -> float:
        """Milliseconds that one of `calls` calls takes."""
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls * 1e3

    def peak_bytes(self, work: Work) -> int | None:
        """The most memory that `work` needs beyond what was there before."""
        tracemalloc.start()
        try:
            kept = work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            kept = None
            del kept
            tracemalloc.stop()


class TorchClock(Clock):
    """CUDA events of torch, and its allocator's counters."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def batch_ms(self, work: Work, calls: int) -> float:
        begin, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        self.cuda.synchronize()
        return begin.elapsed_time(end) / calls

    def peak_bytes(self, work: Work) -> int | None:
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        before = self.cuda.memory_allocated()
        work()
        self.cuda.synchronize()
        return int(self.cuda.max_memory_allocated() - before)


class CupyClock(Clock):
    """CUDA events of CuPy, and a hook that counts what its memory pool hands out."""

    def __init__(self) -> None:
        import cupy

        self.cuda = cupy.cuda

    def synchronize(self) -> None:
        self.cuda.runtime.deviceSynchronize()

    def batch_ms(self, work: Work, calls: int) -> float:
        begin, end = self.cuda.Event(), self.cuda.Event()
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return self.cuda.get_elapsed_time(begin, end) / calls

    def peak_bytes(self, work: Work) -> int | None:
        class Count(self.cuda.MemoryHook):  # type: ignore[name-defined]
            name = "cupyflash bench"
            now = peak = 0

            def malloc_postprocess(self, **facts: Any) -> None:
                self.now += facts["mem_size"]
                self.peak = max(self.peak, self.now)

            def free_postprocess(self, **facts: Any) -> None:
                self.now -= facts["mem_size"]

        with Count() as hook:
            work()
        return int(hook.peak)


def sustained_ms(works: Sequence[Work], clock: Clock, effort: Effort) -> list[float]:
    """Milliseconds of each function, in one interleaved run."""
    best = [math.inf] * len(works)
    for _ in range(effort.rounds):
        for i, work in enumerate(works):
            best[i] = min(best[i], _median_ms(work, clock, effort))
    return best


def _median_ms(work: Work, clock: Clock, effort: Effort) -> float:
    work()
    clock.synchronize()
    start = time.perf_counter()
    single = clock.batch_ms(work, 1)
    while time.perf_counter() - start < effort.warm_s:
        single = clock.batch_ms(work, MIN_BATCH if single < BATCH_MS else 1)
    fewest = MIN_BATCH if single < 1e3 * effort.run_s else 1
    calls = min(MAX_BATCH, max(fewest, math.ceil(BATCH_MS / max(single, 1e-3))))
    samples: list[float] = []
    start = time.perf_counter()
    while not samples or time.perf_counter() - start < effort.run_s:
        samples.append(clock.batch_ms(work, calls))
    return statistics.median(samples)


def host_us(work: Work, clock: Clock, calls: int = 400, rounds: int = 9) -> float:
    """Microseconds that the host spends in a warm call, the device left to itself: the best of the rounds."""
    for _ in range(50):
        work()
    samples = []
    for _ in range(rounds):
        clock.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    clock.synchronize()
    return min(samples)
