"""`bench --plot`: speed, or memory, by sequence length; a column for each head_dim, a row for each pass and mask.

Over a cache: a column for each batch, a row for each dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cell import CPU, ORDERED, OURS, PLAIN, SM80, short
from .decode_cell import COPY, PARTS, WIDE, AnyCell, DecodeCell
from .lengths import DENSE
from .report import OWN, TITLES, Row, best_ratio, by_cell
from .sdpa import TORCH_CPU

LABELS = {OURS: "cupyflash", "flash2": "FlashAttention-2", "cudnn": "cuDNN", "fa4": "FlashAttention-4",
          "efficient": "torch, memory-efficient",
          "math": "plain PyTorch", TORCH_CPU: "torch's CPU kernel", ORDERED: "cupyflash, deterministic",
          "flex": "FlexAttention", DENSE: "cupyflash, not packed", WIDE: "cupyflash, 16 bits",
          PARTS: "cupyflash, two calls", SM80: "cupyflash, sm80 kernels", COPY: "reading alone",
          PLAIN: "cupyflash, plain copies", CPU: "cupyflash, CPU path"}  # fmt: skip
# Told apart by all eyes (Okabe and Ito, 2008), and by their markers in print.
COLORS = {OURS: "#D55E00", "flash2": "#56B4E9", "cudnn": "#009E73", "fa4": "#0072B2", "math": "#777777",
          "efficient": "#F0E442",
          TORCH_CPU: "#000000", "flex": "#CC79A7", DENSE: "#E69F00", WIDE: "#882255", PLAIN: "#44AA99",
          CPU: "#999933", ORDERED: "#661100", PARTS: "#332288", SM80: "#117733", COPY: "#AAAAAA"}  # fmt: skip
MARKERS = {OURS: "o", "flash2": "^", "cudnn": "s", "fa4": "D", "math": "v", "efficient": "<", TORCH_CPU: ">",
           "flex": "P", DENSE: "X", WIDE: "h", PLAIN: "p", CPU: "*", PARTS: "d",
           SM80: "H", ORDERED: "8", COPY: "|"}  # fmt: skip
STYLE = {"font.size": 11, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
         "axes.axisbelow": True, "axes.grid": True, "grid.alpha": 0.25, "hatch.linewidth": 0.6}  # fmt: skip
LOG_RATIO = 10
MIB = 2.0**-20


def draw(document: dict[str, Any], rows: list[Row[Any]], path: Path) -> None:
    """Write the figure; the file's ending says in which format. Memory is drawn where nothing was timed.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    quantity = "speed" if any(r.ms is not None for r in rows) else "peak_bytes"
    rows = [r for r in rows if getattr(r, quantity) is not None]
    if quantity == "peak_bytes":  # all that was measured needs it; the last direction most
        rows = [r for r in rows if r.direction == rows[-1].direction]
    columns = list(dict.fromkeys(r.cell.panel[1] for r in rows))
    lines = list(dict.fromkeys((r.direction, r.cell.panel[0]) for r in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 3.4 * len(columns), 1.5 + 2.6 * len(lines)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(lines), len(columns), squeeze=False, sharey="row")
        for panel_row, (direction, line) in zip(panels, lines, strict=True):
            chosen = [r for r in rows if (r.direction, r.cell.panel[0]) == (direction, line)]
            for panel, column in zip(panel_row, columns, strict=True):
                _panel(panel, [r for r in chosen if r.cell.panel[1] == column], quantity)
                panel.set_title(f"{column}, {line}")
            _share_axis(panel_row[0], chosen, quantity)
            panel_row[0].set_ylabel(_quantity_name(direction, quantity, chosen[0].cell.unit))
        for panel in panels[-1]:
            panel.set_xlabel(rows[0].cell.length_name)
        _add_legend(figure, panels, quantity, document["peer_versions"])
        title = "{device}, {dtype}, {date}, cupyflash {version}".format_map(document)
        figure.suptitle(title + _rounds(rows), fontsize=12)
        figure.savefig(path, dpi=160, facecolor="white")


def _rounds(rows: list[Row[Any]]) -> str:
    """How the figures came about."""
    counts = {len(r.timing.rounds) for r in rows if r.timing is not None}
    order = ", each in a random order" if len({r.implementation for r in rows}) > 1 else ""
    return "".join(f"\nmedian of {n} round{'s' * (n > 1)}{order}" for n in counts)


def _quantity_name(direction: str, quantity: str, unit: str) -> str:
    if quantity == "speed":
        return f"{TITLES[direction]}, {unit}"
    return f"peak extra memory, MiB\n({TITLES['fwd' if direction == 'fwd' else 'both']})"


def _add_legend(figure: Any, panels: Any, quantity: str, versions: dict[str, str]) -> None:
    """Who is who, ours first; and what the numbers in the panels mean, where there are any."""
    named = {name: handle for panel in panels.flat
             for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}  # fmt: skip
    shown = [name for name in LABELS if LABELS[name] in named]
    note = None
    if quantity == "speed" and any(panel.texts for panel in panels.flat):
        note = "numbers: speed of cupyflash / the fastest other, in its colour where that one is ahead"
    labels = [f"{LABELS[name]} {versions.get(name, '')}".strip() for name in shown]
    figure.legend([named[LABELS[name]] for name in shown], labels, loc="outside lower center", ncols=max(1, len(shown)),
                  frameon=False, title=note, title_fontsize=10)  # fmt: skip


def _share_axis(panel: Any, rows: list[Row[Any]], quantity: str) -> None:
    """From 0 upwards; logarithmic for memory where an implementation needs many times that of another."""
    values = [getattr(r, quantity) for r in rows]
    if quantity == "peak_bytes" and max(values) > LOG_RATIO * min(values):
        panel.set_yscale("log")
    else:
        panel.set_ylim(0, (1.12 if _above(rows[0].cell) else 1.05) * panel.get_ylim()[1])


def _panel(panel: Any, rows: list[Row[Any]], quantity: str) -> None:
    """Ours on top of the others; lines by length, or bars by the distribution of packed lengths."""
    packed = any(r.cell.packed for r in rows)
    cells = dict.fromkeys(r.cell for r in rows)
    at = {cell: i if packed else cell.length for i, cell in enumerate(cells)}
    names = sorted({r.implementation for r in rows}, key=lambda n: (n == OURS, list(LABELS).index(n)))
    scale = 1.0 if quantity == "speed" else MIB
    for place, name in enumerate(names):
        points = sorted((at[r.cell], scale * getattr(r, quantity)) for r in rows if r.implementation == name)
        if packed:
            _bars(panel, name, points, place, len(names))
        else:
            _line(panel, name, points)
    if quantity == "speed":
        for (cell, _), by_name in by_cell(rows).items():
            _write_ratio(panel, at[cell], list(by_name.values()))
    if not packed:
        panel.set_xscale("log", base=2)
    panel.set_xticks(list(at.values()), [_length_name(cell) for cell in at])
    panel.minorticks_off()
    panel.margins(x=0.1)


def _length_name(cell: AnyCell) -> str:
    return f"{cell.packed}\n{short(cell.length)}" if cell.packed else short(cell.length)


def _line(panel: Any, name: str, points: list[tuple[int, float]]) -> None:
    ours = name == OURS
    panel.plot(*zip(*points, strict=True), marker=MARKERS[name], markersize=6 if ours else 5, color=COLORS[name],
               linewidth=2.6 if ours else 1.6, zorder=3 if ours else 2, label=LABELS[name])  # fmt: skip


def _bars(panel: Any, name: str, points: list[tuple[int, float]], place: int, places: int) -> None:
    width = 0.8 / places
    middle = (places - 1 - place + 0.5) * width - 0.4  # ours, drawn last, stands first
    x, y = [x + middle for x, _ in points], [y for _, y in points]
    panel.bar(x, y, width, color=COLORS[name], label=LABELS[name], edgecolor="white")
    panel.grid(visible=False, axis="x")


def _above(cell: AnyCell) -> bool:
    """Whether ratios stand above what is drawn: bars, and lines that begin near 0."""
    return bool(cell.packed) or isinstance(cell, DecodeCell)


def _write_ratio(panel: Any, x: int, rows: list[Row[Any]]) -> None:
    """How ours compares with the fastest other."""
    ratio = best_ratio(rows)
    if ratio is None:
        return
    fastest = max((r for r in rows if r.implementation not in OWN), key=lambda r: r.speed or 0)
    ahead = OURS if ratio >= 1 else fastest.implementation
    behind = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    panel.text(x, 0.93 if _above(fastest.cell) else 0.03, f"{ratio:.2f}", fontsize=10, weight="bold", ha="center",
               color=COLORS[ahead], zorder=4, transform=panel.get_xaxis_transform(), bbox=behind)  # fmt: skip
