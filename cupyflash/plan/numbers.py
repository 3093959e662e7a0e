"""Extents: the numbers of a call; and the numbers that its plan chooses for them (extents.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..problem import Problem

Workspace = dict[str, tuple[tuple[int, ...], str]]


class Extents(NamedTuple):
    """The numbers of a problem that decide no kernel, but that there are none of 0; as `Problem` has them."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    max_seqlen_q: int
    max_seqlen_k: int

    def longest(self, packed: bool) -> tuple[int, int]:
        """Queries and keys of a sequence; packed, of the longest that a bias or a mask has room for."""
        return (self.max_seqlen_q, self.max_seqlen_k) if packed else (self.seqlen_q, self.seqlen_k)

    @classmethod
    def of(cls, problem: Problem) -> Extents:
        return cls(*(getattr(problem, name) for name in cls._fields))


class Numbers(NamedTuple):
    """What the plan chooses for some extents.

    Attributes:
        tiles: of work, for each launch.
        workspace: the arrays that the launches share: name -> (shape, dtype).
        section, last_section: heads scheduled together, and the last of them (schedule.cuh).
        first_stores: 1: the first share of each tile of dQ is stored, the others are added (dq_accum.cuh); packed, of
            sequences of fewer keys than that.
        shares: into how many a group's query heads are divided for dK and dV (shares.cuh).
        key_splits: into how many parts the keys of a sequence are divided (key_parts.cuh).
    """

    tiles: tuple[int, ...]
    workspace: Workspace
    section: int
    last_section: int
    first_stores: int = 0
    shares: int = 1
    key_splits: int = 1


# `Numbers` as a plain tuple, which costs less to make and to read.
Chosen = tuple[tuple[int, ...], Workspace, int, int, int, int, int]
ByLengths = Callable[[int, int], Chosen]  # of seqlen_q and seqlen_k
SCHEDULE_NUMBERS = Numbers._fields[2:]  # those that a params struct has
