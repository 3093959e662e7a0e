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
