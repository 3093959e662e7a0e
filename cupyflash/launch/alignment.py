"""How arrays lie in memory, as far as it decides which kernels read them.

Rows, and neighbours of a bias, may start where kernels can read many bytes at once, and TMA reads some strides alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..arrays.adapters import Native
from ..gpu import tensormap
from ..operands import BACKWARD, Pass
from .passes import Given, as_batch, score_steps

Plain = tuple[Any, ...]  # a Signature, or the same as a plain tuple


def _is_aligned(signatures: Sequence[Plain]) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the array does: 8 elements of 16 bits."""
    for (a, b, c, _), (i, j, k, _), _, _ in signatures:
        if (a > 1 and i % 8) or (b > 1 and j % 8) or (c > 1 and k % 8):
            return False
    return True


def _of_rows(signatures: Sequence[Plain], others: Sequence[Plain]) -> tuple[bool, bool]:
    """Of arrays at multiples of 16: whether every row starts at one, and whether TMA can read them; `others`: arrays
    that no kernel reads by TMA."""
    unread = [s for s in signatures if not tensormap.readable(s[0], s[1])]
    aligned = _is_aligned([*unread, *others])
    return aligned, aligned and not unread


class Aligned(NamedTuple):
    """Whether addresses are multiples of 16, of the arrays with strides; and of 8, that of a bias."""

    rows: bool = True
    bias: bool = True


ALIGNED = Aligned()


def aligned_at(which: Pass, names: Iterable[str], addresses: Iterable[int]) -> Aligned:
    """What is so of arrays of these names at these addresses."""
    bits, of_bias = 0, 0
    for name, address in zip(names, addresses, strict=True):
        row = which.rows[name]
        bits |= address if row.strided else 0
        of_bias |= address if row.broadcasts else 0
    return Aligned(bits & 15 == 0, of_bias & 7 == 0)


class Access(NamedTuple):
    """How the arrays of a call lie: all that its spec knows of it, by the names of `Spec.of`.

    Attributes:
        aligned: every row of the arrays with strides starts at a multiple of 16 bytes.
        tma: TMA can read those that some kernel reads by it.
        paired_bias: two neighbouring keys of a bias, and of a mask, lie in an aligned pair; False where there is none.
    """

    aligned: bool
    tma: bool
    paired_bias: bool


def access_of(given: Given, signatures: Sequence[Plain], aligned: Aligned) -> Access:
    """That of arrays; `signatures`: strides in elements, as `as_batch` gives them."""
    rows = _of_rows(given.by_tma(signatures), given.by_hand(signatures)) if aligned.rows else (False, False)
    added = [signatures[i] for i in given.added]
    return Access(*rows, bool(added) and aligned.bias and all(_has_pairs(x[0], x[1]) for x in added))


def known_of(given: Given, library: Native, arrays: Iterable[Any]) -> dict[str, Any]:
    """All that `Spec.of` is told of a call beside its problem and a family, as `prepare` does; `arrays`: those of
    `given`, in its order."""
    keys, addresses = library.look(arrays)
    signatures = [library.describe(name, key) for name, key in zip(given.names, keys, strict=True)]
    access = access_of(given, as_batch(given, signatures), aligned_at(given.which, given.names, addresses))
    return {"backward": given.which is BACKWARD, **given.asked.made(), **access._asdict()}


def _has_pairs(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two neighbouring keys of a bias lie in a pair, aligned where the array is."""
    *steps, key = score_steps(shape, strides)
    return key == 1 and shape[-1] % 2 == 0 and not any(step % 2 for step in steps)
