# ruff: noqa: E501 (a bug a line)
"""Bugs planted in mods."""

from __future__ import annotations

from functools import partial

from .markers import change, without
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")

FORWARD_MODS = (
    Bug("mods: the score of another key", change("score-of-its-place", "query, key)", "query, key + 1)"), "mods"),
    Bug("mods: the mask of another query", change("hidden-by-mask-mod", "query, key)", "query + 1, key)"), "mods-capped-d256"),
    Bug("mods: every head as the first", change("sequence-and-head-of-mods", "head, 0, 0", "0 * head, 0, 0"), "mods"),
    Bug("mods: a place as a number without its step", change("place-as-a-number", "static_cast<float>(a.step)", "0 * a.step"), "mods-capped-d256"),
    Bug("mods: a number times a place without its step", change("times-a-place", "static_cast<float>(b.step)", "0.f"), "mods-heated-d128"),
    Bug("mods: places compared without their steps", change("places-in-order", "b.step - a.step", "0"), "mods-capped-d256"),
    Bug("mods: one place for another", change("places-alike", "b.step - a.step", "0"), "mods-capped-d256"),
    _sm90("mods: every sequence as the first", change("sequence-and-head-of-mods", "s.index, head", "0 * s.index, head"), "mods-every"),
    Bug("mods: an index out of range is not cut", change("index-in-range", "max(0, min(given[i], lengths[i] - 1))", "given[i]"), "mods", r"buffer|load|fault|misaligned"),
    Bug("mods: ALiBi before them", change("alibi-behind-mods", "alibi.biased(mods.modified(s))", "mods.modified(alibi.biased(s))"), "mods-softcap-alibi"),
    Bug("mods: hidden by -inf to one score alone", change("hidden-by-all-scores", "hides_both(1.f) && hides_both(1024.f) && ", ""), "mods-repelled-nan"),
    _sm90("mods: hidden by -inf to one score alone beside a bias", change("hidden-by-all-scores", "hides_both(1.f) && hides_both(1024.f) && ", ""), "mods-repelled-bias-d128"),
)  # fmt: skip
BACKWARD_MODS = (
    Bug("mods: without their derivative", change("mod-derived", "* at.derivative(own(s))", ""), "mods-capped-d256"),
    _sm90("mods: without their derivative on Hopper", change("mod-derived", "* at.derivative(own(s))", ""), "mods-softcap-alibi"),
    _sm90("mods: without the softcap's derivative", change("mod-derived", "weight(s, P) *", "P *"), "mods-softcap-alibi"),
    Bug("mods: half of the product rule", change("product-rule", "a.d * b.x + a.x * b.d", "a.d * b.x"), "mods-functions"),
    Bug("dmods: dS alone", change("derivative-by-the-read", "dS * by_it", "dS"), "mods-heated-d128"),
    Bug("dmods: elements run together", change("sum-of-another-element", "leave(), to = element", "to = element"), "mods"),
    Bug("dmods: a sum added twice", without("sum-begins-again"), "mods"),
    Bug("dmods: the last sums left behind", without("dmods-left-over"), "mods"),
    Bug("dmods: added without atomics", change("dmods-added", "ptx::red_add(to, sum)", "*to += sum"), "mods", r"RACE"),
    Bug("dmods: what sums held before", without("dmods-cleared"), "mods"),
    Bug("dmods: K overwritten while it is read", without("dmods-in-the-place-of-k"), "mods", r"RACE"),
    Bug("dmods: scores read before they are there", without("dmods-scores-of-all-warps"), "mods", r"RACE"),
)  # fmt: skip
# In functions of fp32, with what `tests/elementary.py` finds wrong of them.
ELEMENTARY = (
    Bug("quotients that are not finite corrected", change("quotient-corrected", ": q", ": fmaf(left, r, q)"), "quotient"),
    Bug("quotients not corrected", change("quotient-corrected", "? fmaf(left, r, q)", "? q"), "quotients"),
    Bug("tangent: the series too far", change("tangent-of-small-numbers", "0.7f", "1.f"), "tangent"),
    Bug("tangent: the series too near", change("tangent-of-small-numbers", "0.7f", "0.1f"), "tangent"),
    Bug("logarithm: the series too far", change("logarithm-near-1", "0.225f", "0.4f"), "logs"),
    Bug("logarithm: of subnormal numbers", change("logarithm-of-subnormal-numbers", "? 24.f", "? 0.f"), "log of subnormals"),
    Bug("powers without a slope at their edges", change("edges-of-a-power", "a.x == 0.f || fabsf(a.x) == ptx::infinity() ? edge : ", ""), "slopes of powers"),
    Bug("powers of what is below 0", change("power-of-numbers-below-0", "x >= 0.f || x == -ptx::infinity() ? ptx::lg2(near_1) : ptx::nan()", "ptx::lg2(near_1)"), "powers"),
    Bug("powers: of subnormal numbers", change("power-of-subnormal-numbers", "? 24", "? 0"), "powers of subnormals"),
    Bug("powers: of 0 and inf", change("power-of-0-and-inf", "x == 0.f ? -1e6f : fabsf(x) == ptx::infinity() ? 1e6f : e", "e"), "powers"),
    Bug("powers: an exponent of 0 that fp32 rounds", change("power-of-0-and-inf", "? -1e6f", "? -1e9f"), "powers beyond 2"),
    Bug("powers: roots of -inf", change("root-of-minus-inf", "x == -ptx::infinity() ? ptx::infinity() : x", "x"), "roots"),
    Bug("functions: a slope of a constant", change("slope-of-a-constant", "a.d == 0.f ? 0.f : ", ""), "constants"),
    Bug("functions: reciprocals that the machine has not", change("scaled-reciprocal", "size < 1e-37f ? 16777216.f : size > 1e37f ? 5.9604645e-8f : 1.f", "1.f"), "reciprocals"),
)  # fmt: skip
