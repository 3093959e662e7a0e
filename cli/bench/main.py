"""``cupyflash bench``: how fast, how much memory, and against whom."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cupyflash import __version__
from cupyflash.compile import nvrtc
from cupyflash.errors import DeviceError
from cupyflash.gpu import device
from cupyflash.launch import run
from cupyflash.problem import DTYPES, MAX_HEAD_DIM, SOFTCAPS

from ..output import emit, exit_codes, human, json_option, list_option, progress, quiet
from . import cycles as bench_cycles
from . import plot as bench_plot
from . import startup as bench_startup
from .arguments import check_lengths, check_plot, check_writable
from .cell import DIRECTIONS, FLOP_FORMULA, Cell
from .host import new_lengths_us
from .report import Row, documents, few_rounds, print_ratios, print_rows, ratios, write_csv
from .timing import QUICK, ROUNDS, SUSTAINED, Effort, Timing, host_us, sustained_ms, timings_ms
from .work import OURS, PEERS, Bench, make

# lengths, tokens, hidden: on a GPU those of the FlashAttention papers; on the CPU path what ends in seconds
SIZES = {"cuda": ((1024, 2048, 4096, 8192, 16384), 16384, 2048), "cpu": ((128, 256, 512), 1024, 256)}


@click.command(
    epilog=exit_codes("0 measured, 3 there is no usable GPU, 4 not supported, 5 a kernel did not compile")
)  # fmt: skip
@list_option("--against", choices=PEERS, example="flash2,cudnn", help=f"Peers, through torch: {', '.join(PEERS)}.")
@list_option("--pass", "directions", choices=DIRECTIONS, default="fwd,bwd", example="fwd,bwd,both",
             help="What to time; both is a forward and a backward as one.")  # fmt: skip
@list_option("--head-dim", item=int, choices=range(8, MAX_HEAD_DIM + 1, 8), default="64,128", example="64,128",
             help="Sizes of a head.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True)
@click.option("--causal/--no-causal", default=None, help="One mask alone.  [default: both]")
@list_option("--seqlens", item=int, example="1024,4096", help="Lengths.  [default: 1024 to 16384; CPU: 128 to 512]")
@click.option("--tokens", type=click.IntRange(1), default=None, help="batch * seqlen.  [default: 16384; CPU: 1024]")
@click.option("--hidden", type=click.IntRange(8), default=None, help="heads * head_dim.  [default: 2048; CPU: 256]")
@click.option("--heads-k", type=click.IntRange(1), default=None, help="Heads of k and v.  [default: as many as q has]")
@click.option("--batch", type=click.IntRange(1), default=None, help="For every length, instead of --tokens.")
@click.option("--window", type=click.IntRange(0), default=None, help="Keys that a query sees to its left.")
@click.option("--softcap", type=click.FloatRange(*SOFTCAPS), default=None, help="What no score's magnitude exceeds.")
@click.option("--alibi", is_flag=True, help="With ALiBi's slopes.")
@click.option("--framework", type=click.Choice(["torch", "cupy", "numpy"]), default=None,
              help="Whose arrays, and whose events to time with.  [default: torch where it is installed]")  # fmt: skip
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--quick", is_flag=True, help="Time each for a twentieth of a second a round: faster, less certain.")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True,
              help="Turns of all, each in a new random order.")  # fmt: skip
@click.option("--memory-only", is_flag=True, help="Measure memory, not time.")
@click.option("--host", is_flag=True, help="Also the host's cost of a warm call.")
@click.option("--startup", is_flag=True, help="Also the time to compile a new kernel, and to load it from the cache.")
@click.option("--csv", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the rows there.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Draw speed and memory to a .png or .svg; needs pip install 'cupyflash[plot]'.")  # fmt: skip
@json_option
def command(**options: Any) -> None:
    """Time attention by sequence length, alone or against others, in one run.

    Sustained and in turns: in each round all implementations of a configuration run in a new random order, each until
    the clock is steady and then timed with events for a quarter of a second. Reported are the median of the rounds and
    the spread, (slowest - fastest) / median, on random data. FLOPs are 4 * head_dim for each visible query-key pair and
    head in the forward, and 2.5 times that in the backward.
    """
    quiet()
    check_lengths(options["seqlens"])
    check_plot(options["plot"])
    check_writable("--csv", options["csv"])
    check_writable("--plot", options["plot"])
    bench = make_bench(options["framework"], options["backend"])
    console = human(options["as_json"])
    cells = make_cells(options)
    effort = dataclasses.replace(QUICK if options["quick"] else SUSTAINED, rounds=options["rounds"])
    document = describe(options, bench, effort)
    console.print(", ".join(f"{k} {document[k]}" for k in ("version", "device", "framework", "dtype", "date")))
    console.print(f"FLOPs: {FLOP_FORMULA}", soft_wrap=True)
    if document["matmul_tflops"]:
        console.print(f"matrix product: {document['matmul_tflops']:.3g} TFLOP/s")
    rows = measure(bench, cells, options, effort, console)
    document |= {"rows": documents(rows), "ratios": ratios(rows)}
    if options["host"]:
        document["host_us"] = measure_host(bench, options)
    if options["startup"]:
        arch = device.Device.of(0).arch if options["backend"] == "cuda" else "sm_90"
        document["startup"] = bench_startup.measure(gpu_dtype(options["dtype"]), options["head_dim"][-1], arch)
    show(document, rows, console)
    if options["csv"]:
        write_csv(rows, options["csv"])
    if options["plot"]:
        title = f"cupyflash {__version__}, {document['device']}, {options['dtype']}, rounds: {effort.rounds}"
        bench_plot.draw(rows, options["plot"], title)
    if options["as_json"]:
        emit(document)


def make_bench(framework: str | None, backend: str) -> Bench:
    """Where to run; DeviceError (exit code 3) without a GPU, unless the CPU path was asked for."""
    if backend == "cuda" and not device.count():
        raise DeviceError(f"{device.why_none()}; `--backend cpu` times the CPU path")
    if (framework == "numpy") != (backend == "cpu") and framework in ("numpy", "cupy"):
        raise click.BadParameter(f"{framework} arrays are not timed on backend {backend}", param_hint="--framework")
    os.environ["CUPYFLASH_BACKEND"] = backend
    try:
        return make(framework, backend == "cuda")
    except ImportError as e:
        raise click.BadParameter(f"{framework} is not installed ({e})", param_hint="--framework") from None


def make_cells(options: dict[str, Any]) -> list[Cell]:
    """Every configuration, lengths innermost."""
    seqlens, tokens, hidden = SIZES[options["backend"]]
    seqlens, tokens = options["seqlens"] or seqlens, options["tokens"] or tokens
    hidden = options["hidden"] or hidden
    if options["batch"] and options["tokens"]:
        raise click.BadParameter("either this or --tokens", param_hint="--batch")
    masks = (False, True) if options["causal"] is None else (options["causal"],)
    heads = {d: max(1, hidden // d) for d in options["head_dim"]}
    heads_k = {d: options["heads_k"] or heads[d] for d in heads}
    for d in heads:
        if heads[d] % heads_k[d]:
            raise click.BadParameter(f"{heads_k[d]} does not divide the {heads[d]} heads of q", param_hint="--heads-k")
    return [
        Cell(options["dtype"], d, causal, n, options["batch"] or max(1, tokens // n), heads[d], heads_k[d],
             options["window"], options["softcap"], options["alibi"])
        for d in heads
        for causal in masks
        for n in seqlens
    ]  # fmt: skip


def describe(options: dict[str, Any], bench: Bench, effort: Effort) -> dict[str, Any]:
    """What a reader must know of the run."""
    on_gpu = options["backend"] == "cuda"
    document: dict[str, Any] = {
        "command": "bench",
        "version": __version__,
        "date": datetime.date.today().isoformat(),
        "backend": run.backend(),
        "device": device.Device.of(0).name if on_gpu else "CPU path",
        "cuda_driver": nvrtc.driver_version() if on_gpu else None,
        "framework": bench.name,
        "framework_version": bench.version(),
        "dtype": options["dtype"],
        "flop_formula": FLOP_FORMULA,
        "rounds": effort.rounds,
        "few_rounds": None if options["memory_only"] else few_rounds(effort.rounds),
        "seconds_each": effort.run_s,
        "matmul_tflops": None,
    }
    product = None if options["memory_only"] else bench.matmul()
    if product is not None:
        work, flops = product
        document["matmul_tflops"] = flops / sustained_ms([work], bench.clock, effort)[0] / 1e9
    return document


def measure(bench: Bench, cells: list[Cell], options: dict[str, Any], effort: Effort, console: Console) -> list[Row]:
    """All rows, cell by cell."""
    names = [OURS, *options["against"]]
    rows: list[Row] = []
    with progress(console) as bar:
        task = bar.add_task("timing", total=len(cells))
        for cell in cells:
            rows += measure_cell(bench, cell, names, options, effort)
            gc.collect()
            bar.advance(task)
    return [r for d in options["directions"] for r in rows if r.direction == d]


def measure_cell(bench: Bench, cell: Cell, names: list[str], options: dict[str, Any], effort: Effort) -> list[Row]:
    """All implementations and directions of one configuration; a peer that fails has a reason instead of numbers."""
    directions, works, reasons = options["directions"], {}, {}
    peaks: dict[tuple[str, str], int | None] = {}
    for name in names:
        try:
            if name != OURS and (reason := bench.absent(name)):
                raise NotImplementedError(reason)
            works[name] = bench.works(name, cell)
            for d in directions:
                works[name][d]()
                whole = works[name]["fwd" if d == "fwd" else "both"]
                peaks[name, d] = bench.clock.peak_bytes(whole) if bench.counts_memory(name) else None
        except Exception as e:
            if name == OURS:
                raise
            works.pop(name, None)
            reasons[name] = str(e).strip().splitlines()[0].split(". ")[0] if str(e).strip() else type(e).__name__
    rows = []
    for d in directions:
        times: list[Timing | None] = [None] * len(works)
        if not options["memory_only"]:
            times = list(timings_ms([w[d] for w in works.values()], bench.clock, effort))
        timed = d == "fwd" and not options["memory_only"]
        counts = {OURS: bench_cycles.profile(bench, cell, works[OURS][d]) if timed else None}
        rows += [Row(cell, d, name, timing, peaks[name, d], "", *(counts.get(name) or ()))
                 for name, timing in zip(works, times, strict=True)]  # fmt: skip
        rows += [Row(cell, d, name, None, None, reason) for name, reason in reasons.items()]
    return rows


def measure_host(bench: Bench, options: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Microseconds of host time for a call on a small problem: forward without gradients, both passes, new lengths."""
    cell = Cell(options["dtype"], 64, False, 64, 1, 4, 4)
    names = [OURS, *(name for name in options["against"] if not bench.absent(name))]
    works = [bench.works(name, cell) for name in names]
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for d in ("fwd", "both"):
        for name, timing in zip(names, host_us([w[d] for w in works], bench.clock), strict=True):
            found[name] |= {d: timing.median, f"{d}_spread": timing.spread}
    for name in names:
        if name != "flex":  # which compiles for each length
            found[name]["fwd_new_lengths"] = new_lengths_us(bench, name, cell)
    return found


def gpu_dtype(dtype: str) -> str:
    """A dtype that has kernels."""
    return dtype if dtype in ("bf16", "fp16") else "bf16"


def show(document: dict[str, Any], rows: list[Row], console: Console) -> None:
    """Tables and sentences for people."""
    print_rows(rows, console)
    console.print()
    print_ratios(document["ratios"], console)
    if document["few_rounds"]:
        console.print(document["few_rounds"], style="yellow", soft_wrap=True)
    for name, costs in document.get("host_us", {}).items():
        passes = (f"{label} {costs[d]:.1f} us (spread {costs[d + '_spread']:.1%})"
                  for d, label in (("fwd", "forward"), ("both", "forward + backward")))  # fmt: skip
        console.print(f"host, {name}: {', '.join(passes)} a call", soft_wrap=True)
        if new := costs.get("fwd_new_lengths"):
            console.print(f"host, {name}: forward of lengths never seen {new:.1f} us a call", soft_wrap=True)
    for kind, label in (("cold", "compiled cold"), ("disk_cache", "from the disk cache")):
        for kernel in document.get("startup", {}).get(kind, {}).get("kernels", []):
            console.print(f"{label}: {kernel['symbol']} {1e3 * kernel['seconds']:.1f} ms", soft_wrap=True)
