"""Measures tiles of a forward kernel on this GPU, and prints what to paste into the tables of cupyflash/plan.

    python -m tools.tune --head-dim 128 --only block_n=64,80 --only stages=2,3
    python -m tools.tune --no-run                       # which tiles compile: needs NVRTC, no GPU

Every tile that fits is compiled. Those that spill, that ptxas says loses performance, or whose registers would never
come free are left out; the others are checked against float64 by the 2x rule and then timed in turns.
"""

from __future__ import annotations

import datetime
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from cupyflash.arrays.adapters import CUPY
from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case
from cupyflash.cli.bench import cycles as bench_cycles
from cupyflash.cli.bench.cell import Cell
from cupyflash.cli.bench.clocks import Work
from cupyflash.cli.bench.cupy_work import CupyBench
from cupyflash.cli.bench.timing import QUICK, SUSTAINED, WARM_UP, Effort, sustained_ms
from cupyflash.cli.output import Exit, emit, exit_codes, explain, human, json_option, list_option, progress, quiet
from cupyflash.compile import nvrtc
from cupyflash.errors import CupyflashError, DeviceError, UnsupportedError
from cupyflash.gpu import device
from cupyflash.gpu.device import Device
from cupyflash.launch import clocks
from cupyflash.launch.alignment import ALIGNED
from cupyflash.launch.passes import given_of
from cupyflash.launch.prepare import prepare
from cupyflash.operands import FORWARD
from cupyflash.options import Options
from cupyflash.problem import MAX_HEAD_DIM
from tools.candidates import TILES, Candidate, Speed, candidates, compile_all, in_use

WRONG = "wrong"


def launcher(c: Candidate, arrays: Sequence[Any], causal: bool) -> tuple[Work, Any, Any]:
    """A function that launches the candidate on q, k and v, and the out and lse that it writes."""
    keys, asked = [CUPY.signature(x) for x in arrays], given_of(FORWARD, ("q", "k", "v"), ("lse",))
    with in_use(c.tile):
        call = prepare(asked, CUPY, keys, Options(causal=causal), ALIGNED, CUPY.stream(keys[0][3]))
    out, (lse,) = CUPY.empty_like(arrays[0]), [CUPY.empty(*made, arrays[0]) for made in call.made]
    pointers = dict(zip(("q", "k", "v", "out", "lse"), map(CUPY.pointer, (*arrays, out, lse)), strict=True))
    addresses = [pointers[name] for name in call.order]
    return lambda: call(addresses, CUPY.stream(keys[0][3])), out, lse


def check(found: Sequence[Candidate], dtype: str, masks: Sequence[bool]) -> None:
    """The 2x rule for candidates of one head_dim; one that breaks it gets the reason."""
    import cupy

    for causal in masks:
        case = Case("tune", "full", 1013, 1031, found[0].head_dim, heads_q=4, causal=causal)  # no tile divides these
        q, k, v = case.inputs(dtype)[:3]
        oracle, on_gpu = Oracle(case.problem(dtype), q, k, v), [cupy.asarray(x) for x in (q, k, v)]
        for c in found:
            work, out, lse = launcher(c, on_gpu, causal)
            out.fill(math.nan)
            lse.fill(math.nan)
            work()
            wrong = [str(verdict) for verdict in oracle.judge_forward(out.get(), lse.get()) if not verdict.passed]
            c.reason = c.reason or (f"{WRONG}: {wrong[0]}" if wrong else "")


def measure(found: Sequence[Candidate], cell: Cell, bench: CupyBench, effort: Effort) -> None:
    """One cell: time all candidates in turns, then count the cycles of each while the chip is warm."""
    q, k, v, _ = bench.inputs(cell)
    works, flops = [launcher(c, (q, k, v), cell.causal)[0] for c in found], cell.flops("fwd")
    times = sustained_ms(works, bench.clock, effort)
    for c, work, ms in zip(found, works, times, strict=True):
        sustained_ms([work], bench.clock, WARM_UP)
        with in_use(c.tile):
            counts = clocks.forward_clocks(CUPY, q, k, v, Options(causal=cell.causal))
        percent = None if counts is None else bench_cycles.utilisation(flops, counts[:, 0], counts[:, 1])[0]
        c.speeds.append(Speed(cell.causal, cell.seqlen, flops / ms / 1e9, percent))


def narrow(found: list[Candidate], cells: Sequence[Cell], bench: CupyBench, keep: int) -> list[Candidate]:
    """The fastest `keep` in a quick round over a cell of each mask, and the tile in use, which comes first."""
    if len(found) <= keep:
        return found
    total = [0.0] * len(found)
    for cell in {c.causal: c for c in cells}.values():
        arrays = bench.inputs(cell)[:3]
        times = sustained_ms([launcher(c, arrays, cell.causal)[0] for c in found], bench.clock, QUICK)
        total = [so_far + math.log(ms) for so_far, ms in zip(total, times, strict=True)]
    fastest = sorted(range(1, len(found)), key=lambda i: total[i])[:keep]
    for i in set(range(1, len(found))) - set(fastest):
        found[i].reason = "slower in the first round"
    return [found[0], *(found[i] for i in fastest)]


def measure_all(found: list[Candidate], options: dict[str, Any], console: Console) -> None:
    """Check, narrow down and measure, head_dim by head_dim."""
    bench, effort = CupyBench(), QUICK if options["quick"] else SUSTAINED
    sizes = [(causal, n) for causal in options["masks"] for n in options["seqlens"]]
    with progress(console) as bar:
        task = bar.add_task("measuring", total=len(options["head_dim"]) * len(sizes))
        for d in options["head_dim"]:
            heads = max(1, options["hidden"] // d)
            cells = [Cell(options["dtype"], d, causal, n, max(1, options["tokens"] // n), heads, heads)
                     for causal, n in sizes]  # fmt: skip
            live = [c for c in found if c.head_dim == d and not c.reason]
            if live:
                check(live, options["dtype"], options["masks"])
            live = narrow([c for c in live if not c.reason], cells, bench, options["keep"])
            for cell in cells:
                measure(live, cell, bench, effort)
                bar.advance(task)


def scores(found: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
    """Measured candidates, best first, by the geometric mean over the cells of speed / that of the cell's fastest."""
    measured = [c for c in found if c.speeds]
    best = [max(x.tflops for x in cell) for cell in zip(*(c.speeds for c in measured), strict=True)]
    logs = [sum(math.log(x.tflops / most) for x, most in zip(c.speeds, best, strict=True)) for c in measured]
    ranked = [(math.exp(total / len(best)), c) for total, c in zip(logs, measured, strict=True)]
    return sorted(ranked, key=lambda pair: -pair[0])


def report(found: list[Candidate], gpu: Device, console: Console) -> None:
    """A table for each head_dim; what was left out, by reason; the lines of the best."""
    lines = []
    for d in dict.fromkeys(c.head_dim for c in found):
        mine = [c for c in found if c.head_dim == d]
        ranked = scores(mine) or [(math.nan, c) for c in mine if not c.reason]
        console.print(f"\nhead_dim {d}: {len(mine)} tiles, {len(ranked)} worth running", style="bold")
        console.print(_table(ranked, mine[0]), soft_wrap=True)
        for reason, count in Counter(re.sub(r"fwd_\w+", "...", c.reason) for c in mine if c.reason).items():
            console.print(f"left out, {count}: {reason}", soft_wrap=True)
        for c in mine:
            if c.reason.startswith(WRONG):
                console.print(f"{c.line().strip()} {c.reason}", style="bold red", soft_wrap=True)
        if ranked and ranked[0][1].speeds:
            lines.append(f"{ranked[0][1].line()}  # {gpu.name}, {datetime.date.today()}")
    if lines:
        console.print("\nfor the family's tables in cupyflash/plan:", style="bold")
        console.print("\n".join(lines), soft_wrap=True)


def _table(ranked: list[tuple[float, Candidate]], now: Candidate) -> Table:
    """TFLOP/s by cell, and the percentage of the tensor cores' cycles."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    cells = [f"{'causal' if x.causal else 'dense'} {x.seqlen}" for x in ranked[0][1].speeds] if ranked else []
    for name in ("tile", "registers", *cells, *(("score",) if cells else ())):
        table.add_column(name, justify="left" if name == "tile" else "right", no_wrap=True)
    for value, c in ranked:
        speeds = [f"{x.tflops:.0f}" + ("" if x.percent is None else f" ({x.percent:.0f}%)") for x in c.speeds]
        mark = " (in use)" if c is now else ""
        table.add_row(f"{astuple(c.tile)}{mark}", str(c.registers), *speeds, *([f"{value:.3f}"] if cells else []))
    return table


def constraints(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """FIELD=N,N of a tile, each: the values that candidates may have."""
    names = {f.name for f in fields(TILES[ctx.params["family"]])}
    found = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in names:
            raise click.BadParameter(f"a tile has no {name!r}, but {', '.join(sorted(names))}")
        try:
            found[name] = tuple(int(value) for value in values.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not FIELD=N,N") from None
    return found


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=exit_codes(
        "0 measured, 1 a tile gave wrong results, 3 no usable GPU, 4 not supported, 5 no tile to measure"
    ),
)
@click.option("--family", type=click.Choice(tuple(TILES)), default="sm90", show_default=True, is_eager=True)
@list_option("--head-dim", item=int, choices=range(8, MAX_HEAD_DIM + 1, 8), default="64,128,256", example="64,128",
             help="The largest that each line is for.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option("--causal/--no-causal", default=None, help="One mask alone.  [default: both]")
@list_option("--seqlens", item=int, default="1024,4096,16384", example="1024,4096", help="Lengths.")
@click.option("--tokens", type=click.IntRange(1), default=16384, show_default=True, help="batch * seqlen.")
@click.option("--hidden", type=click.IntRange(8), default=2048, show_default=True, help="heads * head_dim.")
@click.option("--only", multiple=True, callback=constraints, metavar="FIELD=N,N",
              help="Tiles with these values alone, such as block_n=64,80; several must all hold.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compilations at a time.  [default: cores]")
@click.option("--keep", type=click.IntRange(1), default=12, show_default=True,
              help="How many a quick first round leaves for the full measurement.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Time each for a tenth of a second, once.")
@click.option("--no-run", is_flag=True, help="Compile alone, for a typical GPU; needs none.")
@json_option
def main(**options: Any) -> None:
    """Measure tiles of the forward, and print lines for its table in cupyflash/plan. The tile in use now takes part."""
    quiet()
    try:
        code = tune(options)
    except CupyflashError as e:
        explain(e)
        code = Exit.of(e)
    raise SystemExit(code)


def usable_gpu(options: dict[str, Any]) -> Device:
    """What to run on, or compile for; made sure that it has the family, and that the library will take it."""
    if options["no_run"]:
        return Device.synthetic({"sm90": "sm_90", "sm80": "sm_80"}[options["family"]])
    if not device.count():
        raise DeviceError(f"{device.why_none()}; `--no-run` compiles alone")
    gpu = Device.of(0)
    if options["family"] == "sm90" and gpu.capability != (9, 0):
        raise UnsupportedError(f"{gpu.name} has no sm90 family; `--family sm80` measures what it has")
    os.environ["CUPYFLASH_FAMILY"] = options["family"]
    return gpu


def tune(options: dict[str, Any]) -> Exit:
    """All steps; the exit code."""
    options["masks"] = (False, True) if options["causal"] is None else (options["causal"],)
    gpu, console, family = usable_gpu(options), human(options["as_json"]), options["family"]
    nvrtc.find()
    found = [c for d in options["head_dim"] for c in candidates(family, d, gpu, options["only"])]
    with progress(console) as bar:
        task = bar.add_task("compiling", total=len(found))
        work = found, gpu, family, options["dtype"], options["masks"], options["jobs"]
        compile_all(*work, done=lambda: bar.advance(task))
    some = any(not c.reason for c in found)
    if some and not options["no_run"]:
        measure_all(found, options, console)
    report(found, gpu, console)
    if options["as_json"]:
        rows = [asdict(c) | {"line": c.line().strip(), "speeds": [x._asdict() for x in c.speeds]} for c in found]
        emit({"command": "tune", "device": gpu.name, "date": str(datetime.date.today()), "tiles": rows})
    wrong = any(c.reason.startswith(WRONG) for c in found)
    return Exit.FAILED if wrong else Exit.OK if some else Exit.COMPILE


if __name__ == "__main__":
    main()
