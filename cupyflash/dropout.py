"""Which elements of P are dropped: a function of (seed, sequence, head of q, query, key) alone, as in kernels_cu.

Random numbers of 15 bits are Philox-4x32's (Salmon et al. 2011) with 7 rounds, the fewest with which it passes
BigCrush. One call serves 8 elements: `kernels_cu/attention/dropout.cuh` says which, and why these. (i, j) is dropped if
its number is less than p * 2^15, rounded: so p counts in steps of 2^-15, and what is kept is multiplied by 1 / (1 - p)
of that p.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError

Array = NDArray[Any]

ROUNDS = 7
STEPS = 1 << 15
_WORD = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def limit_of(p: float) -> int:
    """Below which number an element is dropped; at most 2^15 - 1, so that some are kept."""
    return min(round(p * STEPS), STEPS - 1)


def key_of(seed: Array) -> tuple[int, int]:
    """The key of Philox from the words of a seed, (2,), or of a seed and an offset, (2, 2); int32, the lower first."""
    words = np.ascontiguousarray(seed, np.int32).view(np.uint32).reshape(-1, 2).tolist()
    numbers = [low | high << 32 for low, high in words]
    key = (numbers[0] + (numbers[1] * _GOLDEN if len(numbers) > 1 else 0)) % 2**64
    return key & 0xFFFFFFFF, key >> 32


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[Array, ...]:
    """Four words for each counter; arrays that broadcast."""
    a, b, c, d = (np.asarray(x, np.uint64) for x in counter)
    for i in range(rounds):
        k0, k1 = (np.uint64((k + i * step) & 0xFFFFFFFF) for k, step in zip(key, _WEYL, strict=True))
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = right >> np.uint64(32) ^ b ^ k0, right & _WORD, left >> np.uint64(32) ^ d ^ k1, left & _WORD
    return a, b, c, d


def kept(seed: Array, limit: int, sequence: Array, head: Array, rows: slice, keys: slice) -> Array:
    """(heads, rows, keys): whether each element is kept, of these heads of these sequences."""
    q0, k0 = rows.start // 16, keys.start // 16
    tile_q, tile_k = np.arange(q0, -(-rows.stop // 16)), np.arange(k0, -(-keys.stop // 16))
    of_head = [np.asarray(x).reshape(-1, 1, 1, 1) for x in (head, sequence)]
    lane = np.arange(32)[:, None]
    words = philox((tile_k, 32 * tile_q[:, None, None] + lane, of_head[0], of_head[1]), key_of(seed))
    found = np.stack(np.broadcast_arrays(*words), -1).astype(np.uint32)  # heads, tiles of q, lanes, tiles of k, words
    heads, n, m = np.size(head), len(tile_q), len(tile_k)
    halves = found[..., None] >> np.array([0, 16], np.uint32) & np.uint32(STEPS - 1)
    # lane: query % 8, key % 8 / 2; word: key / 8 % 2, query / 8 % 2; half: key % 2
    numbers = (
        halves.reshape(heads, n, 8, 4, m, 2, 2, 2).transpose(0, 1, 6, 2, 4, 5, 3, 7).reshape(heads, 16 * n, 16 * m)
    )
    first_q, first_k = rows.start - 16 * q0, keys.start - 16 * k0
    own = numbers[:, first_q : first_q + rows.stop - rows.start, first_k : first_k + keys.stop - keys.start]
    return own >= limit


def words_of(seed: int) -> Array:
    """The words of a seed, any integer, modulo 2^64."""
    return np.array([seed % 2**64], np.uint64).view(np.int32)


def vet_seed(shape: tuple[int, ...], dtype: str) -> None:
    """Raise unless an array of this shape and dtype holds a seed, or a seed and an offset.

    Raises:
        ArgumentError: as it says.
    """
    count = math.prod(shape)
    if (dtype.removeprefix("u"), count) not in (("int64", 1), ("int64", 2), ("int32", 2), ("int32", 4)):
        raise ArgumentError(
            "dropout_seed: expected an integer, or an int64 array of one element or two, a seed and an offset (or "
            f"their words as int32), got {dtype} of shape {tuple(shape)}"
        )


def missing_seed(expected: str = "the seed of the forward") -> ArgumentError:
    """What is raised where a seed must be given."""
    return ArgumentError(f"dropout_seed: expected {expected}, since dropout_p is not 0; got None")


def vet_p(p: float, seed: int) -> None:
    """Raise unless it is a probability of dropout, and there is a seed (of so many dimensions) where it is not 0."""
    if not 0 <= p < 1:
        raise ArgumentError(f"dropout_p: expected a number from 0 on and below 1, got {p}")
    if p and not seed:
        raise missing_seed()
