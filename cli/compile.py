"""``cupyflash compile``: kernels ahead of time, for images and machines without a network, a compiler or a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from cupyflash.ahead import biases_of
from cupyflash.compile import cache, jit, layer, nvrtc, upkeep
from cupyflash.errors import CompileError, UnsupportedError
from cupyflash.gpu.device import ARCHS, Device
from cupyflash.plan.decode import variants_over_cache
from cupyflash.plan.families import GPU_DTYPES, dtypes_on, variants_of_calls
from cupyflash.plan.shipped import shipped
from cupyflash.plan.shipped_cache import shipped_over_cache, usual
from cupyflash.plan.spec import LEARNED
from cupyflash.plan.variant import Variant
from cupyflash.problem import HALF, MAX_HEAD_DIM, Problem, Window

from .output import Exit, emit, exit_codes, explain, gib, human, json_option, list_option, progress, quiet

PRESETS: dict[str, tuple[tuple[Window, ...], tuple[bool, ...], tuple[int, ...]]] = {
    # windows, deterministic, head_dims unless --head-dim names others
    "common": (((None, None), (None, 0)), (False,), (64, 128)),
    "all": (((None, None), (None, 0), (64, 64)), (False, True), (64, 96, 128, 256)),
}
# Features of any size, and what kernels know of them.
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.0},
    "packed": {"packed": True},
    "alibi": {"alibi": 1},  # not how many dimensions
    "kv_range": {"kv_range": True},
    "sink": {"sink": True},
    "dropout": {"dropout_p": 0.1, "dropout": 1},  # neither p nor the seed
}
# How arrays lie, as `plan` is told: most; with a dimension of stride 0, which TMA does not read; with rows that do not
# start at multiples of 16 bytes.
MEMORY = ({"aligned": True, "tma": True}, {"aligned": True, "tma": False}, {"aligned": False, "tma": False})


def head_dim(text: str) -> int:
    """A head_dim the kernels know."""
    value = int(text)
    if value % 8 or not 0 < value <= MAX_HEAD_DIM:
        raise click.BadParameter(f"{value} is not a multiple of 8 up to {MAX_HEAD_DIM}")
    return value


def variants_of(
    preset: str,
    device: Device,
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    *,
    head_dim_v: int | None = None,
    bias: bool = False,
    with_cache: bool = False,
    block_mask: bool = False,
    **features: bool,
) -> list[Variant]:
    """What calls take on one architecture, forward and backward, without repetition; `head_dim_v`: None: as q and k;
    `features`: those of `FEATURES` that some calls have, fixed or learned; `bias`: also one of q's dtype or fp32, of
    any strides; `with_cache`: also those of one query over a cache; `block_mask`: also those of calls with one.

    Those of the common preset with arrays in any memory, the others with the arrays that are usual.
    """
    windows, determinism, default_head_dims = PRESETS[preset]
    common = PRESETS["common"][0]
    dtypes = dtypes_on(device, dtypes or HALF)
    found: dict[Variant, None] = {}
    sizes = [(d, head_dim_v or d) for d in head_dims or default_head_dims]
    problems = list(_problems(dtypes, sizes, windows, determinism))
    for name in (name for name, is_asked in features.items() if is_asked):
        problems += [replace(problem, **FEATURES[name]) for problem in problems]
    if block_mask:
        problems += [replace(problem, block_mask=1, tall=tall) for problem in problems for tall in (False, True)]
    if bias:
        forms = {dtype: dict.fromkeys(form for form, _ in biases_of(dtype, True)) for dtype in dtypes}
        problems += [replace(problem, bias=form) for problem in problems for form in forms[problem.dtype]]
    for problem in problems:
        is_common = problem.window in common and not problem.deterministic
        for memory in MEMORY if is_common else MEMORY[:1]:
            for learned, paired in _forms(problem):
                known = dict.fromkeys(LEARNED, learned) | {"paired_bias": paired, **memory}
                for heads_q in (1, 2):  # as many as of k, and groups of them
                    call = replace(problem, heads_q=heads_q)
                    found.update(dict.fromkeys(variants_of_calls(call, device, **known)))
    if with_cache:
        for masked in range(1 + block_mask):
            for over in usual(dtypes, sizes, block_mask=masked):
                found.update(dict.fromkeys(variants_over_cache(over, device, aligned=True, tma=True)))
    if preset == "all":
        every = *shipped(device), *shipped_over_cache(device)
        rest = (v for v in every if v.dtype in dtypes and (not head_dims or v.head_dim in head_dims))
        found.update(dict.fromkeys(rest))
    return list(found)


def _forms(problem: Problem) -> list[tuple[bool, int]]:
    """Whether what can be learned is, and how neighbouring keys of a bias lie."""
    learned = (False, True) if problem.alibi or problem.sink or problem.bias else (False,)
    lies = dict.fromkeys(paired for _, paired in biases_of(problem.dtype, problem.bias is not None))
    return list(itertools.product(learned, lies))


def _problems(
    dtypes: tuple[str, ...], sizes: list[tuple[int, int]], windows: tuple[Window, ...], determinism: tuple[bool, ...]
) -> Iterator[Problem]:
    """Problems of any size: no length is compiled in."""
    for dtype in dtypes:
        for d, of_v in sizes:
            for window in windows:
                for deterministic in determinism:
                    yield Problem(dtype, 1, 1, 1, 1, 1, d, d**-0.5, window, deterministic, head_dim_v=of_v)


@click.command(
    epilog=exit_codes("0 all compiled, 4 no usable NVRTC or no room in the folder, 5 a kernel did not compile")
)
@list_option("--arch", choices=ARCHS, required=True, example="sm_80,sm_90", help=f"Any of {', '.join(ARCHS)}.")
@list_option("--dtype", choices=GPU_DTYPES, example="bf16,fp16", help="bf16 and fp16 unless given; fp32, too.")
@list_option("--head-dim", item=head_dim, example="64,128", help="Instead of those of the preset.")
@click.option("--head-dim-v", type=head_dim, default=None, metavar="INTEGER", help="Of v.  [default: as q and k]")
@click.option("--preset", type=click.Choice(tuple(PRESETS)), default="common", show_default=True,
              help="common: head_dim 64 and 128, dense and causal, arrays of any strides and alignment. all: also "
              "96 and 256, windows, deterministic, and every variant that the tests cover.")  # fmt: skip
@click.option("--softcap", is_flag=True, help="Also the kernels of calls with a softcap, whatever it is.")
@click.option("--packed", is_flag=True, help="Also the kernels of packed sequences, of attention_varlen.")
@click.option("--alibi", is_flag=True, help="Also the kernels of calls with ALiBi's slopes, fixed or learned.")
@click.option("--kv-range", is_flag=True, help="Also the kernels of calls with a kv_range, whatever it is.")
@click.option("--sink", is_flag=True, help="Also the kernels of calls with sinks, fixed or learned.")
@click.option("--dropout", is_flag=True, help="Also the kernels of calls with dropout, whatever p is.")
@click.option("--bias", is_flag=True, help="Also the kernels of calls with a mask or a bias, fixed or learned.")
@click.option(
    "--with-cache", is_flag=True, help="Also the kernels of attention_with_cache: one query, pages of 16 or none."
)
@click.option("--block-mask", is_flag=True, help="Also the kernels of calls with a block mask, whatever it is.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Cache folder whose precompiled/ layer gets the kernels.  [default: the user's cache]")  # fmt: skip
@click.option("-j", "--jobs", type=click.IntRange(1), default=None, help="Compilations at a time.  [default: cores]")
@json_option
def command(
    arch: tuple[str, ...], dtype: tuple[str, ...], head_dim: tuple[int, ...], preset: str, out: Path | None,
    jobs: int | None, as_json: bool, **asked: Any,
) -> None:  # fmt: skip
    """Compile kernels ahead of time. Needs NVRTC, no GPU and no driver.

    The kernels go to OUT/precompiled/<arch>/, readable for everybody. A process whose CUPYFLASH_CACHE_DIR is OUT loads
    them from there, without NVRTC, and never writes to that layer.
    """
    compiler = nvrtc.find()  # without it, say so before anything else
    quiet()
    work = [(v, a) for a in arch for v in variants_of(preset, Device.synthetic(a), dtype, head_dim, **asked)]
    archs = sorted({a + v.arch_suffix for v, a in work})
    for name in archs:
        jit.target_arch(name, compiler)
    folder = _folder(out, archs)
    console = human(as_json)
    rows, failures = _compile(work, folder, jobs or os.cpu_count() or 1, console)
    if as_json:
        emit({"command": "compile", "out": str(folder), "compiled": rows, "failed": [f.symbol for f in failures]})
    else:
        console.print(_table(rows))
        total = sum(row["bytes"] for row in rows)
        console.print(f"{len(rows)} kernels, {gib(total)}, in {folder / layer.FOLDER}", soft_wrap=True)
    if rows and (out or cache.default().is_chosen) and (closed := layer.closed_to_others(folder)):
        click.echo(f"other users cannot read them: chmod a+x {closed} would let them", err=True)
    for failure in failures:
        explain(failure)
    if failures:
        click.echo(f"{len(failures)} of {len(work)} kernels did not compile", err=True)
        raise SystemExit(Exit.COMPILE)


def _folder(out: Path | None, archs: list[str]) -> Path:
    """The cache folder, with a layer that can be written; a usage error otherwise, before anything is compiled."""
    store = cache.default()
    try:
        folder = out.expanduser() if out else store.path
    except RuntimeError as e:
        raise click.UsageError(f"--out: {out} cannot be found ({e})") from e
    problem = None if out or store.is_chosen else store.problem  # this makes the user's own folder, private
    if folder is None or problem:
        raise click.UsageError(f"--out must be given: {problem or store.missing}")
    for arch in archs:
        try:
            upkeep.prune(layer.make(folder, arch), float("inf"))
        except OSError as e:
            raise click.UsageError(f"--out: {folder} cannot be written ({e})") from e
    return folder


def _compile(
    work: list[tuple[Variant, str]], folder: Path, jobs: int, console: Any
) -> tuple[list[dict[str, Any]], list[CompileError]]:
    """Compile side by side (NVRTC releases the GIL); rows in the order of `work`, and what failed."""
    rows: dict[int, dict[str, Any]] = {}
    failures = []
    with progress(console) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("compiling", total=len(work))
        futures = {pool.submit(jit.precompile, v, a, folder): i for i, (v, a) in enumerate(work)}
        try:
            for future in as_completed(futures):
                try:
                    rows[futures[future]] = facts(future.result())
                except CompileError as e:
                    failures.append(e)
                except OSError as e:
                    raise UnsupportedError(f"--out: {folder} can no longer be written ({e}); make room") from e
                bar.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [rows[i] for i in sorted(rows)], failures


def facts(cubin: cache.Cubin) -> dict[str, Any]:
    """A compiled kernel in tables and JSON."""
    return {
        "symbol": cubin.symbol,
        "arch": cubin.arch,
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
        "bytes": len(cubin.data),
        "seconds": round(cubin.seconds, 3),
        "nvrtc": cubin.nvrtc,
        "from_cache": cubin.from_cache,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("kernel", overflow="fold")
    for name in ("arch", "registers", "spills", "size", "seconds"):
        table.add_column(name, justify="left" if name == "arch" else "right", no_wrap=True)
    for row in rows:
        style = "yellow" if row["spill_bytes"] else None
        numbers = str(row["registers"]), str(row["spill_bytes"]), gib(row["bytes"]), f"{row['seconds']:.2f}"
        table.add_row(row["symbol"], row["arch"], *numbers, style=style)
    return table
