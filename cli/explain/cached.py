"""What a call of attention over a cache would do: kernels, grids, how its blocks share out the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from cupyflash import __version__
from cupyflash.cache.checks import make_cache_options, make_cache_problem
from cupyflash.cache.problem import CacheProblem
from cupyflash.compile import jit
from cupyflash.gpu.device import Device
from cupyflash.launch import prepare
from cupyflash.mods import read
from cupyflash.operand import MASK_TILE, MOD_ARRAYS, TILE_WORDS
from cupyflash.plan.decode import plan_append, plan_decode, why_not_tma
from cupyflash.plan.extents import Extents, Kernels
from cupyflash.plan.families import kernels_of, plan_of
from cupyflash.plan.kernels import Main
from cupyflash.plan.prefill import Lie, Way, spec_of, way_of
from cupyflash.plan.prefill import problem_of as forward_of
from cupyflash.plan.variant import Variant

from ..output import counted, emit, gib, gpu_name, human
from .modded import mods_of

_OWN = ("page_size", "cache_dtype")  # of such calls
_TAKEN = (
    *_OWN, "with_cache", "dtype", "head_dim", "head_dim_v", "batch", "seqlen", "seqlen_q", "heads", "heads_q",
    "heads_k", "causal", "window", "softcap", "alibi", "sink", "kv_range", "bias", "mask", "block_mask", "score_mod",
    "mask_mod", "mod_arrays", "memory", "arch", "no_compile", "as_json",
)  # fmt: skip


def cache_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that are for such calls."""
    command = click.option("--page-size", type=click.IntRange(1), default=None, help="Of a paged cache.")(command)
    command = click.option(
        "--cache-dtype", type=click.Choice(["int8", "float8_e4m3fn"]), default=None, help="Of a cache of 8 bits."
    )(command)
    about = "Attention over a cache with room for --seqlen keys, of --seqlen-q queries (1), whose keys are appended."
    return click.option("--with-cache", is_flag=True, help=about)(command)


def check_options(context: click.Context) -> None:
    """Refuse what such calls do not have, and what only they have where it is another one."""
    options = context.params
    for param in context.command.params:
        name = param.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE or options[name] == param.default:
            continue
        if options["with_cache"] and name not in _TAKEN:
            more = ": attention_with_cache has no such option"
            if name == "seqlen_k":
                more = ", whose room is --seqlen"
            elif name in ("packed", "lengths", "lengths_k"):
                more = ": each sequence has --seqlen-q queries there"
            raise click.UsageError(f"{param.opts[0]}: expected none together with --with-cache{more}")
        if not options["with_cache"] and name in _OWN:
            raise click.UsageError(f"{param.opts[0]}: expected --with-cache beside it")


def problem_of(options: dict[str, Any]) -> CacheProblem:
    """The call, of bshd arrays that are contiguous."""
    batch, capacity, page, d = (options[name] for name in ("batch", "seqlen", "page_size", "head_dim"))
    d_v = d if options["head_dim_v"] is None else options["head_dim_v"]
    heads_q, heads_k = (options[f"heads_{x}"] or options["heads"] for x in "qk")
    rows = 1 if options["seqlen_q"] is None else options["seqlen_q"]
    slots, slot_rows = (batch, capacity) if page is None else (batch * -(-capacity // page), page)
    shapes: dict[str, tuple[int, ...]] = {"q": (batch, rows, heads_q, d), "cache_seqlens": (batch,)}
    for name, width in (("k", d), ("v", d_v)):
        shapes |= {f"{name}_cache": (slots, slot_rows, heads_k, width), name: (batch, rows, heads_k, width)}
    if page is not None:
        shapes["block_table"] = batch, -(-capacity // page)
    for option, name, shape in (
        ("alibi", "alibi_slopes", (heads_q,)), ("kv_range", "kv_range", (batch, 2)), ("sink", "sink", (heads_q,)),
    ):  # fmt: skip
        if options[option]:
            shapes[name] = shape
    whole = batch, heads_q, rows, slot_rows * (1 if page is None else shapes["block_table"][1])
    for name in ("bias", "mask"):
        if options[name] is not None:
            shapes[name] = tuple(n if own else 1 for n, own in zip(whole, options[name], strict=True))
    if options["block_mask"] is not None:
        rows = -(-whole[3] // MASK_TILE)
        shapes |= {"block_tiles": (1, 1, rows, rows), "block_bits": (1, TILE_WORDS)}
    stored = options["cache_dtype"]
    if stored:
        shapes |= dict.fromkeys(("k_scale", "v_scale"), (heads_k,))
    kinds = dict.fromkeys(("k_cache", "v_cache"), stored or options["dtype"]) | {"k_scale": "fp32", "v_scale": "fp32"}
    kinds["mask"] = "bool"
    kinds |= dict.fromkeys(("cache_seqlens", "block_table", "kv_range", "block_tiles", "block_bits"), "int32")
    kinds |= dict.fromkeys(("alibi_slopes", "sink"), "fp64" if options["dtype"] == "fp64" else "fp32")
    plain = make_cache_options(options["causal"], None, options["window"], options["softcap"], False, None, False)
    mods = mods_of(options)
    shapes |= zip(MOD_ARRAYS, mods.get("mod_shapes", ()), strict=False)
    text = mods.get("mods", "")
    kinds |= zip(MOD_ARRAYS, (x.dtype for x in read(text).arrays), strict=False)
    called = plain._replace(mods=text)
    return make_cache_problem(shapes, {name: kinds.get(name, options["dtype"]) for name in shapes}, called)


def explain(options: dict[str, Any], gpu: Device) -> None:
    """Print what the call would do."""
    p, family = problem_of(options), prepare.family()
    lie = Lie(aligned=options["memory"] != "unaligned", tma=options["memory"] == "contiguous")
    plan = plan_decode(p, gpu, aligned=lie.aligned, tma=lie.tma, family=family)
    found: list[tuple[Variant, int]] = [append] if (append := plan_append(p, gpu)) else []
    found += [(plan.variant, plan.grid), *([(plan.combine, plan.combine_grid)] if plan.combine else [])]
    why = why_not_tma(p, lie.aligned) if gpu.capability == (9, 0) else None
    launches = [_launch(variant, grid, gpu, options["no_compile"]) for variant, grid in found]
    way = way_of(p, gpu, lie, family)
    forward, key_splits = (None, 1) if way is None else _forward(p, way, kernels_of(spec_of(p, way, lie, family), gpu))
    bytes_at_most = p.itemsize * p.batch * p.capacity * p.heads_k * sum(p.widths)
    document: dict[str, Any] = {
        "command": "explain", "version": __version__, "device": asdict(gpu) | {"arch": gpu.arch},
        "problem": asdict(p), "shares": plan.shares, "workspace": 4 * plan.places * (p.head_dim_v + 2),
        "bytes_at_most": bytes_at_most, "launches": launches, "not_by_tma": why, "forward": forward,
        "key_splits": key_splits,
    }  # fmt: skip
    if options["as_json"]:
        emit(document)
        return
    console = human()
    batch, keys, queries = counted(p.batch, "sequence"), counted(p.capacity, "key"), counted(p.seqlen_q, "query")
    console.print(f"{gpu_name(gpu.name, gpu.arch, gpu.ordinal)}: {batch} of at most {keys}, {queries} of "
                  f"{counted(p.heads_q, 'head')} over {p.heads_k}, head_dim {_widths(p)}, {p.dtype}",
                  soft_wrap=True)  # fmt: skip
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("kernel", "grid", "threads", "shared memory", "registers", "spills"):
        table.add_column(name, overflow="fold", justify="left" if name == "kernel" else "right")
    for x in launches:
        compiled = (str(x[name]) if x[name] is not None else "-" for name in ("registers", "spill_bytes"))
        table.add_row(x["symbol"], str(x["grid"]), str(x["threads"]), gib(x["smem_bytes"]), *compiled)
    console.print(table)
    if why is not None:
        console.print(f"K and V come by cp.async: {why}", soft_wrap=True)
    if forward is not None:
        parts = f", by {key_splits} parts of the keys" * (key_splits > 1)
        rows = f", write the cache as rows of {p.dtype}, {gib(2 * bytes_at_most)}" * way.dequantized if way else ""
        console.print(f"Calls of so many queries append{rows}, and then take the forward: {forward}{parts}; unless "
                      "they have num_splits or batch_invariant", soft_wrap=True)  # fmt: skip
    console.print(f"K and V: at most {gib(bytes_at_most)}, as lengths on the device say; workspace "
                  f"{gib(document['workspace'])}", soft_wrap=True)  # fmt: skip


def _widths(p: CacheProblem) -> str:
    return f"{p.head_dim}" + (f" (of v {p.head_dim_v})" if p.own_v else "")


def _forward(p: CacheProblem, way: Way, kernels: Kernels) -> tuple[str, int]:
    """The kernel that attends, and by how many parts of the keys."""
    plan = plan_of(kernels, Extents.of(forward_of(p, way)))
    forward = next(x.variant for x in plan.launches if x.grid and isinstance(x.variant, Main))
    return forward.symbol, plan.numbers.key_splits


def _launch(variant: Variant, grid: int, gpu: Device, no_compile: bool) -> dict[str, Any]:
    cubin = None if no_compile else jit.compile_kernel(variant, gpu.arch)
    return {
        "symbol": variant.symbol,
        "arch": gpu.arch + variant.arch_suffix,
        "grid": grid,
        "threads": variant.threads,
        "smem_bytes": variant.smem_bytes,
        "registers": cubin.registers if cubin else None,
        "spill_bytes": cubin.spill_bytes if cubin else None,
    }
