"""Block masks: which keys each query sees, by tiles, and what becomes of two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError
from .mask_tiles import EMPTY, FIRST, FULL, TILE, bits_of, check, cut_off, elements, no_bits
from .operand import TILE_WORDS

Array = NDArray[Any]


def code_of(tiles: tuple[int, ...]) -> int:
    """Who has a mask of its own, as `Problem` has it, by the shape of `tiles`."""
    return 1 + (tiles[0] > 1) + 2 * (tiles[1] > 1)


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which keys each query sees, tile by tile: what `attention` takes as `block_mask`, and `cupyflash.masks` makes.

    Masks of the same lengths combine: ``a & b`` sees what both see, ``a | b`` what either does. One of the two may be
    torch's, of flex_attention.

    Raises:
        ArgumentError: of who makes one by hand: tiles or bits are not such arrays.

    Attributes:
        tiles, bits: as in `mask_tiles`, in NumPy arrays that nobody can write to.
        seqlen_q, seqlen_k: how many queries and keys it is for.
        first_key: of these, counted in its tiles.
        tall: whether blocks of 192 queries by 64 keys hold less that nobody sees than those of 128 by 128, so that the
            forward is faster with them. Known as soon as a mask is made, like `padded`.
        kept: copies on other devices, and what packed sequences take in its place.
    """

    tiles: Array
    bits: Array
    seqlen_q: int
    seqlen_k: int
    first_key: int = 0
    tall: bool = field(default=False, init=False)
    kept: dict[Any, Any] = field(default_factory=dict, init=False)

    __array_ufunc__ = None  # booleans of NumPy ask a mask once, not for each of them

    def __post_init__(self) -> None:
        check(self.tiles, self.bits, (self.seqlen_q, self.first_key + self.seqlen_k))
        for label in ("tiles", "bits"):
            view = getattr(self, label).view()
            view.flags.writeable = False
            object.__setattr__(self, label, view)

    def __reduce__(self) -> tuple[Callable[..., BlockMask], tuple[Any, ...]]:
        """Copies, and what is pickled, are without those on other devices, which another process may not have."""
        return _restored, (self.tiles, self.bits, self.seqlen_q, self.seqlen_k, self.first_key)

    def __repr__(self) -> str:
        """What it is of, and how many tiles of each kind."""
        batch, heads, q_tiles, k_tiles = self.tiles.shape
        full, empty = (int((self.tiles == kind).sum()) for kind in (FULL, EMPTY))
        return (
            f"BlockMask({batch=}, {heads=}, seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, {q_tiles} x {k_tiles} "
            f"tiles, density={self.density:.3g}: {full} full, {self.tiles.size - full - empty} in part, {empty} empty)"
        )

    def __and__(self, other: Any) -> BlockMask:
        return self._combined(_ours(other), with_or=False)

    def __or__(self, other: Any) -> BlockMask:
        return self._combined(_ours(other), with_or=True)

    __rand__, __ror__ = __and__, __or__

    @property
    def density(self) -> float:
        """The part of the tiles that are not empty."""
        return float((self.tiles != EMPTY).mean()) if self.tiles.size else 0.0

    @property
    def own(self) -> tuple[bool, bool]:
        """Whether each sequence, and each head of q, has a mask of its own."""
        return self.tiles.shape[0] > 1, self.tiles.shape[1] > 1

    def part(self, batch: int, seqlen_q: int, keys: slice) -> BlockMask:
        """That of the first queries of one sequence, and of so many of its keys."""
        b, lengths = batch if self.own[0] else 0, {"seqlen_q": seqlen_q, "seqlen_k": keys.stop - keys.start}
        return replace(self, tiles=self.tiles[b : b + 1], **lengths, first_key=self.first_key + keys.start)

    def padded(self) -> BlockMask:
        """The same for whole tiles, as packed sequences take it: queries behind the last one see nothing, and keys
        there are not seen. Kept as soon as a mask is made, since a program of torch.compile could not make it."""
        if self.seqlen_q % TILE == self.seqlen_k % TILE == 0 or self.tiles.size == 0:
            return self
        if "padded" not in self.kept:
            tiles, bits = cut_off(self.tiles, self.bits, self.seqlen_q, self.seqlen_k)
            seqlen_q, seqlen_k = (TILE * n for n in tiles.shape[2:])
            self.kept["padded"] = replace(self, tiles=tiles, bits=bits, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        found: BlockMask = self.kept["padded"]
        return found

    def of(self, batch: int, head: int) -> Array:
        """Which keys each query of one head sees: (seqlen_q, seqlen_k)."""
        b, h = (i if own else 0 for i, own in zip((batch, head), self.own, strict=True))
        alone = replace(self, tiles=self.tiles[b : b + 1, h : h + 1])
        found: Array = alone.sees(slice(0, self.seqlen_q), slice(0, self.seqlen_k))[0, 0]
        return found

    def sees(self, rows: slice, keys: slice) -> Array:
        """Which of some keys each of some queries sees, for all batch and heads: (batch, heads, rows, keys)."""
        keys = slice(keys.start + self.first_key, keys.stop + self.first_key)
        q0, k0 = rows.start // TILE, keys.start // TILE
        tiles = self.tiles[:, :, q0 : -(-rows.stop // TILE), k0 : -(-keys.stop // TILE)]
        b, h, m, n = tiles.shape
        found = np.zeros((b, h, m, TILE, n, TILE), bool)
        found[np.moveaxis(np.broadcast_to((tiles == FULL)[..., None, None], (b, h, m, n, TILE, TILE)), 3, 4)] = True
        in_part = np.argwhere(tiles >= FIRST)
        if len(in_part):
            i = tuple(in_part.T)
            found[i[0], i[1], i[2], :, i[3], :] = elements(self.bits[tiles[i] - FIRST])
        return found.reshape(b, h, m * TILE, n * TILE)[
            :, :, rows.start - q0 * TILE : rows.stop - q0 * TILE, keys.start - k0 * TILE : keys.stop - k0 * TILE
        ]

    def is_empty(self, rows: slice, keys: slice) -> bool:
        """Whether no tile that holds some of these queries and keys has anything to see."""
        keys = slice(keys.start + self.first_key, keys.stop + self.first_key)
        m, n = (slice(x.start // TILE, -(-x.stop // TILE)) for x in (rows, keys))
        return not self.tiles[:, :, m, n].any()

    @classmethod
    def from_stripes(cls, shape: tuple[int, int, int, int], stripe: Callable[[slice], Array]) -> BlockMask:
        """A mask of (batch, heads, seqlen_q, seqlen_k), 1 where all share it, from 64 queries at a time.

        Args:
            stripe: gives what broadcasts to (batch, heads, queries, seqlen_k), True where a key is seen.
        """
        batch, heads, seqlen_q, seqlen_k = shape
        m, n = -(-seqlen_q // TILE), -(-seqlen_k // TILE)
        tiles, found, count = np.zeros((batch, heads, m, n), np.int32), [], 0
        for i in range(m):
            rows = slice(i * TILE, min(seqlen_q, (i + 1) * TILE))
            seen = np.broadcast_to(stripe(rows), (batch, heads, rows.stop - rows.start, seqlen_k))
            some, every = (_by_tiles(reduce, seen, seqlen_k) for reduce in (np.logical_or, np.logical_and))
            tiles[:, :, i] = np.where(every, FULL, np.where(some, FIRST, EMPTY))
            partial = np.argwhere(some & ~every)
            if len(partial):
                b, h, j = partial.T
                tiles[b, h, i, j] = FIRST + count + np.arange(len(partial))
                count += len(partial)
                padded = np.zeros((batch, heads, TILE, n, TILE), bool)
                padded.reshape(batch, heads, TILE, n * TILE)[:, :, : rows.stop - rows.start, :seqlen_k] = seen
                found.append(bits_of(padded[b, h, :, j]))
        return cls(tiles, np.concatenate(found) if found else no_bits(), seqlen_q, seqlen_k).compact()

    def compact(self) -> BlockMask:
        """The same with each pattern once, and none that is empty or full."""
        if not (self.tiles >= FIRST).any():
            return _ready(replace(self, bits=no_bits()))
        used, at = np.unique(self.tiles[self.tiles >= FIRST] - FIRST, return_inverse=True)
        words = np.ascontiguousarray(self.bits[used])
        rows = words.view(np.dtype((np.void, words.itemsize * TILE_WORDS))).ravel()
        _, first, number = np.unique(rows, return_index=True, return_inverse=True)
        tiles = self.tiles.copy()
        tiles[self.tiles >= FIRST] = FIRST + number.ravel()[at.ravel()]
        return _ready(replace(self, tiles=tiles, bits=words[first]))

    def _combined(self, other: BlockMask, with_or: bool) -> BlockMask:
        """What both see, or what either does."""
        if (self.seqlen_q, self.seqlen_k) != (other.seqlen_q, other.seqlen_k):
            raise ArgumentError(
                f"block masks: expected two of the same lengths, got one of {self.seqlen_q} queries and "
                f"{self.seqlen_k} keys and one of {other.seqlen_q} and {other.seqlen_k}"
            )
        for label, x, y in zip(("batch", "heads"), self.tiles.shape, other.tiles.shape, strict=False):
            if x != y and 1 not in (x, y):
                raise ArgumentError(f"block masks: expected two of the same {label}, or one of 1, got {x} and {y}")
        a, b = np.broadcast_arrays(self.tiles, other.tiles)
        absorbing, neutral = (FULL, EMPTY) if with_or else (EMPTY, FULL)
        tiles = np.where(a == neutral, np.where(b >= FIRST, b + len(self.bits), b), a)
        tiles = np.where((a == absorbing) | (b == absorbing), absorbing, tiles).astype(np.int32)
        both = (a >= FIRST) & (b >= FIRST)
        bits = [self.bits, other.bits]
        if both.any():
            pairs, at = np.unique(np.stack([a[both], b[both]]) - FIRST, axis=1, return_inverse=True)
            combine = np.bitwise_or if with_or else np.bitwise_and
            made = combine(self.bits[pairs[0]], other.bits[pairs[1]])
            number = FIRST + len(self.bits) + len(other.bits) + np.arange(len(made))
            # By the elements that exist, of a last tile too: patterns that are full there are left as they are.
            number = np.where((made == 0).all(axis=1), EMPTY, np.where((made == -1).all(axis=1), FULL, number))
            tiles[both] = number[at.ravel()]
            bits.append(made)
        return replace(self, tiles=tiles, bits=np.concatenate(bits)).compact()


def _ready(mask: BlockMask) -> BlockMask:
    """A mask that is made, with all that is kept beside it."""
    mask.padded()
    object.__setattr__(mask, "tall", _is_tall(mask.tiles))
    return mask


_TALL_TIME = 0.935  # of blocks of 192 by 64 over that of as much in blocks of 128 by 128 (docs/performance.md)


def _is_tall(tiles: Array) -> bool:
    high, square = 3 * _blocks(tiles, 3, 1), 4 * _blocks(tiles, 2, 2)
    return _TALL_TIME * high < square


def _blocks(tiles: Array, rows: int, columns: int) -> int:
    """How many blocks of so many tiles are not empty."""
    batch, heads, m, n = tiles.shape
    seen = np.pad(tiles != EMPTY, ((0, 0), (0, 0), (0, -m % rows), (0, -n % columns)))
    return int(seen.reshape(batch, heads, -(-m // rows), rows, -(-n // columns), columns).any((3, 5)).sum())


def _restored(*fields: Any) -> BlockMask:
    """A mask that was pickled."""
    return _ready(BlockMask(*fields))


def _ours(mask: Any) -> BlockMask:
    """A mask, or another library's, as `mask_arrays` takes it.

    Raises:
        ArgumentError: it is none.
    """
    return mask if isinstance(mask, BlockMask) else converters[-1](mask)


converters: list[Callable[[Any], BlockMask]] = []  # `mask_arrays` brings its own, which stands further up


def _by_tiles(reduce: Any, seen: Array, seqlen_k: int) -> Array:
    """(batch, heads, k_tiles) of (batch, heads, queries, seqlen_k)."""
    found: Array = reduce.reduceat(reduce.reduce(seen, axis=2), np.arange(0, seqlen_k, TILE), axis=2)
    return found
