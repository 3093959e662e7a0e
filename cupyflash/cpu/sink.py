"""The sink in NumPy: a logit of each head of q in the softmax's denominator, and its gradient.

lse = ln(exp(sink) + sum_j exp(S_j))       dsink = -sum(P * delta),  P = exp(sink - lse)

Online softmax starts with it, as with one more key whose v is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def start(sink: Array | None, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """m and l of a tile's rows (heads, rows, 1) before the first key; `sink`: (heads, group), or None."""
    if sink is None:
        return np.full(shape, -np.inf, dtype), np.zeros(shape, dtype)
    m = np.repeat(sink, shape[1] // sink.shape[1], axis=1)[..., None]
    return m, np.where(np.isneginf(m), 0, 1).astype(dtype)


def gradient(sink: Array, lse: Array, delta: Array) -> Array:
    """What a tile's rows (heads, rows, 1) contribute to dsink (heads, group). A sink of -inf is none."""
    lse, delta = (x.reshape(*sink.shape, -1) for x in (lse, delta))
    return np.where(np.isneginf(sink), 0, -(np.exp(sink[..., None] - lse) * delta).sum(axis=-1))
