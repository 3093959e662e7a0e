"""Which elements dropout keeps, element by element: apart from `cupyflash.dropout` and from its tiles on purpose.

Philox-4x32 with 7 rounds (Salmon et al. 2011). The element of query i and key j, of head h of sequence s, has 15 of the
128 bits of

    counter (j / 16, i / 16 * 32 + 4 (i % 8) + j % 8 / 2, h, s)        key: seed + offset * 2^64 / golden ratio

namely of word 2 (j / 8 % 2) + i / 8 % 2 the lower ones of half j % 2. It is dropped if they are less than p * 2^15,
rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_LOW = 2**32 - 1


def factors(seed: Array, p: float, sequence: int, head: int, shape: tuple[int, int]) -> Array:
    """Z of one head, (queries, keys): 0 where an element is dropped, else 1 / (1 - p) of the p that counts."""
    i, j = (x.astype(np.uint64) for x in np.indices(shape))
    number = _number(i, j, head, sequence, _key(seed))
    limit = min(round(p * 32768), 32767)
    return np.where(number < limit, 0.0, 32768 / (32768 - limit))


def _key(seed: Array) -> int:
    """The 64 bits of the key."""
    words = [int(word) & _LOW for word in np.ravel(seed)]
    whole = [low + (high << 32) for low, high in zip(words[::2], words[1::2], strict=True)]
    offset = whole[1] if len(whole) > 1 else 0
    return (whole[0] + offset * 0x9E3779B97F4A7C15) % 2**64


def _number(i: Array, j: Array, head: int, sequence: int, key: int) -> Array:
    """The 15 bits of each element."""
    c0, c1 = j // 16, i // 16 * 32 + 4 * (i % 8) + j % 8 // 2
    c2, c3 = np.full_like(i, head), np.full_like(i, sequence)
    low, high = key & _LOW, key >> 32
    for _ in range(7):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (product1 >> 32) ^ c1 ^ np.uint64(low), (product0 >> 32) ^ c3 ^ np.uint64(high)
        c1, c3 = product1 & _LOW, product0 & _LOW
        low, high = (low + 0x9E3779B9) & _LOW, (high + 0xBB67AE85) & _LOW
    word = np.choose((2 * (j // 8 % 2) + i // 8 % 2).astype(int), (c0, c1, c2, c3))
    found: Array = np.where(j % 2 == 0, word, word >> 16) & 0x7FFF
    return found
