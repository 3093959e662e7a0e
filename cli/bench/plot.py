"""`bench --plot`: speed by sequence length, a column for each head_dim, a row for each mask; memory below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import TITLES, Row, best_ratio, by_cell, mask_name
from .work import OURS

COLORS = {OURS: "#d62728", "flash2": "#1f77b4", "cudnn": "#2ca02c", "fa4": "#9467bd", "math": "#7f7f7f",
          "flex": "#ff7f0e"}  # fmt: skip
MARKERS = {OURS: "o", "flash2": "^", "cudnn": "s", "fa4": "D", "math": "v", "flex": "P"}
LOG_RATIO = 10


def draw(rows: list[Row], path: Path, title: str) -> None:
    """Write the figure; the file's ending says in which format.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(r.cell.head_dim for r in rows))
    masks = list(dict.fromkeys(mask_name(r.cell) for r in rows))
    timed = dict.fromkeys(r.direction for r in rows if r.ms is not None)
    measured = [r.direction for r in rows if r.peak_bytes is not None]
    lines = [(d, mask, "tflops") for d in timed for mask in masks]
    lines += [(d, mask, "peak_bytes") for d in measured[-1:] for mask in masks[-1:]]
    figure = Figure(figsize=(1.2 + 4.2 * len(columns), 0.9 + 2.9 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(lines), len(columns), squeeze=False, sharey="row")
    for panel_row, (direction, mask, quantity) in zip(panels, lines, strict=True):
        chosen = [r for r in rows if r.direction == direction and mask_name(r.cell) == mask]
        for panel, head_dim in zip(panel_row, columns, strict=True):
            _panel(panel, [r for r in chosen if r.cell.head_dim == head_dim], quantity)
            panel.set_title(f"{_heading(direction, quantity)}, head_dim {head_dim}, {mask}", fontsize=9)
        _share_axis(panel_row[0], [getattr(r, quantity) for r in chosen], quantity)
        panel_row[0].set_ylabel("TFLOP/s" if quantity == "tflops" else "MiB")
    for panel in panels[-1]:
        panel.set_xlabel("sequence length")
    named = {name: handle for panel in panels.flat
             for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}  # fmt: skip
    figure.legend(named.values(), named, loc="outside lower center", ncols=max(1, len(named)), frameon=False)
    noted = timed and len(named) > 1
    figure.suptitle(title + ("\nnumbers: cupyflash / the fastest other" if noted else ""), fontsize=10)
    figure.savefig(path, dpi=150)


def _share_axis(panel: Any, values: list[float | None], quantity: str) -> None:
    """From 0 upwards; logarithmic for memory where an implementation needs many times that of another."""
    known = [v for v in values if v]
    if quantity == "peak_bytes" and known and max(known) > LOG_RATIO * min(known):
        panel.set_yscale("log")
    else:
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])


def _heading(direction: str, quantity: str) -> str:
    if quantity == "tflops":
        return TITLES[direction]
    return "peak extra memory, " + ("forward" if direction == "fwd" else "forward + backward")


def _panel(panel: Any, rows: list[Row], quantity: str) -> None:
    """One line for each implementation, ours on top; below, how ours compares with the fastest other."""
    for name in sorted({r.implementation for r in rows}, key=lambda n: (n == OURS, n)):
        points = sorted((r.cell.seqlen, getattr(r, quantity)) for r in rows if r.implementation == name
                        and getattr(r, quantity) is not None)  # fmt: skip
        if points:
            x, y = zip(*points, strict=True)
            scale = 1.0 if quantity == "tflops" else 2.0**-20
            panel.plot(x, [v * scale for v in y], marker=MARKERS.get(name), markersize=4, label=name,
                       color=COLORS.get(name), linewidth=2.2 if name == OURS else 1.3)  # fmt: skip
    if quantity == "tflops":
        for (cell, _), found in by_cell(rows).items():
            if ratio := best_ratio(found.values()):
                panel.text(cell.seqlen, 0.03, f"{ratio:.2f}", fontsize=8, ha="center", color=COLORS[OURS],
                           transform=panel.get_xaxis_transform())  # fmt: skip
    lengths = sorted({r.cell.seqlen for r in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    panel.minorticks_off()
    panel.margins(x=0.08)
    panel.grid(alpha=0.25)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
