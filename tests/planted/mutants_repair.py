# ruff: noqa: E501 (a bug a line)
"""Bugs planted in the repair of gradients, as tests/kernels/test_nonfinite.py has their cases."""

from __future__ import annotations

from functools import partial

from .markers import change
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")

REPAIRED = (
    Bug("repair: P that is NaN where it is dropped", change("p-of-what-is-dropped", "taken == kNaN", "false"), "dropout"),
    Bug("repair: inf in q behind a softcap", change("q-behind-a-finite-lse", "taken == kNone", "false"), "softcap"),
    Bug("mods: an infinite score times the derivative of a constant", change("times-a-constant", "a.d * b", "a.d * b + a.x * 0.f"), "mods"),
    _sm90("mods: the same of a quotient", change("by-a-constant", "quotient_by(a.d, b, r)", "quotient_by(a.d - a.x * 0.f, b, r)"), "mods"),
    Bug("mods: a bias where they hide", change("hidden-by-either", "mods.hides() ||", ""), "mods"),
    _sm90("repair: inf in q behind a sink", change("q-behind-a-finite-lse", "|| V::kSink", ""), "sink"),
    _sm90("repair: a softcap's derivative that fp32 rounds to 0", change("derivative-that-is-not-0", "ptx::ex2(-x) * r * r", "r * (1.f - r)"), "softcap"),
    _sm90("repair: a softcap's derivative that is not 0 where that of float64 is", change("derivative-that-is-not-0", "x > 55.f", "false"), "softcap"),
    Bug("repair: a weight that is 0 as a product", change("product-that-is-not-0", "ptx::uint_as_float(1)", "0.f"), "softcap"),
    _sm90("repair: NaN of a query from which all keys are hidden", change("nan-of-a-query-that-sees", "V::kBias", "false"), "bias"),
    Bug("slopes: of a key that a bias hides", change("slopes-of-what-a-bias-shows", "!at.hides()", "true"), "bias"),
)  # fmt: skip
REPAIRED_FORWARD = (
    Bug(
        "mods: NaN of a bias where they hide",
        change("hidden-by-mods-beside-a-bias", "mods.hides()", "false"),
        "documents",
    ),
)
