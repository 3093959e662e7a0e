"""Tensor maps: how TMA, Hopper's copy engine, sees an array. `TensorMap` is what one says; `encode` asks the driver.

A map is 128 opaque bytes. Encoding one costs the host about 2 us, a tenth of a whole call, so a prepared call keeps its
maps and writes new addresses into them. Where these lie is not documented, but `address_slot` finds it by encoding maps
that differ in nothing else.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import driver_function

BOX_COLUMNS = 64  # of 16 bits: 128 bytes, the span of the swizzle
ROW_BYTES = 16  # TMA's unit
EIGHT = 8  # keys that a lane has of a row where they are interleaved
_MAX_STRIDE_BYTES = 1 << 40
_FLOAT16, _BFLOAT16 = 6, 9  # CUtensorMapDataType
_SWIZZLES, _L2_PROMOTION_256B = {64: 2, 128: 3}, 3  # CUtensorMapSwizzle by the bytes of a box's row
L2_PROMOTION_128B = 2  # CUtensorMapL2promotion


@dataclass(frozen=True)
class TensorMap:
    """An array of 16-bit elements, innermost dimension first, and the box that one copy moves.

    Attributes:
        sizes: (head_dim, seqlen, heads, batch).
        strides_bytes: of all dimensions but the innermost.
        rows: of a box, which has `BOX_COLUMNS` columns.
        interleaved: four copies fill a tile of so many rows, each with two of every eight (key_order.cuh); seqlen is a
            multiple of 8.
    """

    dtype: str
    sizes: tuple[int, int, int, int]
    strides_bytes: tuple[int, int, int]
    rows: int
    interleaved: bool = False

    @classmethod
    def of(
        cls, dtype: str, shape: Sequence[int], strides: Sequence[int], layout: str, rows: int, interleaved: bool = False
    ) -> TensorMap:
        """The map of an array in the caller's layout; strides in elements."""
        batch, a, b, head_dim = shape
        lengths, steps = (a, b, batch), (strides[1], strides[2], strides[0])
        if layout == "bhsd":
            lengths, steps = (b, a, batch), (strides[2], strides[1], strides[0])
        # The stride of a dimension of size 1 says nothing, but the driver checks it.
        used = [2 * step if n > 1 else ROW_BYTES for n, step in zip(lengths, steps, strict=True)]
        return cls(dtype, (head_dim, *lengths), (used[0], used[1], used[2]), rows, interleaved)

    @property
    def whole(self) -> BoxMap:
        """All that the driver is told."""
        (head_dim, seqlen, *others), (row, *apart) = self.sizes, self.strides_bytes
        if not self.interleaved:
            box = BOX_COLUMNS, self.rows, 1, 1
            return BoxMap(self.dtype, self.sizes, self.strides_bytes, box, _L2_PROMOTION_256B)
        sizes = head_dim, EIGHT, seqlen // EIGHT, *others
        strides = row, EIGHT * row if seqlen > EIGHT else ROW_BYTES, *apart
        return BoxMap(self.dtype, sizes, strides, (BOX_COLUMNS, 2, self.rows // EIGHT, 1, 1), _L2_PROMOTION_256B)


def readable(shape: Sequence[int], strides: Sequence[int], itemsize: int = 2) -> bool:
    """Whether TMA can read an array whose address is a multiple of 16; strides in elements, itemsize: their bytes."""
    a, b, c, _ = shape
    i, j, k, _ = strides
    return (a < 2 or _is_step(i * itemsize)) and (b < 2 or _is_step(j * itemsize)) and (c < 2 or _is_step(k * itemsize))


def _is_step(step_bytes: int) -> bool:
    return 0 < step_bytes < _MAX_STRIDE_BYTES and step_bytes % ROW_BYTES == 0


@functools.cache
def _encoder() -> Callable[..., int] | None:
    """cuTensorMapEncodeTiled; None without a driver that has it (CUDA 12)."""
    return driver_function("cuTensorMapEncodeTiled")


@dataclass(frozen=True)
class BoxMap:
    """An array of 16-bit elements with as many dimensions as one likes, innermost first, and the box of a copy.

    Attributes:
        strides_bytes: of all dimensions but the innermost.
        promotion: of what the L2 fetches: 1 to 3 for 64, 128, 256 bytes.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    promotion: int = L2_PROMOTION_128B

    @property
    def swizzle(self) -> int:
        """That over all of a box's row."""
        return _SWIZZLES[2 * self.box[0]]


_Storage = ctypes.c_uint64 * 24
_DTYPES = {"fp16": ctypes.c_int(_FLOAT16), "bf16": ctypes.c_int(_BFLOAT16)}


def encode(tensor: TensorMap | BoxMap, address: int) -> NDArray[np.uint64] | None:
    """The driver's map of the array at `address`, as 16 words of 64 bits; None if the driver refuses."""
    function = _encoder()
    if function is None:
        return None
    if isinstance(tensor, TensorMap):
        tensor = tensor.whole
    n, storage = len(tensor.sizes), _Storage()
    start = ctypes.addressof(storage)
    skip = -start % 64  # the driver wants 64-byte alignment
    modes = 0, tensor.swizzle, tensor.promotion, 0  # not interleaved; zeros outside of the tensor
    status = function(
        ctypes.c_void_p(start + skip),
        _DTYPES[tensor.dtype],
        ctypes.c_uint32(n),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * n)(*tensor.sizes),
        (ctypes.c_uint64 * (n - 1))(*tensor.strides_bytes),
        (ctypes.c_uint32 * n)(*tensor.box),
        (ctypes.c_uint32 * n)(*[1] * n),
        *map(ctypes.c_int, modes),
    )
    return None if status else np.frombuffer(memoryview(storage), np.uint64, 16, skip)


ANYWHERE = 1 << 32  # an address to encode a map with that gets another one later
_PROBES = (ANYWHERE, 0x7F1234567890, 0x7FFFFFFFFFF0)  # addresses a multiple of 16 apart; nothing is read
slots: dict[tuple[Any, ...], int] = {}  # what `anywhere` knows, by what maps of a form have in common


def anywhere(tensor: BoxMap) -> tuple[NDArray[np.uint64], int] | None:
    """A map at `ANYWHERE`, and which of its words is that address; None if none is, or the driver refuses.

    Which word it is is asked once for all maps of a form. That another one has the address there, too, is looked at.
    """
    form = tensor.dtype, tensor.box, tensor.promotion
    slot = slots.get(form)
    if slot is None:
        slot = address_slot(tensor)
        if slot is None:
            return None
        slots[form] = slot
    found = encode(tensor, ANYWHERE)
    return None if found is None or found[slot] != ANYWHERE else (found, slot)


def address_slot(tensor: TensorMap | BoxMap) -> int | None:
    """Which of a map's 16 words is the array's address, and nothing but; None if none is, or the driver refuses."""
    maps = [encode(tensor, address) for address in _PROBES]
    if any(m is None for m in maps):
        return None
    words = np.array(maps)
    varies = np.flatnonzero((words != words[0]).any(axis=0))
    if len(varies) != 1 or list(words[:, varies[0]]) != list(_PROBES):
        return None
    return int(varies[0])
