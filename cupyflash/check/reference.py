"""Plain attention and its gradients, with every score materialised: what all other code is measured against.

    S = scale * Q K^T          over the keys that the query sees
    P = softmax(S)             lse = log(sum(exp(S)))
    O = P V

    dV = P^T dO                dP = dO V^T               delta = rowsum(dO * O) - dLSE
    dS = P * (dP - delta)      dQ = scale * dS K         dK = scale * dS^T Q

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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..sequences import Sequences, parts

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

        a is 0 where it is hidden. That is enough for finite b; else 0 * NaN must not happen, and rows go one by one.
        """
        if visible is None or np.isfinite(b).all():
            return a[:, ::-1] @ b[::-1] if self.reverse else a @ b
        rows = [self.product(a[i : i + 1, seen], b[seen]) for i, seen in enumerate(visible)]
        return np.concatenate(rows) if rows else np.zeros((0, b.shape[1]), b.dtype)

    def rounded(self, x: Array) -> Array:
        """What is left of x after it was stored in the dtype of the inputs."""
        return x if self.storage is None else x.astype(self.storage).astype(self.accumulate)


def forward(q: Array, k: Array, v: Array, problem: Problem, sequences: Sequences | None = None) -> tuple[Array, Array]:
    """Exact attention in float64.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), any floating dtype and strides.
        k, v: (batch, seqlen_k, heads_k, head_dim).
        problem: options; a query that sees no key gets out 0 and lse -inf.
        sequences: where the sequences of a packed problem lie, and which of their keys count.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim) and lse (batch, heads_q, seqlen_q), natural log, both float64.
    """
    return _forward(q, k, v, problem, Arithmetic.exact(), sequences)


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    dlse: Array | None = None,
    sequences: Sequences | None = None,
) -> tuple[Array, Array, Array]:
    """Exact gradients (dq, dk, dv) of ``sum(out * dout) + sum(lse * dlse)`` in float64, shaped as q, k, v.

    Args:
        dout: gradient of out, shaped as q.
        dlse: gradient of lse (batch, heads_q, seqlen_q); None is zero.
        sequences: as in `forward`.
    """
    return _backward(dout, q, k, v, problem, dlse, Arithmetic.exact(), sequences)


def plain_forward(
    q: Array, k: Array, v: Array, problem: Problem, sequences: Sequences | None = None
) -> tuple[Array, Array]:
    """Plain attention in the dtype of q: out in that dtype, lse in fp32 (fp64 for fp64)."""
    out, lse = _forward(q, k, v, problem, Arithmetic.plain(q.dtype), sequences)
    return _stored(out, q.dtype), lse


def plain_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    dlse: Array | None = None,
    sequences: Sequences | None = None,
) -> tuple[Array, Array, Array]:
    """Plain gradients (dq, dk, dv) in the dtype of q; delta is taken from the rounded out."""
    dq, dk, dv = _backward(dout, q, k, v, problem, dlse, Arithmetic.plain(q.dtype), sequences)
    return _stored(dq, q.dtype), _stored(dk, q.dtype), _stored(dv, q.dtype)


def _stored(x: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def _forward(
    q: Array, k: Array, v: Array, problem: Problem, a: Arithmetic, sequences: Sequences | None = None
) -> tuple[Array, Array]:
    if sequences is not None:
        out, lse = np.zeros(q.shape, a.accumulate), np.full(problem.rows, -np.inf, a.accumulate)
        for part in parts(problem, sequences):
            out[part.q], lse[part.lse] = _forward(q[part.q], k[part.k], v[part.k], part.problem, a)
        return out, lse
    p, visible = problem, visible_pairs(problem)
    out = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), a.accumulate)
    lse = np.zeros((p.batch, p.heads_q, p.seqlen_q), a.accumulate)
    for b, h, h_k in heads(p):
        Q, K, V = a.load(q[b, :, h]), a.load(k[b, :, h_k]), a.load(v[b, :, h_k])
        with np.errstate(all="ignore"):
            P, lse[b, h] = softmax(scores(Q, K, p, a)[0], visible, a)
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
    sequences: Sequences | None = None,
) -> tuple[Array, Array, Array]:
    if sequences is not None:
        dq, dk, dv = (np.zeros(x.shape, a.accumulate) for x in (q, k, v))
        for part in parts(problem, sequences):
            dlse_of = None if dlse is None else dlse[part.lse]
            found = _backward(dout[part.q], q[part.q], k[part.k], v[part.k], part.problem, dlse_of, a)
            dq[part.q], dk[part.k], dv[part.k] = found
        return dq, dk, dv
    p, visible = problem, visible_pairs(problem)
    dq = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), a.accumulate)
    dk, dv = (np.zeros((p.batch, p.seqlen_k, p.heads_k, p.head_dim), a.accumulate) for _ in range(2))
    dlse = np.zeros((p.batch, p.heads_q, p.seqlen_q), a.accumulate) if dlse is None else a.load(dlse)
    for b, h, h_k in heads(p):
        Q, K, V, dO = a.load(q[b, :, h]), a.load(k[b, :, h_k]), a.load(v[b, :, h_k]), a.load(dout[b, :, h])
        with np.errstate(all="ignore"):
            dQ, dK, dV = _gradients(Q, K, V, dO, dlse[b, h, :, None], visible, p, a)
            dq[b, :, h] = dQ
            dk[b, :, h_k] += dK
            dv[b, :, h_k] += dV
    return dq, dk, dv


def scores(Q: Array, K: Array, p: Problem, a: Arithmetic) -> tuple[Array, Array | float]:
    """The scores of one head, and their derivative by ``scale * q . k``."""
    S = p.scale * a.product(Q, K.T)
    if p.softcap is None:
        return S, 1.0
    t = np.tanh(S / p.softcap)
    return p.softcap * t, 1 - t * t


def softmax(S: Array, visible: Array, a: Arithmetic) -> tuple[Array, Array]:
    """P and lse of one head's scores; hidden entries of P are 0."""
    S = np.where(visible, S, -np.inf)
    m = S.max(axis=1, keepdims=True, initial=-np.inf)
    P = np.where(visible, np.exp(S - m), 0)
    l = (P[:, ::-1] if a.reverse else P).sum(axis=1, keepdims=True)
    lse = np.where(m == -np.inf, m, m + np.log(l))  # ln of a sum of zeros
    return np.where(visible, P / l, 0), lse[:, 0]


def _gradients(
    Q: Array, K: Array, V: Array, dO: Array, dLSE: Array, visible: Array, p: Problem, a: Arithmetic
) -> tuple[Array, Array, Array]:
    """dQ of one head of q, and what this head adds to dK and dV."""
    S, derivative = scores(Q, K, p, a)
    P, _ = softmax(S, visible, a)
    O = a.rounded(a.product(a.rounded(P), V, visible))
    delta = (dO * O).sum(axis=1, keepdims=True) - dLSE
    dP = a.product(dO, V.T)
    dS = a.rounded(np.where(visible, P * (dP - delta) * derivative, 0))
    dV = a.product(a.rounded(P).T, dO, visible.T)
    dQ = p.scale * a.product(dS, K, visible)
    dK = p.scale * a.product(dS.T, Q, visible.T)
    return dQ, dK, dV


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
