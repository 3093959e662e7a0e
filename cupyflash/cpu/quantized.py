"""Caches of 8 bits: int8, or e4m3 as float8_e4m3fn or uint8. What they hold stands for itself times a scale."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

E4M3, LARGEST = np.dtype(ml_dtypes.float8_e4m3fn), 448.0
NAN = 0x7F  # one of e4m3's two


def numbers(stored: Array) -> Array:
    """What is stored as numbers: of int8 itself, of uint8 its bits as e4m3."""
    return stored.view(E4M3) if stored.dtype == np.uint8 else stored


def dequantized(stored: Array, scale: Array, dtype: np.dtype[Any]) -> Array:
    """``scale * stored``."""
    with np.errstate(all="ignore"):
        return numbers(stored).astype(dtype) * scale


def quantized(x: Array, scale: Array, stored: str) -> Array:
    """``x / scale``, rounded, then the nearest number that can be stored, of two the even one; saturated.

    A quotient that is NaN becomes 0 in int8, and NaN in e4m3.

    Returns:
        int8, or the bits of e4m3 as uint8.
    """
    with np.errstate(all="ignore"):
        quotient = x / scale
        if stored == "int8":
            return np.rint(np.clip(np.where(np.isnan(quotient), 0, quotient), -128, 127)).astype(np.int8)
        found = np.clip(quotient, -LARGEST, LARGEST).astype(E4M3)
    return np.where(np.isnan(quotient), np.uint8(NAN), found.view(np.uint8))
