"""``cupyflash verify``: prove on this machine that results are right.

On a GPU the kernels run there. Without one the CPU path runs, the kernels run in the emulator, and NVRTC compiles them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import click
from rich.console import Console

from cupyflash import __version__
from cupyflash.check import cases
from cupyflash.compile import nvrtc
from cupyflash.errors import DeviceError, UnsupportedError
from cupyflash.gpu import device
from cupyflash.launch import run
from cupyflash.plan.families import GPU_DTYPES
from cupyflash.problem import DTYPES, MAX_HEAD_DIM

from .. import watchdog
from ..frameworks import Framework, make
from ..output import FiniteRange, emit, exit_codes, human, json_option, list_option, progress, quiet
from . import cached
from . import emulator as verify_emulator
from .ahead import compiling_ahead
from .cases import run_case
from .checks import NAMES, Context, available, run_check
from .kernels import compile_all, selection
from .report import CASE_HEADER, CHECK_HEADER, Report, case_line, check_line, emulator_header, print_kernels, report_end


@click.command(
    cls=watchdog.Watched,
    epilog=exit_codes("0 verified, 1 a case failed or ended the process, 3 a GPU was asked for and none is usable, "
                      "4 not supported, 5 a kernel did not compile or there is no NVRTC to compile it with, "
                      "6 a case did not end within --timeout")
)  # fmt: skip
@click.option("--level", type=click.Choice(cases.LEVELS), default="quick", show_default=True,
              help="smoke: one case in eleven, without a GPU up to a minute. quick: half of them. full: every case and "
              "shipped kernel. The first time, kernels are compiled, which takes minutes.")  # fmt: skip
@list_option("--dtype", choices=DTYPES, example="bf16,fp16", help="Unless given: all that the backend has.")
@list_option("--head-dim", item=int, choices=range(8, MAX_HEAD_DIM + 1, 8), example="64,128", help="Only those cases.")
@click.option("--framework", type=click.Choice(["numpy", "cupy", "torch", "jax"]), default=None,
              help="Whose arrays to use.  [default: cupy on a GPU, numpy without]")  # fmt: skip
@click.option("--backend", type=click.Choice(run.BACKENDS), default="auto", show_default=True,
              help="auto: a GPU where there is one; else the CPU path, the kernels in an emulator where there is "
              "clang++ or g++, and NVRTC compiles them without running them. cpu: the CPU path alone.")  # fmt: skip
@click.option("--case", "name", metavar="NAME", default=None, help="One case or check alone.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random inputs.")
@click.option("--timeout", type=FiniteRange(0), default=300, show_default=True, metavar="SECONDS",
              help="Of a case, its compilation included: one that takes longer ends the run with its name. "
              "0: wait for ever, in one process.")  # fmt: skip
@json_option
@click.pass_context
def command(ctx: click.Context, /, timeout: float, as_json: bool, **options: Any) -> None:
    """Check results on this machine against float64 attention.

    Errors of out, dq, dk and dv may be at most twice those of plain attention in the same dtype, plus one rounding;
    NaN and inf must stand exactly where float64 has them. Each line shows the largest errors of the four results, then
    for the worst result the error of plain attention, the ratio of ours to that, and how much of the bound was used.
    """
    if timeout and not watchdog.is_watched():
        on_end = partial(report_end, as_json=as_json)
        raise SystemExit(watchdog.watch(["verify", *watchdog.arguments_of(ctx)], timeout, on_end))
    report = verify(human(as_json), **options)
    if as_json:
        emit(report.document())
    watchdog.tell("the end", exit_code=int(report.exit_code))
    raise SystemExit(report.exit_code)


def verify(
    console: Console, level: str, dtype: tuple[str, ...], head_dim: tuple[int, ...], framework: str | None,
    backend: str, name: str | None, seed: int,
) -> Report:  # fmt: skip
    """Run all that was asked for, and print it."""
    quiet()
    where = choose_backend(backend)
    on_gpu = where == "cuda"
    arrays = make_framework(framework or ("cupy" if on_gpu else "numpy"), on_gpu)
    shared = {"level": level, "framework": arrays.name, "backend": backend, "seed": seed}
    report = Report(shared, gpu=device.Device.of(0).name if on_gpu else None)
    watchdog.tell(header=report.header())
    console.print(f"cupyflash {__version__}, {arrays.name} arrays, {report.gpu or 'CPU path'}, level {level}")
    dtypes = dtype or (device.Device.of(0).dtypes if on_gpu else DTYPES)
    if on_gpu and set(dtypes) <= set(GPU_DTYPES):
        os.environ["CUPYFLASH_BACKEND"] = "cuda"  # NumPy arrays, too, however small
    case = cached.case_of(name, head_dim)
    wanted = choose_cases(level, dtypes, head_dim, name)
    over_cache = cached.chosen(level, dtypes, head_dim, name, device.Device.of(0) if on_gpu else None)
    run_cases(report, [*wanted, *over_cache], arrays, console)
    checks = [n for n in available(arrays) if name in (None, n)]
    if not wanted and not over_cache and not checks:
        others = [] if case is None else [x for x in case.dtypes if x not in dtypes]
        why = f"has no {', '.join(dtypes)}, but {', '.join(others)}" if others else "needs a GPU or another --framework"
        raise click.BadParameter(f"{name} {why}", param_hint="--case")
    run_checks(report, checks, arrays, console)
    if backend == "cpu":
        report.no_kernel_ran = "--backend cpu"
    elif not on_gpu:
        console.print(f"\nNo GPU is usable ({device.why_none()}).")
        work = verify_emulator.choose(level, dtypes, head_dim, name) + cached.work_of(level, dtypes, head_dim, name)
        run_emulator(report, sorted(work, key=lambda each: each.family), console)
        if name is None:
            run_kernels(report, level, console)
    console.print(f"\n{report.verdict}", style="green" if report.exit_code == 0 else "bold red", soft_wrap=True)
    if report.reproduce:
        console.print(f"reproduce: {report.reproduce}", soft_wrap=True)
    return report


def choose_backend(wish: str) -> str:
    """ "cuda" or "cpu"; the variable is set too, because the calls decide by it."""
    if wish == "cuda" and not device.count():
        raise DeviceError(f"--backend cuda: {device.why_none()}; --backend auto runs the kernels in the emulator")
    if wish != "auto":
        os.environ["CUPYFLASH_BACKEND"] = wish
    return run.backend()


def make_framework(name: str, on_gpu: bool) -> Framework:
    """The framework, or a usage error that says how to get it."""
    if name == "cupy" and not on_gpu:
        raise DeviceError(f"--framework cupy: {device.why_none()}; see cupyflash doctor, or --framework numpy")
    if importlib.util.find_spec(name) is None:
        raise click.UsageError(f"--framework {name}: {name} is not installed; pip install {name}")
    try:
        return make(name, on_gpu)
    except (ImportError, RuntimeError, AssertionError) as e:  # as torch and JAX say that they see no GPU
        raise click.UsageError(f"--framework {name}: {name} cannot be used here ({e}); try --backend cpu") from None


def choose_cases(
    level: str, dtypes: tuple[str, ...], head_dims: tuple[int, ...], name: str | None
) -> list[tuple[cases.Case, str]]:
    """Cases and dtypes, the dtypes of a case side by side."""
    if name is not None:
        if name in NAMES or name in cached.BY_NAME:
            return []
        try:
            return [(cases.case(name), dtype) for dtype in dtypes]
        except KeyError:
            known = ", ".join([*(c.name for c in cases.CASES), *cached.BY_NAME, *NAMES])
            raise click.BadParameter(f"no case is called {name!r}; there are: {known}", param_hint="--case") from None
    found = [c for c in cases.select(level) if not head_dims or c.head_dim in head_dims]
    if not found:
        raise click.BadParameter(f"no case of level {level} has such a head_dim", param_hint="--head-dim")
    return [(c, dtype) for c in found for dtype in dtypes if dtype in c.dtypes]


def run_cases(report: Report, wanted: list[tuple[Any, str]], arrays: Framework, console: Console) -> None:
    """Run and print them one by one; end when the GPU no longer answers."""
    if not wanted:
        return
    console.print(CASE_HEADER, style="bold", soft_wrap=True)
    ahead = compiling_ahead(wanted, device.Device.of(0)) if report.gpu else nullcontext()
    with ahead, progress(console) as bar:
        task = bar.add_task("cases", total=len(wanted))
        for case, dtype in wanted:
            watchdog.tell(f"case {case.name} ({dtype})", reproduce=report.command(case.name, dtype))
            judge = run_case if isinstance(case, cases.Case) else cached.run_case
            result = judge(case, dtype, arrays, int(report.options["seed"]))
            report.add("cases", result)
            console.print(case_line(result), style=None if result.passed else "red", soft_wrap=True)
            bar.advance(task)
            if result.error is not None:
                report.broken = gpu_problem(arrays)
            if report.broken:
                return


def gpu_problem(arrays: Framework) -> str | None:
    """Why the GPU is unusable after an error, if it is: all later results would be lost."""
    try:
        arrays.synchronize()
    except Exception as e:
        return f"the GPU stopped working in this case ({e}); the cases after it were not run"
    return None


def run_checks(report: Report, names: list[str], arrays: Framework, console: Console) -> None:
    """The checks that are not about numbers."""
    if report.broken or not names:
        return
    console.print(CHECK_HEADER, style="bold")
    dtype = device.usual_dtype(on_gpu=report.gpu is not None)
    context = Context(arrays, dtype, int(report.options["seed"]))
    for name in names:
        watchdog.tell(f"check {name}", reproduce=report.command(name))
        result = run_check(name, context)
        report.add("checks", result)
        console.print(check_line(result), style=None if result.passed else "red", soft_wrap=True)
        if result.shown and not result.passed:
            report.broken = gpu_problem(arrays)
        if report.broken:
            return


def run_emulator(report: Report, work: list[verify_emulator.Work], console: Console) -> None:
    """The kernels themselves on the CPU, family by family; or why not."""
    watchdog.tell("the compilation of the emulator", reproduce=None)
    reason = verify_emulator.missing() if work else "nothing of this is for the emulator"
    if reason:
        report.no_kernel_ran = f"no GPU; {reason}"
        console.print(f"No kernel runs: {reason}.", style="yellow", soft_wrap=True)
        return
    with progress(console) as bar, verify_emulator.compiled_ahead(work) as wait:
        task, family = bar.add_task("emulator", total=len(work)), None
        for each in work:
            if each.family != family:
                family = each.family
                console.print(emulator_header(family), style="bold")
            words = f"case {each.case.name} ({each.dtype}) of the {each.family} kernels in the emulator"
            watchdog.tell(words, reproduce=report.command(each.case.name, each.dtype))
            result = verify_emulator.run_work(each, wait, int(report.options["seed"]))
            report.add("emulator", result)
            console.print(case_line(result), style=None if result.passed else "red", soft_wrap=True)
            bar.advance(task)


def run_kernels(report: Report, level: str, console: Console) -> None:
    """Compile what cannot be run here, and say so."""
    try:
        compiler = nvrtc.find()
    except UnsupportedError as e:
        if sys.platform == "darwin":
            console.print("\nNo kernel was compiled: there is no NVRTC for macOS.")
        else:
            report.no_compiler = str(e)
        return
    version = "{}.{}".format(*compiler.version)
    work = selection(level)
    console.print(f"\nKernels are compiled with NVRTC {version}, not run.")
    with progress(console) as bar:
        task = bar.add_task("kernels", total=len(work))
        watchdog.tell("the compilation of kernels", reproduce=None)
        for result in compile_all(work):
            report.add("kernels", result)
            bar.advance(task)
            if result.error is not None:
                console.print(f"{result.symbol}  {result.arch}  FAIL\n{result.error.log}", style="red", soft_wrap=True)
    print_kernels(report.kernels, console)
