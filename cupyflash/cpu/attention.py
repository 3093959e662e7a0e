"""Attention in NumPy, tile by tile as the kernels do it: the backend where there is no GPU.

Forward, for each tile of queries (FlashAttention-2, Dao 2023, algorithm 1), over the tiles of keys it sees:

    S = scale * Q K^T                       m' = max(m, rowmax(S))
    P = exp(S - m')                         l  = exp(m - m') * l + rowsum(P)
                                            O  = exp(m - m') * O + P V

and at the end O / l and lse = m + log(l): online softmax (Milakov & Gimelshein 2018) keeps a running maximum m and
sum l, so that no more than a tile of scores ever exists. Backward recomputes the tiles (FlashAttention, Dao et al.
2022, algorithm 4):

    P  = exp(S - lse)                       dV += P^T dO
    dP = dO V^T                             dS  = P * (dP - delta)           delta = rowsum(dO * O) - dLSE
    dQ += scale * dS K                      dK += scale * dS^T Q

Memory is linear in the sequence lengths. All arithmetic is fp32 (fp64 for fp64); each result is rounded once. Where one
is not finite, its heads are computed again in fp64: a weight that fp32 rounds to 0 would turn an inf into NaN, and what
overflows fp32 may fit fp64. How the work is cut into tiles: `cpu_tiles`.
"""

# ruff: noqa: E741 (O and l are the paper's names)

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..problem import Problem
from . import sink as sinks
from .added import Added, Adds
from .dropping import Dropping, dropped, dropping_of
from .forward import forward_tile
from .products import product, scores
from .tiles import (
    as_given,
    by_group,
    chunks,
    group_heads,
    group_lse,
    key_tiles,
    load,
    load_rows,
    of_chunk,
    query_tiles,
)

Array = NDArray[Any]

_FP32, _FP64 = np.dtype(np.float32), np.dtype(np.float64)
_DTYPES = {_FP32: (_FP32, _FP64), _FP64: (_FP64,)}  # accumulator -> what to compute in, one after the other


def forward(
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    bias: Array | None = None,
    dropout_seed: Array | None = None,
    corner: tuple[int, int] = (0, 0),
    mask: BlockMask | None = None,
) -> tuple[Array, Array]:
    """``out = softmax(scale * q k^T) v`` over the visible keys.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16, bf16 (ml_dtypes), fp32 or fp64, any strides; never written.
        k, v: (batch, seqlen_k, heads_k, head_dim), same dtype.
        problem: shapes and options.
        alibi_slopes: (heads_q,) or (batch, heads_q), as lse.
        sink: (heads_q,), as lse.
        bias: broadcasts to (batch, heads_q, seqlen_q, seqlen_k), any floating dtype.
        dropout_seed: (2,) or (2, 2), int32 (`dropout.key_of`).
        corner: the first sequence and key, as dropout counts.
        mask: a block mask that all of batch and heads of k share; see `masked` for others.

    Returns:
        out, shape and dtype of q, and lse (batch, heads_q, seqlen_q), natural log, fp32 (fp64 for fp64). A query that
        sees no key has out 0 and lse -inf, or the sink.
    """
    p, accumulate = problem, accumulator(q)
    adds, logits = Adds(p, alibi_slopes, bias), None if sink is None else by_group(sink, p)
    out = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), q.dtype)
    lse = np.zeros((p.batch, p.heads_q, p.seqlen_q), accumulate)
    q_heads, out_heads, lse_heads = group_heads(q, p), group_heads(out, p), group_lse(lse, p)
    for chunk in chunks(p):
        for dtype in _DTYPES[accumulate]:
            K, V = (load(x.swapaxes(1, 2)[chunk], dtype) for x in (k, v))
            finite, added, logit = True, adds.of(chunk, dtype), of_chunk(logits, chunk, dtype)
            for rows in query_tiles(p):
                target = out_heads[chunk][..., rows, :]
                Q = load_rows(q_heads[chunk][..., rows, :], dtype)
                with np.errstate(all="ignore"):
                    dropping = dropping_of(dropout_seed, chunk, p, corner)
                    O, LSE = forward_tile(Q, K, V, rows, p, added, logit, dropping, mask)
                    finite = finite and bool(np.isfinite(O).all())
                    target[...] = O.reshape(target.shape)
                    lse_heads[chunk][..., rows] = LSE.reshape(target.shape[:-1])
            if finite:
                break
    return out, lse


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    problem: Problem,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    bias: Array | None = None,
    dropout_seed: Array | None = None,
    corner: tuple[int, int] = (0, 0),
    wanted: tuple[str, ...] = (),
    mask: BlockMask | None = None,
) -> tuple[Array, ...]:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to q, k and v, bitwise reproducible.

    Args:
        dout: gradient of out, shaped as q.
        q, k, v: as in `forward`.
        out, lse: what `forward` returned.
        dlse: gradient of lse (batch, heads_q, seqlen_q); None is zero.
        problem: shapes and options.
        alibi_slopes, sink, bias, dropout_seed, corner: as in `forward`.
        wanted: of "dalibi_slopes", "dsink" and "dbias", those whose gradient is.
        mask: as in `forward`.

    Returns:
        dq, dk, dv with shapes and dtype of q, k, v; 0 for a query or key that takes no part; and what is wanted, in the
        dtype of sums.
    """
    p, accumulate = problem, accumulator(q)
    adds, logits = Adds(p, alibi_slopes, bias, wanted), None if sink is None else by_group(sink, p)
    dsinks = np.zeros(logits.shape, accumulate) if logits is not None and "dsink" in wanted else None
    dq = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), q.dtype)
    dk, dv = (np.zeros((p.batch, p.seqlen_k, p.heads_k, p.head_dim), q.dtype) for _ in range(2))
    by_row = [group_heads(x, p) for x in (q, dout, out)]
    lse_heads, dlse_heads = group_lse(lse, p), None if dlse is None else group_lse(dlse, p)
    targets = group_heads(dq, p), dk.swapaxes(1, 2), dv.swapaxes(1, 2)
    for chunk in chunks(p):
        dlse_chunk = None if dlse_heads is None else dlse_heads[chunk]
        for dtype in _DTYPES[accumulate]:
            K, V = (load(x.swapaxes(1, 2)[chunk], dtype) for x in (k, v))
            added = adds.of(chunk, dtype)
            logit = None if dsinks is None else of_chunk(logits, chunk, dtype)
            dropping = dropping_of(dropout_seed, chunk, p, corner)
            of = [x[chunk] for x in by_row], K, V, lse_heads[chunk], dlse_chunk, p, added, logit, dropping, mask
            *gradients, dsink = _backward_chunk(*of)
            if all(np.isfinite(x).all() for x in (*gradients, dsink, *added.gradients())):
                break
        adds.keep(chunk, added)
        if dsinks is not None:
            dsinks[chunk] = dsink.reshape(dsinks[chunk].shape)
        for target, gradient in zip(targets, gradients, strict=True):
            with np.errstate(all="ignore"):
                target[chunk] = gradient.reshape(target[chunk].shape)
    found = adds.gradients()
    if dsinks is not None and sink is not None:
        found["dsink"] = as_given(dsinks, sink, p)
    return dq, dk, dv, *(found[name] for name in ("dalibi_slopes", "dsink", "dbias") if name in found)


def _backward_chunk(
    by_row: list[Array],
    K: Array,
    V: Array,
    lse: Array,
    dlse: Array | None,
    p: Problem,
    added: Added,
    sink: Array | None,
    dropping: Dropping,
    mask: BlockMask | None,
) -> tuple[Array, Array, Array, Array]:
    """dQ, dK, dV and, of a `sink`, dsink of some heads in the dtype of K; `by_row`: their q, dout and out."""
    dtype = K.dtype
    dsink = np.zeros(() if sink is None else sink.shape, dtype)
    dQ, dK, dV = np.zeros(by_row[0].shape, dtype), np.zeros_like(K), np.zeros_like(V)
    for rows in query_tiles(p):
        Q, dO, O = (load_rows(x[..., rows, :], dtype) for x in by_row)
        LSE = lse[..., rows].astype(dtype).reshape(*Q.shape[:2], 1)
        with np.errstate(all="ignore"):
            delta = (dO * O).sum(axis=-1, keepdims=True)
            if dlse is not None:
                delta -= dlse[..., rows].astype(dtype).reshape(delta.shape)
            if sink is not None:
                dsink += sinks.gradient(sink, LSE, delta)
            target = dQ[..., rows, :]
            of = Q, K, V, dO, LSE, delta, dK, dV, rows, p, added, dropping, mask
            target[...] = _backward_tile(*of).reshape(target.shape)
    with np.errstate(all="ignore"):
        return dQ, p.scale * dK, dV, dsink


def _backward_tile(
    Q: Array,
    K: Array,
    V: Array,
    dO: Array,
    LSE: Array,
    delta: Array,
    dK: Array,
    dV: Array,
    rows: slice,
    p: Problem,
    added: Added,
    dropping: Dropping,
    mask: BlockMask | None,
) -> Array:
    """dQ of one tile of queries; adds what the tile contributes to dV, dK, still without scale, and what is added."""
    dQ = np.zeros_like(Q)
    for keys, visible in key_tiles(rows, p, mask):
        S = scores(Q, K[:, keys], p)
        derivative = None if p.softcap is None else 1 - np.square(S / p.softcap)  # by scale * q . k
        S, visible = added.to(S, rows, keys), added.visible(visible, rows, keys, LSE)
        P = np.exp(np.subtract(S, LSE, out=S), out=S)
        Z = dropping.factors(rows, keys, P.dtype)
        dP = dropped(dO @ V[:, keys].swapaxes(1, 2), Z)
        dS = np.multiply(P, np.subtract(dP, delta, out=dP), out=dP)
        if added.gradients():
            added.add_gradients(dS if visible is None else np.where(visible, dS, 0), rows, keys)
        if derivative is not None:
            np.multiply(dS, derivative, out=dS)
        if visible is not None:
            np.copyto(P, 0, where=~visible)
            np.copyto(dS, 0, where=~visible)
        P = dropped(P, Z)
        seen_by = None if visible is None else visible.swapaxes(-1, -2)
        dV[:, keys] += product(P.swapaxes(1, 2), dO, seen_by)
        dK[:, keys] += product(dS.swapaxes(1, 2), Q, seen_by)
        dQ += product(dS, K[:, keys], visible)
    return p.scale * dQ


def accumulator(x: Array) -> np.dtype[Any]:
    """The dtype of sums, and of lse."""
    return _FP64 if x.dtype.itemsize == 8 else _FP32
