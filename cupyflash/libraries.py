"""Whose array is this? Every array library that a caller may use, found without importing any.

A library is looked up in ``sys.modules``: one that the caller has not imported cannot own an array of theirs. The
native ones are in `arrays`; arrays of any other (JAX, anything with ``__dlpack__``) are viewed as NumPy or CuPy arrays
without a copy, and results go back the same way.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .arrays import CUPY, NUMPY, TORCH, Native
from .errors import ArgumentError, UnsupportedError


class Foreign:
    """Everything else that speaks DLPack: adopted as NumPy or CuPy arrays, zero copy."""

    name = "dlpack"

    def owns(self, x: Any) -> bool:
        return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")

    def adopt(self, name: str, x: Any) -> Any:
        """x as a NumPy array (host memory) or CuPy array (GPU)."""
        kind = int(x.__dlpack_device__()[0])
        if kind in (1, 3):  # kDLCPU, kDLCUDAHost
            return np.from_dlpack(x)
        if kind not in (2, 13):  # kDLCUDA, kDLCUDAManaged
            raise ArgumentError(f"{name}: expected an array on the CPU or an NVIDIA GPU, got DLPack device type {kind}")
        try:
            import cupy
        except ImportError as e:
            raise UnsupportedError(
                f"{name}: GPU arrays of {type(x).__module__} need CuPy; pip install 'cupyflash[cu12]'"
            ) from e
        return cupy.from_dlpack(x)

    def give_back(self, x: Any) -> Any:
        """A result, for the caller: NumPy and CuPy arrays stay what they are.

        Work on GPU arrays is waited for: the views of the inputs end with the call, and then their library may reuse
        the memory on a stream that knows nothing of the kernels still running.
        """
        if not isinstance(x, np.ndarray):
            sys.modules["cupy"].cuda.get_current_stream().synchronize()
        return x


class Jax(Foreign):
    """Concrete JAX arrays, outside jit."""

    name = "jax"

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["jax"].Array)

    def adopt(self, name: str, x: Any) -> Any:
        if isinstance(x, sys.modules["jax"].core.Tracer):
            raise UnsupportedError(
                f"{name}: traced JAX arrays (inside jit, grad, vmap) are not supported yet; call cupyflash outside "
                "jit, and attention_backward for gradients"
            )
        if len(x.devices()) != 1:
            raise UnsupportedError(f"{name}: expected an array on one device, got one sharded over {len(x.devices())}")
        if next(iter(x.devices())).platform == "cpu":
            return np.asarray(x)
        return super().adopt(name, x)

    def give_back(self, x: Any) -> Any:
        jax, x = sys.modules["jax"], super().give_back(x)
        return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else jax.dlpack.from_dlpack(x)


JAX, FOREIGN = Jax(), Foreign()
_LIBRARIES: tuple[Native | Foreign, ...] = (TORCH, CUPY, NUMPY, JAX, FOREIGN)
_by_type: dict[type, Native | Foreign] = {}


def library_of(name: str, x: Any) -> Native | Foreign:
    """The library that owns `x`, the argument called `name`.

    Raises:
        ArgumentError: if it is no array that any library owns.
    """
    library = _by_type.get(type(x))
    if library is None:
        for library in _LIBRARIES:
            if (library.name in sys.modules or library is FOREIGN) and library.owns(x):
                _by_type[type(x)] = library
                return library
        raise ArgumentError(
            f"{name}: expected an array of CuPy, NumPy, PyTorch or JAX, or another with __dlpack__, "
            f"got {type(x).__module__}.{type(x).__qualname__}"
        )
    return library


def common_library(**arrays: Any) -> Native | Foreign:
    """The library of all the named arrays.

    Raises:
        ArgumentError: if they are not all of one library.
    """
    first, *names = arrays
    library = library_of(first, arrays[first])
    for name in names:
        if type(arrays[name]) is type(arrays[first]):
            continue
        other = library_of(name, arrays[name])
        if other is not library:
            raise ArgumentError(f"{name}: expected an array of {library.name} like {first}, got one of {other.name}")
    return library
