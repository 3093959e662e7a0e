"""Packed sequences: which rows of q and of k and v belong together, and what is wrong with lengths that contradict.

Sequences of any lengths lie one behind the other in arrays ``(total, heads, head_dim)``; number b has the rows
``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. Each is attention of its own: a `Problem` with batch 1 and its own lengths,
whose masks are aligned at its last query and its last used key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError
from .problem import Problem


class Sequences(NamedTuple):
    """Where the sequences of a packed call lie: int32 arrays of the caller's library.

    Attributes:
        cu_seqlens_q: (batch + 1,): sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
        cu_seqlens_k: (batch + 1,): the same for k and v; the same object where keys and queries lie alike.
        seqused_k: (batch,): how many of its keys count, the first ones; None: all.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any | None = None

    def named(self) -> dict[str, Any]:
        """The arrays by their arguments' names, each once."""
        given = {"cu_seqlens_q": self.cu_seqlens_q}
        if self.cu_seqlens_k is not self.cu_seqlens_q:
            given["cu_seqlens_k"] = self.cu_seqlens_k
        if self.seqused_k is not None:
            given["seqused_k"] = self.seqused_k
        return given

    @classmethod
    def of(cls, cu_seqlens_q: Any, cu_seqlens_k: Any | None = None, seqused_k: Any | None = None) -> Sequences:
        """The inverse of `named`: without cu_seqlens_k keys lie as queries do."""
        return cls(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)


def check_lengths(sequences: Sequences, total_q: int, total_k: int) -> None:
    """Refuse lengths that contradict each other or the arrays; `sequences` holds NumPy arrays of the right shapes.

    Raises:
        ArgumentError: names the first wrong entry.
    """
    totals = {"cu_seqlens_q": ("q", total_q), "cu_seqlens_k": ("k", total_k)}
    for name, cu in Sequences(sequences.cu_seqlens_q, sequences.cu_seqlens_k).named().items():
        _check_cumulative(name, cu, *totals[name])
    if sequences.cu_seqlens_k is sequences.cu_seqlens_q:  # all that is left to ask of it
        _check_cumulative("cu_seqlens_q", sequences.cu_seqlens_q, "k", total_k)
    if sequences.seqused_k is not None:
        used, lengths = sequences.seqused_k, np.diff(sequences.cu_seqlens_k.astype(np.int64))
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


def parts(problem: Problem, sequences: Sequences) -> Iterator[tuple[slice, slice, Problem]]:
    """Of each sequence: its rows of q, the rows of k and v it uses, and it as a dense problem with batch 1."""
    first_q, first_k = sequences.cu_seqlens_q, sequences.cu_seqlens_k
    for b in range(problem.batch):
        rows, start = slice(int(first_q[b]), int(first_q[b + 1])), int(first_k[b])
        used = int(first_k[b + 1]) - start if sequences.seqused_k is None else int(sequences.seqused_k[b])
        one = replace(problem, packed=False, batch=1, seqlen_q=rows.stop - rows.start, seqlen_k=used)
        yield rows, slice(start, start + used), one
