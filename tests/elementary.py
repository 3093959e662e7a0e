"""Functions of fp32 that kernels have (kernels_cu/tile/elementary.cuh), and what mods make of them with their slopes
(kernels_cu/attention/mods.cuh), on numbers of all sizes, beside float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAME, THREADS = "elementary", 128
NUMBERS = 3.0, 7.0, 20.0, 50.0, 0.1, 0.088388346  # that are divided by, known to the compiler
POWERS, KNOWN = (0.5, 1.0, 1.5), (0.5, 0.75, 1.5, -0.3, -0.5, -2.25, 2.75, 3.75, 3.9)
Exact = Callable[[Any, Any], Any]


def _quotient(b: float) -> Exact:
    return lambda x, y: x / np.float32(b)


def _power(b: float) -> Exact:
    return lambda x, y: np.power(x, np.full_like(x, np.float32(b)))  # x ** 0.5 would be sqrt(x), NaN of -inf


def _times(x: Any, factor: float) -> Any:
    return (abs(x.astype(np.float32)) * np.float32(factor)).astype(np.float64)


def _tiny(x: Any) -> Any:
    return _times(x, 1e-38)


def _slope(b: float) -> Exact:
    b = float(np.float32(b))
    return lambda x, y: np.where(np.isnan(x), x, b * abs(x) ** (b - 1))


_DUAL, _SIZE, _CONSTANT = "mods::Dual(x, 1.f)", "mods::Dual(fabsf(x), 1.f)", "mods::Dual(0.f * fabsf(x), 0.f)"
_TINY, _HUGE = "mods::Dual(fabsf(x) * 1e-38f, 1.f)", "mods::Dual(fabsf(x) * 1e30f, 1.f)"
# By name: in C++ and in float64, of x and y; how many units in the last place it errs at most.
FUNCTIONS: dict[str, tuple[str, Exact, float]] = {
    "tangent": ("hyperbolic_tangent(x)", lambda x, y: np.tanh(x), 3),
    "quotient": ("quotient_by(x, y, ptx::rcp(y))", lambda x, y: x / y, 0.51),
    "log": ("mods::log(fabsf(x))", lambda x, y: np.log(abs(x)), 9),
    "log2": ("mods::log2(fabsf(x))", lambda x, y: np.log2(abs(x)), 9),
    "log of subnormals": ("mods::log(fabsf(x) * 1e-38f)", lambda x, y: np.log(_tiny(x)), 2),
    "power of subnormals": ("mods::known_power(fabsf(x) * 1e-38f, 0.75f)", lambda x, y: _tiny(x) ** 0.75, 9),
    "sqrt": ("mods::sqrt(fabsf(x))", lambda x, y: np.sqrt(abs(x)), 3),
    "rsqrt": ("mods::rsqrt(fabsf(x))", lambda x, y: 1 / np.sqrt(abs(x)), 3),
    "cube": ("mods::whole_power<3>(x)", lambda x, y: x**3, 2),
    "slope of log": (f"mods::log({_SIZE}).d", lambda x, y: 1 / abs(x), 3),
    "slope of log2": (f"mods::log2({_SIZE}).d", lambda x, y: np.log2(np.e) / abs(x), 3),
    "slope of sqrt": (f"mods::sqrt({_SIZE}).d", lambda x, y: 0.5 / np.sqrt(abs(x)), 3),
    "slope of rsqrt": (f"mods::rsqrt({_SIZE}).d", lambda x, y: -0.5 * abs(x) ** -1.5, 12),
    "slope of a cube": (f"mods::whole_power<3>({_DUAL}).d", lambda x, y: 3 * x * x, 3),
    "slope of a constant's square": (
        "mods::whole_power<2>(mods::Dual(x, 0.f)).d",
        lambda x, y: 0 * np.nan_to_num(x),
        0,
    ),
    "slope of a constant's root": (f"mods::sqrt({_CONSTANT}).d", lambda x, y: 0 * np.nan_to_num(x), 0),
    "sqrt of subnormals": ("mods::sqrt(fabsf(x) * 1e-38f)", lambda x, y: np.sqrt(_tiny(x)), 3),
    "slope of log of subnormals": (f"mods::log({_TINY}).d", lambda x, y: 1 / _tiny(x), 3),
    "slope of log of large numbers": (f"mods::log({_HUGE}).d", lambda x, y: 1 / _times(x, 1e30), 3),
    "slope of x^0.75 of subnormals": (
        f"mods::known_power({_TINY}, 0.75f).d",
        lambda x, y: 0.75 * _tiny(x) ** -0.25,
        12,
    ),
}
FUNCTIONS |= {f"slope of x^{b}": (f"mods::pow({_SIZE}, mods::Dual({b}f)).d", _slope(b), 12) for b in POWERS}
FUNCTIONS |= {f"x^{b} known": (f"mods::known_power(x, {b}f)", _power(b), 12) for b in KNOWN}
FUNCTIONS |= {
    f"slope of x^{b} known": (f"mods::known_power({_SIZE}, {b}f).d", _slope(b), 16) for b in KNOWN[:-3]
}  # of others x^b is 0 where the slope is not
FUNCTIONS |= {f"quotient by {b}": (f"quotient_by(x, {b!r}f, 1.f / {b!r}f)", _quotient(b), 0.51) for b in NUMBERS}
SOURCE = f"""#include "attention/mods.cuh"
extern "C" __global__ void {NAME}(const float *xs, const float *ys, float *out) {{
    const int i = ptx::block_index() * {THREADS} + ptx::thread_index(), n = ptx::grid_size() * {THREADS};
    const float x = xs[i], y = ys[i];
{"".join(f"    out[{n} * n + i] = {text};" for n, (text, _, _) in enumerate(FUNCTIONS.values()))}
}}
"""
Numbers = NDArray[np.float32]


def given(blocks: int) -> tuple[Numbers, Numbers]:
    """Numbers, and what they are divided by: whole ones, of all sizes between 2^-40 and 2^40, near 0.7, where the
    tangent's two forms meet, near 1, where the logarithm's do, and some that are not finite."""
    rng, n = np.random.default_rng(0), blocks * THREADS
    x, y = (rng.standard_normal(n) * 2.0 ** rng.uniform(-40, 40, n) for _ in range(2))
    x[: n // 4], y[: n // 4] = rng.integers(-9999, 9999, n // 4), rng.integers(1, 99, n // 4)
    x[n // 4 : n // 2] = rng.uniform(-1.5, 1.5, n // 4)
    x[-7:], y[-7:] = [-0.0, np.inf, -np.inf, np.nan, 0, 1, 1], [7, 2, -3, 1, 5, 0, np.inf]
    return x.astype(np.float32), y.astype(np.float32)


def wrong(x: Numbers, y: Numbers, out: Numbers, most: float = np.inf) -> list[str]:
    """Which functions err by more than they may, or than `most` units in the last place."""
    with np.errstate(all="ignore"):
        exact = [(name, f(x.astype(np.float64), y), units) for name, (_, f, units) in FUNCTIONS.items()]
        return [
            f"{name}: {x[~good][:3]}, {y[~good][:3]}: {got[~good][:3]}, not {of[~good][:3]}"
            for (name, of, units), got in zip(exact, out.reshape(len(exact), -1), strict=True)
            if not (good := _near(got, of, min(units, most), name.startswith("quotient"))).all()
        ]


def _near(got: Numbers, exact: NDArray[np.float64], units: float, may_be_nan: bool) -> NDArray[np.bool_]:
    """Equal up to so many units in the last place, or as infinite; may_be_nan: NaN in the place of inf, too."""
    nearest = exact.astype(np.float32)
    error = np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(nearest))
    found: NDArray[np.bool_] = np.where(
        np.isfinite(nearest), error <= units, (got == nearest) | (np.isnan(got) & (may_be_nan | np.isnan(nearest)))
    )
    return found
