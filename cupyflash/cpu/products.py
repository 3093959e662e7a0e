"""The matrix products of a tile: its scores, and those that leave out what is hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem

Array = NDArray[Any]


def scores(Q: Array, K: Array, p: Problem) -> Array:
    """scale * Q K^T, capped."""
    S = Q @ K.swapaxes(1, 2)
    if p.softcap is None:
        return np.multiply(S, p.scale, out=S)
    np.tanh(np.multiply(S, p.scale / p.softcap, out=S), out=S)
    return np.multiply(S, p.softcap, out=S)


def product(A: Array, B: Array, visible: Array | None) -> Array:
    """A B without the terms that `visible` hides.

    A is 0 where it is hidden, which is enough as long as B is finite. A row of B with NaN or inf is taken out and added
    term by term to those rows that see it, since 0 * NaN is NaN.
    """
    if visible is None or np.isfinite(B).all():
        return A @ B
    finite = np.isfinite(B).all(axis=(0, 2))
    C = A[:, :, finite] @ B[:, finite]
    for t in np.flatnonzero(~finite):
        C += np.where(visible[..., t, None], A[:, :, t, None] * B[:, t, None, :], 0)
    return C
