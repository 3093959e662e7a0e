"""Caches of 8 bits in cases: what is drawn, what it means in float64, and what new rows must become."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES = {"int8": np.dtype(np.int8), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
_LARGEST = {"int8": 127.0, "e4m3": 448.0}


def drawn_scales(rng: np.random.Generator, shape: tuple[int, ...], stored: str, spread: float) -> Array:
    """So that a normal number fits; within powers of two of that, whose exponents are `spread` apart at most."""
    return 6 / _LARGEST[stored] * 2.0 ** rng.uniform(-spread, spread, shape)


def drawn(x: Array, stored: str, scale: Array | float) -> Array:
    """Numbers that are stored for about x; NaN and inf, which int8 has not, are its extremes."""
    found = np.clip(np.where(np.isfinite(x), x / scale, 0), -_LARGEST[stored], _LARGEST[stored])
    if stored == "int8":
        return np.select([np.isnan(x), np.isinf(x)], [-128, 127], np.rint(found)).astype(np.int8)
    return np.where(np.isfinite(x), found, np.nan).astype(DTYPES["e4m3"])


def meant(stored: Array, scale: Array) -> Array:
    """In float64; `scale`: (heads_k,) or (slots, heads_k) of a cache (slots, rows, heads_k, head_dim)."""
    each = scale[:, None, :, None] if scale.ndim == 2 else scale[:, None]
    with np.errstate(all="ignore"):
        return stored.astype(np.float64) * each.astype(np.float64)


def appended(x: Array, scale: Array, stored: str) -> Array:
    """What a row (heads_k, head_dim) of fp32, or fp64, becomes: of all there is the nearest to the quotient."""
    with np.errstate(all="ignore"):
        quotient = x / scale[:, None]
    size, signs = np.abs(np.clip(quotient.astype(np.float64), -1e6, 1e6)), np.signbit(quotient)
    if stored == "int8":
        sizes = np.arange(129.0)
    else:
        sizes = np.arange(127, dtype=np.uint8).view(DTYPES["e4m3"]).astype(np.float64)
    below = np.clip(np.searchsorted(sizes, size, side="right") - 1, 0, len(sizes) - 2)
    down, up = size - sizes[below], sizes[below + 1] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, below + 1)
    if stored == "int8":
        return np.where(np.isnan(quotient), 0, np.where(signs, -code, np.minimum(code, 127))).astype(np.int8)
    code = np.where(np.isnan(quotient), 127, code | signs * 128).astype(np.uint8)
    return code.view(DTYPES["e4m3"])
