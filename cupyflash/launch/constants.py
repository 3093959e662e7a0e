"""Integers on a GPU that are the same in every call: where packed sequences begin that are all of one length.

They lie in memory that is never given back, so a call, or a graph that holds one, may read them at any time. There is
room for some 60 000 lengths; calls of others make their own each time, as do those that are captured when new.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_BYTES = 1 << 20
_ALIGNMENT = 16
_LEGACY_STREAM = 1  # handle of the default stream, as 0 is


class Constants:
    """Those of one GPU, which is current when a method is called."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._copies: Any = None  # a stream of its own, which waits for no other
        self._end = 0
        self._known: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def steps(self, count: int, step: int, stream: int) -> int:
        """The address of 0, step, 2 step, ... in int32; 0 where there is no room, or a stream is being captured."""
        key = count, step
        found = self._known.get(key, 0)
        if found or self._is_captured(stream):
            return found
        with self._lock:
            size = -(-4 * count // _ALIGNMENT) * _ALIGNMENT
            if key not in self._known and self._end + size <= _BYTES:
                if not (address := self._put(step * np.arange(count, dtype=np.int32))):
                    return 0
                self._known[key] = address
                self._end += size
            return self._known.get(key, 0)

    def _is_captured(self, stream: int) -> bool:
        from cupy.cuda import runtime

        return stream > _LEGACY_STREAM and bool(runtime.streamIsCapturing(stream))  # of the other nobody may ask

    def _put(self, values: np.ndarray) -> int:
        """Copies values, and waits for no more than that; 0 where CUDA does not, as while another thread captures."""
        from cupy.cuda import Stream, runtime
        from cupy.cuda.memory import Memory

        try:
            if self._memory is None:
                self._memory, self._copies = Memory(_BYTES), Stream(non_blocking=True)
            to, stream = self._memory.ptr + self._end, self._copies.ptr
            runtime.memcpyAsync(to, values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice, stream)
            runtime.streamSynchronize(stream)
        except runtime.CUDARuntimeError:
            return 0
        return int(to)


_on: dict[int, Constants] = {}


def on(ordinal: int) -> Constants:
    """Those of this GPU."""
    return _on.setdefault(ordinal, Constants())
