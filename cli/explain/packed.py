"""What `explain` is told of packed sequences, and what follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from cupyflash.problem import Problem

from .. import block_masks
from .work import visible_pairs

Lengths = tuple[int, ...]


def _lengths(ctx: click.Context, param: click.Parameter, text: str | None) -> Lengths | None:
    if text is None:
        return None
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (-1,)
    if min(found) < 0:
        raise click.BadParameter(f"{text!r} is no list of lengths, as in 700,20,280")
    return found


def packed_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--packed, --lengths, --lengths-k."""
    for add in (
        click.option("--lengths-k", callback=_lengths, metavar="N,N,...", default=None, help="Where k's differ."),
        click.option("--lengths", callback=_lengths, metavar="N,N,...", default=None,
                     help="Of packed sequences, with --packed implied; --batch and --seqlen follow from them."),
        click.option("--packed", is_flag=True,
                     help="attention_varlen: --batch sequences of --seqlen rows in all, about equally long."),
    ):  # fmt: skip
        command = add(command)
    return command


def settle(options: dict[str, Any]) -> None:
    """Lengths and heads of q and k; and lengths of all sequences, which decide batch and totals, or follow from them
    (None where nothing is packed)."""
    for name in ("seqlen_q", "seqlen_k", "heads_q", "heads_k"):
        if options[name] is None:
            options[name] = options[name.partition("_")[0]]
    q, k = options["lengths"], options["lengths_k"]
    if q is None and k is not None:
        raise click.UsageError("--lengths-k needs --lengths")
    if q is not None:
        k = q if k is None else k
        if len(q) != len(k):
            raise click.UsageError(f"--lengths-k: expected as many as --lengths, {len(q)}, got {len(k)}")
        options |= {"packed": True, "batch": len(q), "seqlen_q": sum(q), "seqlen_k": sum(k)}
    if options["packed"] and options["block_mask"] is not None:
        raise click.UsageError("--block-mask is explained of a batch: its work depends on which tiles sequences have")
    if q is None and options["packed"]:
        q, k = (_evenly(options[name], options["batch"]) for name in ("seqlen_q", "seqlen_k"))
    options |= {"lengths_q": q, "lengths_k": k}


def _evenly(total: int, parts: int) -> Lengths:
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def pairs_of(problem: Problem, options: dict[str, Any]) -> int:
    """How many (query, key) pairs the mask lets through, in one head of all sequences; a block mask, all those of the
    tiles that are visited."""
    if options["block_mask"] is not None:
        return problem.batch * block_masks.visited(options["block_mask"], problem).pairs
    if not problem.packed:
        return problem.batch * visible_pairs(problem)
    counts = Counter(zip(options["lengths_q"], options["lengths_k"], strict=True))
    return sum(n * visible_pairs(replace(problem, seqlen_q=a, seqlen_k=b)) for (a, b), n in counts.items())
