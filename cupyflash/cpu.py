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

Memory is linear in the sequence lengths. All arithmetic is fp32 (fp64 for fp64); each result is rounded once. The first
axis of a tile runs over pairs of batch and head of k; the heads of q that share such a head are rows of one tile, so K
and V are never repeated and dK and dV sum over the group by themselves. Tiles that no query sees are skipped.
"""

# ruff: noqa: E741 (O and l are the paper's names)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

Array = NDArray[Any]

# On one core of an AMD EPYC (2026-11-20, fp32, causal, forward + backward): tiles of 128 to 512 rows and keys
# differ by less than 10 %; short sequences take 20 % longer with 2^20 scores at a time than with 2^18.
TILE_ROWS = 256  # queries of a tile, times heads of q that share a head of k
BLOCK_M_MIN = 16  # queries of a tile at least, however large the group
BLOCK_N = 256  # keys of a tile
CHUNK_SCORES = 2**18  # scores that exist at a time: tiles of as many heads as fit share one NumPy call
CHUNK_KEYS = 2**24  # elements of K converted to the accumulator's dtype at a time: 64 MiB in fp32


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, Array]:
    """``out = softmax(scale * q k^T) v`` over the visible keys.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16, bf16 (ml_dtypes), fp32 or fp64, any strides; never written.
        k, v: (batch, seqlen_k, heads_k, head_dim), same dtype.
        problem: shapes and options.

    Returns:
        out, shape and dtype of q, and lse (batch, heads_q, seqlen_q), natural log, fp32 (fp64 for fp64). A query that
        sees no key has out 0 and lse -inf.
    """
    p, accumulate = problem, _accumulator(q)
    out = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), q.dtype)
    lse = np.zeros((p.batch, p.heads_q, p.seqlen_q), accumulate)
    q_heads, out_heads, lse_heads = _group_heads(q, p), _group_heads(out, p), _group_lse(lse, p)
    for chunk in _chunks(p):
        K, V = (_load(x.swapaxes(1, 2)[chunk], accumulate) for x in (k, v))
        for rows in _query_tiles(p):
            target = out_heads[chunk][..., rows, :]
            Q = _load_rows(q_heads[chunk][..., rows, :], accumulate)
            with np.errstate(all="ignore"):
                O, LSE = _forward_tile(Q, K, V, rows, p)
                target[...] = O.reshape(target.shape)
                lse_heads[chunk][..., rows] = LSE.reshape(target.shape[:-1])
    return out, lse


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array | None, problem: Problem
) -> tuple[Array, Array, Array]:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to q, k and v, bitwise reproducible.

    Args:
        dout: gradient of out, shaped as q.
        q, k, v: as in `forward`.
        out, lse: what `forward` returned.
        dlse: gradient of lse (batch, heads_q, seqlen_q); None is zero.
        problem: shapes and options.

    Returns:
        dq, dk, dv with shapes and dtype of q, k, v; 0 for a query or key that takes no part.
    """
    p, accumulate = problem, _accumulator(q)
    dq = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), q.dtype)
    dk, dv = (np.zeros((p.batch, p.seqlen_k, p.heads_k, p.head_dim), q.dtype) for _ in range(2))
    by_row = [_group_heads(x, p) for x in (q, dout, out)]
    dq_heads, lse_heads = _group_heads(dq, p), _group_lse(lse, p)
    dlse_heads = None if dlse is None else _group_lse(dlse, p)
    for chunk in _chunks(p):
        K, V = (_load(x.swapaxes(1, 2)[chunk], accumulate) for x in (k, v))
        dK, dV = np.zeros_like(K), np.zeros_like(V)
        for rows in _query_tiles(p):
            Q, dO, O = (_load_rows(x[chunk][..., rows, :], accumulate) for x in by_row)
            LSE = lse_heads[chunk][..., rows].astype(accumulate).reshape(*Q.shape[:2], 1)
            with np.errstate(all="ignore"):
                delta = (dO * O).sum(axis=-1, keepdims=True)
                if dlse_heads is not None:
                    delta -= dlse_heads[chunk][..., rows].astype(accumulate).reshape(delta.shape)
                target = dq_heads[chunk][..., rows, :]
                target[...] = _backward_tile(Q, K, V, dO, LSE, delta, dK, dV, rows, p).reshape(target.shape)
        with np.errstate(all="ignore"):
            for total, target in ((p.scale * dK, dk.swapaxes(1, 2)[chunk]), (dV, dv.swapaxes(1, 2)[chunk])):
                target[...] = total.reshape(target.shape)
    return dq, dk, dv


def _forward_tile(Q: Array, K: Array, V: Array, rows: slice, p: Problem) -> tuple[Array, Array]:
    """O and lse of one tile of queries."""
    O = np.zeros_like(Q)
    m = np.full((*Q.shape[:2], 1), -np.inf, Q.dtype)
    l = np.zeros_like(m)
    for keys, visible in _key_tiles(rows, p):
        S = _scores(Q, K[:, keys], p.scale)
        if visible is not None:
            np.copyto(S, -np.inf, where=~visible)
        m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
        shift = np.where(np.isneginf(m_new), 0, m_new)  # so far only scores of -inf: exp(-inf - 0) is 0, not NaN
        P = np.exp(np.subtract(S, shift, out=S), out=S)
        rescale = np.exp(m - shift)
        l = rescale * l + P.sum(axis=-1, keepdims=True)
        O = rescale * O + _product(P, V[:, keys], visible)
        m = m_new
    sees = _sees_a_key(rows, p)[:, None]
    return np.where(sees, O / l, 0), m + np.log(l)  # every visible score is -inf: out is 0 / 0, as IEEE has it


def _backward_tile(
    Q: Array, K: Array, V: Array, dO: Array, LSE: Array, delta: Array, dK: Array, dV: Array, rows: slice, p: Problem
) -> Array:
    """dQ of one tile of queries; adds what the tile contributes to dV and, still without scale, to dK."""
    dQ = np.zeros_like(Q)
    for keys, visible in _key_tiles(rows, p):
        S = _scores(Q, K[:, keys], p.scale)
        P = np.exp(np.subtract(S, LSE, out=S), out=S)
        dP = dO @ V[:, keys].swapaxes(1, 2)
        dS = np.multiply(P, np.subtract(dP, delta, out=dP), out=dP)
        if visible is not None:
            np.copyto(P, 0, where=~visible)
            np.copyto(dS, 0, where=~visible)
        seen_by = None if visible is None else visible.T
        dV[:, keys] += _product(P.swapaxes(1, 2), dO, seen_by)
        dK[:, keys] += _product(dS.swapaxes(1, 2), Q, seen_by)
        dQ += _product(dS, K[:, keys], visible)
    return p.scale * dQ


def _scores(Q: Array, K: Array, scale: float) -> Array:
    S = Q @ K.swapaxes(1, 2)
    return np.multiply(S, scale, out=S)


def _product(A: Array, B: Array, visible: Array | None) -> Array:
    """A B without the terms that `visible` hides.

    A is 0 where it is hidden, which is enough as long as B is finite. A row of B with NaN or inf is taken out and added
    term by term to those rows that see it, since 0 * NaN is NaN.
    """
    if visible is None or np.isfinite(B).all():
        return A @ B
    finite = np.isfinite(B).all(axis=(0, 2))
    C = A[:, :, finite] @ B[:, finite]
    for t in np.flatnonzero(~finite):
        C += np.where(visible[:, t, None], A[:, :, t, None] * B[:, t, None, :], 0)
    return C


def _query_tiles(p: Problem) -> Iterator[slice]:
    block_m = max(BLOCK_M_MIN, TILE_ROWS * p.heads_k // p.heads_q) if p.heads_q else TILE_ROWS
    for first in range(0, p.seqlen_q, block_m):
        yield slice(first, min(first + block_m, p.seqlen_q))


def _key_tiles(rows: slice, p: Problem) -> Iterator[tuple[slice, Array | None]]:
    """The tiles of keys that a tile of queries sees at least in part, and which of them each row sees (None: all).

    The rows of the mask repeat for each head of the group.
    """
    first_key, end_key = _bounds(np.arange(rows.start, rows.stop)[:, None], p)
    for start in range(max(0, int(first_key[0, 0])), min(p.seqlen_k, int(end_key[-1, 0])), BLOCK_N):
        stop = min(start + BLOCK_N, p.seqlen_k, int(end_key[-1, 0]))
        visible = None
        if start < first_key[-1, 0] or end_key[0, 0] < stop:
            key = np.arange(start, stop)
            visible = np.tile((first_key <= key) & (key < end_key), (p.heads_q // p.heads_k, 1))
        yield slice(start, stop), visible


def _sees_a_key(rows: slice, p: Problem) -> Array:
    """Which rows of a tile of queries see any key."""
    first_key, end_key = _bounds(np.arange(rows.start, rows.stop), p)
    sees = np.maximum(first_key, 0) < np.minimum(end_key, p.seqlen_k)
    return np.tile(sees, p.heads_q // p.heads_k)


def _bounds(query: Array, p: Problem) -> tuple[Array, Array]:
    """First visible key and the one behind the last, as `Problem.visible` but not clipped to the keys there are.

    Both grow with the query: the first and the last row of a tile bound what it sees.
    """
    left, right = p.window
    diagonal = query + (p.seqlen_k - p.seqlen_q)
    first = np.zeros_like(diagonal) if left is None else diagonal - left
    end = np.full_like(diagonal, p.seqlen_k) if right is None else diagonal + right + 1
    return first, end


def _chunks(p: Problem) -> Iterator[tuple[slice, slice]]:
    """Ranges of batch and of heads of k whose tiles are computed together."""
    if not (p.batch and p.heads_q):
        return
    rows = next((t.stop - t.start for t in _query_tiles(p)), 1) * (p.heads_q // p.heads_k)
    scores = CHUNK_SCORES // (rows * max(1, min(p.seqlen_k, BLOCK_N)))
    heads = max(1, min(scores, CHUNK_KEYS // max(1, p.seqlen_k * p.head_dim)))
    batch_step, head_step = max(1, heads // p.heads_k), min(heads, p.heads_k)
    for b in range(0, p.batch, batch_step):
        for h in range(0, p.heads_k, head_step):
            yield slice(b, b + batch_step), slice(h, h + head_step)


def _accumulator(x: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if x.dtype.itemsize == 8 else np.float32)


def _group_heads(x: Array, p: Problem) -> Array:
    """View of a bshd array of queries as (batch, heads_k, group, seqlen_q, head_dim)."""
    return x.reshape(p.batch, p.seqlen_q, p.heads_k, p.heads_q // p.heads_k, p.head_dim).transpose(0, 2, 3, 1, 4)


def _group_lse(x: Array, p: Problem) -> Array:
    """View of (batch, heads_q, seqlen_q) as (batch, heads_k, group, seqlen_q)."""
    return x.reshape(p.batch, p.heads_k, p.heads_q // p.heads_k, p.seqlen_q)


def _load(x: Array, dtype: np.dtype[Any]) -> Array:
    """Keys (batch, heads_k, seqlen_k, head_dim) as contiguous (batch * heads_k, seqlen_k, head_dim)."""
    return np.ascontiguousarray(x, dtype).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _load_rows(x: Array, dtype: np.dtype[Any]) -> Array:
    """A tile (batch, heads_k, group, block_m, head_dim) as (batch * heads_k, group * block_m, head_dim)."""
    b, heads_k, group, block_m, head_dim = x.shape
    return np.ascontiguousarray(x, dtype).reshape(b * heads_k, group * block_m, head_dim)
