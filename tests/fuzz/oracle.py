"""The exact results of a `Spec`, head by head in float64, and for each element how far rounding may take it.

Apart from `cupyflash.check.reference` on purpose: a mistake would have to be made twice. For the row of query i of one
head, over the keys j that it sees (`Spec.visible`):

    s_j = scale q . k_j     p_j = exp(s_j - lse)     lse = ln sum exp s_j       o = sum p_j v_j
    delta = do . o - dlse   ds_j = p_j (do . v_j - delta)
    dq = scale sum_j ds_j k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i p_ij do_i

With a softcap c, of x_j = scale q . k_j: s_j = c tanh(x_j / c), and ds_j is multiplied by g_j = 1 - tanh(x_j / c)^2.

With ALiBi s_j loses a |i + seqlen_k - seqlen_q - j| = a D_ij, and da = -sum_ij ds_ij D_ij, ds before the factor g.

A sink t is one more term exp(t) of the sum, and dt = -sum_i exp(t - lse_i) delta_i.

A bias is added to s_j; where it is -inf the key is not seen, and no key by a query whose s_j are then all -inf, unless
it has a sink. Its gradient is ds before the factor g, summed over the rows, keys, heads and sequences that share an
element. What a block mask hides is not seen either. A mask hides as a bias of -inf does where there is a bias, a block
mask or a mod, too, and where packed sequences share it along queries or keys; alone it hides as a block mask. So does a
mask_mod.

A mod makes f(s_j) of a capped score, before ALiBi (`modding`): g_j is multiplied by f', and what f reads has the
gradient sum ds f_r, ds before the factor g, by its derivative f_r. What a mod hides is not seen, and no key by a query
whose scores are then all -inf, unless it has a sink.

With dropout z_j, 0 or 1 / (1 - p), is a factor of p_j in o and dv and of do . v_j, here and in the bounds below. Where
it is 0, the two latter are 0 whatever they were; o is NaN where v_j is inf, and of a row whose p_j are NaN.

Bounds are of first order in two unit roundoffs: u of the dtype, to which P, dS, o and the results are rounded once
each, and e of the fp32 (fp64 for fp64) in which everything else is computed:

    rho_j   = (error of s_j and of its exponent, relative error of p_j)
            = e ((16 + d/4) |scale| sum |q||k_j| + 4 |s_j| + 4 |lse| + 16), and as much, weighted with p, from the sum
    |d o|   = u (sum p|v| + 2|o|) + sum (rho_j + e (16 + n/4)) p_j |v_j|
    |d delta| = sum_c |do_c| |d o_c| + e (16 + d/4) sum_c |do_c o_c|
    |d ds_j|  = p_j (|d delta| + e (16 + d/4) sum_c |do_c v_jc|) + |ds_j| (rho_j + 2 u)
    |d dq|  = |scale| sum_j |d ds_j| |k_j| + e (16 + n/4) |scale| sum_j |ds_j k_j| + u |dq|,  dk and dv likewise

With a softcap, |d x_j| = e ((16 + d/4) |scale| sum |q||k_j| + 4 |x_j|) takes the place of the first term of rho_j as
(g_j + |d x_j| / c) |d x_j| + 6 e c: tanh is 1 - 2 / (1 + e^2x), with an error of 6 e whatever x is. Each term of
|d ds_j| is then multiplied by g_j, and p_j |do . v_j - delta| |d g_j| is one more, where
|d g_j| = 2 |tanh| g_j |d x_j| / c + (|d x_j| / c)^2 + 12 e. Where the cap is reached g_j is less than its error, so the
errors of do . v_j - delta count here, too.

ALiBi adds 6 e |a| D_ij to rho_j. Neither ds nor da is rounded to the dtype:
|d da| = sum_ij (|d ds_ij| + e (16 + n/4) |ds_ij|) D_ij, with u = 0 in |d ds_ij| but for |d delta|.

P_i = exp(t - lse_i) has the error of a p_j whose score is t:
|d dt| = sum_i P_i (|d delta_i| + (rho_i + e (16 + n/4)) |delta_i|).

A bias B_j adds 4 e |B_j| to rho_j, and |d db| is |d da| without D_ij, with one rounding to its own dtype.

A sum of n terms in fp32 gets e (16 + n/4): tensor cores truncate after every 16 terms. P and dS in fp16 lose up to
2^-25 besides, where they are subnormal; in fp32, what is below 2^-126 may become 0. `MARGIN` stands for what first
order leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyflash.bias import becomes_blocks, own_of_mask
from cupyflash.check.accuracy import LIMITS, UNIT_ROUNDOFF
from cupyflash.check.cases import Inputs

from . import modding
from .dropping import factors
from .spec import Spec

Array = NDArray[Any]
MARGIN = 1.25
# A key with more than so many times the weight of all others together has P = 1, which is not rounded: the sum of |d o|
# leaves it out. (OnlineSoftmax::kMaxP: what P may be before the maximum in use follows.)
DOMINANT = 64


@dataclass
class Bounded:
    """Exact values and how far from them a result may be."""

    exact: Array
    bound: Array


class Rounding:
    """The constants of a dtype."""

    def __init__(self, dtype: str) -> None:
        half = dtype in ("fp16", "bf16")
        self.u = MARGIN * UNIT_ROUNDOFF[dtype]  # of a result
        self.inner = self.u if half else 0.0  # of P and dS
        self.e = MARGIN * UNIT_ROUNDOFF["fp64" if dtype == "fp64" else "fp32"]
        self.flushed = 0.0 if dtype == "fp64" else 2.0**-126  # fp32 below this may count as 0
        self.tiny = max(float(LIMITS[dtype].smallest_subnormal), self.flushed)
        self.lost = 2.0**-25 if dtype == "fp16" else self.flushed  # of P and dS

    def sum(self, n: Any) -> Any:
        return self.e * (16 + n / 4)


class OfHead(NamedTuple):
    """What features bring to one head of q; None: they are not given.

    Attributes:
        slope: ALiBi's; 0 without.
        sink: -inf without.
        bias: (seqlen_q, seqlen_k); where a mask hides, -inf, unless it is alone.
        shown: (seqlen_q, seqlen_k), what a block mask lets see, or a mask alone.
        Z: (seqlen_q, seqlen_k), dropout's factors; 1 without.
        mod: what becomes of its scores.
    """

    slope: float
    sink: float
    bias: Array | None
    shown: Array | None
    Z: Array
    mod: modding.OfHead | None


class Head:
    """P, O and lse of one head of q, with their bounds: (seqlen_q, seqlen_k), (seqlen_q, d), (seqlen_q,)."""

    def __init__(self, s: Spec, r: Rounding, Q: Array, K: Array, V: Array, of: OfHead) -> None:
        self.slope, self.d_slope = np.ones((s.sq, s.sk)), np.zeros((s.sq, s.sk))  # g
        self.Z, self.sink = of.Z, of.sink
        self.d_sink = r.e * (8 * abs(of.sink) + 16) if of.sink > -np.inf else 0.0
        self.reads: tuple[modding.Read, ...] = ()  # of the scores of keys that are shown
        self.shown = _shown(s, of)
        score, d_score = self._scores(s, r, Q, K, of)
        may_hide = (of.bias is not None or of.mod is not None) and of.sink == -np.inf
        self.seen = self.shown & ~(np.isneginf(score).all(axis=1, keepdims=True) & may_hide)
        self._weigh(r, score, d_score)
        self._sum_up(r, V)

    def _scores(self, s: Spec, r: Rounding, Q: Array, K: Array, of: OfHead) -> tuple[Array, Array]:
        """Scores, -inf where a key is not shown, and their errors."""
        score = s.factor * (Q @ K.T)
        d_score = r.sum(s.d) * abs(s.factor) * (np.abs(Q) @ np.abs(K).T)
        if s.softcap is not None:
            score, d_score = self._capped(s.softcap, r, score, d_score)
        if of.mod is not None:
            score, d_score = self._modded(of.mod.form(score, d_score, r.e))
        if s.alibi:
            bias = of.slope * distances(s)
            score, d_score = score - bias, d_score + 6 * r.e * np.abs(bias)
        if of.bias is not None:
            score, d_score = score + of.bias, d_score + 4 * r.e * np.abs(of.bias)
        return np.where(self.shown, score, -np.inf), d_score

    def _weigh(self, r: Rounding, score: Array, d_score: Array) -> None:
        """P and lse."""
        seen, has_sink = self.seen, self.sink > -np.inf
        sees = seen.any(axis=1)
        top = np.maximum(score.max(axis=1, initial=-np.inf), self.sink)  # NaN if a score is
        weight = np.where(seen, np.exp(score - top[:, None]), 0)
        total = weight.sum(axis=1) + (np.exp(self.sink - top) if has_sink else 0)
        self.P = np.where(seen, weight / total[:, None], 0)
        lse = np.where(top == -np.inf, top, top + np.log(total))
        size = np.abs(lse)
        rho = d_score + r.e * (4 * np.abs(score) + 4 * size[:, None] + 16)
        rho = np.where(np.isfinite(score), np.minimum(rho, 100), 0)
        of_sink = np.exp(self.sink - lse + self.d_sink + 4 * r.e * size) if has_sink else 0.0
        common = np.where(np.isfinite(lse), np.log((self.P * np.exp(rho)).sum(axis=1) + of_sink), 0)
        self.lse = np.where(sees, lse, self.sink)
        self.dlse = np.where(sees, common + r.e * (4 * size + 32), self.d_sink)
        self.rho = np.where(seen, np.expm1(rho + self.dlse[:, None]), 0)

    def _sum_up(self, r: Rounding, V: Array) -> None:
        """O."""
        P, seen, n = self.P, self.seen, self.seen.sum(axis=1, keepdims=True)
        is_dominant = P > DOMINANT / (DOMINANT + 1)
        rounded, rest = np.where(is_dominant, 0, P), 1 - np.where(is_dominant, P, 0).sum(axis=1, keepdims=True)
        error = np.where(seen, P * (self.rho + r.sum(n)) + r.lost, 0)
        P, rounded, error = (self.Z * x for x in (P, rounded, error))
        self.O, size = _product(P, V, seen), np.abs(V)
        dO = r.inner * (_product(rounded, size, seen) + rest * np.abs(self.O)) + r.u * np.abs(self.O) + r.tiny
        self.dO = np.where(n > 0, dO + _product(error, size, seen), 0)

    def _capped(self, c: float, r: Rounding, x: Array, d_x: Array) -> tuple[Array, Array]:
        """Scores and their errors; keeps the derivative."""
        t = np.tanh(x / c)
        self.slope = slope = 1 - t * t
        off = np.where(np.isfinite(x), d_x + 4 * r.e * np.abs(x), 0) / c
        self.d_slope = 2 * np.abs(t) * slope * off + off * off + 12 * r.e
        return c * t, c * ((slope + off) * off + 6 * r.e)

    def _modded(self, formed: modding.Formed) -> tuple[Array, Array]:
        """Scores and their errors; keeps the derivative and what is read."""
        before, d_before = self.slope, self.d_slope
        self.slope = before * formed.slope
        self.d_slope = (before + d_before) * formed.d_slope + np.abs(formed.slope) * d_before
        self.reads = formed.reads
        return formed.scores, formed.d_scores


Heads = dict[tuple[int, int], Head]


def _shown(s: Spec, of: OfHead) -> Array:
    """Which keys each query sees, unless all of its scores are -inf."""
    keys, (first, end) = np.arange(s.sk), s.visible.T[:, :, None]
    shown = (first <= keys) & (keys < end)
    if of.bias is not None:
        shown &= ~np.isneginf(of.bias)
    if of.shown is not None:
        shown &= of.shown
    if of.mod is not None:
        shown &= of.mod.shown(s.sq, s.sk)
    return shown


def distances(s: Spec) -> Array:
    """D: of each key from each query's own position."""
    return np.abs(np.arange(s.sq)[:, None] + s.sk - s.sq - np.arange(s.sk)).astype(np.float64)


def _slopes(s: Spec, x: Inputs) -> Array:
    """Of each sequence and head of q; zeros where there are none."""
    batch = len(s.lengths) if s.packed else s.batch
    given = x.features.alibi_slopes
    slopes = np.zeros(()) if given is None else given.astype(np.float64)
    return np.broadcast_to(slopes, (batch, s.heads * s.group))


def _of_head(s: Spec, x: Inputs, slope: float, h: int, sequence: int, shape: tuple[int, int]) -> OfHead:
    """What features bring to head h of q of a sequence of so many queries and keys."""
    of = x.features
    has_tiles = of.mask is not None and becomes_blocks(own_of_mask(of.mask.shape), bool(s.packed))
    is_alone = has_tiles and of.bias is None and of.mods is None and not s.blocks
    bias = of.bias
    if of.mask is not None and not is_alone:
        bias = np.where(of.mask, 0.0 if of.bias is None else of.bias, -np.inf)
    if bias is not None:
        bias = np.broadcast_to(_of_scores(bias, sequence, h, shape), shape).astype(np.float64)
    shown = s.seen() if s.blocks else of.mask if is_alone else None
    shown = None if shown is None else np.broadcast_to(_of_scores(shown, sequence, h, shape), shape)
    sink = -np.inf if of.sink is None else float(of.sink[h])
    Z = np.ones(shape) if of.dropout_seed is None else factors(of.dropout_seed, s.dropout, sequence, h, shape)
    mod = None if of.mods is None else modding.OfHead(modding.MODS[s.mods], of.mods.mod_arrays, sequence, h)
    if mod and modding.MODS[s.mods].score_mod is None and bias is None and not (s.blocks or s.packed):
        shown, mod = mod.shown(*shape), None  # hides as a block mask, too
    return OfHead(slope, sink, bias, shown, Z, mod)


def _of_scores(bias: Array, sequence: int, h: int, shape: tuple[int, int]) -> Array:
    """What a bias, or its gradient, has of the queries and keys of one head: a view, of 1 where they share it."""
    whole = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    found: Array = whole[min(sequence, whole.shape[0] - 1), min(h, whole.shape[1] - 1)]
    queries, keys = (slice(None if n == 1 else end) for n, end in zip(found.shape, shape, strict=True))
    return found[queries, keys]


def _add(total: Array, sequence: int, h: int, dS: Array) -> None:
    """Add what a head gives to the gradient of a bias, or to its bound."""
    target = _of_scores(total, sequence, h, dS.shape)
    target += dS.sum(axis=tuple(axis for axis in (0, 1) if target.shape[axis] != dS.shape[axis]), keepdims=True)


def dropped(X: Array, Z: Array) -> Array:
    """Z * X, and 0 where Z is."""
    return np.where(Z > 0, Z * X, 0)


def _product(W: Array, X: Array, seen: Array) -> Array:
    """W X over the pairs that are seen; term by term what is not finite, so that no library takes a short cut.

    W is 0 where nothing is seen.
    """
    if np.isfinite(X).all() and np.isfinite(W).all():
        return W @ X
    is_odd = seen & ~(np.isfinite(W) & np.isfinite(X).all(axis=1))
    total: Array = np.where(is_odd, 0, W) @ np.where(np.isfinite(X), X, 0)
    for j in np.flatnonzero(is_odd.any(axis=0)):
        rows = is_odd[:, j]
        total[rows] += W[rows, j, None] * X[j]
    return total


def _whole(s: Spec, x: Inputs) -> Inputs:
    """Packed arrays as those of a batch of one."""
    arrays = {name: a[None] for name, a in zip(x._fields[:5], x[:5], strict=True) if s.packed and a is not None}
    return x._replace(**arrays)


def _given_back(s: Spec, *found: Bounded) -> tuple[Bounded, ...]:
    return tuple(Bounded(x.exact[0], x.bound[0]) for x in found) if s.packed else found


def heads(s: Spec, x: Inputs) -> Heads:
    """By sequence and head of q; `forward` and `backward` make their own unless they are given these."""
    r, x = Rounding(s.dtype), _whole(s, x)
    found, slopes = {}, _slopes(s, x)
    with np.errstate(all="ignore"):
        for i, (b, rows, keys, alone) in enumerate(s.parts()):
            for h in range(s.shapes[0][2]):
                of = (x.q[b, rows, h], x.k[b, keys, h // s.group], x.v[b, keys, h // s.group])
                more = _of_head(s, x, slopes[i, h], h, i, (alone.sq, alone.sk))
                found[i, h] = Head(alone, r, *(a.astype(np.float64) for a in of), more)
    return found


def forward(s: Spec, x: Inputs, made: Heads | None = None) -> tuple[Bounded, ...]:
    """out and lse."""
    batch, sq, count, _ = s.shapes[0]
    out = Bounded(np.zeros(s.shapes[0]), np.zeros(s.shapes[0]))
    lse = Bounded(np.full((batch, count, sq), -np.inf), np.zeros((batch, count, sq)))
    made = made or heads(s, x)
    for i, (b, rows, *_) in enumerate(s.parts()):
        for h in range(count):
            head = made[i, h]
            out.exact[b, rows, h], out.bound[b, rows, h] = head.O, head.dO
            lse.exact[b, h, rows], lse.bound[b, h, rows] = head.lse, head.dlse
    return _given_back(s, out, lse)


def backward(s: Spec, x: Inputs, stored: Array, made: Heads | None = None) -> tuple[Bounded, ...]:
    """dq, dk, dv, and those of what features bring.

    `stored`: the out that the backward was given; delta follows from it where it is not finite.
    """
    made = made or heads(s, x)
    r, x = Rounding(s.dtype), _whole(s, x)
    stored = stored[None] if s.packed else stored
    dq, dk, dv = (Bounded(np.zeros(shape), np.zeros(shape)) for shape in (s.shapes[0], s.shapes[1], s.shapes[1]))
    slopes = _slopes(s, x)
    dslopes = Bounded(np.zeros(slopes.shape), np.zeros(slopes.shape))
    dsink = Bounded(np.zeros(s.heads * s.group), np.zeros(s.heads * s.group))
    bias = x.features.bias
    dbias = [] if bias is None else [Bounded(np.zeros(bias.shape), np.zeros(bias.shape))]
    of_mods = modding.Sums(x.features.mods)
    with np.errstate(all="ignore"):
        for i, (b, rows, keys, alone) in enumerate(s.parts()):
            for h in range(s.heads * s.group):
                at_q, at_k = (b, rows, h), (b, keys, h // s.group)
                arrays = (x.q[at_q], x.k[at_k], x.v[at_k], x.dout[at_q], stored[at_q])
                Q, K, V, G, O = (a.astype(np.float64) for a in arrays)  # noqa: E741 (the paper's name)
                dlse = np.zeros(alone.sq) if x.dlse is None else x.dlse[b, h, rows].astype(np.float64)
                head = made[i, h]
                *found, by_score = _gradients(alone, r, head, Q, K, V, G, O, dlse)
                for read in head.reads:
                    of_mods.add(read, head.shown, by_score.exact, by_score.bound)
                for total in dbias:
                    _add(total.exact, i, h, by_score.exact)
                    _add(total.bound, i, h, by_score.bound)
                targets = (dq, at_q), (dk, at_k), (dv, at_k), (dslopes, (i, h)), (dsink, h)
                for (target, at), one in zip(targets, found, strict=True):
                    target.exact[at] += one.exact
                    target.bound[at] += one.bound
        for target in (dq, dk, dv):
            target.bound += r.u * np.abs(target.exact) + r.tiny
    learned: list[Bounded] = []
    if x.features.alibi_slopes is not None:
        if s.alibi == 1:
            dslopes = Bounded(dslopes.exact.sum(axis=0), dslopes.bound.sum(axis=0))
        learned.append(dslopes)
    if x.features.sink is not None:
        learned.append(dsink)
    learned = [Bounded(a.exact, a.bound + 32 * r.e * np.abs(a.exact) + r.tiny) for a in learned]
    if bias is not None:
        u = 0.0 if bias.dtype.itemsize > 2 else r.u
        exact, bound = dbias[0].exact, dbias[0].bound
        learned.append(Bounded(exact, bound + (u + 32 * r.e) * np.abs(exact) + r.tiny))
    with np.errstate(all="ignore"):
        learned += [Bounded(*of) for of in of_mods.found(r.e)]
    return *_given_back(s, dq, dk, dv), *learned


def _gradients(
    s: Spec, r: Rounding, head: Head, Q: Array, K: Array, V: Array, G: Array, stored: Array, dlse: Array
) -> tuple[Bounded, ...]:
    """What one head of q gives to dq, dk, dv, dslopes, dsink and a bias, less the rounding of the results."""
    P, seen, rho, Z, sink = head.P, head.seen, head.rho, head.Z, head.sink
    delta = (G * head.O).sum(axis=1) - dlse
    delta = np.where(np.isfinite(delta), delta, (G * stored).sum(axis=1) - dlse)[:, None]
    d_delta = (np.abs(G) * (head.dO + r.sum(s.d) * np.abs(head.O))).sum(axis=1) + 4 * r.e * np.abs(dlse)
    dP, d_dP = (dropped(x, Z) for x in (G @ V.T, r.sum(s.d) * (np.abs(G) @ np.abs(V).T)))
    difference = dP - delta
    dS = np.where(seen, P * head.slope * difference, 0)
    E = P * head.slope * (d_delta[:, None] + d_dP)
    E += np.abs(dS) * (rho + 2 * r.inner)
    if s.softcap is not None or s.mods:
        E += P * head.d_slope * (np.abs(difference) + d_delta[:, None] + d_dP)
    E += r.lost * (1 + np.abs(difference))
    E = np.where(seen, E, 0)
    n_keys, n_queries = r.sum(s.sk), r.sum(s.sq * s.group)
    by_score = np.where(seen, P * difference, 0)
    d_score = P * (d_delta[:, None] + d_dP) + np.abs(by_score) * (rho + n_queries)
    d_score = np.where(seen, d_score + r.lost * (1 + np.abs(difference)), 0)
    D = distances(s)
    d_P = np.where(seen, P * (rho + r.inner + n_queries) + r.lost, 0)
    PZ, d_P = dropped(P, Z), dropped(d_P, Z)
    c = s.factor
    of_sink = (0.0, 0.0) if sink == -np.inf else _of_sink(head, delta[:, 0], d_delta, r, n_queries)
    return (
        Bounded(c * _product(dS, K, seen), abs(c) * _product(E + n_keys * np.abs(dS), np.abs(K), seen)),
        Bounded(
            c * _product(dS.T, Q, seen.T), abs(c) * _product((E + n_queries * np.abs(dS)).T, np.abs(Q), seen.T)
        ),
        Bounded(_product(PZ.T, G, seen.T), _product(d_P.T, np.abs(G), seen.T)),
        Bounded(-(by_score * D).sum(), (d_score * D).sum()),
        Bounded(*of_sink),
        Bounded(by_score, d_score),
    )  # fmt: skip


def _of_sink(head: Head, delta: Array, d_delta: Array, r: Rounding, n_queries: float) -> tuple[Any, Any]:
    """What one head of q gives to dsink, and its bound."""
    P = np.exp(head.sink - head.lse)
    rho = np.expm1(np.minimum(head.d_sink + 4 * r.e * np.abs(head.lse) + head.dlse, 100)) + n_queries
    return -(P * delta).sum(), (P * d_delta + (rho * P + r.flushed) * np.abs(delta)).sum()


def judge(name: str, got: Array, expected: Bounded, dtype: str) -> str:
    """ "" if every element is right, else what is wrong with the worst one."""
    got, exact = np.asarray(got).astype(np.float64), expected.exact
    if got.shape != exact.shape:
        return f"{name}: shape {got.shape}, expected {exact.shape}"
    largest = float(LIMITS[dtype].max)
    with np.errstate(all="ignore"):
        may_overflow = np.isfinite(exact) & (np.abs(exact) + expected.bound > 0.99 * largest)
        same_kind = (np.isnan(got) == np.isnan(exact)) & (np.isinf(got) == np.isinf(exact))
        same_kind &= ~np.isinf(exact) | (got == exact)
        error = np.abs(got - exact)
        near = np.where(np.isfinite(exact), error <= expected.bound, same_kind)
        wrong = ~np.where(may_overflow, near | (np.isinf(got) & (np.sign(got) == np.sign(exact))), near)
    if not wrong.any():
        return ""
    with np.errstate(all="ignore"):
        share = np.where(wrong, np.nan_to_num(error / expected.bound, nan=np.inf), 0)
    at = tuple(int(i) for i in np.unravel_index(share.argmax(), share.shape))
    return (
        f"{name}: {int(wrong.sum())} of {wrong.size} wrong, worst at {at}: got {got[at]:.8g}, exact {exact[at]:.8g}, "
        f"bound {expected.bound[at]:.3g}"
    )
