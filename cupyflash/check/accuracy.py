"""The 2x rule: which error is rounding, and which is a mistake.

    max|got - exact| <= 2 * max|plain - exact| + u * max|exact|
    rms(got - exact) <= 2 * rms(plain - exact) + u * rms(exact)

`exact` is float64 attention, `plain` is attention written with plain matrix products in the same dtype
(`reference.plain_forward`, `reference.plain_backward`). The last term is one rounding in that dtype, with the unit
roundoff u = 2^-11 (fp16), 2^-8 (bf16), 2^-24 (fp32), 2^-53 (fp64); it is at least the smallest subnormal.

What fp32 arithmetic costs any tiled algorithm does not count: where errors do not obey the rule as they are, `Oracle`
takes from that of each element of got what `noise` says of it, and what is left must obey the rule. That is next to
nothing in fp16 and bf16, unless softmax is saturated or scores are huge.

The gradients of ALiBi's slopes, of sinks, of a bias and of what mods read obey the rule of the dtype that they are
computed from, even where they are stored in fp32; where they are stored in less, that of this dtype.

Errors of lse are divided by max(1, |exact|), each by its own, and `LSE_ROUNDINGS` roundings of fp32 are its last term.

NaN and inf come first: they must stand exactly where `exact` has them. A finite exact value that the dtype cannot hold
may become inf. Where plain is not finite although exact is, float64 alone decides: in such a row (the last dimension)
the errors may be `LONE_ROUNDINGS` roundings of the largest exact value, and no other row is judged differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from . import noise, reference
from .case import NUMPY_DTYPE
from .comparison import Comparison as Comparison
from .features import Features

Array = NDArray[Any]

UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24, "fp64": 2.0**-53}
DTYPE_NAME = {dtype: name for name, dtype in NUMPY_DTYPE.items()}
LIMITS = {name: ml_dtypes.finfo(dtype) for name, dtype in NUMPY_DTYPE.items()}
_PLAIN = Features()
LONE_ROUNDINGS = 16  # P, dS and the result are rounded, each of the former into sums of like terms; the rest is margin
LSE_ROUNDINGS = 16  # fast exp2 and log2 of the hardware: 2 ulp each, twice, and as much again for the sum


def compare(name: str, got: Array, exact: Array, plain: Array, dtype: str, noise: float | Array = 0.0) -> Comparison:
    """Judge `got` by the 2x rule.

    Args:
        name: what the arrays are called in messages.
        got: the result to judge, any float dtype.
        exact: float64, same shape.
        plain: plain attention in the same dtype, same shape.
        dtype: "fp16", "bf16", "fp32" or "fp64": what `got` was rounded to.
        noise: unavoidable absolute error, of each element if it is an array: so much of its error does not count.
    """
    got, exact, plain = (np.asarray(x).astype(np.float64) for x in (got, exact, plain))
    if got.shape != exact.shape:
        return _wrong_shape(name, got, exact)
    places = _, comparable = _places(got, exact, dtype)
    largest, rms = _max_rms(np.abs(np.where(comparable, exact, 0)))
    u, least = UNIT_ROUNDOFF[dtype], float(LIMITS[dtype].smallest_subnormal)
    eps = max(u * largest, least), max(u * rms, least)
    alone = (comparable & ~np.isfinite(plain)).any(axis=-1, keepdims=True)
    noise = noise + np.where(alone, (LONE_ROUNDINGS - 1) * eps[0], 0)
    return _judge(name, got, exact, plain, places, eps, noise)


def compare_lse(got: Array, exact: Array, plain: Array, dtype: str) -> Comparison:
    """The 2x rule for lse, fp32 (fp64 for fp64): errors are divided by max(1, |exact|) of their element.

    One rounding is too little for logarithms and powers in fp32: `eps` is `LSE_ROUNDINGS` of them.
    """
    got, exact, plain = (np.asarray(x).astype(np.float64) for x in (got, exact, plain))
    if got.shape != exact.shape:
        return _wrong_shape("lse", got, exact)
    precision = "fp64" if dtype == "fp64" else "fp32"
    eps = LSE_ROUNDINGS * UNIT_ROUNDOFF[precision]
    places = _places(got, exact, precision)
    return _judge("lse", got, exact, plain, places, (eps, eps), unit=np.fmax(1, np.abs(exact)))


def _judge(
    name: str,
    got: Array,
    exact: Array,
    plain: Array,
    places: tuple[Array, Array],
    eps: tuple[float, float],
    noise: float | Array = 0.0,
    unit: float | Array = 1.0,
) -> Comparison:
    """The rule with `eps` for max and for rms, in units of `unit`, where `_places` says."""
    misplaced, comparable = places
    error = np.maximum(_distance(got, exact, comparable & ~misplaced) - noise, 0) / unit
    plain_error = _distance(plain, exact, comparable & np.isfinite(plain)) / unit
    ours, theirs = (_max_rms(e) for e in (error, plain_error))
    bounds = 2 * theirs[0] + eps[0], 2 * theirs[1] + eps[1]
    reason = _reason(misplaced, ours, bounds)
    index = _worst(misplaced, error)
    values = (float("nan"), float("nan")) if index is None else (float(got[index]), float(exact[index]))
    return Comparison(name, not reason, *ours, *theirs, *bounds, index, *values, reason)


def _wrong_shape(name: str, got: Array, exact: Array) -> Comparison:
    nan = float("nan")
    reason = f"shape {got.shape}, expected {exact.shape}"
    return Comparison(name, False, nan, nan, nan, nan, nan, nan, None, nan, nan, reason)


class Oracle:
    """Exact and plain results of one problem, computed at first use and kept: judge any number of runs with it."""

    def __init__(
        self,
        problem: Problem,
        q: Array,
        k: Array,
        v: Array,
        dout: Array | None = None,
        dlse: Array | None = None,
        features: Features = _PLAIN,
        *,
        unrounded: tuple[Array, Array, Array] | None = None,
    ) -> None:
        """`unrounded`: in float64, what q, k and v are roundings of, where the call under test rounds them itself, or
        does not."""
        of = features
        self.problem, self._forward = problem, (q, k, v, problem, of)
        self._unrounded = unrounded or (q, k, v)
        self._backward = (
            np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype) if dout is None else dout,
            q,
            k,
            v,
            problem,
            dlse,
            of,
        )
        names = ["dq", "dk", "dv", *(f"d{name}" for name in of.learned)]
        self._dtypes = dict.fromkeys(names, problem.dtype)
        for name in () if of.mods is None else of.mods.learned:
            both = problem.dtype, DTYPE_NAME[of.mods.mod_arrays[name].dtype]
            self._dtypes[f"d{name}"] = max(both, key=lambda dtype: UNIT_ROUNDOFF[dtype])

    @cached_property
    def forward(self) -> tuple[Array, Array]:
        """Exact out and lse."""
        q, k, v = self._unrounded
        return reference.forward(q, k, v, *self._forward[3:])

    @cached_property
    def plain_forward(self) -> tuple[Array, Array]:
        """Plain out and lse."""
        return reference.plain_forward(*self._forward)

    @cached_property
    def backward(self) -> tuple[Array, ...]:
        """Exact dq, dk, dv, and those of what features bring."""
        return reference.backward(*self._backward)

    @cached_property
    def plain_backward(self) -> tuple[Array, ...]:
        """The same, plain."""
        return reference.plain_backward(*self._backward)

    @cached_property
    def noise(self) -> tuple[Array, tuple[Array, ...]]:
        """What does not count of the errors of out, and of the gradients."""
        return noise.noise(*self._backward)

    def judge_forward(self, out: Array, lse: Array) -> list[Comparison]:
        """Compare out (bshd, or packed as the problem) and lse."""
        dtype, exact, plain = self.problem.dtype, self.forward, self.plain_forward
        return [
            self._compare("out", dtype, out, exact[0], plain[0], lambda: self.noise[0]),
            compare_lse(lse, exact[1], plain[1], dtype),
        ]

    def judge_backward(self, *gradients: Array) -> list[Comparison]:
        """Compare dq, dk, dv (bshd, or packed as the problem) and, if they are given too, those of features."""
        results = zip(self._dtypes.items(), gradients, self.backward, self.plain_backward, strict=False)
        return [
            self._compare(name, dtype, got, exact, plain, partial(self._noise_of_gradient, i))
            for i, ((name, dtype), got, exact, plain) in enumerate(results)
        ]

    def _compare(
        self, name: str, dtype: str, got: Array, exact: Array, plain: Array, noise: Callable[[], Array]
    ) -> Comparison:
        """Without noise first: to compute it takes a third of the time, and few results need it."""
        found = compare(name, got, exact, plain, dtype)
        return found if found.passed else compare(name, got, exact, plain, dtype, noise())

    def _noise_of_gradient(self, i: int) -> Array:
        return self.noise[1][i]


def _places(got: Array, exact: Array, dtype: str) -> tuple[Array, Array]:
    """Where NaN or inf is missing or too much; where the difference of got and exact means something."""
    finite, largest = np.isfinite(exact), float(LIMITS[dtype].max)
    kind_differs = ~np.where(finite, np.isfinite(got), (got == exact) | (np.isnan(got) & np.isnan(exact)))
    overflows = finite & (np.abs(exact) / 0.99 > largest)
    with np.errstate(invalid="ignore"):  # inf where 0 must be
        not_large = ~(got * np.sign(exact) / 0.98 > largest)
    return np.where(overflows, not_large, kind_differs), finite & ~overflows


def _distance(a: Array, exact: Array, where: Array) -> Array:
    """abs(a - exact), 0 elsewhere."""
    return np.abs(np.subtract(a, exact, out=np.zeros_like(exact), where=where))


def _max_rms(error: Array) -> tuple[float, float]:
    largest = float(error.max(initial=0.0))
    if largest == 0:
        return 0.0, 0.0
    return largest, largest * float(np.sqrt(np.mean((error / largest) ** 2)))


def _reason(misplaced: Array, errors: tuple[float, float], bounds: tuple[float, float]) -> str:
    if misplaced.any():
        return f"NaN or inf missing or out of place in {int(misplaced.sum())} of {misplaced.size} values"
    names = [name for name, e, bound in zip(("max", "rms"), errors, bounds, strict=True) if not e <= bound]
    return f"{' and '.join(names)} error above the bound" if names else ""


def _worst(misplaced: Array, error: Array) -> tuple[int, ...] | None:
    if error.size == 0:
        return None
    flat = misplaced.argmax() if misplaced.any() else error.argmax()
    return tuple(int(i) for i in np.unravel_index(flat, error.shape))
