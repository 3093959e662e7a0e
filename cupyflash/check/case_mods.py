"""The mods of the named cases: `MODS` have expressions, and draw the arrays that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


MODS: dict[str, tuple[str | None, str | None, _Draw]] = {
    "relative": ("score + table[h, max(0, q - k)]", None, _relative),
    "documents": (None, "document(b, q) == document(b, k)", _documents),
    "capped": ("tanh(score / 3) * 3 - 0.05f * abs(q - k)", "(q + k) % 5 != 0", lambda rng, p: {}),
    "hides": ("k % 3 == 1 || q == 5 ? -inf : 0.5f * score", None, lambda rng, p: {}),
    "every": (
        "score * (0.5f + weight(b, h, q, k % 2)) + 0.1f * shift[k]"
        " + (kind[1][q] == 1 ? sigmoid(score) : sin(0.3f * score))",
        "shown(h, k) && k <= q + 200",
        _all_dtypes,
    ),
    "functions": (
        "exp(-0.1f * score * score) + log(1 + score * score) + min(score, 1) + max(k - q, -3) * 0.01f + abs(score)"
        " + cos(score) + sqrt(2 + score * score) + rsqrt(2 + score * score) + exp2(-score * score)"
        " + log2(3 + score * score) + pow(1 + abs(score), 0.7f) + floor(h / 2.f)",
        None,
        lambda rng, p: {},
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
