"""In which dtypes plain attention is computed: exactly, or as the yardstick of the 2x rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Arithmetic:
    """In which dtype tiles are computed, and to which they are rounded before a product.

    Attributes:
        accumulate: dtype of scores, softmax, sums and results of products.
        storage: dtype of the inputs; P and dS are rounded to it before they enter a product. None: no rounding.
        reverse: sum products from the last term to the first (see `plain`).
    """

    accumulate: type[np.floating[Any]]
    storage: np.dtype[Any] | None = None
    reverse: bool = False

    @classmethod
    def exact(cls) -> Arithmetic:
        """Float64 without any further rounding."""
        return cls(np.float64)

    @classmethod
    def plain(cls, dtype: np.dtype[Any]) -> Arithmetic:
        """Scores, softmax and sums in fp32, P and dS rounded to `dtype`; all in fp64 for fp64.

        For fp64 this would be the oracle itself. Products are then summed in reverse order, so that the distance
        between the two shows how much the order of rounding matters.
        """
        double = dtype.itemsize == 8
        return cls(np.float64 if double else np.float32, dtype, reverse=double)

    def load(self, x: Array) -> Array:
        """A copy of x in the dtype of the computation."""
        return np.array(x, dtype=self.accumulate, order="C")

    def product(self, a: Array, b: Array, visible: Array | None = None) -> Array:
        """The matrix product a b; with a mask of the shape of a, only of its visible terms.

        a is 0 where it is hidden. That is enough for finite b; else 0 * NaN must not happen, and rows that see such a b
        go one by one.
        """
        finite = np.isfinite(b)
        if visible is None or finite.all():
            return a[:, ::-1] @ b[::-1] if self.reverse else a @ b
        found = self.product(a, np.where(finite, b, 0))
        for i in np.flatnonzero(visible @ ~finite.all(axis=1)):
            found[i] = self.product(a[i, visible[i]][None], b[visible[i]])[0]
        return found

    def rounded(self, x: Array) -> Array:
        """What is left of x after it was stored in the dtype of the inputs."""
        return x if self.storage is None else x.astype(self.storage).astype(self.accumulate)


def dropped(X: Array, Z: Array | float, a: Arithmetic) -> Array:
    """Z * X, and 0 where Z is."""
    return X if isinstance(Z, float) else np.where(Z > 0, X * Z.astype(a.accumulate), 0)
