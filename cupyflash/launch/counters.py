"""Counters on the GPU, from which the blocks of a persistent kernel draw the numbers of their tiles.

Kernels that may run at the same time need a counter each, and every kernel leaves its own at zero. A stream runs one
kernel after the other, so it has one counter; a launch that is captured into a CUDA graph gets one of its own, because
the graph may run beside anything. The handle of a stream that was destroyed goes to the next one made, at once, while
what was queued still runs: streams are told apart by their ids, which the driver never gives twice.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from ..gpu.driver import driver_function

# Two pairs of 32-bit words: tiles drawn, blocks that are done (work_sm90.cuh). A kernel that starts while the one in
# front of it ends has the second pair.
_COUNTER_BYTES = 16
_CHUNK = 8192  # counters allocated at a time: 128 KiB
_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2  # handles: of the default stream (so is 0), of one that every thread has


@functools.cache
def _get_id() -> Callable[..., int]:
    """cuStreamGetId, of CUDA 12, as are tensor maps; takes two addresses."""
    found: Any = driver_function("cuStreamGetId", is_quick=True)
    if found is None:
        return lambda stream, to: 1
    found.argtypes = ctypes.c_void_p, ctypes.c_void_p  # which costs less than to have the caller convert them
    return found


def _stream_id(stream: int) -> int:
    """What tells a stream from one that had its handle before; 0 where the driver does not say."""
    found = ctypes.c_uint64()
    return 0 if _get_id()(stream, ctypes.addressof(found)) else found.value


class Counters:
    """The counters of one GPU, which is current when a method is called."""

    def __init__(self) -> None:
        from cupy.cuda import runtime

        self._runtime = runtime
        self._is_capturing = runtime.streamIsCapturing
        self._chunks: list[Any] = []
        self._free: list[int] = []
        self._retired: list[int] = []  # of streams that are gone, whose last kernel may still run
        self._of_stream: dict[Any, tuple[int, int]] = {}  # handle -> id, counter
        self._lock = threading.Lock()

    def is_low(self) -> bool:
        """Whether `reserve` would do anything."""
        return len(self._free) <= _CHUNK // 2

    def reserve(self, stream: int) -> None:
        """Make sure that many counters are free; does nothing while `stream` is captured, when nothing can be."""
        if not self.is_low() or self._is_capturing(stream):
            return
        from cupy.cuda.memory import Memory

        with self._lock:
            if len(self._retired) > _CHUNK // 2:
                retired, self._retired = self._retired, []
                self._runtime.deviceSynchronize()
                self._free += retired
                return
            memory = Memory(_CHUNK * _COUNTER_BYTES)
            self._runtime.memset(memory.ptr, 0, memory.size)
            self._runtime.streamSynchronize(0)
            self._chunks.append(memory)
            self._free += [memory.ptr + i * _COUNTER_BYTES for i in range(_CHUNK)]

    def address(self, stream: int) -> int:
        """The counter for a launch on `stream`; 0 if none is left: the kernel then does without."""
        ident = 0
        if stream > _LEGACY_STREAM:  # the default stream cannot be captured, nor destroyed
            if self._is_capturing(stream):
                return self._take()
            ident = _stream_id(stream)
        key = (stream, threading.get_ident()) if stream == _PER_THREAD_STREAM else stream
        known, counter = self._of_stream.get(key, (-1, 0))
        return counter if known == ident else self._assign(key, ident, stream)

    def _assign(self, key: Any, ident: int, stream: int) -> int:
        """A counter for a stream that is new."""
        self.reserve(stream)
        with self._lock:
            known, counter = self._of_stream.pop(key, (-1, 0))
            if known != ident:
                self._retired += [counter] * (known != -1)
                counter = self._take()
            if counter:
                self._of_stream[key] = ident, counter
            return counter

    def _take(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            return 0


_counters: dict[int, Counters] = {}


def of(ordinal: int) -> Counters:
    """The counters of the GPU with this CUDA ordinal."""
    try:
        return _counters[ordinal]
    except KeyError:
        return _counters.setdefault(ordinal, Counters())
