"""What `bench` reads times and memory off: the CPU's clock, or a device's events; calls that it records as one."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

Work = Callable[[], Any]


class Recorded:
    """Calls as one function, of which the time of one is asked for."""

    def __init__(self, run: Work, calls: Sequence[Work], results: Any = None) -> None:
        """`calls`, whose arrays `run` reads, and `results`, which it writes, live as long as it does."""
        self.run, self.kept, self.results = run, tuple(calls), results

    @property
    def calls(self) -> int:
        """How many."""
        return len(self.kept)

    def __call__(self) -> Any:
        return self.run()


class Stepped:
    """A function before each call of which something happens whose time is not asked for."""

    def __init__(self, call: Work, step: Work) -> None:
        self.call, self.step = call, step

    def __call__(self) -> Any:
        self.step()
        return self.call()


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

    def recorded(self, calls: Sequence[Work]) -> Recorded:
        """All of them at once, at no cost to the host where the device can do that."""
        return Recorded(lambda: [call() for call in calls], calls)

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

    def recorded(self, calls: Sequence[Work]) -> Recorded:
        """A CUDA graph."""
        side, graph = self.cuda.Stream(), self.cuda.CUDAGraph()
        with self.cuda.stream(side):
            for call in calls:
                call()
        self.cuda.synchronize()
        with self.cuda.graph(graph, stream=side):
            results = [call() for call in calls]
        return Recorded(graph.replay, calls, results)

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

    def recorded(self, calls: Sequence[Work]) -> Recorded:
        """A CUDA graph."""
        with self.cuda.Stream(non_blocking=True) as side:
            for call in calls:
                call()
            side.synchronize()
            side.begin_capture(self.cuda.runtime.streamCaptureModeRelaxed)
            results = [call() for call in calls]
            graph = side.end_capture()
        return Recorded(graph.launch, calls, results)

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


class JaxClock(Clock):
    """From the first call to the end of the last, which a device runs one after the other: JAX has no events."""

    def __init__(self, device: Any) -> None:
        import jax
        import jax.numpy as jnp

        self.wait = jax.block_until_ready
        zero = jax.device_put(0.0, device)
        self.last = lambda: jnp.negative(zero)

    def synchronize(self) -> None:
        self.wait(self.last())

    def batch_ms(self, work: Work, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = work()
        self.wait(result)
        return (time.perf_counter() - start) / calls * 1e3

    def peak_bytes(self, work: Work) -> None:
        """Not known."""
