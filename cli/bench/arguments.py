"""What can be known of `bench`'s arguments before minutes of timing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cupyflash.problem import MAX_SEQLEN, SOFTCAPS

from .. import block_masks
from ..output import FiniteRange, list_option
from . import features
from .cell import Cell
from .lengths import DENSE, LONGEST, draw
from .mods import MODS

# lengths, tokens, hidden: on a GPU those of the FlashAttention papers; on the CPU path what ends in seconds
SIZES = {"cuda": ((1024, 2048, 4096, 8192, 16384), 16384, 2048), "cpu": ((128, 256, 512), 1024, 256)}

FEATURES = ("bias", "mask", "learned", "dropout", "mod", "padded")


def dims(ctx: click.Context, param: click.Parameter, text: str | None) -> str:
    """Letters of bhqk, in this order; - for none, and "" where there is no such array."""
    if text is None:
        return ""
    if not text or (not set(text) <= set("bhqk") and text != "-"):
        raise click.BadParameter(f"{text!r} is not made of the letters b, h, q and k")
    return "".join(d for d in "bhqk" if d in text) or text


def _block_masks(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Words of `block_masks`; one that is "" without."""
    words = text.split(",") if text else []
    return tuple(block_masks.check(ctx, param, word) or "" for word in words) or ("",)


def feature_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of `FEATURES`, and block masks."""
    for add in (
        click.option("--block-mask", "block_masks", callback=_block_masks, metavar="DENSITY,...", default="",
                     help=f"{block_masks.HELP} FLOPs count visible pairs."),
        click.option("--mod", type=click.Choice(tuple(MODS)), callback=lambda ctx, param, name: name or "",
                     help="With a score_mod or mask_mod: " + "; ".join(f"{n}: {text}" for n, x in MODS.items()
                                                                       for text in x.expressions.values()) + "."),
        click.option("--dropout", type=FiniteRange(0, 1, max_open=True), default=0.0,
                     help="With dropout of this p."),
        click.option("--padded", type=click.Choice(("left", "right")), callback=lambda ctx, param, side: side or "",
                     help="With a kv_range of any length for each sequence, and padding on this side."),
        click.option("--mask", callback=dims, metavar="DIMS", default=None,
                     help="With a random mask that has elements of its own along these, half of them shown."),
        click.option("--learned", is_flag=True, help="The backward makes the bias's gradient, too."),
        click.option("--bias", callback=dims, metavar="DIMS", default=None,
                     help="With a bias that has elements of its own along these: letters of bhqk, - for none."),
        click.option("--softcap", type=FiniteRange(*SOFTCAPS), default=None, help="What no score's magnitude exceeds."),
        click.option("--score-std", type=FiniteRange(0, 1000), default=1.0, show_default=True,
                     help="Standard deviation of the scores: q is of N(0, 1) times this."),
        list_option("--feature", choices=tuple(features.NAMED), example="bias,softcap",
                    help=f"Time each of these alone: {', '.join(features.NAMED)}."),
    ):  # fmt: skip
        command = add(command)
    return command


def check_plot(path: Path | None) -> None:
    """Can the picture be drawn?"""
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise click.BadParameter(f"{path} ends neither in .png nor in .svg", param_hint="--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise click.BadParameter("matplotlib is missing: pip install 'cupyflash[plot]'", param_hint="--plot") from None


def or_zero(ctx: click.Context, option: click.Parameter, value: int | None) -> int:
    """For a number that is not given: cells have 0 then."""
    return value or 0


def check_lengths(seqlens: tuple[int, ...]) -> None:
    """Are these lengths of sequences?"""
    for n in seqlens:
        if not 1 <= n <= MAX_SEQLEN:
            raise click.BadParameter(f"expected lengths from 1 to {MAX_SEQLEN}, got {n}", param_hint="--seqlens")


def check_writable(option: str, path: Path | None) -> None:
    """Can the file be written? One that is there stays as it is."""
    if path is None:
        return
    is_new = not os.path.exists(path)  # of one that nobody may look for, too
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as e:
        raise click.BadParameter(f"{path} cannot be written: {e.strerror}", param_hint=option) from None


def make_cells(options: dict[str, Any]) -> list[Cell]:
    """Every configuration, lengths innermost, feature by feature."""
    return [cell for one in features.each(options) for cell in _cells(one)]


def _cells(options: dict[str, Any]) -> list[Cell]:
    hidden = options["hidden"] or SIZES[options["backend"]][2]
    masks = (False, True) if options["causal"] is None else (options["causal"],)
    heads = {d: max(1, hidden // d) for d in options["head_dim"]}
    heads_k = {d: options["heads_k"] or heads[d] for d in heads}
    for d in heads:
        if heads[d] % heads_k[d]:
            raise click.BadParameter(f"{heads_k[d]} does not divide the {heads[d]} heads of q", param_hint="--heads-k")
    sequences = _packed(options) if options["packed"] else _unpacked(options)
    if options["learned"] and not options["bias"]:
        raise click.BadParameter("there is nothing to learn without --bias", param_hint="--learned")
    if options["padded"] and (options["packed"] or any(options["block_masks"])):
        raise click.BadParameter("neither with --packed nor with --block-mask", param_hint="--padded")
    if options["padded"] and options["mod"] and MODS[options["mod"]].length:  # whose pairs are not counted
        raise click.BadParameter("not with documents", param_hint="--padded")
    named = ("dtype", "head_dim_v", "window", "softcap", "alibi", "sink", "score_std", *FEATURES)
    common = {name: options[name] for name in named}
    return [
        Cell(head_dim=d, causal=causal, heads=heads[d], heads_k=heads_k[d], block_mask=word, **common, **fields)
        for d in heads
        for causal in masks
        for word in options["block_masks"]
        for fields in sequences
    ]


def _unpacked(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Length and batch."""
    if options["batch"] and options["tokens"]:
        raise click.BadParameter("either this or --tokens", param_hint="--batch")
    if DENSE in options["against"]:
        raise click.BadParameter(f"{DENSE}, our own call that is not packed, is a peer of --packed",
                                 param_hint="--against")  # fmt: skip
    lengths, tokens, _ = SIZES[options["backend"]]
    tokens = options["tokens"] or tokens
    return [{"seqlen": n, "batch": options["batch"] or max(1, tokens // n)} for n in options["seqlens"] or lengths]


def _packed(options: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell says of packed sequences."""
    if options["batch"]:
        raise click.BadParameter("--packed draws lengths until --tokens are full", param_hint="--batch")
    if any(options["block_masks"]):
        raise click.BadParameter("block masks are timed with a batch, not with --packed", param_hint="--block-mask")
    tokens = options["tokens"] or SIZES[options["backend"]][1]
    found = []
    for distribution in options["packed"]:
        for longest in options["seqlens"] or LONGEST[options["backend"]][distribution]:
            least = 2 * longest if distribution == "long-tailed" else longest
            if tokens < least:
                raise click.BadParameter(f"{distribution} lengths up to {longest} need at least {least}, got {tokens}",
                                         param_hint="--tokens")  # fmt: skip
            lengths = draw(distribution, longest, tokens)
            found.append({"seqlen": longest, "batch": len(lengths), "packed": distribution, "lengths": lengths})
    return found
