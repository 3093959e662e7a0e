"""Options of `explain` that are more than a flag or a number."""

from __future__ import annotations

import click

from cupyflash.problem import Window


def bias_dims(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[bool, ...] | None:
    """Which of batch, heads of q, queries and keys are named."""
    if text is None:
        return None
    if not text or not set(text) <= set("bhqk-"):
        raise click.BadParameter(f"{text!r} is not made of the letters b, h, q and k")
    return tuple(d in text for d in "bhqk")


def window_bounds(ctx: click.Context, param: click.Parameter, text: str | None) -> Window | None:
    """LEFT or LEFT,RIGHT; an empty side has no bound."""
    if text is None:
        return None
    left, _, right = text.partition(",")
    try:
        return int(left) if left.strip() else None, int(right) if right.strip() else None
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither LEFT nor LEFT,RIGHT in whole numbers") from None
