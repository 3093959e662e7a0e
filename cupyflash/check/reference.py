"""Plain attention and its gradients, with every score materialised: what all other code is measured against.

    S = scale * Q K^T          over the keys that the query sees
    P = softmax(S)             lse = log(sum(exp(S)))
    O = P V

    dV = P^T dO                dP = dO V^T               delta = rowsum(dO * O) - dLSE
    dS = P * (dP - delta)      dQ = scale * dS K         dK = scale * dS^T Q

With ALiBi each score loses slope * D, D = |i + seqlen_k - seqlen_q - j|, and dslope = -sum(dS * D).

The gradients are those of FlashAttention (Dao et al. 2022, appendix B.2), with `lse` as a second output:
d lse / d S = P, hence the term -dLSE in delta.

`forward` and `backward` are the oracle: float64 throughout. `plain_forward` and `plain_backward` are the yardstick of
the 2x rule: what attention written with plain matrix products gives in the arrays' own dtype. They differ only in their
`Arithmetic`.

Hidden pairs of query and key are left out, not multiplied by zero, so a NaN behind the mask cannot leak. Arrays are
bshd; heads of q share the heads of k and v in groups (GQA). Packed sequences, in (total, heads, head_dim), are computed
one by one.
"""

# ruff: noqa: E741 (O and l are the paper's names)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..sequences import Sequences, parts
from .arithmetic import Arithmetic as Arithmetic

Array = NDArray[Any]


def forward(
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    sequences: Sequences | None = None,
    alibi_slopes: Array | None = None,
) -> tuple[Array, Array]:
    """Exact attention in float64.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), any floating dtype and strides.
        k, v: (batch, seqlen_k, heads_k, head_dim).
        problem: options; a query that sees no key gets out 0 and lse -inf.
        sequences: where the sequences of a packed problem lie, and which of their keys count.
        alibi_slopes: (heads_q,) or (batch, heads_q).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim) and lse (batch, heads_q, seqlen_q), natural log, both float64.
    """
    return _forward(q, k, v, problem, Arithmetic.exact(), sequences, alibi_slopes)


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    dlse: Array | None = None,
    sequences: Sequences | None = None,
    alibi_slopes: Array | None = None,
) -> tuple[Array, ...]:
    """Exact gradients of ``sum(out * dout) + sum(lse * dlse)`` in float64: dq, dk, dv; dslopes of slopes.

    Args:
        dout: gradient of out, shaped as q.
        dlse: gradient of lse (batch, heads_q, seqlen_q); None is zero.
        sequences, alibi_slopes: as in `forward`.
    """
    return _backward(dout, q, k, v, problem, dlse, Arithmetic.exact(), sequences, alibi_slopes)


def plain_forward(
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    sequences: Sequences | None = None,
    alibi_slopes: Array | None = None,
) -> tuple[Array, Array]:
    """Plain attention in the dtype of q: out in that dtype, lse in fp32 (fp64 for fp64)."""
    out, lse = _forward(q, k, v, problem, Arithmetic.plain(q.dtype), sequences, alibi_slopes)
    return _stored(out, q.dtype), lse


def plain_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    dlse: Array | None = None,
    sequences: Sequences | None = None,
    alibi_slopes: Array | None = None,
) -> tuple[Array, ...]:
    """Plain gradients in the dtype of q, dslopes in fp32 (fp64 for fp64); delta is taken from the rounded out."""
    found = _backward(dout, q, k, v, problem, dlse, Arithmetic.plain(q.dtype), sequences, alibi_slopes)
    return *(_stored(x, q.dtype) for x in found[:3]), *found[3:]


def _stored(x: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def _forward(
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    a: Arithmetic,
    sequences: Sequences | None,
    slopes: Array | None,
) -> tuple[Array, Array]:
    slopes = spread(slopes, problem)
    if sequences is not None:
        out, lse = np.zeros(q.shape, a.accumulate), np.full(problem.rows, -np.inf, a.accumulate)
        for i, part in enumerate(parts(problem, sequences)):
            own = q[part.q], k[part.k], v[part.k], part.problem, a, None, slopes[i]
            out[part.q], lse[part.lse] = _forward(*own)
        return out, lse
    p, visible = problem, visible_pairs(problem)
    out = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), a.accumulate)
    lse = np.zeros((p.batch, p.heads_q, p.seqlen_q), a.accumulate)
    for b, h, h_k in heads(p):
        Q, K, V = a.load(q[b, :, h]), a.load(k[b, :, h_k]), a.load(v[b, :, h_k])
        with np.errstate(all="ignore"):
            P, lse[b, h] = softmax(scores(Q, K, p, a, slopes[b, h])[0], visible, a)
            out[b, :, h] = a.product(a.rounded(P), V, visible)
    return out, lse


def _backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    dlse: Array | None,
    a: Arithmetic,
    sequences: Sequences | None,
    given: Array | None,
) -> tuple[Array, ...]:
    slopes, dslopes = spread(given, problem), np.zeros((problem.batch, problem.heads_q), a.accumulate)
    if sequences is not None:
        dq, dk, dv = (np.zeros(x.shape, a.accumulate) for x in (q, k, v))
        for i, part in enumerate(parts(problem, sequences)):
            dlse_of = None if dlse is None else dlse[part.lse]
            of = dout[part.q], q[part.q], k[part.k], v[part.k], part.problem, dlse_of, a, None, slopes[i]
            dq[part.q], dk[part.k], dv[part.k], dslopes[i] = _backward(*of)
        return dq, dk, dv, *gathered(dslopes, given)
    p, visible = problem, visible_pairs(problem)
    dq = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), a.accumulate)
    dk, dv = (np.zeros((p.batch, p.seqlen_k, p.heads_k, p.head_dim), a.accumulate) for _ in range(2))
    dlse = np.zeros((p.batch, p.heads_q, p.seqlen_q), a.accumulate) if dlse is None else a.load(dlse)
    for b, h, h_k in heads(p):
        Q, K, V, dO = a.load(q[b, :, h]), a.load(k[b, :, h_k]), a.load(v[b, :, h_k]), a.load(dout[b, :, h])
        with np.errstate(all="ignore"):
            found = _gradients(Q, K, V, dO, dlse[b, h, :, None], visible, p, a, slopes[b, h])
            dQ, dK, dV, dslopes[b, h] = found
            dq[b, :, h] = dQ
            dk[b, :, h_k] += dK
            dv[b, :, h_k] += dV
    return dq, dk, dv, *gathered(dslopes, given)


def spread(slopes: Array | None, p: Problem) -> Array:
    """Slopes as (batch, heads_q); zeros where there are none."""
    return np.broadcast_to(np.float64(0) if slopes is None else slopes, (p.batch, p.heads_q))


def gathered(dslopes: Array, given: Array | None) -> tuple[Array, ...]:
    """The inverse: what was found for each head of each batch, shaped as the slopes were given; nothing without."""
    if given is None:
        return ()
    return (dslopes.sum(axis=0) if given.ndim == 1 else dslopes,)


def distances(p: Problem) -> Array:
    """How far each key (column) is from each query's own position (row)."""
    query, key = np.arange(p.seqlen_q)[:, None], np.arange(p.seqlen_k)
    return np.abs(query + (p.seqlen_k - p.seqlen_q) - key)


def scores(Q: Array, K: Array, p: Problem, a: Arithmetic, slope: Any = 0) -> tuple[Array, Array | float]:
    """The scores of one head, and their derivative by ``scale * q . k``."""
    derivative: Array | float = 1.0
    S = p.scale * a.product(Q, K.T)
    if p.softcap is not None:
        t = np.tanh(S / p.softcap)
        S, derivative = p.softcap * t, 1 - t * t
    if p.alibi:
        S = S - a.accumulate(slope) * distances(p).astype(a.accumulate)
    return S, derivative


def softmax(S: Array, visible: Array, a: Arithmetic) -> tuple[Array, Array]:
    """P and lse of one head's scores; hidden entries of P are 0."""
    S = np.where(visible, S, -np.inf)
    m = S.max(axis=1, keepdims=True, initial=-np.inf)
    P = np.where(visible, np.exp(S - m), 0)
    l = (P[:, ::-1] if a.reverse else P).sum(axis=1, keepdims=True)
    lse = np.where(m == -np.inf, m, m + np.log(l))  # ln of a sum of zeros
    return np.where(visible, P / l, 0), lse[:, 0]


def _gradients(
    Q: Array, K: Array, V: Array, dO: Array, dLSE: Array, visible: Array, p: Problem, a: Arithmetic, slope: Any
) -> tuple[Array, Array, Array, Any]:
    """dQ and dslope of one head of q, and what this head adds to dK and dV."""
    S, derivative = scores(Q, K, p, a, slope)
    P, _ = softmax(S, visible, a)
    O = a.rounded(a.product(a.rounded(P), V, visible))
    delta = (dO * O).sum(axis=1, keepdims=True) - dLSE
    dP = a.product(dO, V.T)
    by_score = np.where(visible, P * (dP - delta), 0)
    dslope = -(by_score * distances(p).astype(a.accumulate)).sum() if p.alibi else 0
    dS = a.rounded(np.where(visible, by_score * derivative, 0))
    dV = a.product(a.rounded(P).T, dO, visible.T)
    dQ = p.scale * a.product(dS, K, visible)
    dK = p.scale * a.product(dS.T, Q, visible.T)
    return dQ, dK, dV, dslope


def heads(p: Problem) -> Iterator[tuple[int, int, int]]:
    """(batch, head of q, head of k) of every head of q."""
    for b in range(p.batch):
        for h in range(p.heads_q):
            yield b, h, h * p.heads_k // p.heads_q


def visible_pairs(p: Problem) -> Array:
    """Which query (row) sees which key (column)."""
    visible = np.zeros((p.seqlen_q, p.seqlen_k), bool)
    for query in range(p.seqlen_q):
        visible[query, slice(*p.visible(query))] = True
    return visible
