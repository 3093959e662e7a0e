"""The array libraries that `run` works on in place: NumPy, CuPy and PyTorch. What an array looks like to a kernel, and
where results are allocated. None of them but NumPy is imported here: whoever has an array of a library has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ArgumentError
from . import torch_private
from .imported import is_instance
from .signature import CPU as CPU
from .signature import Signature as Signature
from .signature import place as place

_NUMPY_DTYPES = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_E4M3 = _NUMPY_DTYPES["float8_e4m3fn"]
_NUMPY_NAMES = {dtype: name for name, dtype in _NUMPY_DTYPES.items() if name != "int32"}


class Numpy:
    """NumPy arrays; strides of NumPy are in bytes."""

    name = "numpy"

    def owns(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def signature(self, x: Any) -> tuple[Any, ...]:
        """The facts of `Signature`, as fast as they come."""
        return x.shape, x.strides, x.dtype, CPU

    def describe(self, name: str, signature: tuple[Any, ...]) -> Signature:
        """The `Signature` of the argument called `name`.

        Raises:
            ArgumentError: its elements do not lie a whole number of elements apart, and it is read where it lies.
        """
        shape, strides, dtype, device = signature
        size = dtype.itemsize or 1
        if device != CPU and any(s % size for s, n in zip(strides, shape, strict=True) if n > 1):
            raise ArgumentError(
                f"{name}: expected strides that are multiples of the {size} bytes of an element, got {strides} bytes; "
                "make a contiguous copy first"
            )
        return Signature(shape, tuple(s // size for s in strides), dtype, device)

    def dtype_name(self, dtype: Any) -> str:
        return _NUMPY_NAMES.get(dtype, str(dtype))

    def pointer(self, x: Any) -> int:
        """The address of the first element."""
        return int(x.ctypes.data)

    def look(self, arrays: Iterable[Any]) -> tuple[list[tuple[Any, ...]], list[int]]:
        """The `signature` and the `pointer` of each, as fast as they come together."""
        signature, pointer, keys, pointers = self.signature, self.pointer, [], []
        for x in arrays:
            keys.append(signature(x))
            pointers.append(pointer(x))
        return keys, pointers

    def make(self, likes: Sequence[str], made: Sequence[tuple[Sequence[int], str]], arrays: Mapping[str, Any]) -> Any:
        """A list of new C-contiguous arrays on the device of q: like some of those given, then of (shape, dtype)."""
        q = arrays["q"]
        return [self.empty_like(arrays[x]) for x in likes] + [self.empty(shape, dtype, q) for shape, dtype in made]

    def empty_like(self, x: Any) -> Any:
        """A new C-contiguous array of x's shape and dtype on x's device."""
        return self.empty(x.shape, self.dtype_name(x.dtype), x)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        """A new C-contiguous array on the device of `like`."""
        return np.empty(shape, _NUMPY_DTYPES[dtype])

    def full(self, shape: Sequence[int], value: int, like: Any) -> Any:
        """The same in int32, with this value; queued on the current stream."""
        x = self.empty(shape, "int32", like)
        x.fill(value)
        return x

    def put(self, x: Any, values: np.ndarray) -> None:
        """Write values from host memory into x, whose shape and dtype they have; nothing waits for a GPU."""
        x[...] = values

    def contiguous(self, x: Any) -> Any:
        return np.ascontiguousarray(x)

    def stream(self, device: int) -> int:
        """The stream that the library would launch on now."""
        return 0

    def to_numpy(self, x: Any) -> np.ndarray:
        """The same data as a NumPy array; no copy for arrays in host memory."""
        return np.asarray(x)

    def from_numpy(self, x: np.ndarray) -> Any:
        """A NumPy array as an array of this library."""
        return x


class Cupy(Numpy):
    """CuPy arrays."""

    name = "cupy"

    def owns(self, x: Any) -> bool:
        return is_instance(x, "cupy", "ndarray")

    def signature(self, x: Any) -> tuple[Any, ...]:
        return x.shape, x.strides, x.dtype, x.device.id

    def pointer(self, x: Any) -> int:
        return int(x.data.ptr)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        cupy, kind = sys.modules["cupy"], _NUMPY_DTYPES[dtype]
        if kind is _E4M3:
            kind = np.dtype(np.uint8)  # CuPy has no other
        if cupy.cuda.runtime.getDevice() == like.device.id:
            return cupy.empty(shape, kind)
        with like.device:
            return cupy.empty(shape, kind)

    def full(self, shape: Sequence[int], value: int, like: Any) -> Any:
        with like.device:
            return super().full(shape, value, like)

    def put(self, x: Any, values: np.ndarray) -> None:
        with x.device:
            x[...] = sys.modules["cupy"].asarray(values)  # by pinned memory, which is kept until the copy is done

    def contiguous(self, x: Any) -> Any:
        return sys.modules["cupy"].ascontiguousarray(x)

    def stream(self, device: int) -> int:
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)

    def to_numpy(self, x: Any) -> np.ndarray:
        return x.get()

    def from_numpy(self, x: np.ndarray) -> Any:
        return sys.modules["cupy"].asarray(x.view(np.uint8) if x.dtype == _E4M3 else x)


class Torch:
    """PyTorch tensors. The attribute reads below are the cheapest that torch offers: this is the hot path."""

    name = "torch"

    @functools.cached_property
    def _dtypes(self) -> dict[str, Any]:
        torch = sys.modules["torch"]
        kinds = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
        kinds |= {name: name for name in ("int32", "int8", "float8_e4m3fn")}
        return {name: getattr(torch, kind) for name, kind in kinds.items()}

    @functools.cached_property
    def _names(self) -> dict[Any, str]:
        return {dtype: name for name, dtype in self._dtypes.items() if name != "int32"}

    @functools.cached_property
    def _raw_stream(self) -> Any:
        return torch_private.raw_stream()

    def owns(self, x: Any) -> bool:
        return is_instance(x, "torch", "Tensor")

    def signature(self, x: Any) -> tuple[Any, ...]:
        return x.shape, x.stride(), x.dtype, x.get_device() if x.is_cuda else CPU

    def describe(self, name: str, signature: tuple[Any, ...]) -> Signature:
        return tuple.__new__(Signature, signature)  # Signature(...) takes twice as long

    def dtype_name(self, dtype: Any) -> str:
        return self._names.get(dtype, str(dtype).removeprefix("torch."))

    def pointer(self, x: Any) -> int:
        return x.data_ptr()

    def look(self, arrays: Iterable[Any]) -> tuple[list[tuple[Any, ...]], list[int]]:
        keys, pointers = [], []
        for x in arrays:
            keys.append((x.shape, x.stride(), x.dtype, x.get_device() if x.is_cuda else CPU))
            pointers.append(x.data_ptr())
        return keys, pointers

    def make(self, likes: Sequence[str], made: Sequence[tuple[Sequence[int], str]], arrays: Mapping[str, Any]) -> Any:
        found = [self.empty_like(arrays[name]) for name in likes]
        if made:
            new, dtypes = arrays["q"].new_empty, self._dtypes
            found += [new(shape, dtype=dtypes[dtype]) for shape, dtype in made]
        return found

    def empty_like(self, x: Any) -> Any:
        torch = sys.modules["torch"]
        if x.is_contiguous():  # asking costs less than naming the format
            return torch.empty_like(x)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=self._dtypes[dtype])

    def full(self, shape: Sequence[int], value: int, like: Any) -> Any:
        return like.new_full(shape, value, dtype=self._dtypes["int32"])

    def put(self, x: Any, values: np.ndarray) -> None:
        x.copy_(self.from_numpy(values), non_blocking=True)  # CUDA has taken the values when this returns

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def stream(self, device: int) -> int:
        return self._raw_stream(device)

    def to_numpy(self, x: Any) -> np.ndarray:
        torch = sys.modules["torch"]
        x = x.detach()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if x.dtype == torch.float8_e4m3fn:
            return x.view(torch.uint8).numpy().view(_E4M3)
        return x.numpy()

    def from_numpy(self, x: np.ndarray) -> Any:
        torch = sys.modules["torch"]
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == _E4M3:
            return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(x)


Native = Numpy | Cupy | Torch
NUMPY, CUPY, TORCH = Numpy(), Cupy(), Torch()
