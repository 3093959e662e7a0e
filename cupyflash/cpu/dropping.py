"""Dropout in NumPy, tile by tile: which elements of a tile of P are kept, of all heads of a chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dropout import STEPS, kept, limit_of
from ..problem import Problem
from .features import Features
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


def dropping_of(of: Features, p: Problem) -> Dropping:
    """That of a chunk, a problem by itself."""
    sequence, head = of.corner.sequence + np.arange(p.batch)[:, None], of.corner.head + np.arange(p.heads_q)
    seed = of.dropout_seed if p.dropout else None
    whole = np.dtype(int)
    return Dropping(seed, p.dropout_p, by_group(sequence, p, whole), by_group(head, p, whole), of.corner.key)
