"""`bench --decode`: calls of attention over a cache, ours and those of peers.

K and V rotate through more memory than a GPU's L2 holds. Where a call is short, many of them run as one CUDA graph:
what they cost the device, not the host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import click
import ml_dtypes
import numpy as np
from click.core import ParameterSource

from cupyflash import kvcache

from ..output import list_option
from .cell import OURS, Cell
from .clocks import Work
from .decode_cell import STORED, WIDE, AnyCell, DecodeCell
from .sdpa import BACKENDS, sdpa
from .timing import host_us
from .work import Bench

ROTATED_BYTES = 1 << 30  # of K and V, if 32 calls have so many: the L2 of an H200 holds 50 MB
MOST_SETS = 32
SHORT_BYTES = 100e6  # of K and V: a graph of calls is timed up to there
PER_GRAPH = 16
# What may be asked for together with --decode.
OPTIONS = ("against", "dtype", "framework", "backend", "quick", "rounds", "host", "saved", "csv", "as_json", "decode",
           "only", "cache_dtype", "grid", "plot")  # fmt: skip
_LARGEST = {"int8": 127, "e4m3": 448}
_DRAWN = 1 << 20  # elements of a cache of 8 bits that are drawn; they repeat


def decode_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of `bench` that this page adds."""
    for add in (
        list_option("--cache-dtype", choices=STORED, example="int8,e4m3",
                    help=f"With --decode: caches of 8 bits, each beside one of --dtype, {WIDE}."),
        click.option("--grid", is_flag=True, help="With --decode: batches by lengths, which --plot draws."),
        click.option("--only", default="", metavar="TEXT", help="With --decode: shapes whose names have this text."),
        click.option("--decode", is_flag=True, help="Time attention over a cache, by bytes of K and V."),
    ):  # fmt: skip
        command = add(command)
    return command


def check_together(ctx: click.Context) -> None:
    """Do the options that were given mean something together? Beside --saved none does, and none is wrong."""
    given = {p.name: p for p in ctx.command.params
             if ctx.get_parameter_source(p.name or "") is ParameterSource.COMMANDLINE}  # fmt: skip
    for name, param in given.items() if "saved" not in given else ():
        if "decode" in given and name not in OPTIONS:
            raise click.BadParameter("--decode has shapes of its own, by name: see --only", param=param)
        if "decode" in given and name == "plot" and "grid" not in given:
            raise click.BadParameter("of --decode it draws a --grid", param=param)
        if "decode" not in given and name in ("only", "cache_dtype", "grid"):
            raise click.BadParameter("it chooses among what --decode times, which is not asked for", param=param)
    if "decode" in given and ctx.params["framework"] == "jax":
        raise click.BadParameter("JAX's calls over a cache are not timed; torch, cupy and numpy are",
                                 param_hint="--framework")  # fmt: skip


def works(bench: Bench, name: str, cell: DecodeCell) -> dict[str, Work]:
    """The one direction of an implementation.

    Raises:
        NotImplementedError: a peer lacks what the cell asks for.
    """
    whole = cell.read_by(name).whole_bytes
    sets = max(1, min(MOST_SETS, -(-ROTATED_BYTES // whole)))
    calls = [call_of(bench, name, cell) for _ in range(sets)]
    turn = itertools.cycle(calls)
    if whole < SHORT_BYTES:
        return {"decode": bench.clock.recorded([next(turn) for _ in range(max(PER_GRAPH, sets))])}
    return {"decode": lambda: next(turn)()}


def call_of(bench: Bench, name: str, cell: DecodeCell) -> Work:
    """One call of an implementation, on arrays of its own.

    Raises:
        NotImplementedError: as `works`.
    """
    if name not in (OURS, WIDE):
        return _peer(bench, name, cell)
    window = None if cell.window is None else (cell.window, None)
    given = arrays(bench, cell.read_by(name)) | {"causal": True, "window": window, "softcap": cell.softcap}
    return functools.partial(kvcache.attention_with_cache, **given)


def arrays(bench: Bench, cell: DecodeCell) -> dict[str, Any]:
    """Random ones of a call, by the names of `attention_with_cache`."""
    shape = cell.slots, cell.page or cell.capacity, cell.heads_k, cell.head_dim
    found = {"q": bench.random(cell.dtype, (cell.batch, cell.seqlen_q, cell.heads, cell.head_dim))}
    for name in ("k_cache", "v_cache"):
        found[name] = _stored(bench, cell, shape) if cell.cache_dtype else bench.random(cell.dtype, shape)
    found["cache_seqlens"] = bench.array(np.array(cell.lengths, np.int32))
    if cell.page:
        pages = bench.rng.permutation(cell.slots)[: cell.batch * cell.pages_per_sequence]
        found["block_table"] = bench.array(pages.astype(np.int32).reshape(cell.batch, -1))
    if cell.cache_dtype:
        scales = np.full((cell.slots, cell.heads_k) if cell.page else cell.heads_k, _scale(cell), np.float32)
        found |= {name: bench.array(scales) for name in ("k_scale", "v_scale")}
    return found


def _scale(cell: DecodeCell) -> float:
    """What is beyond 6 standard deviations becomes the largest number."""
    return 6 / _LARGEST[cell.cache_dtype]


def _stored(bench: Bench, cell: DecodeCell, shape: tuple[int, ...]) -> Any:
    """A cache of 8 bits; e4m3 as uint8, its bits."""
    most = _LARGEST[cell.cache_dtype]
    drawn = (bench.rng.standard_normal(_DRAWN, np.float32) / _scale(cell)).clip(-most, most)
    if cell.cache_dtype == "int8":
        return bench.array(np.resize(drawn.round().astype(np.int8), shape))
    return bench.array(np.resize(drawn.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), shape))


def _peer(bench: Bench, name: str, cell: DecodeCell) -> Work:
    if lacks := peers_lack(name, cell):
        raise NotImplementedError(lacks)
    given = arrays(bench, cell.read_by(name))
    dense = Cell(cell.dtype, cell.head_dim, False, cell.capacity, cell.batch, cell.heads, cell.heads_k)
    return functools.partial(sdpa(name, dense, {}), *(given[x] for x in ("q", "k_cache", "v_cache")))


def peers_lack(name: str, cell: DecodeCell) -> str:
    """What of a call a peer has not; "" if it has all."""
    if name not in BACKENDS:
        return f"{name} is not timed over a cache"
    wanted = {"lengths": cell.ragged, "pages": cell.page, "windows, but for an explicit mask": cell.window is not None,
              "softcap": cell.softcap is not None, "causal mask at the bottom right": cell.seqlen_q > 1}  # fmt: skip
    lacks = next((what for what, is_asked in wanted.items() if is_asked), "")
    return lacks and f"torch's scaled_dot_product_attention has no {lacks}"


def measure_host(bench: Bench, cells: Sequence[AnyCell], options: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Microseconds of host time for a call of the smallest cell."""
    cell = min((c for c in cells if isinstance(c, DecodeCell)), key=lambda c: c.whole_bytes)
    found: dict[str, Work] = {}
    for name in (OURS, *(name for name in options["against"] if not bench.absent(name))):
        try:
            call = call_of(bench, name, cell)
            call()
        except Exception:  # of a peer, of which the rows say why
            if name == OURS:
                raise
        else:
            found[name] = call
    timings = zip(found, host_us(list(found.values()), bench.clock), strict=True)
    return {name: {"fwd": timing.median, "fwd_spread": timing.spread} for name, timing in timings}
