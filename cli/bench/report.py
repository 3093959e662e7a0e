"""What `bench` measured: rows, ratios to the peers, tables, CSV and JSON."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .cell import CPU, ORDERED, OURS, PLAIN, SM80
from .decode_cell import COPY, PARTS, WIDE, AnyCell
from .lengths import DENSE
from .timing import ROUNDS, Timing

C = TypeVar("C", bound=AnyCell)
TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward", "decode": "attention over a cache"}
OWN = (OURS, DENSE, ORDERED, PARTS, WIDE, SM80, COPY, PLAIN, CPU)  # contestants that are not peers
BEST = "best"  # of the peers, cell by cell
PAR = 0.97  # ours / theirs from which on a difference is noise
Ratios = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Row(Generic[C]):
    """One implementation in one direction of one cell; None where it was not measured, `reason` says why."""

    cell: C
    direction: str
    implementation: str
    timing: Timing | None  # milliseconds
    peak_bytes: int | None
    reason: str = ""
    tensor_core_percent: float | None = None
    clock_ghz: float | None = None

    @property
    def ms(self) -> float | None:
        return None if self.timing is None else self.timing.median

    @property
    def spread(self) -> float | None:
        return None if self.timing is None else self.timing.spread

    @property
    def speed(self) -> float | None:
        """In the cell's unit."""
        return None if self.ms is None else self.cell.speed(self.direction, self.implementation, self.ms)

    def document(self) -> dict[str, Any]:
        """One flat record, for JSON and CSV alike."""
        times = () if self.timing is None else self.timing.rounds
        return {
            **self.cell.record(),
            "direction": self.direction,
            "implementation": self.implementation,
            "ms": self.ms,
            "ms_fastest": min(times, default=None),
            "ms_slowest": max(times, default=None),
            "spread": self.spread,
            "rounds": len(times),
            "ms_rounds": list(times),
            **self.cell.facts(self.direction, self.implementation, self.ms),
            "peak_bytes": self.peak_bytes,
            "tensor_core_percent": self.tensor_core_percent,
            "clock_ghz": self.clock_ghz,
            "reason": self.reason,
        }


def ratio_of(ours: Row[Any], theirs: Iterable[Row[Any]]) -> float | None:
    """Ours / the fastest of theirs in calls a second, of one cell and direction; None where one did not run."""
    times = [r.ms for r in theirs if r.ms is not None]
    return None if ours.ms is None or not times else min(times) / ours.ms


def best_ratio(rows: Iterable[Row[Any]]) -> float | None:
    """Ours / the fastest of the others, among which our own calls are not."""
    by_name = {r.implementation: r for r in rows}
    others = [r for name, r in by_name.items() if name not in OWN]
    return ratio_of(by_name[OURS], others) if OURS in by_name else None


def by_cell(rows: Iterable[Row[C]]) -> dict[tuple[C, str], dict[str, Row[C]]]:
    """(cell, direction) -> implementation -> row."""
    grouped: dict[tuple[C, str], dict[str, Row[C]]] = {}
    for row in rows:
        grouped.setdefault((row.cell, row.direction), {})[row.implementation] = row
    return grouped


def documents(rows: Iterable[Row[Any]]) -> list[dict[str, Any]]:
    """A record for each row; those of ours also say how they compare with the fastest peer."""
    best = {key: best_ratio(found.values()) for key, found in by_cell(rows).items()}
    return [r.document() | {BEST: best[r.cell, r.direction] if r.implementation == OURS else None} for r in rows]


def ratios(rows: Iterable[Row[Any]]) -> Ratios:
    """peer, or BEST -> direction -> `_summary` of ours / theirs in speed."""
    found: dict[str, dict[str, list[tuple[float, AnyCell]]]] = {}
    for (cell, direction), by_name in by_cell(rows).items():
        ours = by_name.get(OURS)
        pairs = {name: ratio_of(ours, [row]) for name, row in by_name.items() if ours and name != OURS}
        for name, ratio in (pairs | {BEST: best_ratio(by_name.values())}).items():
            if ratio is not None:
                found.setdefault(name, {}).setdefault(direction, []).append((ratio, cell))
    return {
        name: {direction: _summary(values) for direction, values in found[name].items()}
        for name in sorted(found, key=lambda n: n == BEST)
    }


def _summary(values: list[tuple[float, AnyCell]]) -> dict[str, Any]:
    """Geometric mean, worst cell, how many cells there are and how many of them lie below PAR."""
    worst, cell = min(values, key=lambda pair: pair[0])
    mean = math.exp(sum(math.log(ratio) for ratio, _ in values) / len(values))
    below = sum(ratio < PAR for ratio, _ in values)
    named = {"worst_cell": cell.record(), "worst_name": cell.where}
    return {"geomean": mean, "worst": worst, **named, "cells": len(values), "below_par": below}


def few_rounds(rounds: int) -> str | None:
    """What a reader must know of so few rounds, or None."""
    if rounds >= ROUNDS:
        return None
    return f"{rounds} round{'s' * (rounds > 1)} instead of {ROUNDS}: the figures depend on who ran after whom"


def write_csv(rows: list[Row[Any]], path: Path) -> None:
    """One line a row, without the single rounds."""
    records = documents(rows)
    for record in records:
        del record["ms_rounds"]
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)
