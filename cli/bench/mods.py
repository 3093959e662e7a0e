"""Mods that `bench` times: for us expressions, for FlexAttention the functions that say the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]


class Mod(NamedTuple):
    """One of them.

    Attributes:
        expressions: `attention`'s score_mod or mask_mod, by name.
        function: of the arrays by name: (score, batch, head, query, key) -> what becomes of the score; None: itself.
        shapes: of the arrays, in fp32, of so many heads of q and keys.
        shown: (batch, head, query, key) -> whether the key is visible; None: all are.
        length: of documents that see themselves alone; 0: there are none.
    """

    expressions: dict[str, str]
    function: Callable[[Mapping[str, Any]], ScoreMod] | None
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    shown: MaskMod | None = None
    length: int = 0


def _relative(arrays: Mapping[str, Any]) -> ScoreMod:
    return lambda score, b, h, q, k: score + 0.001 * (k - q)


def _table(arrays: Mapping[str, Any]) -> ScoreMod:
    table = arrays["table"]
    return lambda score, b, h, q, k: score + table[h, (q - k).clamp(min=0)]


def _gates(arrays: Mapping[str, Any]) -> ScoreMod:
    gates = arrays["gates"]
    return lambda score, b, h, q, k: score * gates[h]


def _of_scores(
    expression: str, function: Callable[[Mapping[str, Any]], ScoreMod], shapes: Callable[[int, int], Any]
) -> Mod:
    return Mod({"score_mod": expression}, function, shapes)


def of_documents(length: int) -> Mod:
    """Documents of so many tokens, each of which sees itself alone."""
    shown: MaskMod = lambda b, h, q, k: q // length == k // length  # noqa: E731
    return Mod({"mask_mod": f"q / {length} == k / {length}"}, None, lambda heads, keys: {}, shown, length)


MODS = {
    "relative": _of_scores("score + 0.001 * (k - q)", _relative, lambda heads, keys: {}),
    "table": _of_scores("score + table[h, max(0, q - k)]", _table, lambda heads, keys: {"table": (heads, keys)}),
    "gates": _of_scores("score * gates[h]", _gates, lambda heads, keys: {"gates": (heads,)}),
    "documents": of_documents(1024),
}


def drawn(name: str, rng: np.random.Generator, heads: int, keys: int) -> dict[str, np.ndarray]:
    """The arrays of a mod."""
    shapes = MODS[name].shapes(heads, keys)
    return {label: rng.standard_normal(shape, np.float32) for label, shape in shapes.items()}
