"""The 2x rule: which error is rounding, and which is a mistake.

    max|got - exact| <= 2 * max|plain - exact| + eps          and the same for the root mean square

`exact` is float64 attention, `plain` is attention written with plain matrix products in the same dtype
(`reference.plain_forward`, `reference.plain_backward`). `eps` is one rounding of the largest exact value in that dtype:
u * max|exact| with the unit roundoff u = 2^-11 (fp16), 2^-8 (bf16), 2^-24 (fp32), 2^-53 (fp64), at least the smallest
subnormal. `Oracle` adds what fp32 arithmetic costs any tiled algorithm (`forward_noise`, `gradient_noise`): next to
nothing in fp16 and bf16, unless softmax is saturated or scores are huge.

NaN and inf come first: they must stand exactly where `exact` has them. A finite exact value that the dtype cannot hold
may become inf. Where plain is not finite although exact is, float64 alone decides: the bound is then
`LONE_ROUNDINGS` roundings of the largest exact value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import reference
from .cases import NUMPY_DTYPE
from .problem import Problem

Array = NDArray[Any]

UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24, "fp64": 2.0**-53}
LIMITS = {name: ml_dtypes.finfo(dtype) for name, dtype in NUMPY_DTYPE.items()}
LONE_ROUNDINGS = 16  # P, dS and the result are rounded, each of the former into sums of like terms; the rest is margin
LSE_ROUNDINGS = 16  # fast exp2 and log2 of the hardware: 2 ulp each, twice, and as much again for the sum


@dataclass(frozen=True)
class Comparison:
    """One result against its exact value.

    Attributes:
        name: out, lse, dq, dk or dv.
        passed: whether the rule holds.
        max_error, rms_error: of the result; where exact is finite and the dtype can hold it.
        plain_max_error, plain_rms_error: of plain attention, at the same places.
        max_bound, rms_bound: what the errors may be at most.
        index: where the result is worst, None if it is empty. A misplaced NaN or inf is worse than any error.
        got, exact: both values there.
        reason: "" or, in words, why it failed.
    """

    name: str
    passed: bool
    max_error: float
    rms_error: float
    plain_max_error: float
    plain_rms_error: float
    max_bound: float
    rms_bound: float
    index: tuple[int, ...] | None
    got: float
    exact: float
    reason: str = ""

    @property
    def ratio(self) -> float:
        """The larger of our errors (max, rms) divided by those of plain attention; 0 without any error."""
        pairs = ((self.max_error, self.plain_max_error), (self.rms_error, self.plain_rms_error))
        return max(0.0 if ours == 0 else ours / plain if plain else float("inf") for ours, plain in pairs)

    @property
    def share(self) -> float:
        """The larger of error / bound (max, rms): how much of what is allowed was used."""
        pairs = ((self.max_error, self.max_bound), (self.rms_error, self.rms_bound))
        return max(ours / bound for ours, bound in pairs)

    def __str__(self) -> str:
        text = (
            f"{self.name}: max {self.max_error:.2e} (plain {self.plain_max_error:.2e}, bound {self.max_bound:.2e}), "
            f"rms {self.rms_error:.2e} (plain {self.plain_rms_error:.2e}, bound {self.rms_bound:.2e})"
        )
        if self.index is not None:
            text += f", worst at {self.index}: got {self.got:.8g}, exact {self.exact:.8g}"
        return text if self.passed else f"{text}; FAILED: {self.reason}"


def compare(name: str, got: Array, exact: Array, plain: Array, dtype: str, noise: float = 0.0) -> Comparison:
    """Judge `got` by the 2x rule.

    Args:
        name: what the arrays are called in messages.
        got: the result to judge, any float dtype.
        exact: float64, same shape.
        plain: plain attention in the same dtype, same shape.
        dtype: "fp16", "bf16", "fp32" or "fp64": what `got` was rounded to.
        noise: unavoidable absolute error, added to both bounds.
    """
    got, exact, plain = (np.asarray(x).astype(np.float64) for x in (got, exact, plain))
    if got.shape != exact.shape:
        nan = float("nan")
        reason = f"shape {got.shape}, expected {exact.shape}"
        return Comparison(name, False, nan, nan, nan, nan, nan, nan, None, nan, nan, reason)
    misplaced, comparable = _places(got, exact, dtype)
    alone = comparable & ~np.isfinite(plain)
    error = _distance(got, exact, comparable & ~misplaced)
    plain_error = _distance(plain, exact, comparable & ~alone)
    largest = float(np.abs(exact).max(initial=0.0, where=comparable))
    eps = max(UNIT_ROUNDOFF[dtype] * largest, float(LIMITS[dtype].smallest_subnormal))
    slack = noise + (LONE_ROUNDINGS * eps if alone.any() else eps)
    ours, theirs = (_max_rms(e) for e in (error, plain_error))
    bounds = 2 * theirs[0] + slack, 2 * theirs[1] + slack
    reason = _reason(misplaced, ours, bounds)
    index = _worst(misplaced, error)
    values = (float("nan"), float("nan")) if index is None else (float(got[index]), float(exact[index]))
    return Comparison(name, not reason, *ours, *theirs, *bounds, index, *values, reason)


def compare_lse(got: Array, exact: Array, plain: Array, dtype: str) -> Comparison:
    """The 2x rule for lse, fp32 (fp64 for fp64), with `LSE_ROUNDINGS` roundings of its magnitude, at least 1."""
    precision = _lse_dtype(dtype)
    noise = LSE_ROUNDINGS * UNIT_ROUNDOFF[precision] * max(1.0, _largest(exact))
    return compare("lse", got, exact, plain, precision, noise)


def forward_noise(oracle: Oracle) -> float:
    """Error of out from fp32 arithmetic (fp64 for fp64) in another order, whatever the storage dtype.

    With u its unit roundoff: 2 u max|V| from the sum of P V, or u / 2 max|lse| max|V| from the scores where they are
    large, since their absolute errors are relative errors of P. Next to fp16 and bf16 the first is nothing.
    """
    u = UNIT_ROUNDOFF[_lse_dtype(oracle.problem.dtype)]
    return max(2.0, _largest(oracle.forward[1]) / 2) * u * _largest(oracle.v)


def gradient_noise(oracle: Oracle) -> tuple[float, float, float]:
    """Error of dq, dk and dv from recomputation in fp32 (fp64 for fp64), whatever the storage dtype.

    With u the unit roundoff of fp32, and s = 4 where tensor cores sum, which truncate, else 1:

    - ``dP - delta`` is a difference of dot products. Where P is 0 or 1 it should be 0 and is s u |dO| |V| instead,
      multiplied by K and Q on its way to dq and dk. Invisible unless softmax is saturated.
    - ``P = exp(S - lse)`` cannot be better than its argument: relative error 2 s u |lse|. Invisible unless scores are
      huge.
    """
    o, p = oracle, oracle.problem
    u, s = UNIT_ROUNDOFF[_lse_dtype(p.dtype)], 4 if p.dtype in ("fp16", "bf16") else 1
    difference = s * u * abs(p.scale) * _largest_row(o.dout) * _largest_row(o.v)
    rows = (p.seqlen_q * p.heads_q / p.heads_k) ** 0.5  # independent errors add up in each row of dk
    dq, dk, dv = (2 * s * u * _largest(o.forward[1]) * _largest(x) for x in o.backward)
    return dq + difference * _largest(o.k), dk + difference * rows * _largest(o.q), dv


class Oracle:
    """Exact and plain results of one problem, computed at first use and kept: judge any number of runs with it."""

    def __init__(
        self, problem: Problem, q: Array, k: Array, v: Array, dout: Array | None = None, dlse: Array | None = None
    ) -> None:
        self.problem, self.q, self.k, self.v, self.dlse = problem, q, k, v, dlse
        self.dout = np.zeros_like(q) if dout is None else dout

    @cached_property
    def forward(self) -> tuple[Array, Array]:
        """Exact out and lse."""
        return reference.forward(self.q, self.k, self.v, self.problem)

    @cached_property
    def plain_forward(self) -> tuple[Array, Array]:
        """Plain out and lse."""
        return reference.plain_forward(self.q, self.k, self.v, self.problem)

    @cached_property
    def backward(self) -> tuple[Array, Array, Array]:
        """Exact dq, dk, dv."""
        return reference.backward(self.dout, self.q, self.k, self.v, self.problem, self.dlse)

    @cached_property
    def plain_backward(self) -> tuple[Array, Array, Array]:
        """Plain dq, dk, dv."""
        return reference.plain_backward(self.dout, self.q, self.k, self.v, self.problem, self.dlse)

    def judge_forward(self, out: Array, lse: Array) -> list[Comparison]:
        """Compare out (bshd) and lse."""
        dtype, exact, plain = self.problem.dtype, self.forward, self.plain_forward
        return [
            compare("out", out, exact[0], plain[0], dtype, forward_noise(self)),
            compare_lse(lse, exact[1], plain[1], dtype),
        ]

    def judge_backward(self, dq: Array, dk: Array, dv: Array) -> list[Comparison]:
        """Compare dq, dk and dv (bshd)."""
        names, noise = ("dq", "dk", "dv"), gradient_noise(self)
        results = zip(names, (dq, dk, dv), self.backward, self.plain_backward, noise, strict=True)
        return [compare(n, got, exact, plain, self.problem.dtype, e) for n, got, exact, plain, e in results]


def _lse_dtype(dtype: str) -> str:
    return "fp64" if dtype == "fp64" else "fp32"


def _places(got: Array, exact: Array, dtype: str) -> tuple[Array, Array]:
    """Where NaN or inf is missing or too much; where the difference of got and exact means something."""
    kind_differs = (np.isnan(got) != np.isnan(exact)) | (np.isposinf(got) != np.isposinf(exact))
    kind_differs |= np.isneginf(got) != np.isneginf(exact)
    finite, largest = np.isfinite(exact), float(LIMITS[dtype].max)
    overflows = finite & (np.abs(exact) / 0.99 > largest)
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


def _largest(x: Array) -> float:
    """Largest finite magnitude."""
    x = np.abs(x.astype(np.float64))
    return float(x.max(initial=0.0, where=np.isfinite(x)))


def _largest_row(x: Array) -> float:
    """Largest finite Euclidean norm along the last dimension."""
    x = x.astype(np.float64)
    return _largest(np.sqrt((x * x).sum(axis=-1)))
