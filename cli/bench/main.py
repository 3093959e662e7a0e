"""``cupyflash bench``: how fast, how much memory, and against whom."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from cupyflash import __version__
from cupyflash.compile import nvrtc
from cupyflash.errors import CupyflashError, DeviceError, UnsupportedError
from cupyflash.gpu import device
from cupyflash.launch import run
from cupyflash.problem import DTYPES, MAX_HEAD_DIM

from ..output import Exit, emit, ended_by_terminate, exit_codes, human, json_option, list_option, progress, quiet
from . import cycles as bench_cycles
from . import decode_host as bench_decode_host
from . import host as bench_host
from . import numpy_work as bench_numpy
from . import plot as bench_plot
from . import saved as bench_saved
from . import startup as bench_startup
from .arguments import check_lengths, check_plot, check_writable, feature_options, make_cells, or_zero
from .cell import CPU, DIRECTIONS, FLOP_FORMULA, ORDERED, OURS, PLAIN, SM80
from .contestants import works_of
from .decode import check_together, decode_options
from .decode_cell import BYTES_FORMULA, COPY, PARTS, WIDE, AnyCell
from .decode_shapes import are_a_grid, chosen
from .frameworks import make
from .lengths import DENSE, DISTRIBUTIONS
from .report import Row, documents, few_rounds, ratios, write_csv
from .tables import show, show_head
from .timing import QUICK, ROUNDS, SUSTAINED, Effort, Timing, sustained_ms, timings_ms
from .work import PEERS, Bench


@click.command(
    epilog=exit_codes("0 measured, 3 there is no usable GPU, 4 not supported, 5 a kernel did not compile; "
                      "a run that is interrupted shows what it has measured")
)  # fmt: skip
@list_option("--against", choices=PEERS, example="flash2,cudnn",
             help=f"Peers, through torch: {', '.join(PEERS)}; {DENSE} is our own call, not packed or without a "
                  f"cache, {ORDERED} with deterministic=True, {PARTS} two calls over a cache, {SM80} by those kernels, "
                  f"{COPY} reads K and V, {PLAIN} and {CPU} are other ways of NumPy arrays.")  # fmt: skip
@list_option("--pass", "directions", choices=DIRECTIONS, default="fwd,bwd", example="fwd,bwd,both",
             help="What to time; both is a forward and a backward as one.")  # fmt: skip
@list_option("--head-dim", item=int, choices=range(8, MAX_HEAD_DIM + 1, 8), default="64,128", example="64,128",
             help="Sizes of a head.")  # fmt: skip
@click.option("--head-dim-v", type=click.IntRange(1, MAX_HEAD_DIM), callback=or_zero, help="Of v; default: --head-dim.")
@click.option("--dtype", type=click.Choice(DTYPES), default=None, help="[default: bf16; fp16 on Turing]")
@click.option("--causal/--no-causal", default=None, help="One mask alone.  [default: both]")
@list_option("--seqlens", item=int, example="1024,4096", help="Lengths.  [default: 1024 to 16384; CPU: 128 to 512]")
@click.option("--tokens", type=click.IntRange(1), default=None, help="batch * seqlen.  [default: 16384; CPU: 1024]")
@click.option("--hidden", type=click.IntRange(8), default=None, help="heads * head_dim.  [default: 2048; CPU: 256]")
@click.option("--heads-k", type=click.IntRange(1), default=None, help="Heads of k and v.  [default: as many as q has]")
@click.option("--batch", type=click.IntRange(1), default=None, help="For every length, instead of --tokens.")
@list_option("--packed", choices=DISTRIBUTIONS, example="equal,uniform",
             help=f"Time attention_varlen: lengths up to --seqlens, {', '.join(DISTRIBUTIONS)}.")  # fmt: skip
@click.option("--window", type=click.IntRange(0), default=None, help="Keys that a query sees to its left.")
@click.option("--alibi", is_flag=True, help="With ALiBi's slopes.")
@click.option("--sink", is_flag=True, help="With a sink of each head.")
@feature_options
@decode_options
@click.option("--framework", type=click.Choice(["torch", "jax", "cupy", "numpy"]), default=None,
              help="Whose arrays, and whose events to time with.  [default: torch where it is installed]")  # fmt: skip
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--quick", is_flag=True, help="Time each for a twentieth of a second a round: faster, less certain.")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True,
              help="Turns of all, each in a new random order.")  # fmt: skip
@click.option("--memory-only", is_flag=True, help="Measure memory, not time.")
@click.option("--host", is_flag=True, help="Also the host's cost of a warm call.")
@click.option("--startup", is_flag=True, help="Also the time to compile a new kernel, and to load it from the cache.")
@click.option("--saved", type=click.Path(dir_okay=False, exists=True, path_type=Path), default=None,
              help="Measure nothing: show what --json wrote. Only --pass, --csv, --plot, --json count.")  # fmt: skip
@click.option("--csv", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the rows there.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Draw the speed, or with --memory-only the memory, to a .png or .svg.")  # fmt: skip
@json_option
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Time attention by sequence length, alone or against others, in one run.

    Sustained and in turns: in each round all implementations of a configuration run in a new random order, each until
    the clock is steady and then timed with events for a quarter of a second. Reported are the median of the rounds and
    the spread, (slowest - fastest) / median, on random data. FLOPs are 4 * head_dim for each visible query-key pair and
    head in the forward, 2.5 times that in the backward, with v by --head-dim-v; what masks hide does not count.
    """
    quiet()
    check_together(ctx)
    check_lengths(options["seqlens"])
    check_plot(options["plot"])
    check_writable("--csv", options["csv"])
    check_writable("--plot", options["plot"])
    console = human(options["as_json"])
    if options["saved"]:
        given = ctx.get_parameter_source("directions") is ParameterSource.COMMANDLINE
        document, rows = bench_saved.load(options["saved"], options["directions"] if given else None)
        show_head(document, console)
    else:
        document, rows = measure_all(options, console)
    if options["plot"] and not are_a_grid(dict.fromkeys(row.cell for row in rows)):
        raise click.BadParameter(
            f"{options['saved']} is a run of --decode without --grid, of which there is no picture", param_hint="--plot"
        )
    document |= {"rows": documents(rows), "ratios": ratios(rows)}
    show(document, rows, console)
    if options["csv"]:
        write_csv(rows, options["csv"])
    if options["plot"]:
        bench_plot.draw(document, rows, options["plot"])
    if options["as_json"]:
        emit(document)
    if document.get("not_measured"):
        ctx.exit(Exit.INTERRUPTED)


def measure_all(options: dict[str, Any], console: Console) -> tuple[dict[str, Any], list[Row[Any]]]:
    """The whole run: its document, which still lacks the rows, and the rows."""
    options["dtype"] = options["dtype"] or device.usual_dtype(on_gpu=options["backend"] == "cuda")
    cells: Sequence[AnyCell] = chosen(options) if options["decode"] else make_cells(options)
    if options["decode"]:
        own = (WIDE,) if options["cache_dtype"] else ()
        options |= {"directions": ("decode",), "against": (*options["against"], *own)}
        if options["framework"] == "numpy" and options["backend"] == "cuda":
            raise click.BadParameter("numpy arrays of caches need --backend cpu", param_hint="--framework")
    bench = make_bench(options["framework"], options["backend"])
    effort = dataclasses.replace(QUICK if options["quick"] else SUSTAINED, rounds=options["rounds"])
    document = describe(options, bench, effort) | {"packed": bench_saved.lengths_of(cells)}
    show_head(document, console)
    if bench.name == "numpy" and not options["decode"]:
        document["numpy"] = bench_numpy.facts(cells, options["directions"])
    rows, document["not_measured"] = measure(bench, cells, options, effort, console)
    if document["not_measured"]:
        return document, rows
    if options["host"]:
        measure_host = bench_decode_host.measure if options["decode"] else bench_host.measure
        document |= measure_host(bench, cells, options)
    if options["startup"]:
        arch = device.Device.of(0).arch if options["backend"] == "cuda" else "sm_90"
        document["startup"] = bench_startup.measure(options["dtype"], options["head_dim"][-1], arch)
    return document, rows


def make_bench(framework: str | None, backend: str) -> Bench:
    """Where to run; DeviceError (exit code 3) without a GPU, unless the CPU path was asked for."""
    if backend == "cuda" and not device.count():
        raise DeviceError(f"{device.why_none()}; `--backend cpu` times the CPU path")
    if framework == "cupy" and backend == "cpu":
        raise click.BadParameter("cupy arrays are not timed on backend cpu", param_hint="--framework")
    os.environ["CUPYFLASH_BACKEND"] = backend
    try:
        return make(framework, backend == "cuda")
    except ImportError as e:
        raise click.BadParameter(f"{framework} is not installed ({e})", param_hint="--framework") from None


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
        "peer_versions": bench.versions(options["against"]),
        "dtype": options["dtype"],
        "flop_formula": None if options["decode"] else FLOP_FORMULA,
        "bytes_formula": BYTES_FORMULA if options["decode"] else None,
        "rounds": effort.rounds,
        "few_rounds": None if options["memory_only"] else few_rounds(effort.rounds),
        "seconds_each": effort.run_s,
        "matmul_tflops": None,
    }
    product = None if options["memory_only"] or options["decode"] else bench.matmul()
    if product is not None:
        work, flops = product
        document["matmul_tflops"] = flops / sustained_ms([work], bench.clock, effort)[0] / 1e9
    return document


def measure(
    bench: Bench, cells: Sequence[AnyCell], options: dict[str, Any], effort: Effort, console: Console
) -> tuple[list[Row[Any]], int]:
    """All rows, cell by cell, and of how many cells there are none because somebody, or an error, ended the run."""
    rows: list[Row[Any]] = []
    done = 0
    with progress(console) as bar, ended_by_terminate():
        task = bar.add_task("timing", total=len(cells))
        try:
            for cell in cells:
                rows += measure_cell(bench, cell, [OURS, *options["against"]], options, effort)
                done += 1
                gc.collect()
                bar.advance(task)
        except (KeyboardInterrupt, Exception) as e:
            if not done and ("out of memory" in str(e).lower() or "allocate" in str(e)):
                raise UnsupportedError(f"{e}; give a smaller --batch, --tokens or --hidden") from None
            if not done or isinstance(e, CupyflashError):
                raise
            if isinstance(e, Exception):  # a peer's illegal access, say, after which no CUDA call works
                traceback.print_exc()
    return [r for d in options["directions"] for r in rows if r.direction == d], len(cells) - done


def measure_cell(
    bench: Bench, cell: AnyCell, names: list[str], options: dict[str, Any], effort: Effort
) -> list[Row[Any]]:
    """All implementations and directions of one configuration; a peer that fails has a reason instead of numbers."""
    directions, works, reasons = options["directions"], {}, {}
    peaks: dict[tuple[str, str], int | None] = {}
    for name in names:
        try:
            if name != OURS and (reason := bench.absent(name)):
                raise NotImplementedError(reason)
            works[name] = works_of(bench, name, cell)
            for d in directions:
                works[name][d]()
                whole = works[name]["both" if d == "bwd" else d]
                counted = d != "decode" and bench.counts_memory(name)
                peaks[name, d] = bench.clock.peak_bytes(whole) if counted else None
        except Exception as e:
            if name == OURS:
                raise
            works.pop(name, None)
            reasons[name] = str(e).strip().splitlines()[0].split(". ")[0] if str(e).strip() else type(e).__name__
    rows: list[Row[Any]] = []
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
