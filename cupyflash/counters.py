"""Counters on the GPU, from which the blocks of a persistent kernel draw the numbers of their tiles.

Kernels that may run at the same time need a counter each, and every kernel leaves its own at zero. A stream runs one
kernel after the other, so it has one counter; a launch that is captured into a CUDA graph gets one of its own, because
the graph may run beside anything.
"""

from __future__ import annotations

import threading
from typing import Any

_COUNTER_BYTES = 8  # two 32-bit words: tiles drawn, blocks that are done (pipeline_sm90.cuh)
_CHUNK = 8192  # counters allocated at a time: 64 KiB
_PER_THREAD_STREAM = 2  # the handle of a stream that every thread has its own of


class Counters:
    """The counters of one GPU, which is current when `reserve` is called."""

    def __init__(self) -> None:
        from cupy.cuda import runtime

        self._runtime = runtime
        self._is_capturing = runtime.streamIsCapturing
        self._chunks: list[Any] = []
        self._free: list[int] = []
        self._of_stream: dict[Any, int] = {}
        self._lock = threading.Lock()

    def reserve(self, stream: int) -> None:
        """Make sure that many counters are free; does nothing while `stream` is captured, when nothing can be."""
        if len(self._free) > _CHUNK // 2 or self._is_capturing(stream):
            return
        from cupy.cuda.memory import Memory

        with self._lock:
            memory = Memory(_CHUNK * _COUNTER_BYTES)
            self._runtime.memset(memory.ptr, 0, memory.size)
            self._runtime.streamSynchronize(0)
            self._chunks.append(memory)
            self._free += [memory.ptr + i * _COUNTER_BYTES for i in range(_CHUNK)]

    def address(self, stream: int) -> int:
        """The counter for a launch on `stream`; 0 if none is left: the kernel then does without."""
        if self._is_capturing(stream):
            return self._take()
        key = (stream, threading.get_ident()) if stream == _PER_THREAD_STREAM else stream
        try:
            return self._of_stream[key]
        except KeyError:
            self.reserve(stream)
            with self._lock:
                return self._of_stream.setdefault(key, self._take())

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
