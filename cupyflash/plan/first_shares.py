"""Whether the first share of each tile of dQ is stored, and the others are added (dq_accum.cuh, dq_visits.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from .params import UNBOUNDED
from .spec import Spec

_TURNED_HEADS = 8  # scheduled together where up to 8 key blocks of each wait for each other: 64 blocks, which all run


class StoredFirst(NamedTuple):
    """Where it is: the first share is stored of calls of at most `limit` keys a sequence, packed on average.

    Attributes:
        stored: `Numbers.first_stores` of these calls.
        most_heads: how many heads may be scheduled together.
    """

    limit: int
    stored: int
    most_heads: int = UNBOUNDED

    @classmethod
    def of(cls, spec: Spec, limit: int) -> StoredFirst:
        """For a spec whose kernels gain by it up to so many keys. Packed, each sequence has its own number of them, and
        where no mask hides any, its key blocks wait for each other, whatever the average."""
        if spec.packed and not spec.masked and limit > 0:
            return cls(UNBOUNDED, limit + 1, _TURNED_HEADS)
        return cls(limit, UNBOUNDED if spec.packed else 1)
