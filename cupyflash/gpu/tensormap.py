"""Tensor maps: how TMA, Hopper's copy engine, sees an array. `TensorMap` is what one says; `encode` asks the driver.

A map is 128 opaque bytes. Encoding one costs the host about 2 us, a tenth of a whole call, so a prepared call keeps its
maps and writes new addresses into them, and lengths and strides that are new. Where these lie is not documented, but
`address_slot` and `understand` find them by encoding maps that differ in nothing else.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .driver import driver_function

BOX_COLUMNS = 64  # of 16 bits: 128 bytes, the span of the swizzle
_ROW_BYTES = 16  # TMA's unit
_MAX_STRIDE_BYTES = 1 << 40
_FLOAT16, _BFLOAT16 = 6, 9  # CUtensorMapDataType
_SWIZZLE_128B, _L2_PROMOTION_256B = 3, 3
L2_PROMOTION_128B = 2  # CUtensorMapL2promotion


@dataclass(frozen=True)
class TensorMap:
    """An array of 16-bit elements, innermost dimension first, and the box that one copy moves.

    Attributes:
        sizes: (head_dim, seqlen, heads, batch).
        strides_bytes: of all dimensions but the innermost.
        rows: of a box, which has `BOX_COLUMNS` columns.
    """

    dtype: str
    sizes: tuple[int, int, int, int]
    strides_bytes: tuple[int, int, int]
    rows: int

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int], strides: Sequence[int], layout: str, rows: int) -> TensorMap:
        """The map of an array in the caller's layout; strides in elements."""
        batch, a, b, head_dim = shape
        lengths, steps = (a, b, batch), (strides[1], strides[2], strides[0])
        if layout == "bhsd":
            lengths, steps = (b, a, batch), (strides[2], strides[1], strides[0])
        # The stride of a dimension of size 1 says nothing, but the driver checks it.
        used = [2 * step if n > 1 else _ROW_BYTES for n, step in zip(lengths, steps, strict=True)]
        return cls(dtype, (head_dim, *lengths), (used[0], used[1], used[2]), rows)


def readable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether TMA can read an array of 16-bit elements whose address is a multiple of 16; strides in elements."""
    a, b, c, _ = shape
    i, j, k, _ = strides
    return (a < 2 or _is_step(i)) and (b < 2 or _is_step(j)) and (c < 2 or _is_step(k))


def _is_step(step: int) -> bool:
    return 0 < 2 * step < _MAX_STRIDE_BYTES and 2 * step % _ROW_BYTES == 0


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


_Storage = ctypes.c_uint64 * 24
_DTYPES = {"fp16": ctypes.c_int(_FLOAT16), "bf16": ctypes.c_int(_BFLOAT16)}


def encode(tensor: TensorMap | BoxMap, address: int) -> NDArray[np.uint64] | None:
    """The driver's map of the array at `address`, as 16 words of 64 bits; None if the driver refuses."""
    function = _encoder()
    if function is None:
        return None
    if isinstance(tensor, TensorMap):
        box = BOX_COLUMNS, tensor.rows, 1, 1
        tensor = BoxMap(tensor.dtype, tensor.sizes, tensor.strides_bytes, box, _L2_PROMOTION_256B)
    n, storage = len(tensor.sizes), _Storage()
    start = ctypes.addressof(storage)
    skip = -start % 64  # the driver wants 64-byte alignment
    modes = 0, _SWIZZLE_128B, tensor.promotion, 0  # not interleaved; zeros outside of the tensor
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


@dataclass(frozen=True)
class Form:
    """Maps of one dtype, head_dim and box, as far as they are understood: where their numbers lie.

    Attributes:
        words: of a map, as 128 bytes, into which the others' numbers can be written.
        address: the word of 64 bits that is the array's address.
        slots: the words of 32 bits that hold seqlen - 1, heads - 1, batch - 1, and the strides of row, head and
            sequence in units of 16 bytes; None: unknown, the driver must make each map.
        least_bytes: arrays whose last row is nearer to the first have something more in their maps.
    """

    words: bytes
    address: int
    slots: tuple[int, ...] | None = None
    least_bytes: int = 0

    def tells(self, lengths: tuple[int, int, int], steps: tuple[int, int, int]) -> bool:
        """Whether numbers alone make an array's map of `words`; else the driver must make it.

        Args:
            lengths: seqlen, heads, batch.
            steps: from one row, head and sequence to the next, in elements.
        """
        (seqlen, heads, batch), (row, head, sequence) = lengths, steps
        if self.slots is None or (row | head | sequence) >= _WORD_STEP:
            return False
        apart = (seqlen - 1) * row + (heads - 1) * head + (batch - 1) * sequence if self.least_bytes else 0
        return 2 * apart >= self.least_bytes


_Probe = tuple[tuple[int, int, int], tuple[int, int, int]]  # seqlen, heads and batch, and their strides in bytes
_WORD_STEP = 8 << 32  # elements; longer strides take more than one word
_SMALL_BYTES = 1 << 20
# No two numbers of a probe are the same, neither as they are nor as they are stored: each is found in one place.
_FIRST: _Probe = (70001, 3003, 509), (16 * 8101, 16 * 90007, 16 * 12345701)
_SECOND: _Probe = (1234, 47, 23459), (16 * 765433, 16 * 3571, 16 * 80000011)
_LARGE: tuple[_Probe, ...] = (
    ((1 << 29, 1, 1), (512, 16, 16)),
    ((8192, 16, 4), (8192, 512, 8192 * 8192)),
    ((1, 1, 1 << 20), (16, 16, 1 << 21)),
    ((1, 3, 2), (16, 1 << 35, (1 << 36) - 16)),
    ((4096, 8, 3), (512, 512 * 4096, 1 << 30)),
)
_SMALL: tuple[_Probe, ...] = (
    ((1, 1, 1), (16, 16, 16)),
    ((17, 2, 1), (1024, 512, 16)),
    ((1, 8, 5), (16, 512, 4096)),
    ((300, 1, 1), (512, 16, 16)),
)


def understand(dtype: str, head_dim: int, rows: int) -> Form | None:
    """The `Form` of maps with boxes of `rows`, found by comparing some; None if not even the address is understood."""

    def words(probe: _Probe) -> NDArray[np.uint32] | None:
        found = encode(TensorMap(dtype, (head_dim, *probe[0]), probe[1], rows), ANYWHERE)
        return None if found is None else found.view(np.uint32)

    address = address_slot(TensorMap(dtype, (head_dim, *_FIRST[0]), _FIRST[1], rows))
    first, second = words(_FIRST), words(_SECOND)
    if address is None or first is None:
        return None
    form = Form(first.tobytes(), address)
    slots = () if second is None else _slots(first, second)
    if len(slots) < 6:
        return form
    known = replace(form, slots=slots)
    if not all(_is_told(known, words(probe), probe) for probe in (_SECOND, *_LARGE)):
        return form
    is_whole = all(_is_told(known, words(probe), probe) for probe in _SMALL)
    return known if is_whole else replace(known, least_bytes=_SMALL_BYTES)


def _slots(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> tuple[int, ...]:
    """The words where the maps of both probes hold their numbers; fewer than six if not all are found in one place."""
    pairs = zip(_stored(_FIRST), _stored(_SECOND), strict=True)
    found = [np.flatnonzero((first == a) & (second == b)) for a, b in pairs]
    return tuple(int(places[0]) for places in found if len(places) == 1)


def _stored(probe: _Probe) -> tuple[int, ...]:
    """Lengths less 1, and strides in units of 16 bytes."""
    lengths, strides_bytes = probe
    return (*(n - 1 for n in lengths), *(step // _ROW_BYTES for step in strides_bytes))


def _is_told(form: Form, actual: NDArray[np.uint32] | None, probe: _Probe) -> bool:
    """Whether a map is what the form makes of its numbers."""
    expected = np.frombuffer(form.words, np.uint32).copy()
    expected[list(form.slots or ())] = _stored(probe)
    return actual is not None and bool((actual == expected).all())
