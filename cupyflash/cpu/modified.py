"""What a user's mods make of the scores of a tile in NumPy, and their derivative by the scores before (`mods`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mods.description import Mods, read
from ..problem import Problem
from .features import Corner, Features

Array = NDArray[Any]


@dataclass
class Modified:
    """Of the heads of a chunk.

    Attributes:
        problem: of the chunk; corner: where it begins.
        arrays: what the mods read.
    """

    mods: Mods
    problem: Problem
    corner: Corner
    arrays: tuple[Array, ...]

    def of(self, S: Array, rows: slice, keys: slice) -> tuple[Array, Array, Array]:
        """The scores of a tile (batch * heads_k, group * rows, keys), their derivative by S, and which are shown."""
        p, (sequence, head, key) = self.problem, self.corner
        group, n = p.heads_q // p.heads_k, rows.stop - rows.start
        tile = S.reshape(p.batch, p.heads_k, group, n, -1)
        b = sequence + np.arange(p.batch).reshape(-1, 1, 1, 1, 1)
        h = head + np.arange(p.heads_q).reshape(p.heads_k, group, 1, 1)
        q, k = np.arange(rows.start, rows.stop)[:, None], key + np.arange(keys.start, keys.stop)
        value, derivative, shown = (x.reshape(S.shape) for x in self.mods.of_scores(tile, b, h, q, k, self.arrays))
        return value, derivative, shown

    def hidden(self, rows: slice, keys: slice, shape: tuple[int, ...], dtype: Any) -> Array:
        """Which keys are hidden, whatever their scores are."""
        return ~self.of(np.zeros(shape, dtype), rows, keys)[2]


def modified_of(of: Features, p: Problem) -> Modified | None:
    """That of a chunk, a problem by itself; None: there are no mods."""
    return Modified(read(p.mods), p, of.corner, of.mod_arrays) if p.mods else None
