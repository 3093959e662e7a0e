"""What CuPy does not bind: launches of kernels that may start before the one in front of them has ended, and how many
clusters of blocks a GPU holds at the same time."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from ..errors import DeviceError
from .driver import driver_function, driver_version

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, as far as it is used."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "smem_bytes")],
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("n_attributes", ctypes.c_uint),
    ]  # fmt: skip


@functools.cache
def _launcher() -> Callable[..., int] | None:
    """cuLaunchKernelEx, of CUDA 12, as are tensor maps; takes four addresses."""
    found: Any = driver_function("cuLaunchKernelEx", is_quick=True)
    if found is not None:
        found.argtypes = (ctypes.c_void_p,) * 4  # which costs less than to have the caller convert them
    return found


@functools.cache
def _graphs_know_it() -> bool:
    """Whether such a launch can become part of a CUDA graph; before CUDA 12.3 it is one that waits for all in front."""
    return (driver_version() or (0, 0)) >= (12, 3)


class DependentLaunch:
    """A kernel on a grid, as `jit.launcher` has its facts, that starts once all blocks of the one in front of it on the
    stream allow it (griddepcontrol.launch_dependents) or have ended, and waits for its end itself
    (griddepcontrol.wait)."""

    def __init__(self, function: int, *facts: int) -> None:
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._config = _Config(*facts, None, ctypes.addressof(self._attribute), _graphs_know_it())
        self._lock = threading.Lock()  # of what says on which stream
        self._launch, self._at, self._function = _launcher(), ctypes.addressof(self._config), function

    def __call__(self, stream: int, arguments: int, _: int = 0) -> None:
        """`arguments`: the address of the array of pointers to the kernel's parameters."""
        if self._launch is None:
            raise DeviceError("the NVIDIA driver has no cuLaunchKernelEx, which CUDA 12 has; install a newer one")
        with self._lock:
            self._config.stream = stream
            status = self._launch(self._at, self._function, arguments, None)
        if status:
            raise DeviceError(f"cuLaunchKernelEx: the driver returned {status}")


def max_active_clusters(function: int, cluster: int, threads: int, smem_bytes: int) -> int:
    """How many clusters the current GPU holds at the same time, of a kernel whose clusters have a size of their own.

    It differs from chip to chip: a cluster lies within a GPC, and GPCs have different numbers of multiprocessors.
    """
    ask: Any = driver_function("cuOccupancyMaxActiveClusters")
    found = ctypes.c_int()
    config = _Config(cluster, 1, 1, threads, 1, 1, smem_bytes, None, None, 0)
    if ask is None or ask(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config)):
        return 0
    return found.value
