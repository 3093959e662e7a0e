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

from .bench_work import OURS, Cell

TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}


@dataclass(frozen=True)
class Row:
    """One implementation in one direction of one cell; None where it was not measured, `reason` says why."""

    cell: Cell
    direction: str
    implementation: str
    ms: float | None
    peak_bytes: int | None
    reason: str = ""

    @property
    def tflops(self) -> float | None:
        return None if self.ms is None else self.cell.flops(self.direction) / self.ms / 1e9

    def document(self) -> dict[str, Any]:
        """One flat record, for JSON and CSV alike."""
        return {
            **asdict(self.cell),
            "direction": self.direction,
            "implementation": self.implementation,
            "ms": self.ms,
            "tflops": self.tflops,
            "peak_bytes": self.peak_bytes,
            "ideal_bytes": self.cell.ideal_bytes(self.direction),
            "reason": self.reason,
        }


def ratios(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """peer -> direction -> geometric mean, worst cell and number of cells of ours / theirs in speed."""
    speed = {(r.cell, r.direction, r.implementation): r.tflops for r in rows}
    found: dict[str, dict[str, list[tuple[float, Cell]]]] = {}
    for (cell, direction, name), theirs in speed.items():
        ours = speed.get((cell, direction, OURS))
        if name != OURS and theirs and ours:
            found.setdefault(name, {}).setdefault(direction, []).append((ours / theirs, cell))
    return {
        name: {direction: _summary(values) for direction, values in by_direction.items()}
        for name, by_direction in found.items()
    }


def _summary(values: list[tuple[float, Cell]]) -> dict[str, Any]:
    worst, cell = min(values, key=lambda pair: pair[0])
    mean = math.exp(sum(math.log(ratio) for ratio, _ in values) / len(values))
    return {"geomean": mean, "worst": worst, "worst_cell": asdict(cell), "cells": len(values)}


def print_rows(rows: list[Row], console: Console) -> None:
    """A table of speed for each direction, then one of memory."""
    names = list(dict.fromkeys(r.implementation for r in rows))
    for direction in dict.fromkeys(r.direction for r in rows):
        chosen = [r for r in rows if r.direction == direction]
        if any(r.ms is not None for r in chosen):
            console.print(f"\n{TITLES[direction]}, TFLOP/s (ours / theirs)", style="bold")
            console.print(_speed_table(chosen, names))
    chosen = [r for r in rows if r.peak_bytes is not None]
    if chosen:
        last = chosen[-1].direction
        what = TITLES["fwd" if last == "fwd" else "both"]
        console.print(f"\npeak extra memory of {what}, MiB", style="bold")
        console.print(_memory_table([r for r in chosen if r.direction == last], names))
    for reason in dict.fromkeys(f"{r.implementation}: {r.reason}" for r in rows if r.reason):
        console.print(reason, style="yellow", soft_wrap=True)


def _new_table(names: list[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("head_dim", "mask", "seqlen", *names):
        table.add_column(name, justify="left" if name == "mask" else "right", no_wrap=True)
    return table


def _by_cell(rows: list[Row]) -> dict[Cell, dict[str, Row]]:
    grouped: dict[Cell, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(row.cell, {})[row.implementation] = row
    return grouped


def _labels(cell: Cell) -> tuple[str, str, str]:
    return str(cell.head_dim), "causal" if cell.causal else "dense", str(cell.seqlen)


def _speed_table(rows: list[Row], names: list[str]) -> Table:
    table = _new_table([OURS, "ms", *(n for n in names if n != OURS)])
    for cell, found in _by_cell(rows).items():
        ours = found[OURS]
        texts = ["-", "-"] if ours.ms is None else [f"{ours.tflops:.3g}", f"{ours.ms:.3f}"]
        for name in names:
            if name == OURS:
                continue
            theirs = found[name].tflops if name in found else None
            ratio = f" ({ours.tflops / theirs:.2f})" if theirs and ours.tflops else ""
            texts.append(f"{theirs:.3g}{ratio}" if theirs else "-")
        table.add_row(*_labels(cell), *texts)
    return table


def _memory_table(rows: list[Row], names: list[str]) -> Table:
    table = _new_table(["needed", *names])
    for cell, found in _by_cell(rows).items():
        peaks = [found[n].peak_bytes if n in found else None for n in names]
        texts = ["-" if peak is None else f"{peak / 2**20:.1f}" for peak in peaks]
        table.add_row(*_labels(cell), f"{cell.ideal_bytes(rows[0].direction) / 2**20:.1f}", *texts)
    return table


def print_ratios(summary: dict[str, dict[str, dict[str, Any]]], console: Console) -> None:
    for name, by_direction in summary.items():
        for direction, s in by_direction.items():
            worst = s["worst_cell"]
            where = (
                f"head_dim {worst['head_dim']}, {'causal' if worst['causal'] else 'dense'}, seqlen {worst['seqlen']}"
            )
            console.print(
                f"{OURS} / {name}, {TITLES[direction]}: geometric mean {s['geomean']:.3f} of {s['cells']} cells, "
                f"worst {s['worst']:.3f} ({where})",
                soft_wrap=True,
            )


def write_csv(rows: list[Row], path: Path) -> None:
    """One line a row."""
    documents = [r.document() for r in rows]
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(documents[0]))
        writer.writeheader()
        writer.writerows(documents)
