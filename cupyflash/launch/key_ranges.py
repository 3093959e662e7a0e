"""The ranges of keys that count, made on the GPU from padding masks in one launch (any/key_ranges.cuh)."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from ..compile import jit
from ..gpu.device import Device
from ..plan.key_ranges import KEY_RANGES
from ..plan.params import UNBOUNDED


class KeyRanges:
    """The kernel on one GPU, loaded."""

    def __init__(self, device: Device, stream: int) -> None:
        """`stream`: as of `jit.load`, whose errors it raises."""
        self._device, self._function = device, jit.load(KEY_RANGES, device, stream).function
        self._params = np.zeros((), KEY_RANGES.params)
        self._pointer = ctypes.c_void_p(self._params.ctypes.data)
        self._lock = threading.Lock()  # of the params, which the driver has read when a launch returns

    def __call__(
        self,
        stream: int,
        batch: int,
        *addresses: int,
        stride: int,
        keys: int,
        used: int,
        first: int,
        window: tuple[int | None, int | None],
    ) -> None:
        """Launch it on `stream`.

        Args:
            addresses: of the struct's arrays, in its order; 0: it is null.
            window: left and right of the one query.
        """
        left, right = (UNBOUNDED if n is None else min(n, UNBOUNDED) for n in window)
        launch, arguments = jit.launcher(), ctypes.addressof(self._pointer)
        with self._device.current(), self._lock:
            self._params[()] = (*addresses, stride, keys, used, first, left, right)
            threads, smem = KEY_RANGES.threads, KEY_RANGES.smem_bytes
            launch(self._function, batch, 1, 1, threads, 1, 1, smem, stream, arguments, 0)


_on: dict[int, KeyRanges] = {}


def on(ordinal: int, stream: int) -> KeyRanges:
    """The kernel on this GPU.

    Raises:
        DeviceError, UnsupportedError, CompileError: there is none there, or it is not loaded yet while `stream` is
            captured into a CUDA graph.
    """
    found = _on.get(ordinal)
    if found is None:
        found = _on[ordinal] = KeyRanges(Device.of(ordinal), stream)
    return found
