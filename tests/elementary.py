"""Functions of fp32 that kernels have (kernels_cu/tile/elementary.cuh), on numbers of all sizes, beside float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NAME, THREADS = "elementary", 128
NUMBERS = 3.0, 7.0, 20.0, 50.0, 0.1, 0.088388346  # that are divided by, known to the compiler
SOURCE = f"""#include "tile/elementary.cuh"
extern "C" __global__ void {NAME}(const float *x, const float *y, float *out) {{
    const int i = ptx::block_index() * {THREADS} + ptx::thread_index(), n = ptx::grid_size() * {THREADS};
    out[i] = hyperbolic_tangent(x[i]);
    out[n + i] = quotient_by(x[i], y[i], ptx::rcp(y[i]));
{"".join(f"    out[{2 + i} * n + i] = quotient_by(x[i], {b!r}f, 1.f / {b!r}f);" for i, b in enumerate(NUMBERS))}
}}
"""
Numbers = NDArray[np.float32]


def given(blocks: int) -> tuple[Numbers, Numbers]:
    """Numbers, and what they are divided by: whole ones, of all sizes between 2^-40 and 2^40, near 0.7, where the
    tangent's two forms meet, and some that are not finite."""
    rng, n = np.random.default_rng(0), blocks * THREADS
    x, y = (rng.standard_normal(n) * 2.0 ** rng.uniform(-40, 40, n) for _ in range(2))
    x[: n // 4], y[: n // 4] = rng.integers(-9999, 9999, n // 4), rng.integers(1, 99, n // 4)
    x[n // 4 : n // 2] = rng.uniform(-1.5, 1.5, n // 4)
    x[-6:], y[-6:] = [np.inf, -np.inf, np.nan, 0, 1, 1], [2, -3, 1, 5, 0, np.inf]
    return x.astype(np.float32), y.astype(np.float32)


def wrong(x: Numbers, y: Numbers, out: Numbers) -> list[str]:
    """Which functions err by more than 3 units in the last place, or of quotients by more than rounding."""
    with np.errstate(all="ignore"):
        exact = [np.tanh(x.astype(np.float64)), x.astype(np.float64) / y]
        exact += [x.astype(np.float64) / np.float32(b) for b in NUMBERS]
        names = "tangent", "quotient", *(f"quotient by {b}" for b in NUMBERS)
        return [
            f"{name}: {x[~good][:3]}, {y[~good][:3]}: {got[~good][:3]}, not {of[~good][:3]}"
            for name, got, of in zip(names, out.reshape(len(exact), -1), exact, strict=True)
            if not (good := _near(got, of, 3 if name == "tangent" else 0.51)).all()
        ]


def _near(got: Numbers, exact: NDArray[np.float64], units: float) -> NDArray[np.bool_]:
    """Equal up to so many units in the last place, or alike where they are not finite."""
    nearest = exact.astype(np.float32)
    error = np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(nearest))
    found: NDArray[np.bool_] = np.where(
        np.isfinite(nearest), error <= units, (got == nearest) | np.isnan(got + nearest)
    )
    return found
