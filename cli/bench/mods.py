"""Mods that `bench` times: for us an expression, for FlexAttention the function that says the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


class Mod(NamedTuple):
    """One of them.

    Attributes:
        expression: `attention`'s score_mod.
        function: of the arrays by name: (score, batch, head, query, key) -> what becomes of the score.
        shapes: of the arrays, in fp32, of so many heads of q and keys.
    """

    expression: str
    function: Callable[[Mapping[str, Any]], ScoreMod]
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]


def _relative(arrays: Mapping[str, Any]) -> ScoreMod:
    return lambda score, b, h, q, k: score + 0.001 * (k - q)


def _table(arrays: Mapping[str, Any]) -> ScoreMod:
    table = arrays["table"]
    return lambda score, b, h, q, k: score + table[h, (q - k).clamp(min=0)]


def _gates(arrays: Mapping[str, Any]) -> ScoreMod:
    gates = arrays["gates"]
    return lambda score, b, h, q, k: score * gates[h]


MODS = {
    "relative": Mod("score + 0.001 * (k - q)", _relative, lambda heads, keys: {}),
    "table": Mod("score + table[h, max(0, q - k)]", _table, lambda heads, keys: {"table": (heads, keys)}),
    "gates": Mod("score * gates[h]", _gates, lambda heads, keys: {"gates": (heads,)}),
}


def drawn(name: str, rng: np.random.Generator, heads: int, keys: int) -> dict[str, np.ndarray]:
    """The arrays of a mod."""
    shapes = MODS[name].shapes(heads, keys)
    return {label: rng.standard_normal(shape, np.float32) for label, shape in shapes.items()}
