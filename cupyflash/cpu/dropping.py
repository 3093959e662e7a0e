"""Dropout in NumPy, tile by tile: which elements of a tile of P are kept, of all heads of a chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dropout import STEPS, kept, limit_of
from ..problem import Problem
from .tiles import by_group

Array = NDArray[Any]


class Dropping(NamedTuple):
    """What is dropped of the heads of a chunk: their sequences and numbers, (batch * heads_k, group); without a seed
    nothing is."""

    seed: Array | None
    p: float
    sequence: Array
    head: Array
    first_key: int

    def factors(self, rows: slice, keys: slice, dtype: np.dtype[Any]) -> Array | None:
        """0 where an element is dropped, else 1 / (1 - p): (batch * heads_k, group * rows, keys), as scores are."""
        if self.seed is None:
            return None
        limit, keys = limit_of(self.p), slice(self.first_key + keys.start, self.first_key + keys.stop)
        found = kept(self.seed, limit, self.sequence.ravel(), self.head.ravel(), rows, keys)
        inverse = dtype.type(STEPS / (STEPS - limit))
        return np.where(found.reshape(self.head.shape[0], -1, keys.stop - keys.start), inverse, 0)


def dropped(X: Array, Z: Array | None) -> Array:
    """Z * X, and 0 where Z is, whatever X holds."""
    return X if Z is None else np.where(Z > 0, X * Z, 0)


def dropping_of(seed: Array | None, chunk: tuple[slice, slice], p: Problem, corner: tuple[int, int]) -> Dropping:
    """That of a chunk. `corner`: the first sequence and key."""
    sequence = corner[0] + np.arange(p.batch)[:, None] + np.zeros((1, p.heads_q), int)
    head, group = np.arange(p.heads_q) + np.zeros((p.batch, 1), int), p.heads_q // p.heads_k
    sequence, head = (by_group(x, p)[chunk].reshape(-1, group) for x in (sequence, head))
    return Dropping(seed if p.dropout else None, p.dropout_p, sequence, head, corner[1])
