"""Options of `explain` that are more than a flag or a number."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.bias import Bias
from cupyflash.problem import Problem, Window, make_problem

from .. import block_masks
from .modded import mods_of


def bias_dims(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[bool, ...] | None:
    """Which of batch, heads of q, queries and keys are named."""
    if text is None:
        return None
    if not text or not set(text) <= set("bhqk-"):
        raise click.BadParameter(f"{text!r} is not made of the letters b, h, q and k")
    return tuple(d in text for d in "bhqk")


def bias_of(options: dict[str, Any]) -> Bias | None:
    """What --bias and --mask add to the scores."""
    if options["bias"]:
        return Bias(options["dtype"], options["bias"], beside=options["mask"])
    return Bias("bool", options["mask"]) if options["mask"] else None


def problem_of(options: dict[str, Any], shapes: tuple[tuple[int, ...], ...]) -> Problem:
    """The call; `shapes`: of q, k and v."""
    keep = ("causal", "window", "layout", "deterministic", "softcap", "kv_range", "sink")
    given = {name: options[name] for name in keep} | {"alibi": int(options["alibi"])}
    given |= {"dropout_p": 0.1, "dropout": 1} if options["dropout"] else {}
    given |= {"bias": bias_of(options), "block_mask": int(options["block_mask"] is not None)} | mods_of(options)
    given["sequences"] = options["batch"] if options["packed"] else None
    if options["block_mask"] is not None and not options["packed"]:
        seqlen_q, seqlen_k = (shape[options["layout"].index("s")] for shape in shapes[:2])
        given["tall"] = block_masks.make(options["block_mask"], seqlen_q, seqlen_k).tall
    if options["packed"]:
        given["max_seqlens"] = tuple(max(options[name], default=0) for name in ("lengths_q", "lengths_k"))
    return make_problem(shapes, (options["dtype"],) * 3, **given)


def check_learned(options: dict[str, Any]) -> None:
    """Is there something to learn?"""
    if options["learned"] and not any(options[name] for name in ("alibi", "sink", "bias", "score_mod")):
        what = "there is nothing to learn without --alibi, --sink, --bias or --score-mod"
        raise click.BadParameter(what, param_hint="--learned")


def window_bounds(ctx: click.Context, param: click.Parameter, text: str | None) -> Window | None:
    """LEFT or LEFT,RIGHT; an empty side has no bound."""
    if text is None:
        return None
    left, _, right = text.partition(",")
    try:
        before, after = int(left) if left.strip() else None, int(right) if right.strip() else None
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither LEFT nor LEFT,RIGHT in whole numbers") from None
    if before is not None and after is not None and before + after < 0:
        raise click.BadParameter(f"{text!r} hides every key; leave a side empty that has no bound")
    return before, after


def shapes_of(options: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Of q, k, v and out, in the layout asked for."""
    batch, d, d_v = options["batch"], options["head_dim"], options["head_dim_v"]
    d_v = d if d_v is None else d_v
    pairs = [
        (options[f"seqlen_{x}"], options[f"heads_{x}"], width)
        for x, width in (("q", d), ("k", d), ("k", d_v), ("q", d_v))
    ]
    return tuple(
        (batch, *((n, heads) if options["layout"] == "bshd" else (heads, n)), width) for n, heads, width in pairs
    )
