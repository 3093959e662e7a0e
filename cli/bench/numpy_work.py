"""`bench --framework numpy` on a machine with a GPU: our calls on NumPy arrays, by way of the GPU and on the CPU path.

Contestants are our own ways: `OURS` by way of the GPU with staged copies, `PLAIN` with CuPy's own ones, `CPU` without a
GPU. Beside the times stands which way a call takes that nobody forces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from cupyflash.launch import where
from cupyflash.plan.families import GPU_DTYPES
from cupyflash.problem import Problem
from cupyflash.sequences import Sequences

from ..explain.copied import estimated
from .cell import CPU, OURS, PLAIN, UNRECORDED, Cell
from .clocks import Work
from .report import Row, by_cell, ratio_of
from .work import Bench

_WAYS = {"cuda": {OURS: "GPU", PLAIN: "plain copies", CPU: "CPU path"}, "cpu": {OURS: "CPU path"}}
_FIELDS = sorted(set(Cell.__dataclass_fields__) - UNRECORDED)


class NumpyOnGpu(Bench):
    """NumPy arrays where there is a GPU. A call has its results in host memory when it returns."""

    on_gpu = True

    def absent(self, peer: str) -> str | None:
        return None if peer in (PLAIN, CPU) else super().absent(peer)

    def counts_memory(self, name: str) -> bool:
        return False  # of the host's and the GPU's memory the clock sees one

    def attention(
        self, name: str, cell: Cell, brought: Mapping[str, Any] | None = None
    ) -> Callable[[Any, Any, Any], Any]:
        os.environ["CUPYFLASH_BACKEND"] = "cuda"
        return super().attention(name, cell, brought)

    def works(self, name: str, cell: Cell) -> dict[str, Work]:
        if name == PLAIN:
            return self._plain(cell)
        backend = "cpu" if name == CPU else "cuda"
        os.environ["CUPYFLASH_BACKEND"] = backend

        def forced(work: Work) -> Work:
            def run() -> Any:
                os.environ["CUPYFLASH_BACKEND"] = backend
                return work()

            return run

        return {direction: forced(work) for direction, work in super().works(OURS, cell).items()}

    def _plain(self, cell: Cell) -> dict[str, Work]:
        """Each array by a call of its own, `asarray` and `get`."""
        import cupy

        if cell.brings_arrays or cell.packed:
            raise NotImplementedError(f"{PLAIN} is timed without arrays of features and lengths")
        attention, attention_backward = self.ours(cell)
        q, k, v, dout = self.inputs(cell)

        def forward() -> Any:
            out, lse = attention(*map(cupy.asarray, (q, k, v)), return_lse=True)
            return out.get(), lse.get()

        out, lse = forward()

        def backward() -> Any:
            return [x.get() for x in attention_backward(*map(cupy.asarray, (dout, q, k, v, out, lse)))]

        return {"fwd": forward, "bwd": backward, "both": lambda: (forward(), backward())}

    def matmul(self) -> None:
        """Of the host it says nothing about the GPU."""


def facts(cells: Sequence[Any], directions: Sequence[str]) -> list[dict[str, Any]]:
    """What is known of cells without timing: bytes there and back, `where`'s estimate, the way that a call takes.

    Cells with biases, masks and mods are left out, and both directions as one.
    """
    found = []
    for cell in cells:
        if cell.dtype not in GPU_DTYPES or cell.bias or cell.mask or cell.block_mask or cell.mod:
            continue
        problem, sizes = _problem_of(cell), _sizes_of(cell)
        for direction in (d for d in directions if d != "both"):
            about = estimated(problem, sizes, backward=direction == "bwd")
            found.append(cell.record() | {"direction": direction} | about)
    return found


def _problem_of(cell: Cell) -> Problem:
    """What `where` asks of a cell."""
    rows = cell.tokens if cell.packed else cell.seqlen
    return Problem(
        cell.dtype, cell.batch, rows, rows, cell.heads, cell.heads_k, cell.head_dim, 1.0,
        (cell.window, 0 if cell.causal else None), softcap=cell.softcap, packed=bool(cell.packed),
        alibi=int(cell.alibi), kv_range=bool(cell.padded), sink=cell.sink, dropout=int(cell.dropout > 0),
    )  # fmt: skip


def _sizes_of(cell: Cell) -> where.Sizes:
    problem = _problem_of(cell)
    if cell.packed:
        return where.sizes_of(problem, Sequences.of(np.array(cell.cu_seqlens, np.int32)))
    return where.sizes_of(problem, Sequences(kv_range=cell.ranges) if cell.padded else None)


def table(rows: Sequence[Row[Any]], known: Sequence[dict[str, Any]], direction: str, backend: str) -> Table:
    """A row a cell: its size, milliseconds of each way that was timed, ratios to ours, and the way that a call takes.

    Args:
        known: what `facts` found, of any cells.
    """
    chosen = [row for row in rows if row.direction == direction]
    ways = {name: title for name, title in _WAYS[backend].items()
            if any(row.implementation == name and row.ms is not None for row in chosen)}  # fmt: skip
    others = [name for name in ways if name != OURS]
    columns = ["mask", "batch", "seqlen", "heads", "head_dim", "MB"]
    columns += [x for title in ways.values() for x in (f"{title}, ms", "spread")]
    columns += [f"{ways[name]} / GPU" for name in others]
    made, by_key = Table(box=None, header_style="bold", pad_edge=False), {_key(x): x for x in known}
    for name in (*columns, "taken"):
        made.add_column(name, justify="left" if name in ("mask", "taken") else "right", no_wrap=True)
    for (cell, _), found in by_cell(chosen).items():
        about = by_key.get(_key(cell.record() | {"direction": direction}), {})
        texts = [cell.mask_name, *map(str, (cell.batch, cell.sequences, cell.heads, cell.head_dim))]
        texts.append(_text(about.get("bytes"), 1e-6, ".3g"))
        for name in ways:
            texts += [_text(found[name].ms, 1, ".3f"), _text(found[name].spread, 1, ".1%")]
        texts += [_text(ratio_of(found[OURS], [found[name]]), 1, ".2f") for name in others]
        made.add_row(*texts, {"cuda": "GPU", "cpu": "CPU path"}.get(about.get("taken", ""), "-"))
    return made


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    """How one knows a cell and a direction again, after JSON too."""
    return record["direction"], *(record[name] for name in _FIELDS)


def _text(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(scale * value, form)
