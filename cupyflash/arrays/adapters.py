"""The array libraries that `run` works on in place: NumPy, CuPy and PyTorch. What an array looks like to a kernel, and
where results are allocated. None of them but NumPy is imported here: whoever has an array of a library has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ArgumentError
from .imported import is_instance
from .signature import CPU as CPU
from .signature import FULL_NAMES
from .signature import Signature as Signature
from .signature import place as place
from .tensors import TORCH as TORCH
from .tensors import Torch

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
    allocates = False  # new arrays on a GPU: several that nobody is given may be one
    compares = False  # arrays with others, all at once, by `comparison`

    def __reduce__(self) -> str:
        """Copies, and what is pickled, are the one that there is: others ask whether a library is it."""
        return self.name.upper()

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
        return _NUMPY_NAMES.get(dtype) or str(dtype)  # which takes NumPy 4 us

    def cast(self, label: str, dtype: str) -> str:
        """How a user makes an array of this name one of another dtype."""
        kind = FULL_NAMES.get(dtype, dtype)
        return f"{label}.astype(ml_dtypes.bfloat16)" if dtype == "bf16" else f'{label}.astype("{kind}")'

    def pointer(self, x: Any) -> int:
        """The address of the first element."""
        return int(x.ctypes.data)

    def pointers(self, arrays: Iterable[Any]) -> list[int]:
        """The `pointer` of each."""
        return [*map(self.pointer, arrays)]

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

    def forms(
        self, likes: Sequence[str], made: Sequence[tuple[Sequence[int], str]], arrays: Mapping[str, Any]
    ) -> Sequence[Any]:
        """What `make_like` takes to make all that `make` would; nothing, where that costs no less."""
        return ()

    def make_like(self, forms: Sequence[Any], pointers: list[int]) -> list[Any]:
        """A list of new arrays of these forms, whose addresses join the others."""
        raise AssertionError(f"{self.name} has no forms")

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


_CUPY_DTYPES = _NUMPY_DTYPES | {"float8_e4m3fn": np.dtype(np.uint8)}  # CuPy has no other


class Cupy(Numpy):
    """CuPy arrays."""

    name = "cupy"
    allocates = True

    def owns(self, x: Any) -> bool:
        return is_instance(x, "cupy", "ndarray")

    def signature(self, x: Any) -> tuple[Any, ...]:
        return x.shape, x.strides, x.dtype, x.device.id

    def pointer(self, x: Any) -> int:
        return int(x.data.ptr)

    def look(self, arrays: Iterable[Any]) -> tuple[list[tuple[Any, ...]], list[int]]:
        keys, pointers = [], []
        for x in arrays:
            data = x.data
            keys.append((x.shape, x.strides, x.dtype, data.device_id))
            pointers.append(data.ptr)
        return keys, pointers

    def forms(
        self, likes: Sequence[str], made: Sequence[tuple[Sequence[int], str]], arrays: Mapping[str, Any]
    ) -> Sequence[Any]:
        kinds = [(arrays[name].shape, arrays[name].dtype) for name in likes]
        kinds += [(tuple(shape), _CUPY_DTYPES[dtype]) for shape, dtype in made]
        return sys.modules["cupy"], kinds, arrays["q"].device.id

    def make_like(self, forms: Sequence[Any], pointers: list[int]) -> list[Any]:
        cupy, kinds, device = forms
        new = cupy.ndarray
        if cupy.cuda.runtime.getDevice() == device:
            found = [new(*kind) for kind in kinds]
        else:
            with cupy.cuda.Device(device):
                found = [new(*kind) for kind in kinds]
        for x in found:
            pointers.append(x.data.ptr)
        return found

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return self.make_like(self.forms((), [(shape, dtype)], {"q": like}), [])[0]

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


Native = Numpy | Cupy | Torch
NUMPY, CUPY = Numpy(), Cupy()
