"""`bench --decode`: calls of attention over a cache, ours and those of peers.

K and V rotate through more memory than a GPU's L2 holds. Where a call is short, many of them run as one CUDA graph:
what they cost the device, not the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from ..output import list_option
from .cell import ORDERED, SM80
from .clocks import Work
from .decode_calls import call_of
from .decode_cell import COPY, PARTS, STORED, WIDE, DecodeCell
from .work import Bench

ROTATED_BYTES = 1 << 30  # of K and V, if 32 calls have so many: the L2 of an H200 holds 50 MB
MOST_SETS = 32
SHORT_BYTES = 100e6  # of K and V: a graph of calls is timed up to there
PER_GRAPH = 16
# What may be asked for together with --decode.
OPTIONS = ("against", "dtype", "framework", "backend", "quick", "rounds", "host", "saved", "csv", "as_json", "decode",
           "only", "cache_dtype", "grid", "plot")  # fmt: skip


def decode_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of `bench` that this page adds."""
    for add in (
        list_option("--cache-dtype", choices=STORED, example="int8,e4m3",
                    help=f"With --decode: caches of 8 bits, each beside one of --dtype, {WIDE}."),
        click.option("--grid", is_flag=True, help="With --decode: batches by lengths, which --plot draws."),
        list_option("--only", example="TEXT,...", help="With --decode: shapes whose names have one of these texts, in "
                    "which ^ and $ are the ends of a name."),
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
    if not ctx.params["saved"]:
        _check_against(ctx.params)


def _check_against(options: Mapping[str, Any]) -> None:
    for name in options["against"]:
        if name in (COPY, PARTS) and not options["decode"]:
            raise click.BadParameter(f"{name} is timed with --decode alone", param_hint="--against")
        if name == ORDERED and options["decode"]:
            raise click.BadParameter(f"{name} differs in the backward, which --decode has not", param_hint="--against")
        if name in (COPY, SM80) and options["backend"] == "cpu":
            raise click.BadParameter(
                f"{name} runs a kernel, for which --backend cpu has no GPU", param_hint="--against"
            )


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
