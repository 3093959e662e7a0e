"""What `explain` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..output import counted, gib, gpu_name
from . import copied


def show(document: dict[str, Any], console: Console) -> None:
    """The GPU and the problem in a line each, then every pass."""
    gpu = document["device"]
    name = gpu_name(gpu["name"], gpu["arch"], gpu["ordinal"])
    smem, l2 = gib(gpu["smem_bytes"]), gib(gpu["l2_bytes"])
    console.print(f"{name}: {gpu['sm_count']} SMs, {smem} shared memory a block, {l2} L2", soft_wrap=True)
    console.print(_problem(document["problem"]), soft_wrap=True)
    if document["block_mask"]:
        console.print(_block_mask(document["block_mask"]), soft_wrap=True)
    for found in document["passes"]:
        console.print(f"\n{found['direction']}: {found['family']} family", style="bold")
        for other in found["not_taken"]:
            console.print(f"not taken: {other['path']}: {other['reason']}", style="yellow", soft_wrap=True)
        for launch in found["launches"]:
            console.print(_table(_launch(launch)))
            console.print()
        console.print(_table(_sum(found)))
    console.print()
    for sentence in copied.sentences(document["numpy"]):
        console.print(sentence, soft_wrap=True)


def _dims(own: Sequence[bool]) -> str:
    return (
        ", ".join(d for d, is_own in zip(("batch", "heads", "queries", "keys"), own, strict=True) if is_own)
        or "nothing"
    )


def _problem(p: dict[str, Any]) -> str:
    left, right = ("all" if bound is None else bound for bound in p["window"])
    mask = {(None, None): "no mask", (None, 0): "causal"}.get(tuple(p["window"]), f"window {left}, {right}")
    queries = f"{counted(p['seqlen_q'], 'query')} of {counted(p['heads_q'], 'head')}"
    keys = f"{counted(p['seqlen_k'], 'key')} of {counted(p['heads_k'], 'head')}"
    form = "" if p["softcap"] is None else f", softcap {p['softcap']:g}"
    form += ", ALiBi" * bool(p["alibi"]) + ", sinks" * p["sink"] + ", dropout" * bool(p["dropout"])
    form += f", bias along {_dims(p['bias'][1])}" if p["bias"] and p["bias"][0] != "bool" else ""
    form += f", mask along {_dims(p['mask'])}" if p["mask"] else ""
    form += ", mods" * bool(p["mods"])
    form += ", a range of keys each" if p["kv_range"] else ""
    form += ", deterministic" if p["deterministic"] else ""
    batch = counted(p["batch"], "packed sequence") if p["packed"] else f"batch {p['batch']}"
    return (
        f"{p['dtype']}, {p['layout']}, {p['memory']}, {batch}, {queries}, {keys}, head_dim {_widths(p)}, {mask}{form}"
    )


def _widths(p: dict[str, Any]) -> str:
    return f"{p['head_dim']}" if p["head_dim_v"] == p["head_dim"] else f"{p['head_dim']} (of v {p['head_dim_v']})"


def _block_mask(x: dict[str, Any]) -> str:
    return (
        f"block mask {x['mask']}: {x['visited']} of {x['tiles']} tiles of {x['tile']} x {x['tile']} are visited, "
        f"density {x['density']:.3g}; {gib(x['bytes'])} on the device; work is that of these tiles"
    )


def _table(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _launch(x: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tile = x["tile"]
    yield "kernel", f"{x['symbol']} ({x['arch']})"
    yield "tile", ", ".join(f"{name} {n}" for name, n in tile.items() if name != "warps" and "registers" not in name)
    yield (
        "threads",
        f"{x['threads']}, {tile['warps']} warps"
        + (f": {tile['warps'] // 4 - 1} warpgroups compute, one loads" if "producer_registers" in tile else ""),
    )
    yield "registers", _registers(x)
    for line in x["advice"] or ():
        yield "ptxas", line
    yield "shared memory", f"{x['smem_bytes']} of {x['smem_limit_bytes']} bytes"
    yield "grid", _grid(x)
    if x["resident_blocks"]:
        fitting = ", ".join(f"{n} by {name}" for name, n in x["resident_blocks"].items())
        yield "blocks an SM", f"{x['blocks_per_sm']} (fit: {fitting}), {x['waves']:.2f} waves"
    yield "work", f"{_flops(x['flops'])}, {gib(x['bytes'])}"


def _registers(x: dict[str, Any]) -> str:
    tile, parts = x["tile"], []
    if x["registers"] is not None:
        parts.append(f"{x['registers']} a thread")
    if "producer_registers" in tile:
        parts.append(f"{tile['consumer_registers']} while it computes, {tile['producer_registers']} while it loads")
    if x["spill_bytes"] is not None:
        parts.append(f"{x['spill_bytes']} bytes spilled" if x["spill_bytes"] else "none spilled")
    return ", ".join(parts) or "not compiled"


def _grid(x: dict[str, Any]) -> str:
    if not x["grid"]:
        return "no blocks: not launched"
    return f"{x['grid']} persistent blocks for {x['tiles']} tiles" if x["persistent"] else f"{x['grid']} blocks"


def _flops(flops: float) -> str:
    """FLOPs for people."""
    return f"{flops / 1e12:.3g} TFLOP" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP"


def _sum(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    sizes = found["workspace"]
    arrays = ", ".join(f"{name} {gib(n)}" for name, n in sizes.items())
    yield "heads together", f"{found['sections'][0]}, at last {found['sections'][1]}"
    yield "workspace", f"{gib(sum(sizes.values()))}: {arrays}" if sizes else "none"
    if len(found["launches"]) > 1:
        yield "work in all", f"{_flops(found['flops'])}, {gib(found['bytes'])}"
    for least in found["least_times"]:
        yield "least time", f"{_time(least['ms'])} on {least['gpu']}, by its {least['bound']}"
    if not found["least_times"]:
        yield "least time", f"not known: {found['least_times_reason']}"


def _time(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{1e3 * ms:.3g} us"
