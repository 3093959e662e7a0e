"""What the arrays of a call that lie in host memory say of places: where rows lie, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..problem import Problem
from ..sequences import Sequences, check_lengths, shortened
from .problem import CacheProblem
from .writes import check_writes

Array = NDArray[Any]
# Those that say where things lie: read here, and on a GPU by the kernels alone.
PLACES = ("cache_seqlens", "block_table", "cache_batch_idx", "cu_seqlens_q", "kv_range")


class Part(NamedTuple):
    """One sequence of a call.

    Attributes:
        number: which it is.
        rows: of its queries, and of the new k and v in packed arrays.
        used: rows of the cache in use before the append.
        new: rows that are appended; those beyond the capacity are not written.
        keys: those of its keys that any query may see.
        problem: attention of its queries to these keys: dense, with batch 1.
    """

    number: int
    rows: slice
    used: int
    new: int
    keys: slice
    problem: Problem


def parts(p: CacheProblem, arrays: Mapping[str, Array]) -> Iterator[Part]:
    """The sequences of a call, whose lengths are clamped to what there is room for."""
    dense = Problem(
        p.dtype, 1, p.seqlen_q, p.capacity, p.heads_q, p.heads_k, p.head_dim, p.scale, p.window, softcap=p.softcap,
        head_dim_v=p.head_dim_v, alibi=p.alibi, sink=p.sink, bias=p.bias, mods=p.mods, mod_shapes=p.mod_shapes,
    )  # fmt: skip
    for b in range(p.batch):
        rows = slice(0, p.seqlen_q)
        if p.packed:
            rows = slice(int(arrays["cu_seqlens_q"][b]), int(arrays["cu_seqlens_q"][b + 1]))
        queries = rows.stop - rows.start
        new = (queries if p.packed else p.seqlen_new) if "k" in arrays else 0
        used = min(max(int(arrays["cache_seqlens"][b]), 0), p.capacity)
        total = min(used + new, p.capacity)
        start, end = (int(x) for x in arrays["kv_range"][b]) if p.kv_range else (0, total)
        start, end = max(start, 0), min(end, total)
        keys = slice(start, end) if start < end else slice(0, 0)
        yield Part(b, rows, used, new, keys, shortened(dense, queries, keys, total))


def places(p: CacheProblem, arrays: Mapping[str, Array], b: int, rows: Array) -> tuple[Array, Array]:
    """Where rows of sequence b lie, as indices of the first two dimensions of the caches."""
    if p.page_size is None:
        slot = int(arrays["cache_batch_idx"][b]) if p.chosen else b
        return np.full_like(rows, min(max(slot, 0), p.slots - 1)), rows
    pages = arrays["block_table"][b].astype(np.int64)[rows // p.page_size]
    return np.clip(pages, 0, p.slots - 1), rows % p.page_size


def check_values(p: CacheProblem, arrays: Mapping[str, Array]) -> None:
    """Refuse lengths and places beyond the caches, and appends where others have rows; entries of block_table behind
    the last page in use may be anything.

    Raises:
        ArgumentError: names the first wrong entry.
    """
    new = np.full(p.batch, p.seqlen_new)
    if p.packed:
        cu = arrays["cu_seqlens_q"]
        check_lengths(Sequences.of(cu), p.seqlen_q, p.seqlen_q)
        queries = np.diff(cu.astype(np.int64))
        _check_room_of_bias(p, queries)
        new = queries if "k" in arrays else np.zeros(p.batch, np.int64)
    used = arrays["cache_seqlens"].astype(np.int64)
    check_room(p, used, new)
    if p.chosen:
        _check_slots("cache_batch_idx", arrays["cache_batch_idx"], p.slots, "sequences of the cache")
    if p.page_size:
        columns = np.arange(p.pages_per_sequence) < -(-(used + new) // p.page_size)[:, None]
        table = np.where(columns, arrays["block_table"], 0)
        _check_slots("block_table", table, p.slots if columns.any() else 1, "pages of the pool")
    if p.kv_range:
        _check_ranges(arrays["kv_range"].astype(np.int64), p.capacity)
    check_writes(p, arrays, used, new)


def check_length(p: CacheProblem, length: int) -> None:
    """`check_room` of one length for all; how many rows packed sequences append is not known."""
    new = 0 if p.packed else p.seqlen_new
    if not 0 <= length <= p.capacity - new:  # NumPy would take ten times as long to find that there is room
        check_room(p, np.array([length]), np.array([new]))


def check_room(p: CacheProblem, used: Array, new: Array) -> None:
    """Refuse lengths for which the cache has no room.

    Raises:
        ArgumentError: names the first.
    """
    for b in np.flatnonzero((used < 0) | (used + new > p.capacity))[:1]:
        room = f"0 to {p.capacity - new[b]}"
        room += f", a capacity of {p.capacity} less {new[b]} new keys" if new[b] else ""
        entry = "" if p.one_length else f"cache_seqlens[{b}] = "
        wider = "wider block_table" if p.page_size else "larger cache"
        way_out = "" if used[b] < 0 else f"; a longer sequence needs a {wider}"
        raise ArgumentError(f"cache_seqlens: expected lengths of {room}, got {entry}{used[b]}{way_out}")


def _check_room_of_bias(p: CacheProblem, queries: Array) -> None:
    """Refuse packed sequences of more queries than a bias and a mask have room for."""
    for b in np.flatnonzero(queries > p.max_seqlen_q)[:1]:
        assert p.bias is not None
        arguments = " and ".join([p.bias.argument, *["mask"] * p.bias.masked])
        raise ArgumentError(
            f"{arguments}: expected room for at least {queries[b]} queries, those of sequence {b}, got "
            f"{p.max_seqlen_q} along dimension -2; make room for the longest sequence, or give it length 1, the same "
            "for all queries"
        )


def _check_slots(name: str, numbers: Array, count: int, of: str) -> None:
    wrong = np.argwhere((numbers < 0) | (numbers >= count))
    if wrong.size:
        at = ", ".join(map(str, wrong[0]))
        raise ArgumentError(
            f"{name}: expected numbers of the {count} {of}, from 0, got {name}[{at}] = {numbers[tuple(wrong[0])]}"
        )


def _check_ranges(ranges: Array, capacity: int) -> None:
    start, end = ranges[:, 0], ranges[:, 1]
    for b in np.flatnonzero((start < 0) | (start > end) | (end > capacity))[:1]:
        raise ArgumentError(
            f"kv_range: expected [start, end) with 0 <= start <= end <= {capacity}, the capacity of the cache, got "
            f"kv_range[{b}] = [{start[b]}, {end[b]}]"
        )
