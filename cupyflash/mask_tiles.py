"""Block masks as kernels read them: tiles of 64 queries by 64 keys, each empty, full, or seen in part.

Two arrays: ``tiles``, ``(batch or 1, heads or 1, q_tiles, k_tiles)`` int32, where 0 is empty, 1 is full and 2 + n has
the bits number n; and ``bits``, ``(n, 256)`` int32, at least one row. A row holds 64 times 64 bits by query, the first
key lowest, and then the same by key. Rows and keys behind the last one have no meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError
from .operand import MASK_TILE, TILE_WORDS

Array = NDArray[Any]
TILE = MASK_TILE
EMPTY, FULL, FIRST = 0, 1, 2


def no_bits() -> Array:
    return np.zeros((1, TILE_WORDS), np.int32)


def check(tiles: Array, bits: Array, lengths: tuple[int, int]) -> None:
    """Refuse what is not the two arrays of a mask for so many queries and keys: kernels read where tiles say.

    Raises:
        ArgumentError: names the array.
    """
    for name, x in (("tiles", tiles), ("bits", bits)):
        if not isinstance(x, np.ndarray):
            raise ArgumentError(f"{name}: expected a NumPy array, got {type(x).__name__}; cupyflash.masks makes them")
    least = tuple(-(-n // TILE) for n in lengths)
    if tiles.dtype != np.int32 or tiles.ndim != 4 or tiles.shape[2] < least[0] or tiles.shape[3] < least[1]:
        raise ArgumentError(
            f"tiles: expected int32 (batch, heads, q_tiles, k_tiles), of at least {least[0]} x {least[1]} tiles, got "
            f"{tiles.dtype} of shape {tiles.shape}; cupyflash.masks makes them"
        )
    if bits.dtype != np.int32 or bits.ndim != 2 or bits.shape[1] != TILE_WORDS:
        raise ArgumentError(f"bits: expected int32 (n, {TILE_WORDS}), got {bits.dtype} of shape {bits.shape}")
    if tiles.size and not EMPTY <= tiles.min() <= tiles.max() < FIRST + len(bits):
        raise ArgumentError(
            f"tiles: expected numbers from 0 to {FIRST + len(bits) - 1}, for {len(bits)} rows of bits, got "
            f"{tiles.min()} to {tiles.max()}"
        )


def bits_of(elements: Array) -> Array:
    """Rows of bits, of (n, 64, 64) booleans."""
    packed = [np.packbits(x, axis=-1, bitorder="little") for x in (elements, elements.swapaxes(1, 2))]
    return np.stack(packed, axis=1).reshape(len(elements), 4 * TILE_WORDS).view(np.int32)


def elements(bits: Array) -> Array:
    """The inverse."""
    by_query = np.ascontiguousarray(bits[:, : TILE_WORDS // 2]).view(np.uint8)
    return np.unpackbits(by_query, axis=-1, bitorder="little").reshape(-1, TILE, TILE).astype(bool)


def cut_off(tiles: Array, bits: Array, seqlen_q: int, seqlen_k: int) -> tuple[Array, Array]:
    """The same tiles, where queries behind the last one see nothing and keys there are not seen; and their bits."""
    queries, keys = (np.arange(TILE) < (n % TILE or TILE) for n in (seqlen_q, seqlen_k))
    ends = np.ones((2, 2, TILE, TILE), bool)  # what there is of a tile, by whether it has the last queries and keys
    ends[1] &= queries[:, None]
    ends[:, 1] &= keys
    of_queries, of_keys = np.zeros((tiles.shape[2], 1), bool), np.zeros(tiles.shape[3], bool)
    of_queries[-1:], of_keys[-1:] = not queries.all(), not keys.all()
    is_last = (tiles != EMPTY) & (of_queries | of_keys)
    old, end = tiles[is_last], np.broadcast_to(2 * of_queries + of_keys, tiles.shape)[is_last]
    seen = np.where((old >= FIRST)[:, None], bits[np.maximum(old - FIRST, 0)], -1)
    made, number = np.unique(seen & bits_of(ends.reshape(4, TILE, TILE))[end], axis=0, return_inverse=True)
    found = tiles.copy()
    found[is_last] = np.where(made.any(axis=1), FIRST + len(bits) + np.arange(len(made)), EMPTY)[number.ravel()]
    return found, np.concatenate([bits, made])
