"""XLA's buffers as arrays of a native library, so that a call of XLA's takes the way of every other call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..arrays.adapters import CPU, Numpy, Signature
from ..gpu import device as gpu
from ..launch.passes import contiguous_strides

# XLA_FFI_DataType of what the table of arrays knows.
CODES = {
    "bool": 1, "int8": 2, "int32": 4, "int64": 5, "uint8": 6, "fp16": 10, "fp32": 11, "fp64": 12, "bf16": 16,
    "float8_e4m3fn": 20,
}  # fmt: skip
_NAMES = {code: name for name, code in CODES.items()}
_DTYPES: dict[int, Any] = {
    CODES["bool"]: np.dtype(np.bool_),
    CODES["int32"]: np.dtype(np.int32),
    CODES["int64"]: np.dtype(np.int64),
    CODES["fp16"]: np.dtype(np.float16),
    CODES["fp32"]: np.dtype(np.float32),
    CODES["fp64"]: np.dtype(np.float64),
    CODES["bf16"]: np.dtype(ml_dtypes.bfloat16),
    CODES["int8"]: np.dtype(np.int8),
    CODES["uint8"]: np.dtype(np.uint8),
    CODES["float8_e4m3fn"]: np.dtype(ml_dtypes.float8_e4m3fn),
}


class Buffer(NamedTuple):
    """An array of XLA's: always contiguous. dtype: XLA's code; device: the GPU's ordinal, or -1."""

    address: int
    shape: tuple[int, ...]
    dtype: int
    device: int

    @property
    def itemsize(self) -> int:
        return int(_DTYPES[self.dtype].itemsize)

    def numpy(self) -> np.ndarray:
        """The memory itself, of a buffer on the host."""
        dtype = _DTYPES[self.dtype]
        size = math.prod(self.shape) * self.itemsize
        if size == 0:
            return np.empty(self.shape, dtype)
        memory: Any = (ctypes.c_char * size).from_address(self.address)
        return np.frombuffer(memory, dtype).reshape(self.shape)


class Buffers(Numpy):
    """The library of one call's buffers: what would be allocated is the next of those that XLA gave for results."""

    name = "xla"

    def __init__(self, results: Sequence[Buffer] = (), stream: int = 0) -> None:
        self._results: Iterator[Buffer] = iter(results)
        self._stream = stream

    def owns(self, x: Any) -> bool:
        return isinstance(x, Buffer)

    def signature(self, x: Any) -> tuple[Any, ...]:
        return x.shape, contiguous_strides(x.shape), x.dtype, x.device

    def describe(self, name: str, signature: tuple[Any, ...]) -> Signature:
        return tuple.__new__(Signature, signature)

    def dtype_name(self, dtype: Any) -> str:
        return _NAMES.get(dtype, str(dtype))

    def pointer(self, x: Any) -> int:
        return int(x.address)

    def _next(self) -> Buffer:
        for found in self._results:
            return found
        raise other_trace()

    def empty_like(self, x: Any) -> Any:
        return self._next()

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return self._next()

    def stream(self, device: int) -> int:
        return self._stream

    def to_numpy(self, x: Any) -> np.ndarray:
        """Of a GPU's memory a copy, which waits: CUPYFLASH_DEBUG asks for it."""
        if x.device == CPU:
            return x.numpy()
        found = np.empty(x.shape, _DTYPES[x.dtype])
        gpu.read(x.address, found, self._stream)
        return found

    def from_numpy(self, x: np.ndarray) -> Any:
        """Copies a result of the CPU path into XLA's buffer for it."""
        found = self._next()
        found.numpy()[...] = x
        return found


def other_trace() -> RuntimeError:
    """The error where XLA has not got memory for all that is made."""
    return RuntimeError(
        "the call was traced for other kernels than it runs: trace, export and run it on GPUs of one kind, "
        "with one value of CUPYFLASH_FAMILY"
    )
