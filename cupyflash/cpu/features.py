"""What features bring to a call, those of a part of it, and their gradients, summed over the parts.

A part is some of the sequences, heads of q and keys of a call: a sequence, the heads that share a block mask, a chunk
of heads that are computed together. What an array has of them is a view of it; what a part gives to the array's
gradient is added to the same view of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..operand import MOD_ARRAYS, MOD_GRADIENTS
from ..operands import BACKWARD
from ..sequences import Sequences

Array = NDArray[Any]

LEARNED = BACKWARD.learned  # the arrays that have gradients, in the order of these; then those of mods
_ALL = slice(None)


class Place(NamedTuple):
    """Which sequences, heads of q, keys and queries of a call are a part of it."""

    batch: slice = _ALL
    heads: slice = _ALL
    keys: slice = _ALL
    rows: slice = _ALL

    def of(self, name: str, x: Array) -> Array:
        """What an array has of them: a view. Dimensions that it lacks or broadcasts hold for all parts."""
        if name.startswith("mod_array"):
            return x
        if name == "sink":
            return x[self.heads]
        if name == "alibi_slopes":
            return x[(self.batch, self.heads)[2 - x.ndim :]]
        own = (self.batch, self.heads, self.rows, self.keys)[4 - x.ndim :]
        index: tuple[Any, ...] = (*(_ALL if n == 1 else part for part, n in zip(own, x.shape, strict=True)), ...)
        return x[index]


class Corner(NamedTuple):
    """The first sequence, head of q and key of a part, as dropout and mods count them."""

    sequence: int = 0
    head: int = 0
    key: int = 0


_WHOLE = Corner()


@dataclass(frozen=True)
class Features:
    """The arrays; None: not given.

    Attributes:
        alibi_slopes: (heads_q,) or (batch, heads_q), as lse.
        sink: (heads_q,), as lse.
        bias: broadcasts to (batch, heads_q, seqlen_q, seqlen_k), any floating dtype; packed, it has room for
            the longest sequence, and each has its first queries and keys.
        mask: likewise, of bool; True where a key is seen.
        dropout_seed: (2,) or (2, 2), int32 (`dropout.key_of`).
        block_mask: which keys each query sees.
        mod_arrays: what the problem's mods read.
        sequences: where the sequences of a packed call lie, and which of their keys count.
        wanted: "dalibi_slopes", "dsink", "dbias", "dmod_array_0" and so on: those whose gradients are.
        corner: where it begins, if it is a part of a call.
        by_element: whether kernels read a mask, or ask a mask_mod, by element: a query all of whose visible scores are
            -inf then counts as one that sees no key.
    """

    alibi_slopes: Array | None = None
    sink: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    dropout_seed: Array | None = None
    block_mask: BlockMask | None = None
    mod_arrays: tuple[Array, ...] = ()
    sequences: Sequences | None = None
    wanted: tuple[str, ...] = ()
    corner: Corner = _WHOLE
    by_element: bool = False

    def at(self, place: Place) -> Features:
        """Those of a part; its block mask and its sequences are those of the whole."""
        given = {name: getattr(self, name) for name in (*LEARNED, "mask")}
        arrays: dict[str, Any] = {name: None if x is None else place.of(name, x) for name, x in given.items()}
        first = Corner(*(a + (s.start or 0) for a, s in zip(self.corner, place[:3], strict=True)))
        return replace(self, **arrays, corner=first)

    def wants(self, name: str) -> bool:
        """Whether the gradient of one of `LEARNED` is made."""
        return f"d{name}" in self.wanted and getattr(self, name) is not None

    def learned_of_mods(self) -> dict[int, Array]:
        """The arrays of mods whose gradients are made, by their numbers."""
        return {i: x for i, x in enumerate(self.mod_arrays) if MOD_GRADIENTS[i] in self.wanted}


class Sums:
    """The gradients of features that are wanted, shaped as the arrays, in the dtype of sums: those of mods fp64."""

    def __init__(self, of: Features) -> None:
        self._totals: dict[str, Array] = {}
        for name in filter(of.wants, LEARNED):
            x = getattr(of, name)
            self._totals[name] = np.zeros(x.shape, accumulator(x))
        for i, x in of.learned_of_mods().items():
            self._totals[MOD_ARRAYS[i]] = np.zeros(x.shape)

    def add(self, place: Place, found: Iterable[Array]) -> None:
        """Add those of a part, in the order of `LEARNED`."""
        for (name, total), x in zip(self._totals.items(), found, strict=True):
            target = place.of(name, total)
            with np.errstate(all="ignore"):
                target += x.reshape(target.shape)

    def found(self) -> tuple[Array, ...]:
        """All of them, in the order of `LEARNED`."""
        return tuple(self._totals.values())


def accumulator(x: Array) -> np.dtype[Any]:
    """The dtype of sums, and of lse."""
    return np.dtype(np.float64 if x.dtype.itemsize == 8 else np.float32)
