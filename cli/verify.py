"""``cupyflash verify``: prove on this machine that results are right."""

from __future__ import annotations

import importlib.util
import os
import sys

import click
from rich.console import Console

from cupyflash import __version__, cases, device, nvrtc, run
from cupyflash.errors import UnsupportedError
from cupyflash.problem import DTYPES, MAX_HEAD_DIM

from .frameworks import Framework, make
from .output import emit, exit_codes, human, json_option, list_option, progress, quiet
from .verify_cases import run_case
from .verify_checks import NAMES, Context, available, run_check
from .verify_kernels import compile_all, selection
from .verify_report import CASE_HEADER, CHECK_HEADER, Report, case_line, check_line, print_kernels

GPU_DTYPES = ("bf16", "fp16")


@click.command(
    epilog=exit_codes("0 verified, 1 a case failed, 3 a GPU was asked for and none is usable, 4 not supported, "
                      "5 a kernel did not compile or there is no NVRTC to compile it with")
)  # fmt: skip
@click.option("--level", type=click.Choice(cases.LEVELS), default="quick", show_default=True,
              help="smoke: seconds. quick: up to 90 s. full: every case, every shipped kernel, minutes.")  # fmt: skip
@list_option("--dtype", choices=DTYPES, example="bf16,fp16", help="Unless given: all that the backend has.")
@list_option("--head-dim", item=int, choices=range(8, MAX_HEAD_DIM + 1, 8), example="64,128", help="Only those cases.")
@click.option("--framework", type=click.Choice(["numpy", "cupy", "torch", "jax"]), default=None,
              help="Whose arrays to use.  [default: cupy on a GPU, numpy without]")  # fmt: skip
@click.option("--backend", type=click.Choice(run.BACKENDS), default="auto", show_default=True,
              help="auto: a GPU where there is one; else the CPU path, and kernels are compiled without being run. "
              "cpu: the CPU path alone.")  # fmt: skip
@click.option("--case", "name", metavar="NAME", default=None, help="One case or check alone.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random inputs.")
@json_option
def command(
    level: str, dtype: tuple[str, ...], head_dim: tuple[int, ...], framework: str | None, backend: str,
    name: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Check results on this machine against float64 attention.

    Errors of out, dq, dk and dv may be at most twice those of plain attention in the same dtype, plus one rounding;
    NaN and inf must stand exactly where float64 has them. Each line shows the largest errors of the four results, then
    for the worst result the error of plain attention, the ratio of ours to that, and how much of the bound was used.
    """
    quiet()
    where = choose_backend(backend)
    on_gpu = where == "cuda"
    arrays = make_framework(framework or ("cupy" if on_gpu else "numpy"), on_gpu)
    shared = {"level": level, "framework": arrays.name, "backend": backend, "seed": seed}
    report = Report(shared, gpu=device.Device.of(0).name if on_gpu else None)
    console = human(as_json)
    console.print(f"cupyflash {__version__}, {arrays.name} arrays, {report.gpu or 'CPU path'}, level {level}")
    wanted = choose_cases(level, dtype or (GPU_DTYPES if on_gpu else DTYPES), head_dim, name)
    run_cases(report, wanted, arrays, console)
    checks = [n for n in available(arrays) if name in (None, n)]
    if not wanted and not checks:
        raise click.BadParameter(f"{name} needs a GPU or another --framework", param_hint="--case")
    run_checks(report, checks, arrays, console)
    if backend != "cpu" and not on_gpu and name is None:
        run_kernels(report, level, console)
    console.print(f"\n{report.verdict}", style="green" if report.exit_code == 0 else "bold red", soft_wrap=True)
    if report.reproduce:
        console.print(f"reproduce: {report.reproduce}", soft_wrap=True)
    if as_json:
        emit(report.document())
    raise SystemExit(report.exit_code)


def choose_backend(wish: str) -> str:
    """ "cuda" or "cpu"; the variable is set too, because the calls decide by it."""
    if wish != "auto":
        os.environ["CUPYFLASH_BACKEND"] = wish
    return run.backend()


def make_framework(name: str, on_gpu: bool) -> Framework:
    """The framework, or a usage error that says how to get it."""
    if name == "cupy" and not on_gpu:
        raise click.UsageError("--framework cupy needs a GPU; see: cupyflash doctor")
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
        if name in NAMES:
            return []
        try:
            return [(cases.case(name), dtype) for dtype in dtypes]
        except KeyError:
            known = ", ".join([*(c.name for c in cases.CASES), *NAMES])
            raise click.BadParameter(f"no case is called {name!r}; there are: {known}", param_hint="--case") from None
    found = [c for c in cases.select(level) if not head_dims or c.head_dim in head_dims]
    if not found:
        raise click.BadParameter(f"no case of level {level} has such a head_dim", param_hint="--head-dim")
    return [(c, dtype) for c in found for dtype in dtypes if dtype in c.dtypes]


def run_cases(report: Report, wanted: list[tuple[cases.Case, str]], arrays: Framework, console: Console) -> None:
    """Run and print them one by one; end when the GPU no longer answers."""
    if not wanted:
        return
    console.print(CASE_HEADER, style="bold")
    with progress(console) as bar:
        task = bar.add_task("cases", total=len(wanted))
        for case, dtype in wanted:
            result = run_case(case, dtype, arrays, int(report.options["seed"]))
            report.cases.append(result)
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
    context = Context(arrays, "bf16", int(report.options["seed"]))
    for name in names:
        result = run_check(name, context)
        report.checks.append(result)
        console.print(check_line(result), style=None if result.passed else "red", soft_wrap=True)
        if not result.passed:
            report.broken = gpu_problem(arrays)
        if report.broken:
            return


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
    console.print(f"\nNo GPU is usable ({device.why_none()}).\nKernels are compiled with NVRTC {version}, not run.")
    with progress(console) as bar:
        task = bar.add_task("kernels", total=len(work))
        for result in compile_all(work):
            report.kernels.append(result)
            bar.advance(task)
            if result.error is not None:
                console.print(f"{result.symbol}  {result.arch}  FAIL\n{result.error.log}", style="red", soft_wrap=True)
    print_kernels(report.kernels, console)
