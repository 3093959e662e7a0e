"""Python functions as trees: a function is called once, with symbols.

Functions as FlexAttention takes them work as they are: arrays that a function's closure or module holds become arrays
of the mod. JAX's functions take no objects but its own, so those that a function names are replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from ..arrays.imported import imported
from ..errors import ArgumentError
from .expression import NAMES, Node, name
from .symbols import ArraySymbol, Symbol, called, node_of


def captured(function: Callable[..., Any], is_array: Callable[[Any], bool]) -> dict[str, Any]:
    """The arrays that a Python function's closure, defaults or module holds and its code names."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found = {word: cell.cell_contents for word, cell in closure if _is_filled(cell)}
    module = function.__globals__
    found |= {word: module[word] for word in code.co_names if word in module and word not in found}
    return {word: x for word, x in found.items() if is_array(x)}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def trace(function: Callable[..., Any], what: str, arrays: Mapping[str, tuple[str, int]]) -> Node:
    """The tree of what a function computes.

    Args:
        function: of score, b, h, q, k (without the score: of a mask), by position, and of arrays by their names.
        what: the argument that it is.
        arrays: name -> dtype and dimensions, of those that it may read.

    Raises:
        ArgumentError: it asks for something else, or does what symbols do not know.
    """
    symbols = {label: ArraySymbol(label, *of) for label, of in arrays.items()}
    positional = [Symbol(name(word)) for word in NAMES if word != "inf" and (what == "score_mod" or word != "score")]
    try:
        wanted = list(inspect.signature(function).parameters.values())[len(positional) :]
        missing = [
            x.name for x in wanted if x.kind is not x.VAR_KEYWORD and x.name not in symbols and x.default is x.empty
        ]
        if missing:
            raise ArgumentError(
                f"expected {', '.join(missing)} among mod_arrays ({', '.join(symbols) or 'none given'})"
            )
        named = {x.name: symbols[x.name] for x in wanted if x.name in symbols}
        with _numbers_are_known():
            return node_of(_with(function, symbols)(*positional, **named))
    except ArgumentError as e:
        raise ArgumentError(f"{what}: {e}") from None
    except TypeError as e:
        wanted_of = f"a function of {len(positional)} values and of mod_arrays"
        if Symbol.__name__ in str(e):  # as JAX's functions say what they were given
            wanted_of = "operators, cupyflash.mods.where, and functions of jax.numpy that the mod itself names"
        raise ArgumentError(f"{what}: expected {wanted_of}; {e}") from e


def _numbers_are_known() -> contextlib.AbstractContextManager[Any]:
    """What JAX's functions make of numbers inside are numbers, also where JAX traces."""
    jax = imported("jax")
    known: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if jax is None else jax.ensure_compile_time_eval()
    )
    return known


def _with(function: Callable[..., Any], symbols: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with symbols in place of the arrays that it holds, and with ours in place of JAX's functions."""
    if not isinstance(function, types.FunctionType):
        return function
    code, module = function.__code__, function.__globals__
    cells = []
    for word, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if word in symbols:
            cell = types.CellType(symbols[word])
        elif _is_filled(cell):
            cell = types.CellType(_taking_symbols(cell.cell_contents))
        cells.append(cell)
    module = module | {word: _taking_symbols(module[word]) for word in code.co_names if word in module}
    module |= {word: x for word, x in symbols.items() if word in module}
    copy = types.FunctionType(code, module, function.__name__, function.__defaults__, tuple(cells))
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Jax:
    """A module of JAX whose functions take symbols, too."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, word: str) -> Any:
        return _taking_symbols(getattr(self._module, word), word)


def _taking_symbols(x: Any, word: str = "") -> Any:
    """A module or function of JAX, which the mod calls `word`, as one that takes symbols; all else as it is."""
    if isinstance(x, types.ModuleType):
        return _Jax(x) if _is_of_jax(x.__name__) else x
    if not callable(x) or isinstance(x, type) or not _is_of_jax(getattr(x, "__module__", None)):
        return x
    known = word or getattr(x, "__name__", "")

    def function(*args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        if any(isinstance(value, (Symbol, ArraySymbol)) for value in given):
            return called(_OF_LAX.get(known, known), given)
        return x(*args, **options)

    return function


_OF_LAX = {"select": "where", "div": "lax.div"}  # whose quotients of integers are cut off


def _is_of_jax(module: Any) -> bool:
    return isinstance(module, str) and module.split(".")[0] in ("jax", "jaxlib")
