"""Runs that `bench --json` wrote down, for `bench --saved`: the same rows, from which tables and pictures follow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .cell import UNRECORDED, Cell
from .decode_cell import AnyCell, DecodeCell
from .report import Row
from .timing import Timing

_CELL, _DECODE = ([f.name for f in dataclasses.fields(kind) if f.name not in UNRECORDED] for kind in (Cell, DecodeCell))
# What earlier versions did not write, of a cell and of one over a cache.
_NEWER = ("bias", "mask", "learned", "dropout", "block_mask", "mod", "padded", "score_std")
_NEWER_DECODE = ("chunk", "alibi", "sink", "kv_range", "head_dim_v")
_HEAD = ("version", "device", "framework", "dtype", "date", "peer_versions", "flop_formula", "matmul_tflops",
         "few_rounds")  # fmt: skip
_ROW = ("direction", "implementation", "peak_bytes", "reason", "tensor_core_percent", "clock_ghz")


def lengths_of(cells: Sequence[AnyCell]) -> list[dict[str, Any]]:
    """The lengths of packed sequences, each list once: what the cells' records leave out."""
    found = {(c.packed, c.seqlen): c.lengths for c in cells if isinstance(c, Cell) and c.packed}
    return [{"packed": name, "seqlen": n, "lengths": list(lengths)} for (name, n), lengths in found.items()]


def load(path: Path, directions: tuple[str, ...] | None) -> tuple[dict[str, Any], list[Row[Any]]]:
    """The document and its rows, of these directions alone.

    Raises:
        click.BadParameter: the file holds no run of bench, or none of these directions.
    """
    try:
        document = json.loads(path.read_text())
        if document["command"] != "bench" or not set(_HEAD) <= document.keys():
            raise ValueError
        lengths = {(x["packed"], x["seqlen"]): tuple(x["lengths"]) for x in document["packed"]}
        rows = [_row(record, lengths) for record in document["rows"]]
    except OSError as e:
        raise click.BadParameter(f"{path} cannot be read: {e.strerror}", param_hint="--saved") from None
    except (ValueError, KeyError, TypeError):
        raise click.BadParameter(f"{path} is not what `cupyflash bench --json` of this version prints",
                                 param_hint="--saved") from None  # fmt: skip
    rows = [row for row in rows if directions is None or row.direction in directions]
    if not rows:
        raise click.BadParameter(f"{path} has no rows of {', '.join(directions or ())}", param_hint="--pass")
    return document, rows


def _row(record: dict[str, Any], lengths: dict[tuple[str | None, int], tuple[int, ...]]) -> Row[Any]:
    cell: AnyCell
    if record["direction"] == "decode":
        cell = DecodeCell(**{name: record[name] for name in _DECODE if name in record or name not in _NEWER_DECODE})
    else:
        known = {name: record[name] for name in _CELL if name in record or name not in _NEWER}
        cell = Cell(**known, lengths=lengths.get((record["packed"], record["seqlen"]), ()))
    times = record["ms_rounds"]
    return Row(cell, timing=Timing(tuple(times)) if times else None, **{name: record[name] for name in _ROW})
