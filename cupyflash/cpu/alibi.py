"""ALiBi in NumPy: what it takes from the scores of a tile (Press et al. 2022), and the gradient of its slopes.

S = S - slope * D,  D = |i + seqlen_k - seqlen_q - j|          dslope = -sum(dS * D)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from .tiles import of_chunk

Array = NDArray[Any]
# The slopes of some heads, (batch * heads_k, group), and their gradient if it is wanted; () without.
Bias = tuple[Array, ...]


def bias_of(slopes: Array | None, chunk: tuple[slice, slice], dtype: np.dtype[Any], has_gradient: bool = False) -> Bias:
    """That of the heads of a chunk, `slopes` as `by_group` gives them; the gradient is 0 so far."""
    own = of_chunk(slopes, chunk, dtype)
    if own is None:
        return ()
    return (own, np.zeros_like(own)) if has_gradient else (own,)


def biased(S: Array, bias: Bias, rows: slice, keys: slice, p: Problem) -> Array:
    """The scores of a tile, less what is taken from them; in place."""
    if not bias:
        return S
    slopes = np.repeat(bias[0], rows.stop - rows.start, axis=1)[..., None]
    return np.subtract(S, slopes * _distances(rows, keys, p, S.dtype), out=S)


def add_gradient(bias: Bias, dS: Array, rows: slice, keys: slice, p: Problem) -> None:
    """Add what a tile contributes, whose dS is 0 where nothing is seen."""
    of_rows = (dS * _distances(rows, keys, p, dS.dtype)).sum(axis=-1)
    bias[1][...] -= of_rows.reshape(*bias[1].shape, -1).sum(axis=-1)


def _distances(rows: slice, keys: slice, p: Problem, dtype: np.dtype[Any]) -> Array:
    """How far each key lies from each query's own position; rows repeat for each head of the group."""
    query, key = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
    distance = np.abs(query + (p.seqlen_k - p.seqlen_q) - key).astype(dtype)
    return np.tile(distance, (p.heads_q // p.heads_k, 1))
