"""Plain attention and its gradients, with every score materialised: what all other code is measured against.

    S = scale * Q K^T          over the keys that the query sees
    P = softmax(S)             lse = log(sum(exp(S)))
    O = P V

    dV = P^T dO                dP = dO V^T               delta = rowsum(dO * O) - dLSE
    dS = P * (dP - delta)      dQ = scale * dS K         dK = scale * dS^T Q

With a bias each score gains B_ij, and dB = dS, summed where B is broadcast. Where B is -inf the key is hidden, and a
query whose scores are then all -inf sees none, unless it has a sink (`bias`).

With ALiBi each score loses slope * D, D = |i + seqlen_k - seqlen_q - j|, and dslope = -sum(dS * D). A sink is the score
of one more key, whose v is 0: dsink = -sum(P_sink * delta), P_sink = exp(sink - lse).

The gradients are those of FlashAttention (Dao et al. 2022, appendix B.2), with `lse` as a second output:
d lse / d S = P, hence the term -dLSE in delta.

`forward` and `backward` are the oracle: float64 throughout. `plain_forward` and `plain_backward` are the yardstick of
the 2x rule: what attention written with plain matrix products gives in the arrays' own dtype. They differ only in their
`Arithmetic`.

Mods make of a score, with its softcap, what they say, and dS takes their derivative (`mods.evaluate`); what they read
has the sum of dS, by what they make of scores, times the derivative by the element that is read.

Hidden pairs of query and key are left out, not multiplied by zero, so a NaN behind the mask cannot leak. Arrays are
bshd; heads of q share the heads of k and v in groups (GQA). Packed sequences, in (total, heads, head_dim), are computed
one by one.
"""

# ruff: noqa: E741 (O and l are the paper's names)

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..sequences import parts
from . import mods
from .arithmetic import Arithmetic as Arithmetic
from .arithmetic import dropped as dropped
from .bias import add_head, add_part, broadcast, none_of, seen_of
from .features import Features as Features
from .features import OfHead as OfHead

Array = NDArray[Any]
_PLAIN, _NONE = Features(), OfHead()


def forward(q: Array, k: Array, v: Array, problem: Problem, of: Features = _PLAIN) -> tuple[Array, Array]:
    """Exact attention in float64.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), any floating dtype and strides.
        k, v: (batch, seqlen_k, heads_k, head_dim), v (..., head_dim_v).
        problem: options; a query that sees no key gets out 0 and lse -inf, or the sink.
        of: what features bring.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), natural log, both float64.
    """
    return _forward(q, k, v, problem, Arithmetic.exact(), of)


def backward(
    dout: Array, q: Array, k: Array, v: Array, problem: Problem, dlse: Array | None = None, of: Features = _PLAIN
) -> tuple[Array, ...]:
    """Exact gradients of ``sum(out * dout) + sum(lse * dlse)`` in float64: dq, dk, dv, and what features have.

    Args:
        dout: gradient of out, shaped as it.
        dlse: gradient of lse (batch, heads_q, seqlen_q); None is zero.
        of: as in `forward`.
    """
    of_mods = mods.none_of(of)
    *found, learned, dbias = _backward(dout, q, k, v, problem, dlse, Arithmetic.exact(), of, of_mods)
    return *found, *of.gathered(learned, dbias, of_mods)


def plain_forward(q: Array, k: Array, v: Array, problem: Problem, of: Features = _PLAIN) -> tuple[Array, Array]:
    """Plain attention in the dtype of q: out in that dtype, lse in fp32 (fp64 for fp64)."""
    out, lse = _forward(q, k, v, problem, Arithmetic.plain(q.dtype), of)
    return _stored(out, q.dtype), lse


def plain_backward(
    dout: Array, q: Array, k: Array, v: Array, problem: Problem, dlse: Array | None = None, of: Features = _PLAIN
) -> tuple[Array, ...]:
    """Plain gradients in the dtype of q, dslopes and dsink in fp32 (fp64 for fp64), others in that of their arrays;
    delta of the rounded out."""
    of_mods = mods.none_of(of)
    *found, learned, dbias = _backward(dout, q, k, v, problem, dlse, Arithmetic.plain(q.dtype), of, of_mods)
    dbias = dbias if of.bias is None else _stored(dbias, of.bias.dtype)
    of_mods = list(map(_stored, of_mods, mods.dtypes_of(of)))
    return *(_stored(x, q.dtype) for x in found), *of.gathered(learned, dbias, of_mods)


def _stored(x: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def _forward(q: Array, k: Array, v: Array, problem: Problem, a: Arithmetic, of: Features) -> tuple[Array, Array]:
    if of.sequences is not None:
        out = np.zeros((*q.shape[:-1], v.shape[-1]), a.accumulate)
        lse = np.full(problem.rows, -np.inf, a.accumulate)
        for part in parts(problem, of.sequences):
            own = q[part.q], k[part.k], v[part.k], part.problem, a, of.part(problem, part)
            out[part.q], lse[part.lse] = _forward(*own)
        return out, lse
    p, bounds, biases = problem, visible_pairs(problem), broadcast(of.added(problem), problem)
    out = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim_v), a.accumulate)
    lse = np.zeros((p.batch, p.heads_q, p.seqlen_q), a.accumulate)
    for b, h, h_k in heads(p):
        Q, K, V = a.load(q[b, :, h]), a.load(k[b, :, h_k]), a.load(v[b, :, h_k])
        visible = of.seen(p, bounds, b, h)
        with np.errstate(all="ignore"):
            S, _ = scores(Q, K, p, a, of.head(b, h), biases[b][h], partial(of.modified, p=p, b=b, h=h))
            seen = seen_of(S, visible, biases[b][h], of.head(b, h).sink)
            P, lse[b, h] = softmax(S, seen, a, of.head(b, h))
            PZ = P * np.asarray(of.kept(p, b, h), a.accumulate)  # NaN in a row of NaN, even if all of it is dropped
            out[b, :, h] = a.product(a.rounded(PZ), V, seen)
    return out, lse


def _backward(
    dout: Array, q: Array, k: Array, v: Array, problem: Problem, dlse: Array | None, a: Arithmetic, of: Features,
    of_mods: list[Array],
) -> tuple[Array, ...]:  # fmt: skip
    """dq, dk, dv, what each head's `OfHead` has for a gradient, and dbias; those of mods are added to `of_mods`."""
    learned = np.zeros((problem.batch, problem.heads_q, len(OfHead._fields)), a.accumulate)
    dbias = none_of(of.bias, a.accumulate)
    if of.sequences is not None:
        dq, dk, dv = (np.zeros(x.shape, a.accumulate) for x in (q, k, v))
        for i, part in enumerate(parts(problem, of.sequences)):
            dlse_of = None if dlse is None else dlse[part.lse]
            own = dout[part.q], q[part.q], k[part.k], v[part.k], part.problem, dlse_of, a, of.part(problem, part)
            dq[part.q], dk[part.k], dv[part.k], learned[i : i + 1], of_bias = _backward(*own, of_mods)
            add_part(dbias, part, of_bias)
        return dq, dk, dv, learned, dbias
    p, bounds, biases = problem, visible_pairs(problem), broadcast(of.added(problem), problem)
    dq = np.zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim), a.accumulate)
    dk, dv = (np.zeros((p.batch, p.seqlen_k, p.heads_k, width), a.accumulate) for width in p.widths)
    dlse = np.zeros((p.batch, p.heads_q, p.seqlen_q), a.accumulate) if dlse is None else a.load(dlse)
    for b, h, h_k in heads(p):
        Q, K, V, dO = a.load(q[b, :, h]), a.load(k[b, :, h_k]), a.load(v[b, :, h_k]), a.load(dout[b, :, h])
        visible = of.seen(p, bounds, b, h)
        with np.errstate(all="ignore"):
            of_head = of.head(b, h), biases[b][h], of.kept(p, b, h), partial(of.modified, p=p, b=b, h=h)
            found = _gradients(Q, K, V, dO, dlse[b, h, :, None], visible, p, a, *of_head)
            dq[b, :, h], dK, dV, learned[b, h], by_score = found
            add_head(dbias, b, h, by_score)
            if of_mods:
                mods.add_head(of_mods, by_score, scores(Q, K, mods.before_mods(p), a)[0], p, of, b, h)
            dk[b, :, h_k] += dK
            dv[b, :, h_k] += dV
    return dq, dk, dv, learned, dbias


def distances(p: Problem) -> Array:
    """How far each key (column) is from each query's own position (row)."""
    query, key = np.arange(p.seqlen_q)[:, None], np.arange(p.seqlen_k)
    return np.abs(query + p.diagonal - key)


def scores(
    Q: Array, K: Array, p: Problem, a: Arithmetic, of: OfHead = _NONE, bias: Array | None = None,
    modified: Callable[[Array], tuple[Any, Any]] | None = None,
) -> tuple[Array, Array | float]:  # fmt: skip
    """The scores of one head, and their derivative by ``scale * q . k``; `modified`: `Features.modified` of it."""
    derivative: Array | float = 1.0
    S = p.scale * a.product(Q, K.T)
    if p.softcap is not None:
        t = np.tanh(S / p.softcap)
        S, derivative = p.softcap * t, 1 - t * t
    if p.mods and modified is not None:
        S, slope = modified(S)
        derivative = derivative * slope
    if p.alibi:
        S = S - a.accumulate(of.alibi_slopes) * distances(p).astype(a.accumulate)
    if bias is not None:
        S = np.where(np.isneginf(bias), -np.inf, S + a.load(bias)).astype(a.accumulate)
    return S, derivative


def softmax(S: Array, visible: Array, a: Arithmetic, of: OfHead = _NONE) -> tuple[Array, Array]:
    """P and lse of one head's scores; hidden entries of P are 0."""
    S = np.where(visible, S, -np.inf)
    m = S.max(axis=1, keepdims=True, initial=a.accumulate(of.sink))
    P = np.where(visible, np.exp(S - m), 0)
    l = (P[:, ::-1] if a.reverse else P).sum(axis=1, keepdims=True)
    if of.sink != -np.inf:
        l = l + np.exp(a.accumulate(of.sink) - m)
    lse = np.where(m == -np.inf, m, m + np.log(l))  # ln of a sum of zeros
    return np.where(visible, P / l, 0), lse[:, 0]


def _gradients(
    Q: Array,
    K: Array,
    V: Array,
    dO: Array,
    dLSE: Array,
    visible: Array,
    p: Problem,
    a: Arithmetic,
    of: OfHead,
    bias: Array | None,
    Z: Array | float,
    modified: Callable[[Array], tuple[Any, Any]],
) -> tuple[Array, Array, Array, OfHead, Array]:
    """dQ of one head of q, what this head adds to dK and dV, and the gradients of its `OfHead` and of its scores."""
    S, derivative = scores(Q, K, p, a, of, bias, modified)
    visible = seen_of(S, visible, bias, of.sink)
    P, lse = softmax(S, visible, a, of)
    PZ = a.rounded(dropped(P, Z, a))
    O = a.rounded(a.product(PZ, V, visible))
    delta = (dO * O).sum(axis=1, keepdims=True) - dLSE
    dP = dropped(a.product(dO, V.T), Z, a)
    by_score = np.where(visible, P * (dP - delta), 0)
    dslope = -(by_score * distances(p).astype(a.accumulate)).sum() if p.alibi else 0
    dsink = 0 if of.sink == -np.inf else -(np.exp(a.accumulate(of.sink) - lse) * delta[:, 0]).sum()
    dS = a.rounded(np.where(visible, by_score * derivative, 0))
    dV = a.product(PZ.T, dO, visible.T)
    dQ = p.scale * a.product(dS, K, visible)
    dK = p.scale * a.product(dS.T, Q, visible.T)
    return dQ, dK, dV, OfHead(alibi_slopes=dslope, sink=dsink), by_score


def heads(p: Problem) -> Iterator[tuple[int, int, int]]:
    """(batch, head of q, head of k) of every head of q."""
    for b in range(p.batch):
        for h in range(p.heads_q):
            yield b, h, h * p.heads_k // p.heads_q


def visible_pairs(p: Problem) -> Array:
    """Which query (row) may see which key (column), as bounds have it."""
    visible = np.zeros((p.seqlen_q, p.seqlen_k), bool)
    for query in range(p.seqlen_q):
        visible[query, slice(*p.visible(query))] = True
    return visible
