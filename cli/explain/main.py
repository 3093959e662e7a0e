"""``cupyflash explain``: what a call would do, and why: kernels, launches, registers, work, and the paths not taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple

import click

from cupyflash import __version__
from cupyflash.arrays.adapters import Signature
from cupyflash.compile import jit
from cupyflash.compile.cache import Cubin
from cupyflash.errors import UnsupportedError
from cupyflash.gpu import device, tensormap
from cupyflash.gpu.device import ARCHS, Device
from cupyflash.gpu.tensormap import TensorMap
from cupyflash.launch.alignment import Aligned, access_of
from cupyflash.launch.passes import contiguous_strides, given_of
from cupyflash.launch.prepare import family
from cupyflash.operands import BACKWARD, FORWARD
from cupyflash.plan.extents import Extents
from cupyflash.plan.families import FAMILIES, Launch, Plan, choose, kernels_of, plan_of
from cupyflash.plan.spec import LEARNED, Spec
from cupyflash.plan.variant import Variant
from cupyflash.problem import DTYPES, LAYOUTS, SOFTCAPS, Problem

from .. import block_masks
from ..output import FiniteRange, emit, exit_codes, human, json_option, quiet
from . import cached, copied, masked
from . import report as explain_report
from . import work as explain_work
from .arguments import bias_dims, check_learned, problem_of, shapes_of, window_bounds
from .cached import cache_options, check_options
from .modded import mod_options
from .packed import packed_options, pairs_of, settle
from .work import Work

_NAMES = ["q", "k", "v", "out", "dout"]
_MORE = ("layout", "memory", "lengths_q", "lengths_k", "mask")  # of the problem, as it was given
MEMORY = ("contiguous", "unaligned", "broadcast")
UNREADABLE = {  # why TMA cannot read the arrays, given what it can read
    "unaligned": "{}; the addresses of q, k and v are not",
    "broadcast": "{}; that of k and v along the heads is 0",
}


@click.command(
    epilog=exit_codes("0 explained, 4 not supported (nor is the call) or no usable NVRTC, 5 a kernel did not compile")
)
@click.option("--dtype", type=click.Choice(DTYPES), default=None, help="[default: bf16; fp16 on Turing]")
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--head-dim-v", type=int, help="Of v.  [default: as --head-dim]")
@click.option("--batch", type=click.IntRange(0), default=1, show_default=True)
@click.option("--seqlen", type=click.IntRange(0), default=4096, show_default=True, help="Of q and of k.")
@click.option("--seqlen-q", type=click.IntRange(0), default=None, help="Where q's differs.")
@click.option("--seqlen-k", type=click.IntRange(0), default=None, help="Where k's differs.")
@packed_options
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True, help="Of q and of k.")
@click.option("--heads-q", type=click.IntRange(1), default=None, help="Where q's differ.")
@click.option("--heads-k", type=click.IntRange(1), default=None, help="Where k's differ.")
@click.option("--causal", is_flag=True, help="Hide later keys.")
@click.option("--window", callback=window_bounds, metavar="LEFT,RIGHT", default=None,
              help="Keys that a query sees on each side; a side left empty has no bound.")  # fmt: skip
@click.option("--softcap", type=FiniteRange(*SOFTCAPS), default=None, help="What no score's magnitude exceeds.")
@click.option("--alibi", is_flag=True, help="With ALiBi's slopes, one a head.")
@click.option("--learned", is_flag=True, help="Slopes, sinks, a bias and what mods read have a gradient.")
@click.option("--sink", is_flag=True, help="With a sink of each head.")
@click.option("--dropout", is_flag=True, help="With dropout, of any p.")
@click.option("--bias", metavar="DIMS", callback=bias_dims, default=None,
              help="With a bias that has elements of its own along these: letters of bhqk, - for none.")  # fmt: skip
@click.option("--mask", metavar="DIMS", callback=bias_dims, default=None, help="With a mask, likewise.")
@click.option("--block-mask", metavar="DENSITY", callback=block_masks.check, default=None, help=block_masks.HELP)
@mod_options
@click.option("--kv-range", is_flag=True, help="With a range of keys for each sequence; work is counted for all keys.")
@cache_options
@click.option("--layout", type=click.Choice(LAYOUTS), default="bshd", show_default=True)
@click.option("--memory", type=click.Choice(MEMORY), default="contiguous", show_default=True,
              help="unaligned: no address is a multiple of 16. broadcast: k and v repeat one head.")  # fmt: skip
@click.option("--backward", is_flag=True, help="Also the backward.")
@click.option("--deterministic", is_flag=True, help="Its bitwise reproducible form.")
@click.option("--arch", type=click.Choice(ARCHS), default=None,
              help="For a typical GPU of this architecture.  [default: GPU 0; sm_90 where there is none]")  # fmt: skip
@click.option("--no-compile", is_flag=True, help="Leave out what only the compiler knows, such as registers.")
@json_option
def command(**options: Any) -> None:
    """Say what a call would do: kernels, grid, registers, shared memory, work, least time, and the paths not taken.

    Compiles the kernels as the call would, unless they are in the cache, but launches nothing and needs no GPU.
    """
    quiet()
    check_options(click.get_current_context())
    gpu = _device(options["arch"])
    options["dtype"] = options["dtype"] or gpu.dtypes[0]
    if options["with_cache"]:
        return cached.explain(options, gpu)
    settle(options)
    q, k, v, _ = (shape[1:] if options["packed"] else shape for shape in shapes_of(options))
    check_learned(options)
    problem = problem_of(options, (q, k, v))
    goes_back = options["backward"] or options["deterministic"] or options["learned"]
    directions = (False, True) if goes_back else (False,)
    passes = [explained(problem, gpu, options, backward=backward) for backward in directions]
    cubins = {} if options["no_compile"] else _compile([x.variant for p in passes for x in p.plan.launches], gpu)
    more = {name: options[name] for name in _MORE}  # which say how long sequences are
    document = {
        "command": "explain",
        "version": __version__,
        "device": asdict(gpu) | {"arch": gpu.arch},
        "problem": {x: n for x, n in asdict(problem).items() if not x.startswith("max_seqlen")} | more,
        "block_mask": masked.facts(problem, options["block_mask"]),
        "numpy": copied.facts(problem, options, directions),
        "passes": [_document(p, gpu, cubins) for p in passes],
    }
    if options["as_json"]:
        emit(document)
    else:
        explain_report.show(document, human())


class Pass(NamedTuple):
    """A forward or a backward: its plan, what each launch has to do, and what it does without."""

    direction: str
    family: str
    plan: Plan
    work: list[Work]
    not_taken: list[dict[str, str]]


def _device(arch: str | None) -> Device:
    if arch is None and device.count():
        return Device.of(0)
    return Device.synthetic(arch or "sm_90")


def _signatures(options: dict[str, Any], names: Sequence[str]) -> list[Signature]:
    """Of arrays of these names."""
    shapes, heads = dict(zip(_NAMES, shapes_of(options), strict=False)), options["layout"].index("h")
    shapes["dout"] = shapes["out"]
    strides = {name: list(contiguous_strides(shapes[name])) for name in names}
    for name in "kv" if options["memory"] == "broadcast" else "":
        strides[name][heads] = 0
    return [Signature(shapes[name], tuple(own), options["dtype"], 0) for name, own in strides.items()]


def explained(problem: Problem, gpu: Device, options: dict[str, Any], *, backward: bool) -> Pass:
    """The way of `prepare.prepare`, arrays and kernels apart."""
    signatures = _signatures(options, _NAMES if backward else _NAMES[:3])
    arrays: dict[str, Signature] = dict(zip(_NAMES, signatures, strict=False))
    if problem.bias is not None:
        shape = explain_work.added_shape(problem, problem.bias.own)
        arrays["bias"] = Signature(shape, contiguous_strides(shape), None, 0)
    given = given_of(BACKWARD if backward else FORWARD, tuple(arrays), (), problem.head_dim != problem.head_dim_v)
    access = access_of(given, list(arrays.values()), Aligned(rows=options["memory"] != "unaligned"))
    known: dict[str, Any] = dict.fromkeys(LEARNED, options["learned"])
    known |= {"dmods": options["dmods"], "family": family()}
    spec = Spec.of(problem, backward=backward, **known, **access._asdict())
    chosen, reasons = choose(spec, gpu)
    unread = UNREADABLE.get(options["memory"], "this driver's tensor maps are not understood")
    needs_maps = chosen.why_not(spec._replace(tma=False), gpu) is not None
    if needs_maps and gpu.ordinal >= 0 and not _maps_are_understood(signatures, gpu, options):
        spec = spec._replace(tma=False)
        chosen, reasons = choose(spec, gpu)
    plan = plan_of(kernels_of(spec, gpu), Extents.of(problem))
    pairs, added = pairs_of(problem, options), explain_work.added_bytes(problem, options)
    ahead = masked.list_work(problem, options, plan)
    added += masked.bits_instead(problem, options, plan)
    if backward:
        work = explain_work.backward_work(problem, signatures, plan, pairs, added)
    else:
        work = explain_work.forward_work(problem, signatures, pairs, added)
    work = ahead + work
    not_taken = []
    for name, reason in reasons.items():
        is_unread = not spec.tma and FAMILIES[name].why_not(spec._replace(tma=True), gpu) is None
        not_taken.append({"path": f"{name} family", "reason": unread.format(reason) if is_unread else reason})
    if spec.unaligned:
        reason = "not every row of the arrays starts at a multiple of 16 bytes; elements are loaded one by one"
        not_taken.append({"path": "copies of 16 bytes", "reason": reason})
    return Pass("backward" if backward else "forward", chosen.name, plan, work, not_taken)


def _maps_are_understood(signatures: Sequence[Signature], gpu: Device, options: dict[str, Any]) -> bool:
    """Whether the driver's tensor maps of these arrays can be filled in."""
    maps = [TensorMap.of(options["dtype"], s.shape, s.strides, options["layout"], 64) for s in signatures]
    with gpu.current():
        return all(tensormap.address_slot(m) is not None for m in maps)


def _compile(variants: Sequence[Variant], gpu: Device) -> dict[Variant, Cubin]:
    """Side by side."""
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return dict(zip(variants, pool.map(lambda v: jit.compile_kernel(v, gpu.arch), variants), strict=True))
    except UnsupportedError as e:
        raise UnsupportedError(f"{e}; `--no-compile` does without") from e


def _document(p: Pass, gpu: Device, cubins: dict[Variant, Cubin]) -> dict[str, Any]:
    """A pass in JSON and for the report."""
    work_left = [w if launch.grid else Work(0.0, 0) for w, launch in zip(p.work, p.plan.launches, strict=True)]
    times, reason = explain_work.least_times(work_left, gpu, p.plan.launches[0].variant.dtype)
    launches = [
        _launch(launch, work, gpu, cubins.get(launch.variant))
        for launch, work in zip(p.plan.launches, work_left, strict=True)
    ]
    return {
        "direction": p.direction,
        "family": p.family,
        "not_taken": p.not_taken,
        "sections": (p.plan.numbers.section, p.plan.numbers.last_section),
        "workspace": explain_work.workspace_bytes(p.plan.workspace),
        "flops": sum(w.flops for w in work_left),
        "bytes": sum(w.bytes for w in work_left),
        "least_times": times,
        "least_times_reason": reason,
        "launches": launches,
    }


def _launch(launch: Launch, work: Work, gpu: Device, cubin: Cubin | None) -> dict[str, Any]:
    """A launch; what the compiler decides is null without a cubin."""
    v = launch.variant
    resident = explain_work.resident_blocks(v, gpu, cubin.registers) if cubin else None
    per_sm = None if resident is None else 1 if v.persistent else min(resident.values())
    return {
        "symbol": v.symbol,
        "arch": gpu.arch + v.arch_suffix,
        "tile": {n: x for n, x in v.constants.items() if type(x) is int and not n.startswith("head_dim")},
        "flags": [n for n, x in v.constants.items() if x is True],
        "threads": v.threads,
        "smem_bytes": v.smem_bytes,
        "smem_limit_bytes": gpu.smem_bytes,
        "registers": cubin.registers if cubin else None,
        "spill_bytes": cubin.spill_bytes if cubin else None,
        "advice": cubin.advice.splitlines() if cubin else None,
        "grid": launch.grid,
        "persistent": v.persistent,
        "tiles": launch.tiles,
        "resident_blocks": resident,
        "blocks_per_sm": per_sm,
        "waves": launch.tiles / (per_sm * gpu.sm_count) if per_sm else None,
        **work._asdict(),
    }
