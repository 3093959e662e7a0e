"""How arrays in host memory are cut into pieces that fit the slots of `staging`, and cleared of what repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

Array = NDArray[Any]

_ALIGNED = 64  # bytes: pieces begin at multiples of it in a slot
_PARTS = 4  # pieces of a slot at least, so that the first is on the bus while the next is written


class Piece(NamedTuple):
    """A part of an array in host memory, of unsigned integers, and where it lies on the GPU, contiguous."""

    host: Array
    address: int


def batches(arrays: Iterable[tuple[Array, int]], most: int) -> Iterator[list[Piece]]:
    """The pieces of arrays, each at an address on the GPU; those that fit a slot of so many bytes in one list."""
    found: list[Piece] = []
    used = 0
    for x, address in arrays:
        x = x.view(f"u{x.itemsize}")  # of a dtype of its own NumPy copies one element after the other, with the lock
        for piece in _pieces(x.reshape(-1) if x.flags.c_contiguous else x, address, most // _PARTS):
            if used + piece.host.nbytes > most:
                yield found
                found, used = [], 0
            found.append(piece)
            used += rounded(piece.host.nbytes)
    if found:
        yield found


def _pieces(x: Array, address: int, most: int) -> Iterator[Piece]:
    """Views of at most so many bytes, in the order of a contiguous array at this address."""
    if x.nbytes <= most:
        if x.size:
            yield Piece(x, address)
        return
    row = x.nbytes // len(x)
    if row > most:
        for i, part in enumerate(x):
            yield from _pieces(part, address + i * row, most)
        return
    step = most // row
    for i in range(0, len(x), step):
        yield Piece(x[i : i + step], address + i * row)


def rounded(size: int) -> int:
    """The room of a piece of so many bytes."""
    return -(-size // _ALIGNED) * _ALIGNED


def without_repeats(x: Array) -> Array:
    """A view of x of length 1 along dimensions along which it repeats, as `np.broadcast_to` makes them."""
    return x[tuple(slice(None) if step or n == 0 else slice(1) for n, step in zip(x.shape, x.strides, strict=True))]
