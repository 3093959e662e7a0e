"""Rows that a call appends, by places in host memory: no two sequences write one, and none writes what another has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from .problem import CacheProblem

Array = NDArray[Any]
_MAX_WORK = 100_000


class Lies(NamedTuple):
    """Where an array lies: address, shape, and strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def reach(self) -> tuple[int, int]:
        """Its first byte, and the one behind its last; of one without elements the same."""
        if 0 in self.shape:
            return self.address, self.address
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        first = self.address + sum(min(step, 0) for step in steps)
        return first, first + sum(map(abs, steps)) + self.itemsize

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For NumPy, which is asked about addresses alone."""
        return {"data": (self.address, True), "shape": self.shape, "strides": self.strides,
                "typestr": f"|V{self.itemsize}", "version": 3}  # fmt: skip


def check_caches_apart(k_cache: Lies, v_cache: Lies) -> None:
    """Refuse an append to caches that have memory in common; their rows may lie between each other's.

    Raises:
        ArgumentError: rows of k would be written over by those of v.
    """
    (a, a_end), (b, b_end) = k_cache.reach, v_cache.reach
    if a >= b_end or b >= a_end or a == a_end or b == b_end:
        return
    try:
        is_shared = np.shares_memory(np.asarray(k_cache), np.asarray(v_cache), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # NumPy cannot tell in so many steps: nobody has such strides
        is_shared = False
    if is_shared:
        raise ArgumentError("v_cache: expected memory of its own, since k and v are appended, got that of k_cache")


def check_rows_apart(name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Refuse a cache in which rows are the same memory, where k is appended.

    Raises:
        ArgumentError: sequences, or heads, would be written over each other.
    """
    if 0 in shape:
        return
    taken = 0  # elements that the dimensions of smaller strides reach beyond the first one
    lengths = [(abs(step), n, i) for i, (n, step) in enumerate(zip(shape, strides, strict=True)) if n > 1]
    for step, n, i in sorted(lengths):
        if step <= taken:
            within = f", where one takes {taken + 1} elements" if step else ""
            raise ArgumentError(
                f"{name}: expected memory of its own for each row, since k is appended, got a stride of {step} along "
                f"dimension {i}{within}; copy it first"
            )
        taken += (n - 1) * step


def check_writes(p: CacheProblem, arrays: Mapping[str, Array], used: Array, new: Array) -> None:
    """Refuse an append that writes a row twice, or over one in use; pages that are only read may be shared.

    Args:
        used, new: of each sequence, for which there is room.

    Raises:
        ArgumentError: names the first two.
    """
    if not new.any():
        return
    if p.chosen:
        numbers = arrays["cache_batch_idx"]
        for a, b in _repeated(numbers)[:1]:
            raise ArgumentError(
                "cache_batch_idx: expected each sequence of the cache once, since k is appended to it, got "
                f"cache_batch_idx[{a}] = cache_batch_idx[{b}] = {numbers[b]}; append in one call for each"
            )
    if p.page_size:
        _check_pages(p, arrays, used, new)


def _check_pages(p: CacheProblem, arrays: Mapping[str, Array], used: Array, new: Array) -> None:
    assert p.page_size
    table = arrays["block_table"]
    writer = np.repeat(np.arange(p.batch), new)
    rows = np.arange(len(writer)) - np.repeat(np.cumsum(new) - new - used, new)
    pages, rows = table[writer, rows // p.page_size], rows % p.page_size
    for a, b in _repeated(pages.astype(np.int64) * p.page_size + rows)[:1]:
        raise _shared(f"sequences {writer[a]} and {writer[b]} both write row {rows[b]} of page {pages[b]}")
    starts = np.arange(p.pages_per_sequence) * p.page_size
    first = _first_seen(p, arrays, used + new)
    low, filled = (np.clip(n[:, None] - starts, 0, p.page_size) for n in (first, used))
    held = low < filled
    changes = np.zeros((p.slots, p.page_size + 1), np.int64)
    np.add.at(changes, (table[held], low[held]), 1)
    np.add.at(changes, (table[held], filled[held]), -1)
    for b in np.flatnonzero(changes.cumsum(axis=1)[pages, rows] > 0)[:1]:
        owner = np.argwhere((table == pages[b]) & (low <= rows[b]) & (rows[b] < filled))[0, 0]
        raise _shared(
            f"sequence {writer[b]} writes row {rows[b]} of page {pages[b]}, which sequence {owner} has in use"
        )


def _first_seen(p: CacheProblem, arrays: Mapping[str, Array], length: Array) -> Array:
    """The first row of each sequence that a query may see: pages of those before may be those of later ones."""
    first = np.zeros(p.batch, np.int64)
    if p.window[0] is not None:
        queries = np.diff(arrays["cu_seqlens_q"]) if p.packed else np.full(p.batch, p.seqlen_q)
        first = np.maximum(first, length - np.maximum(queries, 1) - p.window[0])
    return np.maximum(first, arrays["kv_range"][:, 0]) if p.kv_range else first


def _shared(what: str) -> ArgumentError:
    return ArgumentError(
        f"block_table: expected pages that no other sequence of the call has, where k is appended, but {what}; copy "
        "the page first, as PagedCache.append does"
    )


def _repeated(numbers: Array) -> list[tuple[int, int]]:
    """The places of each number that came before, and where it came first."""
    _, first, kind = np.unique(numbers, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[kind] != np.arange(len(numbers)))
    return [(int(first[kind[b]]), int(b)) for b in again]
