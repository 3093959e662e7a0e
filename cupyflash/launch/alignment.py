"""How arrays lie: whether rows, and neighbours of a bias, start where kernels can read many bytes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..gpu import tensormap
from .passes import score_steps

Plain = tuple[Any, ...]  # a Signature, or the same as a plain tuple


def _is_aligned(signatures: Sequence[Plain]) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the array does: 8 elements of 16 bits."""
    for (a, b, c, _), (i, j, k, _), _, _ in signatures:
        if (a > 1 and i % 8) or (b > 1 and j % 8) or (c > 1 and k % 8):
            return False
    return True


def access(signatures: Sequence[Plain], aligned: bool, others: Sequence[Plain] = ()) -> tuple[bool, bool]:
    """(aligned, tma): whether every row of the arrays starts at a multiple of 16 bytes, and whether TMA can read them.

    Args:
        aligned: whether their addresses are multiples of 16.
        others: arrays that no kernel reads by TMA.
    """
    if not aligned:
        return False, False
    unread = [s for s in signatures if not tensormap.readable(s[0], s[1])]
    aligned = _is_aligned([*unread, *others])
    return aligned, aligned and not unread


class Aligned(NamedTuple):
    """Whether addresses are multiples of 16, of the arrays with strides; and of 8, that of a bias."""

    rows: bool = True
    bias: bool = True


ALIGNED = Aligned()


def has_pairs(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two neighbouring keys of a bias lie in a pair, aligned where the array is."""
    *steps, key = score_steps(shape, strides)
    return key == 1 and shape[-1] % 2 == 0 and not any(step % 2 for step in steps)
