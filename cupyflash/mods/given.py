"""Mods as a user gives them: expressions, functions, and arrays by name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

from ..arrays.imported import constant_in_programs, is_instance
from ..arrays.libraries import common_library_of_all
from ..errors import ArgumentError
from ..operand import MOD_ARRAYS
from .description import Read, make
from .expression import Node
from .held import Held, Unknown, captured
from .parse import parse
from .trace import trace

_DTYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


def bind(
    score_mod: Any, mask_mod: Any, mod_arrays: Mapping[str, Any] | None, q: Any = None
) -> tuple[str, dict[str, Any]]:
    """The text of mods, and the arrays that they read by the names of the table of arrays.

    Raises:
        ArgumentError: one is neither an expression nor a function of what it may be of; an array is not of q's library;
            or there are arrays and no mod.
    """
    if mod_arrays is not None and not isinstance(mod_arrays, Mapping):
        raise ArgumentError(f"mod_arrays: expected arrays by their names, a dict, got a {type(mod_arrays).__name__}")
    arrays = dict(mod_arrays or {})
    if wrong := [label for label in arrays if not isinstance(label, str)]:
        raise ArgumentError(f"mod_arrays: expected names as keys, got {wrong[0]!r:.60}")
    if score_mod is None and mask_mod is None:
        if arrays:
            raise ArgumentError(
                f"mod_arrays: expected none without a mod that reads them, got {', '.join(map(str, arrays))}; give a "
                "score_mod or a mask_mod, or leave them out"
            )
        return "", {}
    labels = {id(x): label for label, x in arrays.items()}
    for what, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not isinstance(mod, str) and not callable(mod):
            raise ArgumentError(f"{what}: expected a C++ expression or a function, got a {type(mod).__name__}")
        if callable(mod):
            for label, x, is_own in captured(mod, _is_array):
                if is_own and arrays.get(label, x) is not x and label in (mod_arrays or {}):
                    raise ArgumentError(f"{what}: {label!r} is another array in mod_arrays; rename one of them")
                if id(x) not in labels:
                    labels[id(x)] = _new(label, arrays)
                    arrays[labels[id(x)]] = x
    described = tuple(sorted((label, *_described(label, x)) for label, x in arrays.items()))
    are_expressions = not callable(score_mod) and not callable(mask_mod)
    mods = score_mod, mask_mod, described
    text, names = _of_expressions(*mods) if are_expressions else _of_functions(*mods, labels)
    if q is not None:  # here, where arrays have the names that the caller knows
        common_library_of_all({"q": q, **{f"mod_arrays: {label}": arrays[label] for label in names}})
    operands = MOD_ARRAYS[: len(names)]  # as many, since programs of torch 2.9 take any zip for a strict one
    return text, {operand: arrays[label] for operand, label in zip(operands, names, strict=True)}


def _described(label: str, x: Any) -> tuple[str, int]:
    """dtype and dimensions of an array of any library."""
    try:
        dtype = str(x.dtype).removeprefix("torch.")
        return _DTYPES.get(dtype, dtype), len(x.shape)
    except AttributeError:
        raise ArgumentError(f"mod_arrays: {label}: expected an array, got a {type(x).__name__}") from None


def _is_array(x: Any) -> bool:
    kinds = (("numpy", "ndarray"), ("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array"))
    return any(is_instance(x, *kind) for kind in kinds) and len(x.shape) > 0


def _new(label: str, arrays: Mapping[str, Any]) -> str:
    """A name that no array has."""
    return next(x for x in itertools.chain([label], (f"{label}_{i}" for i in itertools.count(2))) if x not in arrays)


def _made(
    score_mod: Any, mask_mod: Any, described: tuple[tuple[str, str, int], ...], labels: Mapping[int, str] | None = None
) -> tuple[str, tuple[str, ...]]:
    """The text of mods, and the arrays that they read, in the order of names; `labels` as in `trace`."""
    known = {label: (dtype, dims) for label, dtype, dims in described}
    nodes: list[Node | None] = []
    for what, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is None:
            nodes.append(None)
        else:
            nodes.append(parse(mod, what, known) if isinstance(mod, str) else _traced(mod, what, known, labels or {}))
    used = set().union(*(_read_by(node) for node in nodes if node is not None))
    read = tuple(Read(*x) for x in described if x[0] in used)
    return make(read, *nodes).text, tuple(x.name for x in read)


_kept = functools.lru_cache(maxsize=256)(_made)
_find: Any = _kept.__call__  # which torch.compile runs as it is; of the other it would warn, and look into it


@constant_in_programs
def _of_expressions(*of: Any) -> tuple[str, tuple[str, ...]]:
    return _kept(*of)


def _of_functions(
    score_mod: Any, mask_mod: Any, described: tuple[tuple[str, str, int], ...], labels: Mapping[int, str]
) -> tuple[str, tuple[str, ...]]:
    """Traced again only if a function holds something else than before."""
    try:
        mods = [Held(mod, labels) if callable(mod) else mod for mod in (score_mod, mask_mod)]
    except (Unknown, RecursionError):  # a list that holds itself
        return _made(score_mod, mask_mod, described, labels)
    found = _find(*mods, described)
    for mod in mods:
        if isinstance(mod, Held):
            mod.release()
    return found


def _traced(mod: Any, what: str, known: Mapping[str, tuple[str, int]], labels: Mapping[int, str]) -> Node:
    if isinstance(mod, Held):
        mod, labels = mod.function, mod.labels
    return trace(mod, what, known, labels)


def _read_by(node: Node) -> set[str]:
    return {str(x.value) for x in node.nodes() if x.op == "load"}
