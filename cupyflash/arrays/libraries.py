"""Whose array is this? Every array library that a caller may use, found without importing any.

A library is looked up in ``sys.modules``: one that the caller has not imported cannot own an array of theirs. The
native ones are in `arrays`; arrays of any other with ``__dlpack__`` are viewed as NumPy or CuPy arrays without a copy,
and results go back the same way. JAX has operations of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import FROM_ELSEWHERE, ArgumentError, CupyflashError, UnsupportedError
from . import torch_private
from .adapters import CUPY, NUMPY, TORCH, Native
from .imported import is_instance, is_parameter, is_tensor
from .vetting import is_followed_by_torch, vet_type

_OWN_RULES = {"numpy": ("__array_ufunc__", "__array_function__"), "torch": ("__torch_dispatch__",)}
_OWN_RULES["cupy"] = _OWN_RULES["numpy"]
# What makes an array of a library of another's.
_MAKES = {"numpy": "numpy.asarray({x})", "cupy": "cupy.asarray({x})", "jax": "jax.numpy.asarray({x})"}
_MAKES["torch"] = "torch.as_tensor({x}, device={first}.device)"


class Foreign:
    """Everything else that speaks DLPack: adopted as NumPy or CuPy arrays, zero copy."""

    name = "dlpack"

    def owns(self, x: Any) -> bool:
        """Asks the class: an object that answers to every attribute is no array."""
        return hasattr(type(x), "__dlpack__") and hasattr(type(x), "__dlpack_device__")

    def adopt(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The named arrays as those of a native library: the same memory.

        Raises:
            ArgumentError: one is not in memory that can be read, or not on the device of the first.
            UnsupportedError: it needs a library that is not there, or is not supported yet.
        """
        return {name: self._adopt(name, x) for name, x in arrays.items()}

    def give_back(self, x: Any, like: Any) -> Any:
        """A result, for the caller, on the device of `like`: NumPy and CuPy arrays stay what they are.

        Work on GPU arrays is waited for: the views of the inputs end with the call, and then their library may reuse
        the memory on a stream that knows nothing of the kernels still running.
        """
        if not isinstance(x, np.ndarray):
            with x.device:
                sys.modules["cupy"].cuda.get_current_stream().synchronize()
        return x

    def _adopt(self, name: str, x: Any) -> Any:
        """x as a NumPy array (host memory) or CuPy array (GPU)."""
        try:
            kind = int(x.__dlpack_device__()[0])
            if kind in (1, 3):  # kDLCPU, kDLCUDAHost
                return np.from_dlpack(x)
            if kind in (2, 13):  # kDLCUDA, kDLCUDAManaged
                return _cupy(name, x).from_dlpack(x)
        except (CupyflashError, *FROM_ELSEWHERE):
            raise
        except Exception as e:
            raise ArgumentError(
                f"{name}: this {type(x).__module__}.{type(x).__qualname__} cannot be read through DLPack ({e}); "
                "give an array of NumPy (where bf16 is ml_dtypes.bfloat16), CuPy, PyTorch or JAX"
            ) from e
        raise ArgumentError(f"{name}: expected an array on the CPU or an NVIDIA GPU, got DLPack device type {kind}")


def _cupy(name: str, x: Any) -> Any:
    try:
        import cupy
    except ImportError as e:
        raise UnsupportedError(
            f"{name}: GPU arrays of {type(x).__module__} need CuPy; pip install 'cupyflash[cu12]'"
        ) from e
    return cupy


class Jax(Foreign):
    """JAX arrays, concrete or traced: `cupyflash.jax` takes them as they are."""

    name = "jax"

    def owns(self, x: Any) -> bool:
        return is_instance(x, "jax", "Array")


class TorchSubclass(Foreign):
    """Tensors of a subclass without rules of its own: taken, and answered, as plain tensors."""

    name = "torch"

    def adopt(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        with torch_private.without_rules():
            return {name: x.as_subclass(sys.modules["torch"].Tensor) for name, x in arrays.items()}

    def give_back(self, x: Any, like: Any) -> Any:
        return x


JAX, FOREIGN, TORCH_SUBCLASS = Jax(), Foreign(), TorchSubclass()
_LIBRARIES: tuple[Native | Foreign, ...] = (NUMPY, TORCH, CUPY, JAX, FOREIGN)
_by_type: dict[type, Native | Foreign] = {}


def library_of(name: str, x: Any) -> Native | Foreign:
    """The library that owns `x`, the argument called `name`.

    Raises:
        ArgumentError: if it is no array that any library owns.
        UnsupportedError: if it is one by rules of its own.
    """
    if is_tensor(type(x)) or is_parameter(type(x)):
        return TORCH
    library = _by_type.get(type(x))
    if library is None:
        library = _by_type[type(x)] = _find(name, x)
    return library


def _find(name: str, x: Any) -> Native | Foreign:
    kind = type(x)
    for library in _LIBRARIES:
        if library.owns(x):
            break
    else:
        raise ArgumentError(
            f"{name}: expected an array of CuPy, NumPy, PyTorch or JAX, or another with __dlpack__, "
            f"got {kind.__module__}.{kind.__qualname__}"
        )
    if library in (NUMPY, CUPY, TORCH):
        module = sys.modules[library.name]
        base = module.Tensor if library is TORCH else module.ndarray
        if library is TORCH and is_followed_by_torch(kind):
            return library
        vet_type(name, kind, base, _OWN_RULES[library.name])
        if library is TORCH and kind not in (module.Tensor, module.nn.Parameter):
            return TORCH_SUBCLASS
    return library


def common_library(**arrays: Any) -> Native | Foreign:
    """The library of all the named arrays.

    Raises:
        ArgumentError: if they are not all of one library.
    """
    libraries = {name: library_of(name, x) for name, x in arrays.items()}
    first, library = next(iter(libraries.items()))
    for name, other in libraries.items():
        if other.name != library.name:
            of, x = (other, first) if is_instance(arrays[name], "jax.core", "Tracer") else (library, name.split()[-1])
            make = _MAKES.get(of.name, "arrays of one library").format(x=x, first=first)
            raise ArgumentError(
                f"{name}: expected an array of {library.name} like {first}, got one of {other.name}; give {make}"
            )
    return TORCH_SUBCLASS if any(x is TORCH_SUBCLASS for x in libraries.values()) else library


def common_library_of_all(arrays: Mapping[str, Any]) -> Native | Foreign:
    """`common_library`, at once where all are of one type that is known."""
    kinds = [type(x) for x in arrays.values()]
    first = kinds[0]
    for kind in kinds:
        if kind is not first:
            return common_library(**arrays)
    library = TORCH if is_tensor(first) else _by_type.get(first)
    return common_library(**arrays) if library is None else library


def common_library_of_three(q: Any, k: Any, v: Any) -> Native | Foreign:
    """`common_library`, at once where all are of one type that is known."""
    kind = type(q)
    if type(k) is kind and type(v) is kind:
        library = TORCH if is_tensor(kind) else _by_type.get(kind)
        if library is not None:
            return library
    return common_library(q=q, k=k, v=v)
