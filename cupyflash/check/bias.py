"""A bias as plain attention sees it: whole, head by head, and its gradient summed up in the bias's own shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..sequences import Part

Array = NDArray[Any]


def broadcast(bias: Array | None, p: Problem) -> Any:
    """By batch and head, (seqlen_q, seqlen_k); None for each where there is none."""
    if bias is None:
        return [[None] * p.heads_q] * p.batch
    return np.broadcast_to(bias, (p.batch, p.heads_q, p.seqlen_q, p.seqlen_k))


def seen_of(S: Array, visible: Array, bias: Array | None, sink: Any = -np.inf) -> Array:
    """Which query (row) sees which key, given what the mask leaves: none where the bias is -inf, and none of a row
    whose lse is -inf, since all of its scores are and there is no sink."""
    if bias is None:
        return visible
    visible = visible & ~np.isneginf(bias)
    if sink != -np.inf:
        return visible
    return visible & ~(np.isneginf(S) | ~visible).all(axis=1, keepdims=True)


def none_of(bias: Array | None, dtype: Any) -> Array:
    """A gradient of a bias to which nothing was added; of no size where there is no bias."""
    return np.zeros((0,) if bias is None else bias.shape, dtype)


def add_head(total: Array, b: int, h: int, dS: Array) -> None:
    """Add what one head contributes, (seqlen_q, seqlen_k), to the gradient of a bias, if there is one."""
    if total.shape == (0,):
        return
    batch, heads, rows, keys = shape = (1,) * (4 - total.ndim) + total.shape
    whole = total.reshape(shape)
    dS = dS if rows != 1 else dS.sum(axis=0, keepdims=True)
    whole[b if batch != 1 else 0, h if heads != 1 else 0] += dS if keys != 1 else dS.sum(axis=1, keepdims=True)


def part_of(bias: Array | None, part: Part) -> Array | None:
    """That of one sequence, and of the keys that its queries may see: a view, as broadcast as it was."""
    if bias is None:
        return None
    sequence, first = part.corner
    rows, keys = slice(0, part.problem.seqlen_q), slice(first, first + part.problem.seqlen_k)
    whole = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    for axis, own in ((0, slice(sequence, sequence + 1)), (2, rows), (3, keys)):
        if whole.shape[axis] != 1:
            whole = whole[(slice(None),) * axis + (own,)]
    return whole


def add_part(total: Array, part: Part, found: Array) -> None:
    """Add what one sequence contributes, if there is a bias."""
    if found.shape != (0,):
        target = part_of(total, part)
        assert target is not None
        target += found
