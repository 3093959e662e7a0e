"""Sequences: which rows of q and of k and v belong together, and what is wrong with lengths that contradict.

Packed, sequences of any lengths lie one behind the other in arrays ``(total, heads, head_dim)``; number b has the rows
``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. Each is attention of its own: a `Problem` with batch 1 and its own lengths,
whose masks are aligned at its last query and its last used key.

With a range of keys, packed or not, the queries of sequence b see none but the keys ``kv_range[b, 0]`` to
``kv_range[b, 1]`` of it. That is a problem without the other keys, whose masks stay where they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError
from .problem import Problem

Index = tuple[Any, ...]


class Sequences(NamedTuple):
    """Where the sequences of a call lie and which of their keys count: int32 arrays of the caller's library.

    Attributes:
        cu_seqlens_q: (batch + 1,): sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q. None: nothing
            is packed, and of the others only kv_range may be given.
        cu_seqlens_k: (batch + 1,): the same for k and v; the same object where keys and queries lie alike.
        seqused_k: (batch,): how many of its keys count, the first ones; None: all.
        kv_range: (batch, 2): which of these its queries see at most, from kv_range[b, 0] to kv_range[b, 1]; None: all.
    """

    cu_seqlens_q: Any | None = None
    cu_seqlens_k: Any | None = None
    seqused_k: Any | None = None
    kv_range: Any | None = None

    def named(self) -> dict[str, Any]:
        """The arrays by their arguments' names, each once."""
        given = {name: x for name, x in zip(Sequences._fields, self, strict=True) if x is not None}
        if self.cu_seqlens_k is self.cu_seqlens_q:
            given.pop("cu_seqlens_k", None)
        return given

    @classmethod
    def of(
        cls,
        cu_seqlens_q: Any | None = None,
        cu_seqlens_k: Any | None = None,
        seqused_k: Any | None = None,
        kv_range: Any | None = None,
    ) -> Sequences:
        """The inverse of `named`: without cu_seqlens_k keys lie as queries do."""
        return cls(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k, kv_range)


def check_lengths(sequences: Sequences, seqlen_q: int, seqlen_k: int) -> None:
    """Refuse lengths that contradict each other or the arrays; `sequences` holds NumPy arrays of the right shapes.

    Args:
        seqlen_q, seqlen_k: the totals where sequences are packed.

    Raises:
        ArgumentError: names the first wrong entry.
    """
    if sequences.cu_seqlens_q is not None:
        _check_packed(sequences, seqlen_q, seqlen_k)
    if sequences.kv_range is not None:
        ranges, cu = sequences.kv_range.astype(np.int64), sequences.cu_seqlens_k
        lengths = np.full(len(ranges), seqlen_k) if cu is None else np.diff(cu.astype(np.int64))
        start, end = ranges[:, 0], ranges[:, 1]
        wrong = np.flatnonzero((start < 0) | (start > end) | (end > lengths))
        if wrong.size:
            b = wrong[0]
            raise ArgumentError(
                f"kv_range: expected [start, end) with 0 <= start <= end <= {lengths[b]}, the keys of sequence {b}, "
                f"got kv_range[{b}] = [{start[b]}, {end[b]}]"
            )


def _check_packed(sequences: Sequences, total_q: int, total_k: int) -> None:
    """Those that say where packed sequences lie."""
    cu_q, cu_k, used, _ = sequences
    assert cu_q is not None
    assert cu_k is not None
    _check_cumulative("cu_seqlens_q", cu_q, "q", total_q)
    _check_cumulative("cu_seqlens_q" if cu_k is cu_q else "cu_seqlens_k", cu_k, "k", total_k)
    if used is not None:
        lengths = np.diff(cu_k.astype(np.int64))
        wrong = np.flatnonzero((used < 0) | (used > lengths))
        if wrong.size:
            b = wrong[0]
            raise ArgumentError(
                f"seqused_k: expected at most the keys of each sequence, 0 to {lengths[b]} for sequence {b}, "
                f"got seqused_k[{b}] = {used[b]}"
            )


def _check_cumulative(name: str, cu: NDArray[Any], rows_of: str, total: int) -> None:
    meaning = f"{name} holds the lengths added up, with a 0 before the first"
    if cu[0] != 0:
        raise ArgumentError(f"{name}: expected 0 as its first entry, got {name}[0] = {cu[0]}; {meaning}")
    wrong = np.flatnonzero((cu[1:] < cu[:-1]) | (cu[1:] > total))
    if wrong.size:
        i = wrong[0] + 1
        least = (
            f"at least {name}[{i - 1}] = {cu[i - 1]}" if cu[i] < cu[i - 1] else f"at most the {total} rows of {rows_of}"
        )
        raise ArgumentError(f"{name}: expected {least} as entry {i}, got {name}[{i}] = {cu[i]}; {meaning}")


def check_room(sequences: Sequences, problem: Problem) -> None:
    """Refuse packed sequences that are longer than a bias, a mask or a block mask has room for; `sequences` as
    `check_lengths` left them.

    Raises:
        ArgumentError: names the first one.
    """
    for name, room, axis in (("queries", problem.max_seqlen_q, -2), ("keys", problem.max_seqlen_k, -1)):
        cu = sequences.cu_seqlens_q if axis == -2 else sequences.cu_seqlens_k
        assert cu is not None
        used = None if axis == -2 else sequences.seqused_k
        lengths = np.diff(cu.astype(np.int64)) if used is None else used
        wrong = np.flatnonzero(lengths > room)
        if wrong.size:
            b = wrong[0]
            of_bias = [] if problem.bias is None else [problem.bias.argument, *["mask"] * problem.bias.masked]
            arguments = " and ".join([*of_bias, *["block_mask"] * (problem.block_mask > 0)])
            raise ArgumentError(
                f"{arguments}: expected room for at least {lengths[b]} {name}, those of sequence {b}, got {room} along "
                f"dimension {axis}; make room for the longest sequence"
                + (f", or give it length 1, the same for all {name}" if of_bias else "")
            )


class Part(NamedTuple):
    """One sequence, as arrays with a batch have it: number `batch`, or rows of the only one if they are packed.

    Attributes:
        keys: those that its queries may see.
        problem: it alone, dense, with batch 1 and these keys.
        corner: the sequence's number and the first of `keys`, counted from its own key 0, as dropout counts.
    """

    batch: int
    rows: slice
    keys: slice
    problem: Problem
    packed: bool
    corner: tuple[int, int]

    @property
    def q(self) -> Index:
        """Of an array of queries, packed or not: a batch of one."""
        return (None, self.rows) if self.packed else (slice(self.batch, self.batch + 1), self.rows)

    @property
    def k(self) -> Index:
        """The same of an array of keys."""
        return (None, self.keys) if self.packed else (slice(self.batch, self.batch + 1), self.keys)

    @property
    def lse(self) -> Index:
        """The same of lse."""
        return (None, slice(None), self.rows) if self.packed else (slice(self.batch, self.batch + 1),)


def parts(problem: Problem, sequences: Sequences) -> Iterator[Part]:
    """The sequences of a packed call, or one whose keys have ranges; rows and keys that none has take no part."""
    cu_q, cu_k, used_k, kv_range = sequences
    for b in range(problem.batch):
        rows, first, used = slice(0, problem.seqlen_q), 0, problem.seqlen_k
        if cu_q is not None and cu_k is not None:
            rows, first = slice(int(cu_q[b]), int(cu_q[b + 1])), int(cu_k[b])
            used = int(cu_k[b + 1]) - first if used_k is None else int(used_k[b])
        start, end = (0, used) if kv_range is None else (max(0, int(kv_range[b, 0])), min(used, int(kv_range[b, 1])))
        if start >= end:
            start = end = 0
        one = shortened(problem, rows.stop - rows.start, slice(start, end), used)
        of_all = slice(first + start, first + end)
        yield Part(0 if problem.packed else b, rows, of_all, one, problem.packed, (b, start))


@dataclass(frozen=True)
class _Shortened(Problem):
    """A problem without some of the last keys, whose masks and ALiBi stay where they were."""

    left_out: int = 0

    @property
    def diagonal(self) -> int:
        return self.seqlen_k + self.left_out - self.seqlen_q


def shortened(problem: Problem, seqlen_q: int, keys: slice, seqlen_k: int) -> Problem:
    """One sequence by itself, dense, with batch 1: its queries see at most these of its keys."""
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": keys.stop - keys.start, "packed": False, "kv_range": False}
    return _Shortened(**vars(problem) | sizes, left_out=seqlen_k - keys.stop)
