"""Rows that a call appends, by places in host memory: no two sequences write one, and none writes what another has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from .problem import CacheProblem

Array = NDArray[Any]


def check_caches_apart(p: CacheProblem) -> None:
    """Refuse an append to k_cache and v_cache that begin at one address.

    Raises:
        ArgumentError: rows of k would be written over by those of v.
    """
    if p.seqlen_new and p.slots and p.capacity:
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
        _check_pages(p, arrays["block_table"], used, new)


def _check_pages(p: CacheProblem, table: Array, used: Array, new: Array) -> None:
    assert p.page_size
    writer = np.repeat(np.arange(p.batch), new)
    rows = np.arange(len(writer)) - np.repeat(np.cumsum(new) - new - used, new)
    pages, rows = table[writer, rows // p.page_size], rows % p.page_size
    for a, b in _repeated(pages.astype(np.int64) * p.page_size + rows)[:1]:
        raise _shared(f"sequences {writer[a]} and {writer[b]} both write row {rows[b]} of page {pages[b]}")
    if p.kv_range or p.window[0] is not None:  # which hide the first keys: their pages may be those of later ones
        return
    filled = np.clip(used[:, None] - np.arange(p.pages_per_sequence) * p.page_size, 0, p.page_size)
    most = np.zeros(p.slots, np.int64)
    np.maximum.at(most, table[filled > 0], filled[filled > 0])
    for b in np.flatnonzero(rows < most[pages])[:1]:
        owner = np.argwhere((table == pages[b]) & (filled > rows[b]))[0, 0]
        raise _shared(
            f"sequence {writer[b]} writes row {rows[b]} of page {pages[b]}, which sequence {owner} has in use"
        )


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
