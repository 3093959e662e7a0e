"""The forward of one tile of queries, over the tiles of keys that it sees: online softmax (`attention`)."""

# ruff: noqa: E741 (O and l are the paper's names)

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from . import sink as sinks
from .chunk import Chunk
from .dropping import dropped
from .products import product, scores
from .tiles import key_tiles, sees_a_key

Array = NDArray[Any]


def forward_tile(Q: Array, KT: Array, V: Array, rows: slice, p: Problem, of: Chunk) -> tuple[Array, Array]:
    """O and lse of one tile of queries, of K transposed."""
    O, added = np.zeros((*Q.shape[:2], V.shape[2]), Q.dtype), of.added
    m, l = sinks.start(of.sink, (*Q.shape[:2], 1), Q.dtype)
    is_shown = np.zeros(m.shape, bool)
    for keys, visible in key_tiles(rows, p, of.mask):
        S = added.to(scores(Q, KT[..., keys], p), rows, keys)
        visible = added.visible(S, visible, rows, keys)
        if visible is not None:
            np.copyto(S, -np.inf, where=~visible)
        if added.has_mask_alone:
            is_shown |= visible is None or visible.any(axis=-1, keepdims=True)
        m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
        shift = np.where(np.isneginf(m_new), 0, m_new)  # so far only scores of -inf: exp(-inf - 0) is 0, not NaN
        P = np.exp(np.subtract(S, shift, out=S), out=S)
        rescale = np.exp(m - shift)
        l = rescale * l + P.sum(axis=-1, keepdims=True)
        P = dropped(P, of.dropping.factors(rows, keys, P.dtype))
        O = np.multiply(rescale, O, out=O)
        O += product(P, V[:, keys], visible)
        m = m_new
    sees = sees_a_key(rows, p, of.mask)[:, None]
    if added.may_hide:  # where there is more than a mask, a row whose scores are all -inf sees none
        sees = sees & (is_shown if added.has_mask_alone else l != 0)
    return np.where(sees, O / l, 0), m + np.log(l)  # every visible score is -inf: out is 0 / 0, as IEEE has it
