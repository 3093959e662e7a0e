"""What features bring to plain attention: arrays beside q, k and v, and those of one sequence or head alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..sequences import Part, Sequences
from .bias import part_of

Array = NDArray[Any]


class OfHead(NamedTuple):
    """What one head of q has of them, and as an array of these numbers their gradients."""

    slope: Any = 0.0
    sink: Any = -np.inf


class Features(NamedTuple):
    """The arrays; None: not given.

    Attributes:
        sequences: where the sequences of a packed problem lie, and which of their keys count.
        alibi_slopes: (heads_q,) or (batch, heads_q).
        sink: (heads_q,).
        bias: broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
    """

    sequences: Sequences | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    bias: Array | None = None

    def part(self, i: int, p: Problem, part: Part) -> Features:
        """Those of sequence number i by itself."""
        slopes = self.alibi_slopes
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[i : i + 1]
        return Features(None, own, self.sink, part_of(self.bias, p, part))

    def head(self, b: int, h: int) -> OfHead:
        """Those of a head of q."""
        slopes = self.alibi_slopes
        slope = 0.0 if slopes is None else slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return OfHead(slope, -np.inf if self.sink is None else self.sink[h])

    def gathered(self, found: Array, dbias: Array) -> tuple[Array, ...]:
        """What was found for each head of each sequence, (batch, heads_q, OfHead), shaped as the arrays given; and
        that of a bias."""
        results = []
        for i, given in enumerate((self.alibi_slopes, self.sink)):
            if given is not None:
                results.append(found[..., i].sum(axis=0) if given.ndim == 1 else found[..., i])
        return *results, *([] if self.bias is None else [dbias])
