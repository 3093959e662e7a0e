"""Streams, events, pinned memory and copies of a GPU that is not there; its memory is the host's, its kernels are the
CPU path.

What is queued runs as late as CUDA may run it: when somebody waits. Whoever writes memory from which a queued copy
still reads, or reads memory to which none has copied yet, gets wrong data. Memory of the host that is not pinned is
read before a copy of it returns, as CUDA promises. Each thread begins with GPU 0, as with CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash.arrays.adapters import CUPY, NUMPY
from cupyflash.gpu import device
from cupyflash.launch import on_cpu, run, staging
from cupyflash.launch.checks import check
from cupyflash.launch.packed import sequences_of, vet_lengths
from cupyflash.launch.passes import given_of


class Stream:
    """What was queued and has not run."""

    ptr = 0x77

    def __init__(self, cuda: Cuda, ordinal: int = 0) -> None:
        self.cuda, self.ordinal = cuda, ordinal
        self.queued: list[Callable[[], None]] = []
        self.done = 0  # operations that have run, of all that were queued

    @property
    def end(self) -> int:
        with self.cuda.lock:
            return self.done + len(self.queued)

    def queue(self, operation: Callable[[], None]) -> None:
        with self.cuda.lock:
            self.queued.append(operation)

    def run(self, until: int) -> None:
        with self.cuda.lock:
            while self.done < until:
                operation = self.queued.pop(0)
                operation()
                self.done += 1

    def synchronize(self) -> None:
        self.run(self.end)

    def wait_event(self, event: Event) -> None:
        where = event.where  # as it is recorded now
        self.queue(lambda: event.cuda.run(where))


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.where: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        assert stream.ordinal == self.cuda.device, "an event of another GPU"
        self.where = stream, stream.end

    def synchronize(self) -> None:
        self.cuda.run(self.where)

    @property
    def done(self) -> bool:
        return self.where is None or self.where[0].done >= self.where[1]


class Error(RuntimeError):
    """CUDARuntimeError."""


class Cuda:
    """`cupy.cuda`, and as `runtime` its functions.

    Attributes:
        pinned: bytes that were pinned.
        copies: (bytes, kind) of each copy that was queued.
        fails: the copy with this number, from 0, raises.
        threads: whose copies were queued.
    """

    memcpyHostToDevice, memcpyDeviceToHost = 1, 2
    CUDARuntimeError = Error

    def __init__(self) -> None:
        self.runtime = self
        self.lock = threading.RLock()  # one operation at a time, of all streams
        self._local = threading.local()
        self.current = Stream(self)
        self.streams: list[Stream] = []
        self.pinned = 0
        self._pinned: list[ctypes.Array[ctypes.c_uint8]] = []  # kept, so that nothing else comes to lie there
        self.copies: list[tuple[int, int]] = []
        self.fails = -1
        self.can_pin = True
        self.threads: set[int] = set()

    @property
    def device(self) -> int:
        return getattr(self._local, "device", 0)

    def setDevice(self, ordinal: int) -> None:
        self._local.device = ordinal

    def getDevice(self) -> int:
        return self.device

    def get_current_stream(self) -> Stream:
        return self.current

    def Stream(self, non_blocking: bool) -> Stream:
        assert non_blocking
        stream = Stream(self, self.device)
        stream.ptr = 0x1000 + len(self.streams)
        self.streams.append(stream)
        return stream

    def Event(self, disable_timing: bool) -> Event:
        return Event(self)

    def run(self, where: tuple[Stream, int] | None) -> None:
        if where is not None:
            where[0].run(where[1])

    def alloc_pinned_memory(self, size: int) -> Any:
        if not self.can_pin:
            raise Error("cudaErrorMemoryAllocation")
        self.pinned += size
        memory = (ctypes.c_uint8 * size)()
        self._pinned.append(memory)
        return memory

    def _is_pinned(self, address: int) -> bool:
        return any(0 <= address - ctypes.addressof(memory) < len(memory) for memory in self._pinned)

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        if len(self.copies) == self.fails:
            self.fails = -1
            raise Error("cudaErrorIllegalAddress")
        self.copies.append((size, kind))
        self.threads.add(threading.get_ident())
        queue = self.current if stream == self.current.ptr else self.streams[stream - 0x1000]
        read = None if kind == self.memcpyDeviceToHost or self._is_pinned(source) else ctypes.string_at(source, size)
        queue.queue(lambda: ctypes.memmove(to, source if read is None else read, size) and None)


class _Memory:
    def __init__(self, x: np.ndarray) -> None:
        self.ptr = x.ctypes.data


class GpuArray:
    """The part of CuPy's arrays that is asked for."""

    def __init__(self, x: np.ndarray, cuda: Cuda) -> None:
        self.x, self.shape, self.dtype, self.data, self.cuda = x, x.shape, x.dtype, _Memory(x), cuda

    def get(self) -> np.ndarray:
        self.cuda.current.synchronize()
        return self.x.copy()


class Cupy:
    """The module; what looks for CuPy finds that it is there."""

    __spec__ = importlib.machinery.ModuleSpec("cupy", None)
    ndarray = GpuArray

    def __init__(self) -> None:
        self.cuda = Cuda()

    def empty(self, shape: Any, dtype: Any) -> GpuArray:
        """Full of what nobody means."""
        x = np.empty(shape, dtype)
        if x.ndim:
            x.view(np.uint8)[...] = 0xA5
        return GpuArray(x, self.cuda)

    def asarray(self, x: np.ndarray) -> GpuArray:
        return GpuArray(np.array(x), self.cuda)

    def broadcast_to(self, x: GpuArray, shape: tuple[int, ...]) -> GpuArray:
        return GpuArray(np.broadcast_to(x.x, shape), self.cuda)


def pretend(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Staged copies go to a GPU that is not there, of which no ring is kept yet."""
    module = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(staging, "_rings", {})
    return module.cuda


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """NumPy arrays and those of the module find a GPU whose kernels are the CPU path; it runs when somebody waits."""
    cuda, real = pretend(monkeypatch), run._run
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(device.Device, "of", lambda ordinal: device.Device.synthetic("sm_90"))

    def kernels(which: Any, library: Any, arrays: Any, options: Any, wanted: Any, into: Any = None) -> Any:
        if library is not CUPY:
            return real(which, library, arrays, options, wanted, into)
        given = given_of(which, tuple(arrays), wanted)
        cuda.current.synchronize()
        plain = {name: x.x for name, x in arrays.items()}
        problem, _ = check(which, tuple(plain), NUMPY, [NUMPY.signature(x) for x in plain.values()], options)
        lengths = vet_lengths(NUMPY, sequences_of(plain), problem) if problem.packed or problem.kv_range else None
        results = on_cpu.compute(which, NUMPY, plain, problem, options, lengths, wanted)
        results = results[: len(given.made) + len(given.shaped)]
        made = [GpuArray(np.full_like(x, 0.125), cuda) for x in results]
        for to, x in zip(made, results, strict=True):
            cuda.current.queue(lambda to=to, x=x: np.copyto(to.x, x))
        return given.made, [*made, "a workspace"]

    monkeypatch.setattr(run, "_run", kernels)
    return cuda
