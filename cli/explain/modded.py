"""What `explain` is told of mods: a user's own expressions, and the arrays that they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import numpy as np

from cupyflash.mods import bind, read

DTYPES = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16",
    "int32": "int32", "int64": "int64", "bool": "bool",
}  # fmt: skip


class _Array(NamedTuple):
    """What there is to know of an array without its elements."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


def _arrays(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, _Array]:
    found: dict[str, _Array] = {}
    for text in texts:
        name, dtype, shape = parts if len(parts := text.split(":")) == 3 else ("", "", "")
        sizes = shape.split("x")
        if name in found:
            raise click.BadParameter(f"{text!r} is the second one called {name}")
        if dtype not in DTYPES or not all(x.isdecimal() for x in sizes):
            raise click.BadParameter(
                f"{text!r} is not NAME:DTYPE:SIZES, as in table:fp32:16x128; dtypes: {', '.join(DTYPES)}"
            )
        found[name] = _Array(tuple(map(int, sizes)), DTYPES[dtype])
    return found


def mod_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--score-mod, --mask-mod, --mod-array."""
    for add in (
        click.option("--mod-array", "mod_arrays", callback=_arrays, multiple=True, metavar="NAME:DTYPE:SIZES",
                     help="An array that they read, as in table:fp32:16x128; several times for several."),
        click.option("--mask-mod", metavar="EXPRESSION", default=None, help="Which keys are visible, likewise."),
        click.option("--score-mod", metavar="EXPRESSION", default=None,
                     help="What becomes of scores, as in 'score + table[h, k]'."),
    ):  # fmt: skip
        command = add(command)
    return command


def mods_of(options: dict[str, Any]) -> dict[str, Any]:
    """Of the problem; what the arrays that are read have in bytes, and which are learned, goes to the options."""
    options |= {"mod_bytes": 0, "dmods": ()}
    if options["score_mod"] is None and options["mask_mod"] is None:
        if options["mod_arrays"]:
            raise click.BadParameter("nothing reads it without --score-mod or --mask-mod", param_hint="--mod-array")
        return {}
    text, arrays = bind(options["score_mod"], options["mask_mod"], options["mod_arrays"])
    options["mod_bytes"] = sum(x.nbytes for x in arrays.values())
    options["dmods"] = read(text).learned if options["learned"] else ()
    return {"mods": text, "mod_shapes": tuple(x.shape for x in arrays.values())}
