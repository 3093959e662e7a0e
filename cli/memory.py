"""Memory as `verify` needs it: arrays as pieces of memory with their gaps and alignment, and memory full of NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Array = NDArray[Any]
ALIGNMENT = 16  # bytes; what a kernel can tell of an address


class Flat(NamedTuple):
    """A strided array as a piece of memory: `elements` from an aligned address on, and where in it the array lies."""

    elements: Array
    offset: int
    strides: tuple[int, ...]  # in elements


def flatten(x: Array) -> Flat:
    """The memory under `x`, its gaps included and its alignment kept; strides must not be negative."""
    itemsize = x.itemsize
    strides = tuple(stride // itemsize for stride in x.strides)
    if x.size == 0:
        return Flat(np.zeros(0, x.dtype), 0, strides)
    offset = x.ctypes.data % ALIGNMENT // itemsize
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    elements = np.full(offset + span, -1 if x.dtype.kind == "i" else np.nan, x.dtype)
    elements[offset:] = as_strided(x, (span,), (itemsize,))
    return Flat(elements, offset, strides)


@contextlib.contextmanager
def cupy_poisoned() -> Iterator[None]:
    """CuPy's allocator fills what it hands out: all bits set is a NaN in every dtype."""
    from cupy import cuda

    pool = cuda.get_allocator()

    def allocate(size: int) -> Any:
        memory = pool(size)
        if size:
            memory.memset_async(0xFF, size)
        return memory

    with cuda.using_allocator(allocate):
        yield


def freed_full_of_nan() -> None:
    """Blocks of many sizes, filled and freed: likely what the C allocator hands out next."""
    for exponent in range(8, 23):
        for _ in range(4):
            np.full(1 << exponent, 0xFF, np.uint8)
