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
is not finite, its tile of queries (in the backward its heads) is computed again in fp64: a weight that fp32 rounds to 0
would turn an inf into NaN, and what overflows fp32 may fit fp64. How the work is cut into tiles: `tiles`; which threads
do it: `workers`.
"""

# ruff: noqa: E741 (O and l are the paper's names)

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from . import workers
from .chunk import Chunk, chunk_of
from .dropping import dropped
from .features import Features, Place, Sums
from .features import accumulator as accumulator
from .forward import forward_tile
from .products import matmul, product, scores
from .tiles import chunks, group_heads, group_lse, key_tiles, load, load_rows, query_tiles, scores_of, transposed

Array = NDArray[Any]

_FP32, _FP64 = np.dtype(np.float32), np.dtype(np.float64)
_DTYPES = {_FP32: (_FP32, _FP64), _FP64: (_FP64,)}  # accumulator -> what to compute in, one after the other
_NOTHING = Features()
_Loaded = tuple[Array, Array, Chunk]


def forward(q: Array, k: Array, v: Array, problem: Problem, of: Features = _NOTHING) -> tuple[Array, Array]:
    """``out = softmax(scale * q k^T) v`` over the visible keys.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16, bf16 (ml_dtypes), fp32 or fp64, any strides; never written.
        k, v: (batch, seqlen_k, heads_k, head_dim), same dtype; v (..., head_dim_v).
        problem: shapes and options.
        of: features, without sequences; all of batch and heads of k share a block mask. See `call` for others.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, and lse (batch, heads_q, seqlen_q), natural log,
        fp32 (fp64 for fp64). A query that sees no key has out 0 and lse -inf, or the sink.
    """
    p, accumulate = problem, accumulator(q)
    out = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim_v), q.dtype)
    lse = np.zeros((p.batch, p.heads_q, p.seqlen_q), accumulate)
    q_heads, out_heads, lse_heads = group_heads(q, p), group_heads(out, p), group_lse(lse, p)

    def tasks() -> Iterator[workers.Task]:
        for chunk in chunks(p):
            load_chunk = partial(_load_forward, k, v, chunk, p, of)
            loaded = load_chunk(accumulate)
            for rows in query_tiles(p):
                target = out_heads[chunk][..., rows, :], lse_heads[chunk][..., rows]
                yield partial(_forward_rows, q_heads[chunk][..., rows, :], target, rows, p, loaded, load_chunk)

    workers.run(tasks(), workers.threads(scores_of(p)))
    return out, lse


def _load_forward(k: Array, v: Array, chunk: Any, p: Problem, of: Features, dtype: np.dtype[Any]) -> _Loaded:
    """K^T, V and features of some heads in one dtype."""
    K, V = (load(x.swapaxes(1, 2)[chunk], dtype) for x in (k, v))
    return transposed(K, p), V, chunk_of(of, chunk, p, dtype)


def _forward_rows(
    q: Array, target: tuple[Array, Array], rows: slice, p: Problem, loaded: _Loaded, again: Callable[..., _Loaded]
) -> None:
    """Write out and lse of a tile of queries of some heads; `again`: loads what is `loaded` in another dtype."""
    out, lse = target
    for dtype in _DTYPES[loaded[1].dtype]:
        KT, V, own = loaded if dtype == loaded[1].dtype else again(dtype)
        with np.errstate(all="ignore"):
            O, LSE = forward_tile(load_rows(q, dtype), KT, V, rows, p, own)
            out[...] = O.reshape(out.shape)
            lse[...] = LSE.reshape(lse.shape)
            if np.isfinite(O).all():
                return


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    problem: Problem,
    of: Features = _NOTHING,
) -> tuple[Array, ...]:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to q, k and v, bitwise reproducible.

    Args:
        dout: gradient of out, shaped as it.
        q, k, v: as in `forward`.
        out, lse: what `forward` returned.
        dlse: gradient of lse (batch, heads_q, seqlen_q); None is zero.
        problem, of: as in `forward`.

    Returns:
        dq, dk, dv with shapes and dtype of q, k, v; 0 for a query or key that takes no part; and what is wanted of
        features, in the order of `LEARNED` and the dtype of sums.
    """
    p, sums = problem, Sums(of)
    dq = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), q.dtype)
    dk, dv = (np.zeros((p.batch, p.seqlen_k, p.heads_k, width), q.dtype) for width in p.widths)
    by_row = [group_heads(x, p) for x in (q, dout, out)]
    lse_heads, dlse_heads = group_lse(lse, p), None if dlse is None else group_lse(dlse, p)
    targets = group_heads(dq, p), dk.swapaxes(1, 2), dv.swapaxes(1, 2)

    def task(chunk: Any) -> tuple[Place, tuple[Array, ...]]:
        dlse_chunk = None if dlse_heads is None else dlse_heads[chunk]
        for dtype in _DTYPES[accumulator(q)]:
            K, VT = load(k.swapaxes(1, 2)[chunk], dtype), transposed(load(v.swapaxes(1, 2)[chunk], dtype), p)
            own = chunk_of(of, chunk, p, dtype)
            gradients = _backward_chunk([x[chunk] for x in by_row], K, VT, lse_heads[chunk], dlse_chunk, p, own)
            learned = own.gradients()
            if all(np.isfinite(x).all() for x in (*gradients, *learned)):
                break
        for target, gradient in zip(targets, gradients, strict=True):
            with np.errstate(all="ignore"):
                target[chunk] = gradient.reshape(target[chunk].shape)
        return own.place, learned

    tasks = [partial(task, chunk) for chunk in chunks(p)]
    workers.run(iter(tasks), min(len(tasks), workers.threads(scores_of(p))), lambda found: sums.add(*found))
    return dq, dk, dv, *sums.found()


def _backward_chunk(
    by_row: list[Array], K: Array, VT: Array, lse: Array, dlse: Array | None, p: Problem, of: Chunk
) -> tuple[Array, Array, Array]:
    """dQ, dK and dV of some heads in the dtype of K, and of V transposed; `by_row`: their q, dout and out."""
    dtype = K.dtype
    dQ, dK, dV = np.zeros(by_row[0].shape, dtype), np.zeros_like(K), np.zeros((*K.shape[:2], VT.shape[1]), dtype)
    KT = transposed(K, p)
    for rows in query_tiles(p):
        Q, dO, O = (load_rows(x[..., rows, :], dtype) for x in by_row)
        LSE = lse[..., rows].astype(dtype).reshape(*Q.shape[:2], 1)
        with np.errstate(all="ignore"):
            delta = (dO * O).sum(axis=-1, keepdims=True)
            if dlse is not None:
                delta -= dlse[..., rows].astype(dtype).reshape(delta.shape)
            of.add_to_sink(LSE, delta)
            target = dQ[..., rows, :]
            tile = _backward_tile(Q, K, KT, VT, dO, LSE, delta, dK, dV, rows, p, of)
            target[...] = tile.reshape(target.shape)
    with np.errstate(all="ignore"):
        return dQ, np.multiply(p.scale, dK, out=dK), dV


def _backward_tile(
    Q: Array,
    K: Array,
    KT: Array,
    VT: Array,
    dO: Array,
    LSE: Array,
    delta: Array,
    dK: Array,
    dV: Array,
    rows: slice,
    p: Problem,
    of: Chunk,
) -> Array:
    """dQ of one tile of queries; adds what the tile contributes to dV, dK, still without scale, and what is added."""
    dQ, added = np.zeros_like(Q), of.added
    for keys, visible in key_tiles(rows, p, of.mask):
        S = scores(Q, KT[..., keys], p)
        derivative = None if p.softcap is None else 1 - np.square(S / p.softcap)  # by scale * q . k
        by_mods = None if added.mods is None else added.mods.of(S, rows, keys)[1]
        reads = [] if added.mods is None else added.mods.reads(S, rows, keys)
        S = added.to(S, rows, keys)
        visible = added.visible(S, visible, rows, keys, LSE)
        P = np.exp(np.subtract(S, LSE, out=S), out=S)
        Z = of.dropping.factors(rows, keys, P.dtype)
        dP = dropped(matmul(dO, VT[..., keys]), Z)
        dS = np.multiply(P, np.subtract(dP, delta, out=dP), out=dP)
        if added.is_learned:
            added.add_gradients(dS if visible is None else np.where(visible, dS, 0), rows, keys, reads)
        if derivative is not None:
            np.multiply(dS, derivative, out=dS)
        if by_mods is not None:
            np.multiply(dS, np.where(P == 0, 0, by_mods), out=dS)
        if visible is not None:
            np.copyto(P, 0, where=~visible)
            np.copyto(dS, 0, where=~visible)
        P = dropped(P, Z)
        seen_by = None if visible is None else visible.swapaxes(-1, -2)
        dV[:, keys] += product(P.swapaxes(1, 2), dO, seen_by)
        dK[:, keys] += product(dS.swapaxes(1, 2), Q, seen_by)
        dQ += product(dS, K[:, keys], visible)
    return p.scale * dQ
