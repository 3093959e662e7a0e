"""Array libraries: who owns an array, what it looks like to a kernel, and where results are allocated.

A library is never imported unless the caller already has: it is looked up in ``sys.modules``. Three libraries are
native, which means that `run` reads their arrays in place: NumPy, CuPy and PyTorch. Arrays of any other (JAX, anything
with ``__dlpack__``) are viewed as NumPy or CuPy arrays without a copy, and results go back the same way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .errors import ArgumentError, UnsupportedError

CPU = -1  # the device of arrays in host memory

_NUMPY_DTYPES = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "int32": np.dtype(np.int32),
}
_NUMPY_NAMES = {dtype: name for name, dtype in _NUMPY_DTYPES.items() if name != "int32"}


class Signature(NamedTuple):
    """All that a launch depends on but the address: equal signatures share one prepared call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: Any  # the library's own object
    device: int  # CUDA ordinal, or CPU


class Numpy:
    """NumPy arrays; strides of NumPy are in bytes."""

    name = "numpy"
    native = True

    def owns(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def signature(self, x: Any) -> Signature:
        return Signature(x.shape, tuple(s // x.itemsize for s in x.strides), x.dtype, CPU)

    def dtype_name(self, dtype: Any) -> str:
        return _NUMPY_NAMES.get(dtype, str(dtype))

    def pointer(self, x: Any) -> int:
        """The address of the first element."""
        return int(x.ctypes.data)

    def empty_like(self, x: Any) -> Any:
        """A new C-contiguous array of x's shape and dtype on x's device."""
        return self.empty(x.shape, self.dtype_name(x.dtype), x)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        """A new C-contiguous array on the device of `like`."""
        return np.empty(shape, _NUMPY_DTYPES[dtype])

    def contiguous(self, x: Any) -> Any:
        return np.ascontiguousarray(x)

    def stream(self, device: int) -> int:
        """The stream that the library would launch on now."""
        return 0

    def to_numpy(self, x: Any) -> np.ndarray:
        """The same data as a NumPy array; no copy for arrays in host memory."""
        return x

    def from_numpy(self, x: np.ndarray) -> Any:
        """A NumPy array as an array of this library."""
        return x


class Cupy(Numpy):
    """CuPy arrays."""

    name = "cupy"

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["cupy"].ndarray)

    def signature(self, x: Any) -> Signature:
        return Signature(x.shape, tuple(s // x.itemsize for s in x.strides), x.dtype, x.device.id)

    def pointer(self, x: Any) -> int:
        return int(x.data.ptr)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        cupy = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() == like.device.id:
            return cupy.empty(shape, _NUMPY_DTYPES[dtype])
        with like.device:
            return cupy.empty(shape, _NUMPY_DTYPES[dtype])

    def contiguous(self, x: Any) -> Any:
        return sys.modules["cupy"].ascontiguousarray(x)

    def stream(self, device: int) -> int:
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)

    def to_numpy(self, x: Any) -> np.ndarray:
        return x.get()

    def from_numpy(self, x: np.ndarray) -> Any:
        return sys.modules["cupy"].asarray(x)


class Torch:
    """PyTorch tensors. The attribute reads below are the cheapest that torch offers: this is the hot path."""

    name = "torch"
    native = True

    @functools.cached_property
    def _dtypes(self) -> dict[str, Any]:
        torch = sys.modules["torch"]
        kinds = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "int32": "int32"}
        return {name: getattr(torch, kind) for name, kind in kinds.items()}

    @functools.cached_property
    def _names(self) -> dict[Any, str]:
        return {dtype: name for name, dtype in self._dtypes.items() if name != "int32"}

    @functools.cached_property
    def _raw_stream(self) -> Any:
        return sys.modules["torch"]._C._cuda_getCurrentRawStream

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["torch"].Tensor)

    def signature(self, x: Any) -> Signature:
        return Signature(x.shape, x.stride(), x.dtype, x.get_device() if x.is_cuda else CPU)

    def dtype_name(self, dtype: Any) -> str:
        return self._names.get(dtype, str(dtype).removeprefix("torch."))

    def pointer(self, x: Any) -> int:
        return x.data_ptr()

    def empty_like(self, x: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=self._dtypes[dtype])

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def stream(self, device: int) -> int:
        return self._raw_stream(device)

    def to_numpy(self, x: Any) -> np.ndarray:
        torch = sys.modules["torch"]
        if x.device.type != "cpu":
            raise ArgumentError(f"q, k, v: expected tensors on the CPU or an NVIDIA GPU, got device {x.device}")
        x = x.detach()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    def from_numpy(self, x: np.ndarray) -> Any:
        torch = sys.modules["torch"]
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)


class Foreign:
    """Everything else that speaks DLPack: adopted as NumPy or CuPy arrays, zero copy."""

    name = "dlpack"
    native = False

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


Native = Numpy | Cupy | Torch
NUMPY, CUPY, TORCH, JAX, FOREIGN = Numpy(), Cupy(), Torch(), Jax(), Foreign()
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
