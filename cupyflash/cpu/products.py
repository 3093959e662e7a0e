"""The matrix products of a tile: its scores, and those that leave out what is hidden."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem

Array = NDArray[Any]

# Multiplications that OpenBLAS does on the calling thread: 64^3 of two matrices, 4 * 2304 of a matrix and a vector.
# More of them it hands to threads of its own, which wait for each other by spinning: beside ours (`workers`), or beside
# other processes, a product then takes up to a hundred times longer (docs/performance.md).
ONE_THREAD, ONE_THREAD_VECTOR = 2**18, 2**13


def scores(Q: Array, KT: Array, p: Problem) -> Array:
    """scale * Q K^T, capped, of K transposed."""
    S = matmul(Q, KT)
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
        return matmul(A, B)
    finite = np.isfinite(B).all(axis=(0, 2))
    C = A[:, :, finite] @ B[:, finite]
    for t in np.flatnonzero(~finite):
        C += np.where(visible[..., t, None], A[:, :, t, None] * B[:, t, None, :], 0)
    return C


def matmul(A: Array, B: Array, out: Array | None = None) -> Array:
    """A B of (heads, m, k) and (heads, k, n), in blocks that BLAS multiplies on the calling thread."""
    (heads, rows, depth), columns = A.shape, B.shape[2]
    C = np.empty((heads, rows, columns), A.dtype) if out is None else out
    m, n = _block(rows, columns, depth)
    if (m, n) == (rows, columns) or not C.size:
        return np.matmul(A, B, out=C)
    i, j = rows // m * m, columns // n * n  # up to where whole blocks reach
    a = A[:, :i].reshape(heads, i // m, 1, m, depth)
    b = B[:, :, :j].reshape(heads, 1, depth, j // n, n).swapaxes(2, 3)
    np.matmul(a, b, out=C[:, :i, :j].reshape(heads, i // m, m, j // n, n).swapaxes(2, 3))
    if i < rows:
        matmul(A[:, i:], B, C[:, i:])
    if j < columns:
        matmul(A[:, :i], B[:, :, j:], C[:, :i, j:])
    return C


@functools.lru_cache(maxsize=256)
def _block(rows: int, columns: int, depth: int) -> tuple[int, int]:
    """Rows and columns of a block: powers of two as nearly equal as they can be, or all there are."""
    if min(rows, columns) <= 1:
        most = max(1, ONE_THREAD_VECTOR // max(1, depth))
        return min(rows, most), min(columns, most)
    most = max(1, ONE_THREAD // max(1, depth))
    n = min(columns, _power_of_two(math.isqrt(most)))
    m = rows if rows * n <= most else _power_of_two(most // n)
    return m, columns if columns * m <= most else _power_of_two(most // m)


def _power_of_two(n: int) -> int:
    """The largest one up to n."""
    return 1 << n.bit_length() - 1
