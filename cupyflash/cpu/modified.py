"""What a user's mods make of the scores of a tile in NumPy, their derivative by the scores before (`mods`), and the
gradients of the arrays that they read (`mods.learned`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mods.description import Mods, read
from ..problem import Problem
from .features import Corner, Features

Array = NDArray[Any]
Reads = list[tuple[int, Array, Array]]  # an array's number, its elements' numbers, the derivative of scores by them


@dataclass
class Modified:
    """Of the heads of a chunk.

    Attributes:
        problem: of the chunk; corner: where it begins.
        arrays: what the mods read.
        sums: the gradients of some of them, by their numbers, so far.
    """

    mods: Mods
    problem: Problem
    corner: Corner
    arrays: tuple[Array, ...]
    sums: dict[int, Array]

    def of(self, S: Array, rows: slice, keys: slice) -> tuple[Array, Array]:
        """The scores of a tile (batch * heads_k, group * rows, keys), and their derivative by S."""
        tile = S.reshape(self._shape(rows, keys))
        value, derivative = self.mods.of_scores(tile, self._places(rows, keys), self.arrays)
        return value.reshape(S.shape), derivative.reshape(S.shape)

    def reads(self, S: Array, rows: slice, keys: slice) -> Reads:
        """What the scores of a tile depend on of the arrays with gradients."""
        if not self.sums:
            return []
        tile = S.reshape(self._shape(rows, keys))
        return self.mods.by_reads(tile, self._places(rows, keys), self.arrays, tuple(self.sums))

    def add_gradients(self, dS: Array, reads: Reads) -> None:
        """Add what a tile contributes: `dS`, by what mods made of the scores, is 0 where nothing is seen."""
        for number, elements, derivative in reads:
            weights = np.where(dS == 0, 0, dS * derivative.reshape(dS.shape))
            np.add.at(self.sums[number].reshape(-1), elements.ravel(), weights.ravel())

    def hidden(self, rows: slice, keys: slice, dtype: np.dtype[Any]) -> Array:
        """Which keys of a tile are hidden, whatever their scores are; `dtype`: of the scores."""
        batch, heads_k, group, n, m = shape = self._shape(rows, keys)
        shown: Array = self.mods.shown(shape, dtype, self._places(rows, keys), self.arrays)
        return ~shown.reshape(batch * heads_k, group * n, m)

    def _shape(self, rows: slice, keys: slice) -> tuple[int, ...]:
        p = self.problem
        return p.batch, p.heads_k, p.heads_q // p.heads_k, rows.stop - rows.start, keys.stop - keys.start

    def _places(self, rows: slice, keys: slice) -> tuple[Array, Array, Array, Array]:
        """b, h, q and k of a tile in `_shape`."""
        p, (sequence, head, key) = self.problem, self.corner
        b = sequence + np.arange(p.batch).reshape(-1, 1, 1, 1, 1)
        h = head + np.arange(p.heads_q).reshape(p.heads_k, -1, 1, 1)
        return b, h, np.arange(rows.start, rows.stop)[:, None], key + np.arange(keys.start, keys.stop)


def modified_of(of: Features, p: Problem) -> Modified | None:
    """That of a chunk, a problem by itself; None: there are no mods."""
    sums = {i: np.zeros(x.shape) for i, x in of.learned_of_mods().items()}
    return Modified(read(p.mods), p, of.corner, of.mod_arrays, sums) if p.mods else None
