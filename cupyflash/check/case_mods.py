"""The mods of the named cases: `MODS` have expressions, and draw the arrays that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..mods.description import read
from ..mods.given import bind
from ..problem import Problem

Array = NDArray[Any]
Rng = np.random.Generator


class ModInputs(NamedTuple):
    """What `attention` takes, by the names of its arguments."""

    score_mod: str | None
    mask_mod: str | None
    mod_arrays: dict[str, Array]

    def bound(self) -> tuple[str, dict[str, Array]]:
        """Their text, and the arrays by the names of the table of arrays."""
        return bind(self.score_mod, self.mask_mod, self.mod_arrays)

    @property
    def learned(self) -> dict[str, int]:
        """The numbers of the arrays that have gradients other than 0, by name, in their order."""
        mods = read(self.bound()[0])
        return {mods.arrays[i].name: i for i in mods.learned}


_Draw = Callable[[Rng, Problem], dict[str, Array]]


def _relative(rng: Rng, p: Problem) -> dict[str, Array]:
    """A number for each head and distance; fewer than there are, so that the last one counts for all beyond."""
    return {"table": rng.standard_normal((p.heads_q, 40)).astype(np.float32)}


def _documents(rng: Rng, p: Problem) -> dict[str, Array]:
    """The document of each position of each sequence, drawn from three."""
    longest = max(p.seqlen_q, p.seqlen_k)
    return {"document": np.sort(rng.integers(0, 3, (p.batch, longest)), axis=1)}


def _all_dtypes(rng: Rng, p: Problem) -> dict[str, Array]:
    return {
        "weight": rng.random((p.batch, p.heads_q, p.seqlen_q, 2)).astype(np.float16),
        "shift": rng.standard_normal(p.seqlen_k),
        "shown": rng.random((p.heads_q, p.seqlen_k)) < 0.7,
        "kind": rng.integers(0, 3, (3, p.seqlen_q)).astype(np.int32)[::2],
    }


def _scales(rng: Rng, p: Problem) -> dict[str, Array]:
    """A number for each head, or for each sequence, and one for every seventh key."""
    scale = rng.uniform(0.5, 1.5, max(p.heads_q, p.batch)).astype(ml_dtypes.bfloat16)
    return {"scale": scale, "shift": rng.standard_normal(7).astype(np.float32)}


def _heat(rng: Rng, p: Problem) -> dict[str, Array]:
    """A temperature for each query of each head, and an array without elements."""
    return {
        "heat": rng.standard_normal((p.heads_q, p.seqlen_q)).astype(np.float16),
        "none": np.zeros((0, 3), np.float32),
    }


MODS: dict[str, tuple[str | None, str | None, _Draw]] = {
    "relative": ("score + table[h, max(0, q - k)]", None, _relative),
    "documents": (None, "document(b, q) == document(b, k)", _documents),
    "padded": (None, "k < length[b]", lambda rng, p: {"length": rng.integers(1, p.seqlen_k + 1, p.batch)}),
    "rows": (None, "(q + h) % 3 != 1 && k >= 0", lambda rng, p: {}),
    "capped": (
        "tanh(score / (3 + h % 2)) * 3 - 0.05f * abs(q - k)",
        "(q + k) % 5 != 0 && q - k != 3 && k <= q + 60",
        lambda rng, p: {},
    ),
    "hides": (
        "k % 3 == 1 || q == 5 ? -inf : 0.5f * score + 1 / pow(k % 7 == 3 ? inf : 1 + abs(score), 2)",
        None,
        lambda rng, p: {},
    ),
    "repelled": ("score - 0.05f / (score * score)", None, lambda rng, p: {}),  # -inf to a score of 0, and to no other
    "adds": ("score + hidden[k]", None, lambda rng, p: {"hidden": np.where(np.arange(p.seqlen_k) % 2, -np.inf, 0)}),
    "every": (
        "score * (0.5f + weight(b, h, q, k % 2)) + 0.1f * shift[k]"
        " + (kind[1][q] == 1 ? sigmoid(score) : sin(0.3f * score))",
        "shown(h, k) && k <= q + 20",
        _all_dtypes,
    ),
    "scales": (
        "score * scale[h] + 0.3f * scale[h] * shift[k % 7] + max(0, scale[b] - 0.9f) * scale[b] * score",
        None,
        _scales,
    ),
    "heated": ("q % 9 == 4 ? score : score * exp(0.3f * heat[h][q]) + none[h, q] + 0.02f * (k - q)", None, _heat),
    "functions": (
        "exp(-0.1f * score * score) + log(1 + score * score) + min(score, x[0]) + max(k - q, -3) * 0.01f"
        " + abs(score - x[1]) + cos(score / 1.5f) + sqrt(2 + score * score) + rsqrt(2 + score * score)"
        " + exp2(-score * score) + log2(3 + score * score) + pow(1 + abs(score), x[2]) + floor(k / 3.f)"
        " + sin(x[3] * k) / (2 + x[4] * x[4])"
        " + (k < 9 ? 2 : -x[5]) + max(x[6], k % 2) * tanh(x[7]) - (q % 3 == 0 ? x[8] : 1) * sigmoid(x[9] * score)"
        " + (score && !(q % 2 && !score) ? 0.05f * score : 0)",
        None,
        lambda rng, p: {"x": rng.standard_normal(10).astype(np.float32)},
    ),
}  # fmt: skip


def draw_mods(name: str, rng: Rng, p: Problem) -> ModInputs | None:
    """Those of a case; "" has none."""
    if not name:
        return None
    score_mod, mask_mod, draw = MODS[name]
    return ModInputs(score_mod, mask_mod, draw(rng, p))


def with_mods(p: Problem, mods: ModInputs | None) -> Problem:
    """The problem with mods, whose arrays have these shapes."""
    if mods is None:
        return p
    text, arrays = mods.bound()
    return replace(p, mods=text, mod_shapes=tuple(x.shape for x in arrays.values()))


def hide_by_mods(mods: ModInputs | None, k: Array, v: Array) -> None:
    """NaN and inf in k and v, (batch, seqlen_k, ...), for the keys that `adds` hides."""
    assert mods is not None
    hidden = np.flatnonzero(np.isneginf(mods.mod_arrays["hidden"]))
    k[:, hidden], v[:, hidden] = np.nan, np.nan
    k[:, hidden[::3]], v[:, hidden[1::3]] = np.inf, -np.inf
