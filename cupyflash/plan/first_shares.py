"""Whether the first share of each tile of dQ is stored, and the others are added (dq_accum.cuh, dq_visits.cuh)."""

from __future__ import annotations

from .params import UNBOUNDED
from .spec import Spec

_TURNED_HEADS = 8  # scheduled together where up to 8 key blocks of each wait for each other: 64 blocks, which all run


def stored_first(spec: Spec, limit: int, seqlen_k: int) -> tuple[int, int]:
    """`Numbers.first_stores` of a call, and the most heads that may be scheduled together then.

    Args:
        limit: up to so many keys it pays.
        seqlen_k: keys of a sequence; packed, on average. There each has its own number of them, and where no mask hides
            any, its key blocks wait for each other, whatever the average.
    """
    if spec.packed and not spec.masked:
        return limit + 1, _TURNED_HEADS if limit > 0 else UNBOUNDED
    pays = seqlen_k <= limit
    return (UNBOUNDED if spec.packed else 1) * pays, UNBOUNDED
