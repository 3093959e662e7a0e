"""What `bench` measured: rows, ratios to the peers, tables, CSV and JSON."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cell import Cell
from .lengths import DENSE
from .timing import ROUNDS, Timing
from .work import OURS

TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}
BEST = "best"  # of the peers, cell by cell
PAR = 0.97  # ours / theirs from which on a difference is noise
Ratios = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One implementation in one direction of one cell; None where it was not measured, `reason` says why."""

    cell: Cell
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
    def tflops(self) -> float | None:
        return None if self.ms is None else self.cell.flops(self.direction) / self.ms / 1e9

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
            "tflops": self.tflops,
            "peak_bytes": self.peak_bytes,
            "ideal_bytes": self.cell.ideal_bytes(self.direction),
            "tensor_core_percent": self.tensor_core_percent,
            "clock_ghz": self.clock_ghz,
            "reason": self.reason,
        }


def ratio_of(ours: Row, theirs: Iterable[Row]) -> float | None:
    """Ours / the fastest of theirs in speed, of the rows of one cell and direction; None where one did not run."""
    speeds = [r.tflops for r in theirs if r.tflops is not None]
    return None if ours.tflops is None or not speeds else ours.tflops / max(speeds)


def best_ratio(rows: Iterable[Row]) -> float | None:
    """Ours / the fastest of the others, among which our own dense call is not."""
    by_name = {r.implementation: r for r in rows}
    others = [r for name, r in by_name.items() if name not in (OURS, DENSE)]
    return ratio_of(by_name[OURS], others) if OURS in by_name else None


def by_cell(rows: Iterable[Row]) -> dict[tuple[Cell, str], dict[str, Row]]:
    """(cell, direction) -> implementation -> row."""
    grouped: dict[tuple[Cell, str], dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault((row.cell, row.direction), {})[row.implementation] = row
    return grouped


def documents(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A record for each row; those of ours also say how they compare with the fastest peer."""
    best = {key: best_ratio(found.values()) for key, found in by_cell(rows).items()}
    return [r.document() | {BEST: best[r.cell, r.direction] if r.implementation == OURS else None} for r in rows]


def ratios(rows: Iterable[Row]) -> Ratios:
    """peer, or BEST -> direction -> `_summary` of ours / theirs in speed."""
    found: dict[str, dict[str, list[tuple[float, Cell]]]] = {}
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


def _summary(values: list[tuple[float, Cell]]) -> dict[str, Any]:
    """Geometric mean, worst cell, how many cells there are and how many of them lie below PAR."""
    worst, cell = min(values, key=lambda pair: pair[0])
    mean = math.exp(sum(math.log(ratio) for ratio, _ in values) / len(values))
    below = sum(ratio < PAR for ratio, _ in values)
    return {"geomean": mean, "worst": worst, "worst_cell": cell.record(), "cells": len(values), "below_par": below}


def mask_name(cell: Cell) -> str:
    """full or causal, and the features."""
    parts = ["causal" if cell.causal else "full"]
    parts += [] if cell.window is None else [f"window {cell.window}"]
    parts += [f"block mask {cell.block_mask}"] if cell.block_mask else []
    parts += [] if cell.softcap is None else [f"softcap {cell.softcap:g}"]
    parts += ["ALiBi"] * cell.alibi + ["sinks"] * cell.sink
    parts += [f"{'learned ' * cell.learned}bias {cell.bias}"] if cell.bias else []
    parts += [f"mask {cell.mask}"] if cell.mask else []
    parts += [f"dropout {cell.dropout:g}"] if cell.dropout else []
    return ", ".join(parts)


def few_rounds(rounds: int) -> str | None:
    """What a reader must know of so few rounds, or None."""
    if rounds >= ROUNDS:
        return None
    return f"{rounds} round{'s' * (rounds > 1)} instead of {ROUNDS}: the figures depend on who ran after whom"


def write_csv(rows: list[Row], path: Path) -> None:
    """One line a row, without the single rounds."""
    records = documents(rows)
    for record in records:
        del record["ms_rounds"]
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)
