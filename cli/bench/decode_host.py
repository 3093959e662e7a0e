"""What a call over a cache costs the host: `bench --decode --host`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash import kvcache

from .cell import OURS, SM80
from .clocks import Stepped, Work
from .decode_arrays import arrays
from .decode_calls import call_of, options
from .decode_cell import COPY, AnyCell, DecodeCell
from .timing import host_us
from .work import Bench

_STEPS = "_steps"
_PAGE = 16
PLACES = {
    "cache": "attention over a cache",
    f"cache{_STEPS}": "attention over a cache, lengths that change with each call",
    "pages": "attention over a cache in pages",
    f"pages{_STEPS}": "attention over a cache in pages, lengths that change with each call",
}


def _smallest(cells: Sequence[AnyCell]) -> DecodeCell:
    return min((c for c in cells if isinstance(c, DecodeCell)), key=lambda c: c.whole_bytes)


def measure(bench: Bench, cells: Sequence[AnyCell], asked: dict[str, Any]) -> dict[str, Any]:
    """For a document, what it says of hosts."""
    return {"host_us": measure_host(bench, cells, asked), "host_places": measure_places(bench, cells)}


def measure_host(bench: Bench, cells: Sequence[AnyCell], asked: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Microseconds of host time for a call of the smallest cell."""
    cell = _smallest(cells)
    found: dict[str, Work] = {}
    for name in (OURS, *(name for name in asked["against"] if name not in (COPY, SM80) and not bench.absent(name))):
        try:
            call = call_of(bench, name, cell)
            call()
        except Exception:  # of a peer, of which the rows say why
            if name == OURS:
                raise
        else:
            found[name] = call
    timings = zip(found, host_us(list(found.values()), bench.clock), strict=True)
    return {name: {"fwd": timing.median, "fwd_spread": timing.spread} for name, timing in timings}


def measure_places(bench: Bench, cells: Sequence[AnyCell]) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of host time, and their spread, of our call of the smallest cell, in turns: by `PLACES`, then by
    whose arrays they are; on a GPU CuPy's stand beside torch's.

    Lengths change where they lie: by one more key before each call, a change whose time does not count.
    """
    smallest = replace(_smallest(cells), kv_range=False)
    shapes = {"cache": replace(smallest, page=0), "pages": replace(smallest, page=smallest.page or _PAGE)}
    works: dict[tuple[str, str], Work] = {}
    for own in _frameworks(bench):
        for place, cell in shapes.items():
            works[place, own.name] = call_of(own, OURS, cell)
            works[place + _STEPS, own.name] = _stepped(own, cell)
    found: dict[str, dict[str, dict[str, float]]] = {place: {} for place in PLACES}
    for (place, name), timing in zip(works, host_us(list(works.values()), bench.clock), strict=True):
        found[place][name] = {"us": timing.median, "spread": timing.spread}
    return found


def _frameworks(bench: Bench) -> Iterator[Bench]:
    yield bench
    if bench.on_gpu and bench.name == "torch":
        from .cupy_work import CupyBench

        yield CupyBench()


def _stepped(bench: Bench, cell: DecodeCell) -> Stepped:
    given = arrays(bench, cell)
    room = cell.capacity - cell.capacity // 2
    given["cache_seqlens"] = bench.array(np.array([max(1, n // 2) for n in cell.lengths], np.int32))
    call = functools.partial(kvcache.attention_with_cache, **given, **options(cell))
    return Stepped(call, functools.partial(next, _grown(given["cache_seqlens"], room)))


def _grown(lengths: Any, room: int) -> Iterator[None]:
    """Each time one more key in all sequences, in place; after `room` of them as at first."""
    while True:
        for _ in range(room):
            lengths += 1
            yield
        lengths -= room
        yield
