"""What features bring to a chunk, heads that are computed together, in the dtype that they are computed in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..problem import Problem
from . import sink as sinks
from .added import Added, added_of
from .dropping import Dropping, dropping_of
from .features import Features, Place
from .tiles import by_group

Array = NDArray[Any]


@dataclass
class Chunk:
    """Of the heads of a chunk.

    Attributes:
        place: where in the call they are.
        sink: (batch * heads_k, group); None: there is none.
        dsink: its gradient if it is wanted, so far.
        mask: a block mask that all of batch and heads of k share.
    """

    place: Place
    features: Features
    added: Added
    dropping: Dropping
    mask: BlockMask | None = None
    sink: Array | None = None
    dsink: Array | None = None

    def add_to_sink(self, lse: Array, delta: Array) -> None:
        """Add what a tile's rows contribute to dsink."""
        if self.dsink is not None and self.sink is not None:
            self.dsink += sinks.gradient(self.sink, lse, delta)

    def gradients(self) -> tuple[Array, ...]:
        """Those that are wanted, in the order of `LEARNED`, shaped as the arrays of these heads are."""
        found = []
        for x, of_head in ((self.features.alibi_slopes, self.added.dslopes), (self.features.sink, self.dsink)):
            if x is not None and of_head is not None:
                by_head = of_head.reshape(-1, x.shape[-1])
                found.append(by_head.sum(axis=0) if x.ndim == 1 else by_head)
        found += [] if self.added.dbias is None else [self.added.dbias]
        return *found, *(() if self.added.mods is None else self.added.mods.sums.values())


def chunk_of(of: Features, chunk: tuple[slice, slice], p: Problem, dtype: np.dtype[Any]) -> Chunk:
    """That of a chunk of `tiles.chunks`: ranges of batch and of heads of k."""
    group = p.heads_q // p.heads_k
    batch, heads_k = (len(range(n)[part]) for n, part in zip((p.batch, p.heads_k), chunk, strict=True))
    one = replace(p, batch=batch, heads_k=heads_k, heads_q=group * heads_k)
    place = Place(chunk[0], slice(chunk[1].start * group, chunk[1].stop * group))
    own = of.at(place)
    found = Chunk(place, own, added_of(own, one, dtype), dropping_of(own, one), own.block_mask)
    if own.sink is not None:
        found.sink = by_group(own.sink, one, dtype)
        found.dsink = np.zeros_like(found.sink) if own.wants("sink") else None
    return found
