"""What `bench` measured: rows, ratios to the peers, tables, CSV and JSON."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .cell import Cell
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
            **asdict(self.cell),
            "direction": self.direction,
            "implementation": self.implementation,
            "ms": self.ms,
            "ms_fastest": min(times, default=None),
            "ms_slowest": max(times, default=None),
            "spread": self.spread,
            "rounds": len(times),
            "tflops": self.tflops,
            "peak_bytes": self.peak_bytes,
            "ideal_bytes": self.cell.ideal_bytes(self.direction),
            "tensor_core_percent": self.tensor_core_percent,
            "clock_ghz": self.clock_ghz,
            "reason": self.reason,
        }


def best_ratio(rows: Iterable[Row]) -> float | None:
    """Ours / the fastest of the peers, of the rows of one cell and direction."""
    speed = {r.implementation: r.tflops for r in rows if r.tflops is not None}
    ours = speed.pop(OURS, None)
    return ours / max(speed.values()) if ours and speed else None


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
        pairs = {name: best_ratio([by_name[OURS], row]) for name, row in by_name.items() if OURS in by_name}
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
    return {"geomean": mean, "worst": worst, "worst_cell": asdict(cell), "cells": len(values), "below_par": below}


def print_rows(rows: list[Row], console: Console) -> None:
    """A table of speed for each direction, then one of memory."""
    names = list(dict.fromkeys(r.implementation for r in rows))
    for direction in dict.fromkeys(r.direction for r in rows):
        chosen = [r for r in rows if r.direction == direction]
        if any(r.ms is not None for r in chosen):
            console.print(f"\n{TITLES[direction]}, TFLOP/s (ours / theirs)", style="bold")
            _print_table(_speed_table(chosen, names), console)
    chosen = [r for r in rows if r.peak_bytes is not None]
    if chosen:
        last = chosen[-1].direction
        what = TITLES["fwd" if last == "fwd" else "both"]
        console.print(f"\npeak extra memory of {what}, MiB", style="bold")
        _print_table(_memory_table([r for r in chosen if r.direction == last], names), console)
    for reason in dict.fromkeys(f"{r.implementation}: {r.reason}" for r in rows if r.reason):
        console.print(reason, style="yellow", soft_wrap=True)


def _print_table(table: Table, console: Console) -> None:
    """No column is cut short, however narrow the terminal or the pipe."""
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)
    console.width = width


def _new_table(names: list[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("head_dim", "mask", "seqlen", *names):
        table.add_column(name, justify="left" if name == "mask" else "right", no_wrap=True)
    return table


def mask_name(cell: Cell) -> str:
    """dense or causal, the window, the softcap and ALiBi."""
    window = "" if cell.window is None else f", window {cell.window}"
    softcap = "" if cell.softcap is None else f", softcap {cell.softcap:g}"
    return ("causal" if cell.causal else "dense") + window + softcap + ", ALiBi" * cell.alibi


def _labels(cell: Cell) -> tuple[str, str, str]:
    return str(cell.head_dim), mask_name(cell), str(cell.seqlen)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speed_table(rows: list[Row], names: list[str]) -> Table:
    peers = [n for n in names if n != OURS]
    best = [BEST] if len(peers) > 1 else []
    counted = any(r.tensor_core_percent is not None for r in rows)
    spreads = [column for name in peers for column in (name, "spread")]
    table = _new_table([OURS, "ms", "spread", *spreads, *best, *(("MMA %", "GHz") if counted else ())])
    for (cell, _), found in by_cell(rows).items():
        ours = found[OURS]
        texts = [_number(ours.tflops, ".3g"), _number(ours.ms, ".3f"), _number(ours.spread, ".1%")]
        for name in peers:
            ratio = best_ratio([ours, found[name]]) if name in found else None
            texts.append("-" if ratio is None else f"{found[name].tflops:.3g} ({ratio:.2f})")
            texts.append(_number(found[name].spread if name in found else None, ".1%"))
        texts += [_number(best_ratio(found.values()), ".2f") for _ in best]
        if counted:
            texts += [_number(ours.tensor_core_percent, ".1f"), _number(ours.clock_ghz, ".2f")]
        table.add_row(*_labels(cell), *texts)
    return table


def _memory_table(rows: list[Row], names: list[str]) -> Table:
    table = _new_table(["needed", *names])
    for (cell, _), found in by_cell(rows).items():
        peaks = [found[n].peak_bytes if n in found else None for n in names]
        texts = ["-" if peak is None else f"{peak / 2**20:.1f}" for peak in peaks]
        table.add_row(*_labels(cell), f"{cell.ideal_bytes(rows[0].direction) / 2**20:.1f}", *texts)
    return table


def print_ratios(summary: Ratios, console: Console) -> None:
    """A sentence for each peer and direction; where there are several peers, also for the best of each cell."""
    for name, by_direction in summary.items():
        if name == BEST and len(summary) == 2:
            continue
        for direction, s in by_direction.items():
            worst = s["worst_cell"]
            where = (
                f"head_dim {worst['head_dim']}, {'causal' if worst['causal'] else 'dense'}, seqlen {worst['seqlen']}"
            )
            console.print(
                f"{OURS} / {name}, {TITLES[direction]}: geometric mean {s['geomean']:.3f} of {s['cells']} cells, "
                f"worst {s['worst']:.3f} ({where}), {s['below_par']} below {PAR}",
                soft_wrap=True,
            )


def few_rounds(rounds: int) -> str | None:
    """What a reader must know of so few rounds, or None."""
    if rounds >= ROUNDS:
        return None
    return f"{rounds} round{'s' * (rounds > 1)} instead of {ROUNDS}: the figures depend on who ran after whom"


def write_csv(rows: list[Row], path: Path) -> None:
    """One line a row."""
    records = documents(rows)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)
