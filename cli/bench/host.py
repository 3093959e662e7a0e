"""What a call costs the host: `bench --host`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .cell import CPU, ORDERED, OURS, PLAIN, SM80, Cell
from .contestants import works_of
from .decode_cell import AnyCell
from .host_places import measure_places
from .lengths import DENSE
from .timing import host_us
from .work import Bench


def small(dtype: str) -> Cell:
    """A problem that costs the device next to nothing."""
    return Cell(dtype, 64, False, 64, 1, 4, 4)


def measure(bench: Bench, cells: Sequence[AnyCell], options: dict[str, Any]) -> dict[str, Any]:
    """For a document, what it says of hosts."""
    found: dict[str, Any] = {"host_us": measure_host(bench, cells, options)}
    if not options["packed"]:
        found["host_places"] = measure_places(bench, small(options["dtype"]))
    return found


def measure_host(bench: Bench, cells: Sequence[AnyCell], options: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Microseconds of host time for a call on a small problem: forward without gradients, both passes, new lengths."""
    cell = small(options["dtype"])
    if options["packed"]:
        cell = replace(cell, batch=2, packed="equal", lengths=(64, 64))
    names, works = [], []
    as_ours = SM80, ORDERED  # our own calls once more
    for name in [OURS, *(name for name in options["against"] if name not in as_ours and not bench.absent(name))]:
        try:
            works.append(works_of(bench, name, cell))
            names.append(name)
        except NotImplementedError:  # a peer without such calls; the rows say so
            pass
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for d in ("fwd", "both"):
        for name, timing in zip(names, host_us([w[d] for w in works], bench.clock), strict=True):
            found[name] |= {d: timing.median, f"{d}_spread": timing.spread}
    for name in names:
        if name not in ("flex", DENSE, PLAIN, CPU):  # the first compiles for each length, the others are calls of ours
            found[name]["fwd_new_lengths"] = new_lengths_us(bench, name, cell)
    return found


def new_lengths_us(bench: Bench, name: str, cell: Cell, calls: int = 20, rounds: int = 5) -> float:
    """Microseconds of host time for a forward whose lengths are new: the median of the rounds.

    The cell's lengths are the longest, and none is below half of them: some peers have no kernel for the shortest. A
    quarter of their product must be `calls * rounds` at least.
    """
    q, k, v, _ = bench.inputs(cell)
    half = cell.seqlen // 2
    pairs = [(cell.seqlen - i // half, cell.seqlen - i % half) for i in range(calls * rounds)]
    dense = None if cell.packed else bench.attention(name, cell)
    samples = []
    for start in range(0, len(pairs), calls):
        prepared = []
        for m, n in pairs[start : start + calls]:
            if dense:
                prepared.append((dense, q[:, :m], k[:, :n], v[:, :n]))
            else:
                attention = bench.attention(name, replace(cell, lengths=(m, n)))
                prepared.append((attention, q[: m + n], k[: m + n], v[: m + n]))
        bench.clock.synchronize()
        begin = time.perf_counter()
        for attention, *arrays in prepared:
            attention(*arrays)
        samples.append((time.perf_counter() - begin) / calls * 1e6)
    bench.clock.synchronize()
    return statistics.median(samples)
