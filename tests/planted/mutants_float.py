# ruff: noqa: E501 (a bug a line)
"""Bugs planted in attention over a cache of fp32: cases are those of tests/kernels/test_emulator_decode_fp32.py."""

from __future__ import annotations

from .markers import change, without
from .mutants_fp32 import Fp32Bug

_SMALL, _NARROW, _MANY = "four-rows-d64", "three-rows-d80-v24", "33-rows-d128"

DECODE_FP32 = (
    Fp32Bug("a slice cut by the end is whole, fp32", change("slice-seen-by-all", "key + kSlice <= end_whole", "key < end_whole"), _SMALL),
    Fp32Bug("slope of the first head, fp32", change("slope-of-a-packed-row-float", "rows.head_q(head(), row)", "rows.head_k"), "eight-rows-d128"),
    Fp32Bug("columns of K that there are not", change("columns-of-k-float", "col >= D", "false"), _NARROW, "FAILED|uninitialized|buffer|NaN|outside"),
    Fp32Bug("rows of other lanes", change("rows-of-a-lane", "upper ? high : low", "upper ? low : high"), _SMALL),
    Fp32Bug("keys of the other lanes left out", without("keys-of-other-lanes"), _SMALL),
    Fp32Bug("P read before it is there", without("p-seen-by-the-warp-float"), _SMALL, "RACE"),
    Fp32Bug("factors read before they are there", without("factors-seen-by-the-warp"), _SMALL, "RACE"),
    Fp32Bug("P written over factors", without("factors-read"), _SMALL, "RACE"),
    Fp32Bug("all teams have one P", change("p-of-the-warp", "team * kRows + row", "row"), _MANY, "RACE"),
    Fp32Bug("the first half of wide rows alone", change("pieces-of-wide-rows", "pass % kPassesPerRow * kLanesPerRow", "0"), "four-rows-d256", "RACE, access to the destination of cp.async|FAILED"),
)  # fmt: skip
