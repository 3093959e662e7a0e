"""Lengths of packed sequences that contradict each other or the arrays, for the emulator and a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.check.cases import Case
from cupyflash.sequences import Sequences

TOTAL_Q, TOTAL_K = 197, 261
# cu_seqlens_q, cu_seqlens_k, seqused_k of three sequences; the totals are `TOTAL_Q` and `TOTAL_K`.
WRONG: dict[str, tuple[list[int], list[int], list[int] | None]] = {
    "decreasing": ([0, 150, 20, 197], [0, 200, 70, 261], None),
    "decreasing-to-zero": ([0, 197, 0, 0], [0, 261, 3, 0], None),
    "all-over-again": ([0, 197, 0, 197], [0, 261, 0, 261], None),
    "zigzag": ([190, 5, 180, 2], [250, 1, 255, 9], None),
    "negative": ([0, -5, 90, -(2**31)], [0, 100, -7, 261], None),
    "first-not-zero": ([66, 100, 150, 197], [130, 140, 200, 261], None),
    "beyond": ([0, 100, 190, 900], [0, 100, 5000, 2**31 - 1], None),
    "all-beyond": ([500, 600, 700, 800], [2**31 - 1] * 4, None),
    "keys-run-out": ([0, 60, 130, 197], [0, 261, 261, 300], None),
    "used-beyond": ([0, 60, 130, 197], [0, 90, 170, 261], [91, 2**31 - 1, 5000]),
    "used-negative": ([0, 60, 130, 197], [0, 90, 170, 261], [-1, -(2**31), 30]),
    "used-of-wrong-ones": ([100, 60, 300, -1], [200, 90, 400, 0], [5000, -3, 77]),
}


def three(head_dim: int, **more: Any) -> Case:
    """Any case of three sequences of the totals of `WRONG`."""
    return Case("three", "full", TOTAL_Q, TOTAL_K, head_dim, 3, lengths_q=(60, 70, 67), lengths_k=(90, 80, 91), **more)


def given(q: list[int], k: list[int], used: list[int] | None) -> Sequences:
    cu_q, cu_k = np.array(q, np.int32), np.array(k, np.int32)
    return Sequences(cu_q, cu_k, None if used is None else np.array(used, np.int32))
