"""Mods of random problems: as cupyflash is given them, and as formulas with derivatives worked out by hand.

Apart from `cupyflash.mods` on purpose. A mod makes of a score x of query i and key j, of head h of sequence b, a score
f(x), with bounds of first order for what fp32 does to f, to f' and to the derivatives by what f reads; e as in
`oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupyflash.check.accuracy import UNIT_ROUNDOFF
from cupyflash.check.case_mods import ModInputs

Array = NDArray[Any]
Arrays = dict[str, Array]
Shown = Callable[[Arrays, int, int, Array, Array], Array]
# Of an array's own dtype: the unit roundoff, and what is lost below its smallest numbers (`oracle.Rounding`).
_UNITS = {"float32": UNIT_ROUNDOFF["fp32"], "float16": UNIT_ROUNDOFF["fp16"], "bfloat16": UNIT_ROUNDOFF["bf16"]}
_TINY = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}


class Read(NamedTuple):
    """What scores depend on of an array: the elements, the derivative by them, and its error."""

    name: str
    elements: tuple[Any, ...]
    derivative: Any
    error: Any


class Formed(NamedTuple):
    """What a mod makes of scores: them and their derivative, each with its error, and what it reads."""

    scores: Array
    d_scores: Array
    slope: Any
    d_slope: Any
    reads: tuple[Read, ...] = ()


class Mod(NamedTuple):
    """Arguments of a call, a draw of (sequences, heads), and the same of arrays, b, h, i, keys in NumPy, i a column.

    `form` takes scores, their errors and e before those.
    """

    score_mod: str | None
    mask_mod: str | None
    draw: Callable[[np.random.Generator, int, int], Arrays]
    shown: Shown = lambda arrays, b, h, i, keys: np.ones(keys.shape, bool)
    form: Callable[..., Formed] = lambda x, d_x, e, *of: Formed(x, d_x, 1.0, 0.0)


def _by_distance(x: Array, d_x: Array, e: float, arrays: Arrays, b: int, h: int, i: Array, keys: Array) -> Formed:
    table = arrays["table"]
    distance = np.clip(i - keys, 0, table.shape[1] - 1)
    added = table[h, distance].astype(np.float64)
    d_scores = d_x + 2 * e * (np.abs(x) + np.abs(added))
    return Formed(x + added, d_scores, 1.0, 0.0, (Read("table", (h, distance), 1.0, 0.0),))


def _same_document(arrays: Arrays, b: int, h: int, i: Array, keys: Array) -> Array:
    document = arrays["document"]
    last = document.shape[1] - 1
    return document[b, np.minimum(i, last)] == document[b, np.minimum(keys, last)]


def _capped(x: Array, d_x: Array, e: float, arrays: Arrays, b: int, h: int, i: Array, keys: Array) -> Formed:
    t, distance = np.tanh(x / 4), np.abs(i - keys)
    slope, off = 1 - t * t, d_x / 4
    scores = 4 * t - 0.05 * distance
    d_scores = (slope + off) * d_x + e * (32 + 4 * 0.05 * distance)
    return Formed(scores, d_scores, slope, 2 * np.abs(t) * slope * off + off * off + 12 * e)


def _scaled(x: Array, d_x: Array, e: float, arrays: Arrays, b: int, h: int, i: Array, keys: Array) -> Formed:
    """An element of `scale` stands at two places of the expression: one read, whose derivatives add up."""
    scale, shift = float(arrays["scale"][h]), arrays["shift"][keys % 7].astype(np.float64)
    by_scale = x + 0.3 * shift
    size = np.abs(x) + 0.3 * np.abs(shift)
    reads = (
        Read("scale", (h,), by_scale, d_x + 4 * e * size),
        Read("shift", (keys % 7,), 0.3 * scale, 2 * e * abs(scale)),
    )
    return Formed(scale * by_scale, abs(scale) * (d_x + 6 * e * size), scale, 0.0, reads)


def _heated(x: Array, d_x: Array, e: float, arrays: Arrays, b: int, h: int, i: Array, keys: Array) -> Formed:
    heat = arrays["heat"]
    at = b, h, np.minimum(i, heat.shape[2] - 1)
    factor = heat[at].astype(np.float64)
    error = np.abs(factor) * (d_x + 2 * e * np.abs(x))
    return Formed(factor * x, error, factor, 0.0, (Read("heat", at, x, d_x),))


MODS = {
    "distances": Mod(
        "score + table[h, max(0, q - k)]", None,
        lambda rng, n, heads: {"table": rng.standard_normal((heads, 40)).astype(np.float32)}, form=_by_distance,
    ),
    "documents": Mod(
        None, "document[b, q] == document[b, k]",
        lambda rng, n, heads: {"document": np.sort(rng.integers(0, 3, (n, 50)), axis=1)}, _same_document,
    ),
    "capped": Mod(
        "tanh(0.5f * score / (2 + min(h, 0))) * 4 - 0.05f * abs(q - k)", "(q + k) % 5 != 0", lambda rng, n, heads: {},
        lambda arrays, b, h, i, keys: (i + keys) % 5 != 0, _capped,
    ),
    "scaled": Mod(
        "score * scale[h] + 0.3f * scale[h] * shift[k % 7]", None,
        lambda rng, n, heads: {
            "scale": rng.uniform(0.5, 1.5, heads).astype(np.float16),
            "shift": rng.standard_normal(7).astype(np.float32),
        },
        form=_scaled,
    ),
    "heated": Mod(
        "k % 3 == 1 ? -inf : score * heat[b, h, q]", None,
        lambda rng, n, heads: {"heat": rng.uniform(0.5, 1.5, (n, heads, 33)).astype(ml_dtypes.bfloat16)},
        lambda arrays, b, h, i, keys: keys % 3 != 1, _heated,
    ),
}  # fmt: skip
LEARNED = ("distances", "scaled", "heated")  # not with deterministic=True, which a GPU refuses


def given(name: str, seed: int, sequences: int, heads: int) -> ModInputs:
    """What a call is given. Drawn apart, so that the other arrays are those of the problem without mods."""
    mod = MODS[name]
    return ModInputs(mod.score_mod, mod.mask_mod, mod.draw(np.random.default_rng([seed, 4]), sequences, heads))


class OfHead(NamedTuple):
    """The mod of a head of q of a sequence."""

    mod: Mod
    arrays: Arrays
    b: int
    h: int

    def shown(self, queries: int, keys: int) -> Array:
        """Which keys each query may see, whatever the scores are."""
        return self.mod.shown(self.arrays, self.b, self.h, *_indices(queries, keys))

    def form(self, x: Array, d_x: Array, e: float) -> Formed:
        """What becomes of scores x, a row for each query. The error of one that is not finite says nothing."""
        at = _indices(*x.shape)
        return self.mod.form(x, np.where(np.isfinite(x), d_x, 0), e, self.arrays, self.b, self.h, *at)


def _indices(queries: int, keys: int) -> tuple[Array, Array]:
    return np.arange(queries)[:, None], np.arange(keys)


class Sums:
    """The gradients of the arrays that have one, in the order of their names."""

    def __init__(self, mods: ModInputs | None) -> None:
        given = {} if mods is None else {name: mods.mod_arrays[name] for name in mods.learned}
        self.units = {name: _UNITS[str(x.dtype)] for name, x in given.items()}
        self.tiny = {name: _TINY[str(x.dtype)] for name, x in given.items()}
        self.exact, self.bound, self.size, self.terms = (
            {name: np.zeros(x.shape) for name, x in given.items()} for _ in range(4)
        )

    def add(self, read: Read, shown: Array, dS: Array, d_dS: Array) -> None:
        """Add what the scores of shown keys give, by which the gradient is dS with an error."""
        parts = (np.broadcast_to(x, shown.shape)[shown] for x in (read.derivative, read.error, *read.elements))
        slope, error, *indices = parts
        elements, dS, d_dS = tuple(indices), dS[shown], d_dS[shown]
        exact, by_error = np.where(dS == 0, 0, dS * slope), np.where(dS == 0, 0, np.abs(dS) * error)
        found = exact, np.where(np.isfinite(slope), d_dS * np.abs(slope), 0) + by_error
        for total, x in zip((self.exact, self.bound, self.size), (*found, np.abs(exact)), strict=True):
            np.add.at(total[read.name], elements, x)
        np.add.at(self.terms[read.name], elements, 1)

    def found(self, e: float) -> list[tuple[Array, Array]]:
        """Values and bounds, with the rounding of sums and of the results to their dtypes."""
        bounds = []
        for name, exact in self.exact.items():
            of_sum = e * (32 + self.terms[name] / 4) * self.size[name]
            bounds.append((exact, self.bound[name] + of_sum + self.units[name] * np.abs(exact) + self.tiny[name]))
        return bounds
