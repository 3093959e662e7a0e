"""Counts the cycles of the kernels of two source trees on this GPU, by Nsight Compute.

    git worktree add ../before main
    python -m tools.cycles ../before .                                        # 12 cells, forward and backward
    python -m tools.cycles ../before . --pass bwd --head-dim 64 --seqlens 1024 --mask full

The time of a call depends on the chip's clock, and that on what ran before: it moves by up to 6 %. Cycles of one
kernel after the other, with the GPU otherwise idle, move by 0.1 to 0.5 % where a call takes 200 us or more, so that a
gain of 1 % shows in two calls. They say nothing of power, which bounds long calls on a chip at its limit: `bench` does.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from cupyflash.cli.output import Exit, emit, exit_codes, human, json_option, list_option
from tools import cycles_calls
from tools.cycles_calls import CALLS, Cell

METRIC = "sm__cycles_elapsed.max"
NCU = (
    "--profile-from-start",
    "off",
    "--clock-control",
    "none",
    "--cache-control",
    "none",
    "--metrics",
    METRIC,
    "--csv",
)


def calls_of(report: str) -> list[dict[str, float]]:
    """The cycles of each call's kernels by name, from ncu's CSV: what sleeps stands before each call."""
    calls: list[dict[str, float]] = []
    for row in csv.DictReader(line for line in report.splitlines() if line.startswith('"')):
        if "spin" in row["Kernel Name"]:
            calls.append({})
        else:
            calls[-1][row["Kernel Name"].split("(")[0]] = float(row["Metric Value"].replace(",", ""))
    return calls


def measure(tree: Path, cells: list[Cell], ncu: str) -> list[list[dict[str, float]]]:
    """Of each cell its calls."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [ncu, *NCU, sys.executable, cycles_calls.__file__, json.dumps(cells)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tree)
    calls = calls_of(done.stdout)
    if done.returncode or len(calls) != CALLS * len(cells):
        said = (done.stderr or done.stdout)[-2000:]
        raise click.ClickException(f"{tree}: the run ended with {done.returncode}: {said}")
    return [calls[CALLS * i : CALLS * (i + 1)] for i in range(len(cells))]


def compare(found: dict[Path, list[list[dict[str, float]]]], cells: list[Cell]) -> list[dict[str, Any]]:
    """Of each cell the medians, the first tree's over the others', and the largest spread."""
    rows = []
    for i, cell in enumerate(cells):
        sums = {tree: [sum(call.values()) for call in of[i]] for tree, of in found.items()}
        middle = [statistics.median(of) for of in sums.values()]
        spread = max((max(of) - min(of)) / statistics.median(of) for of in sums.values())
        rows.append(
            {"cell": cell.text, "cycles": middle, "ratios": [middle[0] / m for m in middle[1:]], "spread": spread}
        )
    return rows


@click.command(epilog=exit_codes("0, or 1 if a tree could not be measured"))
@click.argument("trees", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@list_option("--pass", "passes", choices=("fwd", "bwd"), default="fwd,bwd", example="fwd,bwd", help="What is called.")
@list_option(
    "--head-dim", "head_dims", item=int, default="64,128,256", example="64,128", help="Of 2048 columns in all."
)
@list_option("--seqlens", item=int, default="1024,4096", example="1024,4096", help="Of 16384 tokens in all.")
@list_option(
    "--mask", "masks", choices=("full", "causal"), default="full,causal", example="full", help="What is hidden."
)
@click.option("--rounds", default=2, show_default=True, help="Runs of each tree, in random order.")
@json_option
def main(
    trees: tuple[Path, ...], passes: tuple[str, ...], head_dims: tuple[int, ...], seqlens: tuple[int, ...],
    masks: tuple[str, ...], rounds: int, as_json: bool,
) -> None:  # fmt: skip
    """Cycles of the kernels of source trees: the first one's over the others'. Above 1 the others are faster."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise click.ClickException("ncu is not on the PATH; it comes with CUDA's toolkit and with Nsight Compute")
    cells = [Cell(p, d, m, n) for p in passes for d in head_dims for m in masks for n in seqlens]
    found: dict[Path, list[list[dict[str, float]]]] = {tree.resolve(): [[] for _ in cells] for tree in trees}
    for _ in range(rounds):
        for tree in random.sample(list(found), len(found)):
            for of, new in zip(found[tree], measure(tree, cells, ncu), strict=True):
                of += new
    rows = compare(found, cells)
    if as_json:
        emit({"command": "cycles", "trees": [str(tree) for tree in found], "cells": rows, "exit_code": Exit.OK})
        return
    table = Table("", "cycles", *[str(tree) for tree in trees[1:]], "spread")
    for row in rows:
        ratios = [f"{r:.3f}" for r in row["ratios"]]
        table.add_row(row["cell"], f"{row['cycles'][0]:.0f}", *ratios, f"{row['spread']:.3f}")
    means = [math.exp(statistics.fmean(math.log(row["ratios"][i]) for row in rows)) for i in range(len(trees) - 1)]
    table.add_row("geometric mean", "", *[f"{m:.3f}" for m in means], "")
    human().print(table)


if __name__ == "__main__":
    main()
