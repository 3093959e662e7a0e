"""Functions of the installed CUDA driver, for what CuPy does not bind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_NAMES = ("libcuda.so.1", "nvcuda.dll")


def driver_function(name: str, *, is_quick: bool = False) -> Callable[..., int] | None:
    """The driver's function of that name, which returns a CUresult; None without a driver that has it.

    Args:
        is_quick: other Python threads need not run meanwhile.
    """
    load = ctypes.PyDLL if is_quick else ctypes.CDLL
    for library in _NAMES:
        try:
            found: Callable[..., int] = getattr(load(library), name)
            return found
        except (OSError, AttributeError):
            continue
    return None


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the installed driver supports, such as (12, 8); None without a driver."""
    version, ask = ctypes.c_int(), driver_function("cuDriverGetVersion")
    if ask and ask(ctypes.byref(version)) == 0 and version.value:
        return version.value // 1000, version.value % 1000 // 10
    return None
