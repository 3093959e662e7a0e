"""What `bench` tells people: what was measured, tables, ratios, and what a call costs the host."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .cell import OURS
from .decode_host import PLACES as OVER_A_CACHE
from .host_places import PLACES
from .numpy_work import table as ways_of_numpy
from .report import BEST, OWN, PAR, TITLES, Ratios, Row, best_ratio, by_cell, ratio_of


def show_head(document: dict[str, Any], console: Console) -> None:
    """What is, or was, measured."""
    console.print(", ".join(f"{k} {document[k]}" for k in ("version", "device", "framework", "dtype", "date")))
    if document["peer_versions"]:
        console.print(", ".join(f"{name} {version}" for name, version in document["peer_versions"].items()))
    for what, formula in (("FLOPs", document["flop_formula"]), ("bytes", document.get("bytes_formula"))):
        if formula:
            console.print(f"{what}: {formula}", soft_wrap=True)
    if document["matmul_tflops"]:
        console.print(f"matrix product: {document['matmul_tflops']:.3g} TFLOP/s")
    for drawn in document["packed"]:
        lengths = drawn["lengths"]
        rows = " to ".join(str(n) for n in sorted({min(lengths), max(lengths)}))
        console.print(f"{drawn['packed']} {drawn['seqlen']}: {len(lengths)} sequences of {rows} rows, "
                      f"{sum(lengths)} in all", soft_wrap=True)  # fmt: skip


def show(document: dict[str, Any], rows: list[Row[Any]], console: Console) -> None:
    """Tables and sentences for people."""
    print_rows(rows, console)
    if left := document.get("not_measured"):
        cells = left + len(dict.fromkeys(row.cell for row in rows))
        console.print(
            f"interrupted: {left} of {cells} configurations are not measured", style="bold yellow", soft_wrap=True
        )
    for direction in dict.fromkeys(x["direction"] for x in document.get("numpy", ())):
        console.print(f"\nNumPy arrays, {TITLES[direction]}, the time that each way takes", style="bold")
        _print_table(ways_of_numpy(rows, document["numpy"], direction, document["backend"]), console)
    console.print()
    print_ratios(document["ratios"], console)
    if document["few_rounds"]:
        console.print(document["few_rounds"], style="yellow", soft_wrap=True)
    for name, costs in document.get("host_us", {}).items():
        passes = (f"{label} {costs[d]:.1f} us (spread {costs[d + '_spread']:.1%})"
                  for d, label in (("fwd", "forward"), ("both", "forward + backward")) if d in costs)  # fmt: skip
        console.print(f"host, {name}: {', '.join(passes)} a call", soft_wrap=True)
        if new := costs.get("fwd_new_lengths"):
            console.print(f"host, {name}: forward of lengths never seen {new:.1f} us a call", soft_wrap=True)
    for place, costs in document.get("host_places", {}).items():
        found = (f"{name} {cost['us']:.1f} us (spread {cost['spread']:.1%})" for name, cost in costs.items())
        console.print(f"host, {(PLACES | OVER_A_CACHE)[place]}: {', '.join(found)} a call", soft_wrap=True)
    for kind, label in (("cold", "compiled cold"), ("disk_cache", "from the disk cache")):
        for kernel in document.get("startup", {}).get(kind, {}).get("kernels", []):
            console.print(f"{label}: {kernel['symbol']} {1e3 * kernel['seconds']:.1f} ms", soft_wrap=True)


def print_rows(rows: list[Row[Any]], console: Console) -> None:
    """A table of speed for each direction, then one of memory."""
    names = list(dict.fromkeys(r.implementation for r in rows))
    for direction in dict.fromkeys(r.direction for r in rows):
        chosen = [r for r in rows if r.direction == direction]
        if any(r.ms is not None for r in chosen):
            console.print(f"\n{TITLES[direction]}, {chosen[0].cell.heading}", style="bold")
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


def _new_table(rows: list[Row[Any]], names: list[str]) -> Table:
    table, labels = Table(box=None, header_style="bold", pad_edge=False), rows[0].cell.labels
    for name in (*labels, *names):
        table.add_column(name, justify="left" if name in ("mask", "cache") else "right", no_wrap=True)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speed_table(rows: list[Row[Any]], names: list[str]) -> Table:
    peers = [n for n in names if n != OURS]
    best = [BEST] if len(set(peers) - {*OWN}) > 1 else []
    time = "us" if rows[0].direction == "decode" else "ms"
    counted = any(r.tensor_core_percent is not None for r in rows)
    spreads = [column for name in peers for column in (name, "spread")]
    table = _new_table(rows, [OURS, time, "spread", *spreads, *best, *(("MMA %", "GHz") if counted else ())])
    for (cell, _), found in by_cell(rows).items():
        ours = found[OURS]
        taken = "-" if ours.ms is None else f"{ours.ms * 1e3:.1f}" if time == "us" else f"{ours.ms:.3f}"
        texts = [_number(ours.speed, ".3g"), taken, _number(ours.spread, ".1%")]
        for name in peers:
            ratio = ratio_of(ours, [found[name]]) if name in found else None
            texts.append("-" if ratio is None else f"{found[name].speed:.3g} ({ratio:.2f})")
            texts.append(_number(found[name].spread if name in found else None, ".1%"))
        texts += [_number(best_ratio(found.values()), ".2f") for _ in best]
        if counted:
            texts += [_number(ours.tensor_core_percent, ".1f"), _number(ours.clock_ghz, ".2f")]
        table.add_row(*cell.label(), *texts)
    return table


def _memory_table(rows: list[Row[Any]], names: list[str]) -> Table:
    table = _new_table(rows, ["needed", *names])
    for (cell, _), found in by_cell(rows).items():
        peaks = [found[n].peak_bytes if n in found else None for n in names]
        texts = ["-" if peak is None else f"{peak / 2**20:.1f}" for peak in peaks]
        table.add_row(*cell.label(), f"{cell.ideal_bytes(rows[0].direction) / 2**20:.1f}", *texts)
    return table


def print_ratios(summary: Ratios, console: Console) -> None:
    """A sentence for each peer and direction; where there are several peers, also for the best of each cell."""
    for name, by_direction in summary.items():
        if name == BEST and len(summary.keys() - {BEST, *OWN}) < 2:
            continue
        for direction, s in by_direction.items():
            console.print(
                f"{OURS} / {name}, {TITLES[direction]}: geometric mean {s['geomean']:.3f} of {s['cells']} cells, "
                f"worst {s['worst']:.3f} ({s['worst_name']}), {s['below_par']} below {PAR}",
                soft_wrap=True,
            )
