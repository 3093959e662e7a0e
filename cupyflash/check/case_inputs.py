"""What the arrays of the named cases hold (`VALUES`) and how they lie in memory (`MEMORY`).

`VALUES` draw (q, k, v, dout) as contiguous float64 in bshd. `MEMORY` places them, converted to the dtype of the case;
values stay, but for broadcast ones. Gaps between rows are filled with NaN: reading one shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..problem import Problem

Array = NDArray[Any]
Tensors = tuple[Array, Array, Array, Array]
Rng = np.random.Generator

GROWING_BLOCK = 32  # keys that share a maximum in `growing_maxima`


def normal(rng: Rng, p: Problem) -> Tensors:
    """N(0, 1)."""
    rows_q, rows_k = (p.batch, p.seqlen_q, p.heads_q), (p.batch, p.seqlen_k, p.heads_k)
    shapes = (*rows_q, p.head_dim), (*rows_k, p.head_dim), (*rows_k, p.head_dim_v), (*rows_q, p.head_dim_v)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v, dout


def outliers(rng: Rng, p: Problem) -> Tensors:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001): FlashAttention-3's model of activations with outliers."""
    q, k, v, dout = normal(rng, p)
    q, k, v = (x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001) for x in (q, k, v))
    return q, k, v, dout


def overflow(rng: Rng, p: Problem) -> Tensors:
    """q and k are +-300: their products are far beyond fp16 and still exact in fp32."""
    q, k, v, dout = normal(rng, p)
    return np.copysign(300.0, q), np.copysign(300.0, k), v, dout


def growing_maxima(rng: Rng, p: Problem) -> Tensors:
    """Every block of keys raises the maximum of each row by about 2: online softmax rescales at each block."""
    q, k, v, dout = normal(rng, p)
    block = np.arange(p.seqlen_k) // GROWING_BLOCK
    q[..., 0] = 4 + 0.1 * q[..., 0]
    k[..., 0] = 2 * block[None, :, None] / (4 * p.scale)
    return q, k, v, dout


def falling_maxima(rng: Rng, p: Problem) -> Tensors:
    """The same from the last key to the first: for kernels that go through the keys backwards."""
    q, k, v, dout = growing_maxima(rng, p)
    return q, k[:, ::-1].copy(), v, dout


def large_scores(rng: Rng, p: Problem) -> Tensors:
    """Scores in the hundreds: their standard deviation is 100, and one key decides most rows."""
    q, k, v, dout = normal(rng, p)
    return 100 / (p.head_dim**0.5 * abs(p.scale)) * q, k, v, dout


def nan_in_hidden_key(rng: Rng, p: Problem) -> Tensors:
    """Keys that no query sees hold NaN and inf in k and v; every result is finite."""
    q, k, v, dout = normal(rng, p)
    seen = np.zeros(p.seqlen_k, bool)
    for query in range(p.seqlen_q):
        seen[slice(*p.visible(query))] = True
    hidden = np.flatnonzero(~seen)
    k[:, hidden], v[:, hidden] = np.nan, np.nan
    k[:, hidden[::3]], v[:, hidden[1::3]] = np.inf, -np.inf
    return q, k, v, dout


def nan_in_visible_key(rng: Rng, p: Problem) -> Tensors:
    """One NaN in k of the first head and one in v of the last; with a mask, part of each tile of queries sees them."""
    q, k, v, dout = normal(rng, p)
    k[:, p.seqlen_k // 2, 0, 3] = np.nan
    v[:, p.seqlen_k // 3, -1, 5] = np.nan
    return q, k, v, dout


def inf_in_visible_key(rng: Rng, p: Problem) -> Tensors:
    """+inf in k of the first head; in v of the last head +inf, -inf, and both in one column."""
    q, k, v, dout = normal(rng, p)
    k[:, p.seqlen_k // 2, 0, 3] = np.inf
    v[:, p.seqlen_k // 3, -1, 1] = np.inf
    v[:, p.seqlen_k // 2, -1, 2] = -np.inf
    v[:, p.seqlen_k // 3, -1, 4] = np.inf
    v[:, p.seqlen_k // 2, -1, 4] = -np.inf
    return q, k, v, dout


def minus_inf_scores(rng: Rng, p: Problem) -> Tensors:
    """Scores of -inf: in the first head for the first 3/5 of the keys (finite rows), in the last for all (NaN rows)."""
    q, k, v, dout = normal(rng, p)
    q[..., 0] = 0.5 + np.abs(q[..., 0])
    k[:, : 3 * p.seqlen_k // 5, 0, 0] = -np.inf
    k[:, :, -1, 0] = -np.inf
    return q, k, v, dout


def nan_in_other_batch(rng: Rng, p: Problem) -> Tensors:
    """The last batch is all NaN: a tile that reaches beyond the end of the batch before must not let it in."""
    tensors = normal(rng, p)
    for x in tensors:
        x[-1:] = np.nan
    return tensors


def alibi_slopes(rng: Rng, p: Problem) -> Array:
    """Slopes from 2^-8 to 1/2, one negative: models learn them."""
    slopes = 2.0 ** rng.uniform(-8, -1, (p.batch, p.heads_q)[2 - p.alibi :])
    slopes[..., :1] *= -0.1
    return slopes


def sink_logits(rng: Rng, p: Problem) -> Array:
    """From -2 to 6, which outweighs the scores of many keys; that of every third head is none."""
    logits = rng.uniform(-2, 6, p.heads_q)
    logits[2::3] = -np.inf
    return logits


def contiguous(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """Each array by itself, C order."""
    return q, k, v, dout


def fused_qkv(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """q, k and v are slices of one array (batch, seqlen, heads_q + 2 heads_k, head_dim)."""
    q, k, v = np.split(np.concatenate((q, k, v), axis=2), [q.shape[2], q.shape[2] + k.shape[2]], axis=2)
    return q, k, v, dout


def bhsd_storage(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """Heads lie outside of rows, C order in bhsd."""
    q, k, v, dout = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v, dout))
    return q, k, v, dout


def broadcast_batch(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """k and v of the first batch for all: batch stride 0."""
    return q, _broadcast(k, 0), _broadcast(v, 0), dout


def broadcast_heads(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """k and v of the first head for all: head stride 0."""
    return q, _broadcast(k, 2), _broadcast(v, 2), dout


def broadcast_dout(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """One row of dout for all: strides 0 but for the last."""
    return q, k, v, _broadcast(_broadcast(_broadcast(dout, 0), 1), 2)


def padded_rows(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """Rows lie head_dim + 8 elements apart: aligned, not contiguous."""
    q, k, v, dout = (_with_gaps(x, gap=8, offset=0) for x in (q, k, v, dout))
    return q, k, v, dout


def misaligned(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """Rows lie head_dim + 3 elements apart and the first starts one element behind an allocation."""
    q, k, v, dout = (_with_gaps(x, gap=3, offset=1) for x in (q, k, v, dout))
    return q, k, v, dout


def every_second_row(q: Array, k: Array, v: Array, dout: Array) -> Tensors:
    """Every second row of arrays of twice the length."""
    q, k, v, dout = (_every_second(x) for x in (q, k, v, dout))
    return q, k, v, dout


def _broadcast(x: Array, axis: int) -> Array:
    """The first entry of `axis` for all, with stride 0; writable, so that any framework takes it."""
    strides = tuple(0 if i == axis else stride for i, stride in enumerate(x.strides))
    return as_strided(x, x.shape, strides)


def _with_gaps(x: Array, gap: int, offset: int) -> Array:
    shape = (*x.shape[:-1], x.shape[-1] + gap)
    buffer = np.full(offset + int(np.prod(shape)), np.nan, x.dtype)
    view = buffer[offset:].reshape(shape)[..., : x.shape[-1]]
    view[...] = x
    return view


def _every_second(x: Array) -> Array:
    buffer = np.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), np.nan, x.dtype)
    view = buffer[:, ::2]
    view[...] = x
    return view


_VALUES = (
    normal,
    outliers,
    overflow,
    growing_maxima,
    falling_maxima,
    large_scores,
    nan_in_hidden_key,
    nan_in_visible_key,
    inf_in_visible_key,
    minus_inf_scores,
    nan_in_other_batch,
)
_MEMORY = (
    contiguous,
    fused_qkv,
    bhsd_storage,
    broadcast_batch,
    broadcast_heads,
    broadcast_dout,
    padded_rows,
    misaligned,
    every_second_row,
)
VALUES: dict[str, Callable[[Rng, Problem], Tensors]] = {f.__name__: f for f in _VALUES}
MEMORY: dict[str, Callable[[Array, Array, Array, Array], Tensors]] = {f.__name__: f for f in _MEMORY}
