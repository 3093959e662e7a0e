"""What fp32 arithmetic (fp64 for fp64) costs any tiled algorithm, whatever the storage dtype: a bound for each element.

Next to the rounding of fp16 and bf16 it is nothing, unless softmax is saturated or scores are huge. With u the unit
roundoff of the arithmetic:

- Sums are taken in another order: 2 u times the sum of the magnitudes that they add up.
- An absolute error of a score is a relative error of P. d_i = |scale| |q_i| max_j |k_j| roundings come from the dot
  products in row i, where u is also the roundoff of the storage dtype (fp32, fp64): in fp16 and bf16 the rounding of P
  hides them. More are as large as lse: in the forward half of one, since what a row has in common cancels; in the
  backward, where P = exp(S - lse), those of the scale, of lse itself, and of S or of lse in powers of two.
- A softcap c is c tanh(x) = c - 2 c / (1 + e^2x), with an error of 4 u c, which joins d_i, and 4 u in its derivative.
- ALiBi takes |slope| D_ij from a score, D_ij = |i + seqlen_k - seqlen_q - j|, with an error of 4 u |slope| D_ij, which
  joins e_i.
- The gradient of a slope is one number of many rows, and the error of plain attention may be small there by chance. So
  what the rounding of O to the dtype does to it by delta does not count: r is 2^-11 or 2^-8 in 16 bits, and what stands
  below is more than three times its standard deviation.
- The gradient of a sink is such a number, too: of P_i = exp(sink - lse_i), with the error of e_i, and delta_i.
- A bias B_ij is added with an error of 2 u |B_ij|, which joins e_i. Its gradient has the bound E; of one that is
  broadcast, what is said of a slope's gradient holds: 2 r (sum_i (|dO_i O_i| P_ij)^2)^1/2 is added, over the rows
  that an element sums up (P_ij summed over the keys first, where those are broadcast).
- Each operation of a mod has an error of u times the score before and after it, and in the derivative, which also
  multiplies d_i. A mod whose terms are larger than these and cancel each other is not covered.
- The gradient of an element that mods read is a sum of E_ij by the derivatives r_ij by it, whose errors are those of a
  mod's operations and of the score that it is given; and what is said of a slope's gradient holds.
- dP - delta is a difference of two dot products, each with an error of s u times what it adds up: s = 4 for tensor
  cores, which truncate, else 1. It should be 0 where P is 0 or 1.

    noise(O)_ic = u (2 sum_j P_ij |V_jc| + max(|lse_i| / 2, d_i) std(O)_ic)
    std(O)_ic^2 = sum_j P_ij V_jc^2 - O_ic^2                what relative errors of P can do: sum_j P_ij |V_jc - O_ic|
                                                            is no larger

    e_i         = u (2 + 3 |lse_i| + d_i)
    D_ij        = sum_c |dO_ic V_jc| + sum_c |dO_ic O_ic|
    E_ij        = P_ij (e_i |dP_ij - delta_i| + s u D_ij)
    noise(dQ)   = |scale| E |K|       noise(dK) = |scale| E^T |Q|       noise(dV) = (e P)^T |dO|
    noise(dslope) = sum_ij E_ij D_ij + 2 r (sum_i (|dO_i O_i| sum_j P_ij D_ij)^2)^1/2      (E by the capped score)
    noise(dsink) = sum_i P_i (e_i |delta_i| + s u sum_c |dO_ic O_ic|) + 2 r (sum_i (|dO_i O_i| P_i)^2)^1/2

With dropout, P is Z P in noise(O), std(O) (whose V is Z V) and noise(dV), and dO V^T is Z dO V^T.

All are 0 where they would not be finite: there is nothing to be excused.
"""

# ruff: noqa: E741 (O and l are the paper's names)

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mods.description import read
from ..problem import Problem
from ..sequences import parts
from . import mods, reference
from .bias import add_head, add_part, broadcast, none_of, seen_of
from .features import Features, OfHead
from .reference import Arithmetic

Array = NDArray[Any]
Gradients = tuple[Array, ...]

_PLAIN = Features()
UNIT = {"fp16": 2.0**-24, "bf16": 2.0**-24, "fp32": 2.0**-24, "fp64": 2.0**-53}  # of the arithmetic
STORED = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24, "fp64": 2.0**-53}
HALF = ("fp16", "bf16")  # stored with fewer digits than computed, on tensor cores


def noise(
    dout: Array, q: Array, k: Array, v: Array, problem: Problem, dlse: Array | None = None, of: Features = _PLAIN
) -> tuple[Array, Gradients]:
    """The bounds for out, and for the gradients, each in its shape; arguments as in `reference.backward`."""
    of_mods = mods.none_of(of), mods.none_of(of)
    out, *found, learned, dbias, of_rows = _noise(dout, q, k, v, problem, dlse, of, of_mods)
    if of.bias is not None and of.bias.shape != (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k):
        dbias = dbias + 2 * STORED[problem.dtype] * np.sqrt(of_rows)
    bounds = [UNIT[problem.dtype] * x + 2 * STORED[problem.dtype] * np.sqrt(y) for x, y in zip(*of_mods, strict=True)]
    return out, (*found, *of.gathered(learned, dbias, [_finite(x) for x in bounds]))


def _noise(
    dout: Array, q: Array, k: Array, v: Array, problem: Problem, dlse: Array | None, of: Features,
    of_mods: tuple[list[Array], list[Array]],
) -> tuple[Array, ...]:  # fmt: skip
    """Of out, dq, dk, dv, the numbers of each head, a bias; and squares of what the rounding of O does to the last.
    Both of what mods read are added to `of_mods`, not yet in units of u."""
    dbias, of_rows = (none_of(of.bias, np.float64) for _ in range(2))
    learned = np.zeros((problem.batch, problem.heads_q, len(OfHead._fields)))
    out, dq, dk, dv = (np.zeros(x.shape) for x in (dout, q, k, v))
    if of.sequences is not None:
        for i, part in enumerate(parts(problem, of.sequences)):
            dlse_of = None if dlse is None else dlse[part.lse]
            own = dout[part.q], q[part.q], k[part.k], v[part.k], part.problem, dlse_of, of.part(problem, part)
            out[part.q], dq[part.q], dk[part.k], dv[part.k], learned[i : i + 1], *found = _noise(*own, of_mods)
            add_part(dbias, part, found[0])
            add_part(of_rows, part, found[1])
        return out, dq, dk, dv, learned, dbias, of_rows
    p, a, all_seen = problem, Arithmetic.exact(), reference.visible_pairs(problem)
    distance, biases = reference.distances(p), broadcast(of.added(p), p)
    for b, h, h_k in reference.heads(p):
        Q, dO, K, V = a.load(q[b, :, h]), a.load(dout[b, :, h]), a.load(k[b, :, h_k]), a.load(v[b, :, h_k])
        dLSE = np.zeros(p.seqlen_q) if dlse is None else a.load(dlse[b, h])
        with np.errstate(all="ignore"):
            of_head: Any = of.head(b, h), biases[b][h], partial(of.modified, p=p, b=b, h=h)
            S, derivative = reference.scores(Q, K, p, a, *of_head)
            visible = seen_of(S, of.seen(p, all_seen, b, h), biases[b][h], of_head[0].sink)
            P, lse = reference.softmax(S, visible, a, of_head[0])
            large = np.abs(np.where(lse == -np.inf, 0, lse))[:, None]
            dots = (p.dtype not in HALF) * abs(p.scale) * _norms(Q) * _norms(K).max(initial=0) + 4 * (p.softcap or 0)
            PZ = reference.dropped(P, Z := of.kept(p, b, h), a)
            O, squares = a.product(PZ, V, visible), a.product(PZ * Z, V * V, visible)
            std = np.sqrt(np.maximum(squares - O * O, 0))
            out[b, :, h] = 2 * a.product(PZ, np.abs(V), visible) + np.maximum(large / 2, dots) * std
            added, dots = _with_mods(_of_added(of_head, distance), dots, S, p.scale * (Q @ K.T), derivative, p)
            out[b, :, h] += a.product(PZ * added, np.abs(V), visible) + (P * added).sum(axis=1)[:, None] * np.abs(O)
            e = 2 + 3 * large + dots + added
            dq[b, :, h], dK, dV, by_score, gap = _gradients(Q, K, V, dO, dLSE, P, Z, O, e, visible, p, derivative)
            if of_mods[0]:
                _add_of_mods(of_mods, Q, K, P, by_score, gap, _norms(dO * O), dots, p, of, b, h)
            dslope = (by_score * distance).sum() + _of_delta(dO * O, (P * distance).sum(axis=1), p)
            learned[b, h] = OfHead(alibi_slopes=dslope, sink=_of_sink(of_head[0].sink - lse, dO * O, dLSE, large, p))
            add_head(dbias, b, h, by_score)
            add_head(of_rows, b, h, np.square(_norms(dO * O) * _along_keys(P, of.bias)))
            dk[b, :, h_k] += dK
            dv[b, :, h_k] += dV
    return *(UNIT[p.dtype] * _finite(x) for x in (out, dq, dk, dv, learned, dbias)), _finite(of_rows)


def _gradients(
    Q: Array,
    K: Array,
    V: Array,
    dO: Array,
    dLSE: Array,
    P: Array,
    Z: Array | float,
    O: Array,
    e: Array,
    visible: Array,
    p: Problem,
    derivative: Array | float,
) -> Gradients:
    """The bounds of one head of q in units of u, named as in the formulas; E by the score itself, and dP - delta where
    something is seen, come last."""
    a, s = Arithmetic.exact(), 4 if p.dtype in HALF else 1
    difference = reference.dropped(dO @ V.T, Z, a) - (dO * O).sum(axis=1, keepdims=True) + dLSE[:, None]
    D = reference.dropped(np.abs(dO) @ np.abs(V).T, Z, a) + np.abs(dO * O).sum(axis=1, keepdims=True)
    by_score = np.where(visible, P * (e * np.abs(difference) + s * D), 0)
    E = by_score * np.abs(derivative)
    if p.mods:
        E = E + _operations(p) * P * np.abs(difference) * (1 + np.abs(derivative))
    if p.softcap is not None:
        E = E + 4 * P * np.abs(difference)
    E = np.where(visible, E, 0)
    eP = np.where(visible, reference.dropped(e * P, Z, a), 0)
    dQ = abs(p.scale) * a.product(E, np.abs(K), visible)
    dK = abs(p.scale) * a.product(E.T, np.abs(Q), visible.T)
    return dQ, dK, a.product(eP.T, np.abs(dO), visible.T), by_score, np.where(visible, difference, 0)


def _add_of_mods(
    totals: tuple[list[Array], list[Array]], Q: Array, K: Array, P: Array, E: Array, gap: Array, dOO: Array,
    dots: Array, p: Problem, of: Features, b: int, h: int,
) -> None:  # fmt: skip
    """Add the bounds, by what mods read, of a head of q; `dots`: the error by dot products."""
    S, _ = reference.scores(Q, K, mods.before_mods(p), Arithmetic.exact())
    mods.add_bounds(totals, S, P, E, gap, dOO, _operations(p) * (1 + dots), p, of, b, h)


def _of_added(of_head: Any, distance: Array) -> Array:
    """The error of a score by what is added to it, a slope and a bias, in units of u."""
    of, bias, _ = of_head
    found = 4 * abs(np.float64(of.alibi_slopes)) * distance
    return found if bias is None else found + 2 * np.abs(_finite(bias.astype(np.float64)))


def _operations(p: Problem) -> int:
    """How often mods may round."""
    node = read(p.mods).score
    return 0 if node is None else node.size


def _with_mods(
    added: Array, dots: Array, S: Array, raw: Array, derivative: Array | float, p: Problem
) -> tuple[Array, Array]:
    """Of scores that mods made of raw ones: the error by what is added, mods too, and by dot products."""
    if not p.mods:
        return added, dots
    slope = _finite(np.abs(derivative))
    by_mods = _operations(p) * (_finite(np.abs(S)) + np.abs(raw) * (1 + slope))
    return added + by_mods, (dots * slope).max(axis=1, keepdims=True, initial=0)


def _along_keys(P: Array, bias: Array | None) -> Array:
    """P; of a bias that is the same for all keys its sum over them, in the first one."""
    if bias is None or (bias.shape[-1:] != (1,) and bias.ndim):
        return P
    found = np.zeros_like(P)
    found[:, :1] = P.sum(axis=1, keepdims=True)
    return found


def _of_delta(dOO: Array, weight: Array, p: Problem) -> Any:
    """What the rounding of O does to a sum of weighted deltas, in units of u."""
    return 2 * STORED[p.dtype] / UNIT[p.dtype] * np.sqrt(np.square(_norms(dOO)[:, 0] * weight).sum())


def _of_sink(score: Array, dOO: Array, dLSE: Array, large: Array, p: Problem) -> Any:
    """The bound of dsink of one head, in units of u; `score`: the sink less lse, `large`: |lse|, a column."""
    s, P, e = 4 if p.dtype in HALF else 1, np.exp(score), 2 + 3 * large[:, 0]
    return (P * (e * np.abs(dOO.sum(axis=1) - dLSE) + s * np.abs(dOO).sum(axis=1))).sum() + _of_delta(dOO, P, p)


def _norms(x: Array) -> Array:
    """Finite Euclidean norms of the rows, as a column."""
    return _finite(np.sqrt((x * x).sum(axis=1, keepdims=True)))


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0)
