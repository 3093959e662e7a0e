"""Python functions as trees: a function is called once, with symbols.

Functions as FlexAttention takes them are called as they are: arrays that a function's closure or module holds become
arrays of the mod. JAX's functions take no objects but its own, so those that a function names are replaced.
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
from .held import functions_in, names_in
from .symbols import ArraySymbol, Symbol, called, node_of


def trace(
    function: Callable[..., Any], what: str, arrays: Mapping[str, tuple[str, int]], labels: Mapping[int, str]
) -> Node:
    """The tree of what a function computes.

    Args:
        function: of score, b, h, q, k (without the score: of a mask), by position, and of arrays by their names.
        what: the argument that it is.
        arrays: name -> dtype and dimensions, of those that it may read.
        labels: the names of arrays that it may hold, by their ids.

    Raises:
        ArgumentError: it asks for something else, or does what symbols do not know.
    """
    symbols = {label: ArraySymbol(label, *of) for label, of in arrays.items()}
    positional = [Symbol(name(word)) for word in NAMES if word != "inf" and (what == "score_mod" or word != "score")]
    try:
        wanted = _parameters(function)[len(positional) :]
        missing = [
            x.name for x in wanted if x.kind is not x.VAR_KEYWORD and x.name not in symbols and x.default is x.empty
        ]
        if missing:
            raise ArgumentError(
                f"expected {', '.join(missing)} among mod_arrays ({', '.join(symbols) or 'none given'})"
            )
        named = {x.name: symbols[x.name] for x in wanted if x.name in symbols}
        with _numbers_are_known():
            copies = _Copies(function, {key: symbols[label] for key, label in labels.items()})
            return node_of(copies.instead(function)(*positional, **named))
    except ArgumentError as e:
        raise ArgumentError(f"{what}: {e}") from None
    except IndexError as e:
        if "only integers, slices" not in str(e):  # which NumPy's arrays say of symbols
            raise
        raise ArgumentError(
            f"{what}: expected arrays of mod_arrays, or of the function's own closure and defaults, not of lists, "
            f"dicts and attributes; {e}"
        ) from e
    except TypeError as e:
        wanted_of = f"a function of {len(positional)} values and of mod_arrays"
        if Symbol.__name__ in str(e):  # as JAX's functions say what they were given
            wanted_of = "operators, cupyflash.mods.where, and functions of jax.numpy that the mod itself names"
        raise ArgumentError(f"{what}: expected {wanted_of}; {e}") from e


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError as e:  # of some that Python has built in, nobody knows
        raise TypeError(str(e)) from e


def _numbers_are_known() -> contextlib.AbstractContextManager[Any]:
    """What JAX's functions make of numbers inside are numbers, also where JAX traces."""
    jax = imported("jax")
    known: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if jax is None else jax.ensure_compile_time_eval()
    )
    return known


class _Copies:
    """Functions with symbols in place of the arrays that they hold, and with ours in place of JAX's functions."""

    def __init__(self, function: Any, symbols: Mapping[int, ArraySymbol]) -> None:
        self.symbols, self.made = symbols, dict[int, Any]()
        self.of = {id(x) for x in functions_in(function)}

    def of_function(self, function: types.FunctionType) -> Any:
        if id(function) in self.made:
            return self.made[id(function)]
        code, module = function.__code__, dict(function.__globals__)
        cells = tuple(types.CellType() for _ in code.co_freevars)
        copy = types.FunctionType(code, module, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__dict__.update(function.__dict__)
        self.made[id(function)] = copy  # before its closure, which may have it
        copy.__defaults__ = None if function.__defaults__ is None else tuple(map(self.instead, function.__defaults__))
        copy.__kwdefaults__ = {word: self.instead(x) for word, x in (function.__kwdefaults__ or {}).items()}
        module.update({word: self.instead(module[word]) for word in names_in(code) if word in module})
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is not filled yet
                cell.cell_contents = self.instead(old.cell_contents)
        return copy

    def instead(self, x: Any) -> Any:
        """What stands in place of a value."""
        if id(x) in self.symbols:
            return self.symbols[id(x)]
        if id(x) in self.of:
            return self.of_function(x)
        if type(x) in (tuple, list) and x and all(map(callable, x)):
            return type(x)(map(self.instead, x))
        return _taking_symbols(x)


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
        if any(isinstance(value, (Symbol, ArraySymbol)) for value in (*args, *options.values())):
            return called(_OF_LAX.get(known, known), args, options)
        return x(*args, **options)

    return function


_OF_LAX = {"select": "where", "div": "lax.div", "clamp": "lax.clamp"}  # which differ from torch's of these names


def _is_of_jax(module: Any) -> bool:
    return isinstance(module, str) and module.split(".")[0] in ("jax", "jaxlib")
