"""What is refused of a scale and a softcap."""

from __future__ import annotations

import math

from .errors import ArgumentError

MAX_SCALE = 1e38  # times log2(e), a number of fp32, in which all but fp64 is computed
SOFTCAPS = (1e-3, 1e3)  # tanh has an absolute error, of 1e-7 in fp32, which the softcap multiplies


def vet_scale(scale: float | None, head_dim: int, dtype: str) -> float:
    """The scale of the scores."""
    if scale is None:
        return float(head_dim**-0.5)
    if not math.isfinite(scale):
        raise ArgumentError(f"scale: expected a finite number, got {scale}")
    if dtype != "fp64" and abs(scale) > MAX_SCALE:
        raise ArgumentError(f"scale: expected a number of at most {MAX_SCALE:g} for {dtype}, got {scale}")
    return scale


def vet_softcap(softcap: float | None, scale: float, dtype: str) -> float | None:
    """The softcap, if any."""
    if softcap is None:
        return None
    least, most = SOFTCAPS
    if not least <= softcap <= most:
        raise ArgumentError(
            f"softcap: expected a number from {least:g} to {most:g}, got {softcap}; write None for no cap"
        )
    if dtype != "fp64" and abs(scale) / softcap > MAX_SCALE:
        raise ArgumentError(f"scale: expected a number of at most {MAX_SCALE:g} times the softcap, got {scale}")
    return softcap
