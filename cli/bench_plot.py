"""`bench --plot`: speed by sequence length, a panel for each head_dim and mask; memory below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .bench_report import TITLES, Row
from .bench_work import OURS

COLORS = {OURS: "#d62728", "flash2": "#1f77b4", "cudnn": "#2ca02c", "fa4": "#9467bd", "math": "#7f7f7f"}
LOG_RATIO = 10


def draw(rows: list[Row], path: Path, title: str) -> None:
    """Write the figure; the file's ending says in which format.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((r.cell.head_dim, r.cell.causal) for r in rows))
    timed = list(dict.fromkeys(r.direction for r in rows if r.ms is not None))
    measured = [r.direction for r in rows if r.peak_bytes is not None]
    lines = [(direction, "tflops") for direction in timed] + [(d, "peak_bytes") for d in measured[-1:]]
    figure = Figure(figsize=(1.2 + 3.4 * len(columns), 0.9 + 2.7 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(lines), len(columns), squeeze=False, sharex=True, sharey="row")
    for panel_row, (direction, quantity) in zip(panels, lines, strict=True):
        for panel, (head_dim, causal) in zip(panel_row, columns, strict=True):
            chosen = [r for r in rows if r.direction == direction and r.cell.head_dim == head_dim
                      and r.cell.causal == causal]  # fmt: skip
            _panel(panel, chosen, quantity)
            panel.set_title(f"{_heading(direction, quantity)}\nhead_dim {head_dim}, {'causal' if causal else 'dense'}",
                            fontsize=9)  # fmt: skip
        _share_axis(panel_row[0], [getattr(r, quantity) for r in rows if r.direction == direction], quantity)
        panel_row[0].set_ylabel("TFLOP/s" if quantity == "tflops" else "MiB")
    for panel in panels[-1]:
        panel.set_xlabel("sequence length")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=max(1, len(names)), frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _share_axis(panel: Any, values: list[float | None], quantity: str) -> None:
    """From 0 upwards; logarithmic for memory where an implementation needs many times that of another."""
    known = [v for v in values if v]
    if quantity == "peak_bytes" and known and max(known) > LOG_RATIO * min(known):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)


def _heading(direction: str, quantity: str) -> str:
    if quantity == "tflops":
        return TITLES[direction]
    return "peak extra memory, " + ("forward" if direction == "fwd" else "forward + backward")


def _panel(panel: Any, rows: list[Row], quantity: str) -> None:
    """One line for each implementation, ours on top."""
    for name in sorted({r.implementation for r in rows}, key=lambda n: (n == OURS, n)):
        points = sorted((r.cell.seqlen, getattr(r, quantity)) for r in rows if r.implementation == name
                        and getattr(r, quantity) is not None)  # fmt: skip
        if points:
            x, y = zip(*points, strict=True)
            scale = 1.0 if quantity == "tflops" else 2.0**-20
            panel.plot(x, [v * scale for v in y], marker="o", markersize=3.5, label=name, color=COLORS.get(name),
                       linewidth=2.2 if name == OURS else 1.3)  # fmt: skip
    lengths = sorted({r.cell.seqlen for r in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
