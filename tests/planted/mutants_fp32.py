# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what fp32 has of its own: what becomes of marked statements."""

from __future__ import annotations

from dataclasses import dataclass

from .markers import change
from .mutants import Bug


@dataclass(frozen=True)
class Fp32Bug(Bug):
    """One of fp32."""

    @property
    def dtype(self) -> str:
        return "fp32"


FORWARD_FP32 = (
    Fp32Bug("products of the largest and the smallest parts left out", change("products-of-parts", "n <= order", "n <= order && order < 2"), "dense-d64"),
    Fp32Bug("parts of neighbours that overlap", change("what-is-left-of-a-number", "x.y - Bf16::hi(parts[n])", "x.y"), "causal-d128"),
    Fp32Bug("infinite scores are NaN", change("infinite-products", "found != found ? x : found", "found"), "minus-inf-scores"),
)  # fmt: skip

BACKWARD_FP32 = (
    Fp32Bug("products of the largest and the smallest parts left out of gradients", change("products-of-parts", "n <= order", "n <= order && order < 2"), "dense-d64"),
    Fp32Bug("weights of sinks never below the smallest number", change("subnormal-sinks", "root * root", "weight_ex2(x)"), "sink-scores-in-the-hundreds"),
    Fp32Bug("columns of wide rows beyond the first 128 left out of delta", change("pieces-of-o-delta", "n < kPieces", "n < 1"), "dense-d256"),
)  # fmt: skip
