"""The block masks of the named cases: `MASKS` draw (batch or 1, heads or 1, seqlen_q, seqlen_k) booleans."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask

Array = NDArray[Any]
Shape = tuple[int, int, int, int]
Rng = np.random.Generator


def tiles(rng: Rng, shape: Shape) -> Array:
    """Tiles of 64 that are empty, full or drawn element by element, one mask for all; some rows see nothing."""
    *_, seqlen_q, seqlen_k = shape
    seen = _by_kind(rng, (-(-seqlen_q // 64), -(-seqlen_k // 64)), 64)[:seqlen_q, :seqlen_k]
    seen[seqlen_q // 3 : seqlen_q // 3 + 2] = False
    return seen[None, None]


def tiles_of_heads(rng: Rng, shape: Shape) -> Array:
    """The same for each sequence and head by itself."""
    seen = np.empty(shape, bool)
    for head in np.ndindex(shape[:2]):
        seen[head] = tiles(rng, shape)[0, 0]
    return seen


def tiles_of_batch(rng: Rng, shape: Shape) -> Array:
    """The same for each sequence."""
    return tiles_of_heads(rng, (shape[0], 1, *shape[2:]))


def squares_of_heads(rng: Rng, shape: Shape) -> Array:
    """Squares of 128 that are empty, full or drawn element by element, for each sequence and head by itself."""
    batch, heads, seqlen_q, seqlen_k = shape
    squares = batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)
    return _by_kind(rng, squares, 128)[:, :, :seqlen_q, :seqlen_k]


def blocks(rng: Rng, shape: Shape) -> Array:
    """Blocks of 128 queries by 128 keys, a third of them full and the others empty; each head has its own."""
    _, heads, seqlen_q, seqlen_k = shape
    full = rng.random((1, heads, -(-seqlen_q // 128), -(-seqlen_k // 128))) < 0.34
    return np.repeat(np.repeat(full, 128, 2), 128, 3)[:, :, :seqlen_q, :seqlen_k]


def stripes(rng: Rng, shape: Shape) -> Array:
    """Of each two neighbouring tiles of 64 queries one sees the first half of the keys, the other one the rest."""
    *_, seqlen_q, seqlen_k = shape
    is_even = np.arange(seqlen_q)[:, None] // 64 % 2 == 0
    return (is_even == (np.arange(seqlen_k) < seqlen_k // 2))[None, None]


def holes(rng: Rng, shape: Shape) -> Array:
    """Two thirds of the keys are hidden from all queries, and of the others a query sees half."""
    *_, seqlen_q, seqlen_k = shape
    return ((rng.random((1, seqlen_k)) < 0.34) & (rng.random((seqlen_q, seqlen_k)) < 0.5))[None, None]


def nothing(rng: Rng, shape: Shape) -> Array:
    """Nobody sees anything."""
    return np.zeros((1, 1, *shape[2:]), bool)


def everything(rng: Rng, shape: Shape) -> Array:
    """Everybody sees everything."""
    return np.ones((1, 1, *shape[2:]), bool)


def _by_kind(rng: Rng, shape: tuple[int, ...], size: int) -> Array:
    """Of so many squares of this size, rows of elements: 0.4 of them are empty, 0.3 full, and others by bits."""
    kinds = rng.random((*shape[:-1], 1, shape[-1], 1))
    bits = rng.integers(0, 256, (*shape[:-1], size, shape[-1], size // 8), np.uint8)
    bits |= np.where(kinds < 0.7, 255, 0).astype(np.uint8)
    bits &= np.where(kinds < 0.4, 0, 255).astype(np.uint8)
    seen = np.unpackbits(bits, axis=-1).view(bool)
    return seen.reshape(*shape[:-2], shape[-2] * size, shape[-1] * size)


_MASKS = (tiles, tiles_of_heads, tiles_of_batch, squares_of_heads, blocks, stripes, holes, nothing, everything)
MASKS: dict[str, Callable[[Rng, Shape], Array]] = {f.__name__: f for f in _MASKS}


@functools.lru_cache(maxsize=64)
def draw_mask(name: str, case: str, shape: Shape) -> BlockMask:
    """The mask of a case: the same on every machine."""
    seen = MASKS[name](np.random.default_rng(zlib.crc32(case.encode())), shape)
    return BlockMask.from_stripes(seen.shape, lambda rows: seen[:, :, rows])


def hide_keys(mask: BlockMask, tensors: tuple[Array, ...]) -> None:
    """NaN and inf in k and v for the keys that no query of a sequence sees by its mask."""
    _, k, v, _ = tensors
    for b in range(len(k)):
        heads = [mask.of(b, h) for h in range(mask.tiles.shape[1])]
        hidden = np.flatnonzero(~np.any(heads, axis=(0, 1)))
        k[b, hidden], v[b, hidden] = np.nan, np.nan
        k[b, hidden[::3]], v[b, hidden[1::3]] = np.inf, -np.inf
