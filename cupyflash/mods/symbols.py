"""Symbols: values of each element that write down, as a tree, what is done to them.

NumPy's, torch's, JAX's and Python's own functions of symbols are known by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError
from .expression import BOOL, FLOAT, FUNCTIONS, Node, apply, load, number


class Symbol:
    """A value of each element: what is done to it is written down."""

    __array_priority__ = 1000

    def __init__(self, node: Node) -> None:
        self.node = node

    def __bool__(self) -> bool:
        raise ArgumentError(
            "expected an expression without if, and, or, not: a function is called once for all elements; use where(), "
            "&, | and ~"
        )

    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        raise ArgumentError("expected no int() or index of a Python list: it is called once for all elements")

    __index__ = __float__ = __int__

    def __iter__(self) -> Any:
        raise ArgumentError("expected one value, got a loop over it")

    def __neg__(self) -> Symbol:
        return made("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return made("abs", self)

    def __invert__(self) -> Symbol:
        return made("!" if self.node.kind == BOOL else "~", self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Symbol:
        if method != "__call__" or options:
            raise ArgumentError(f"np.{ufunc.__name__}: expected a plain call of a function of {', '.join(_CALLS)}")
        return called(ufunc.__name__, inputs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Symbol:
        return called(function.__name__, (*args, *options.values()))

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Symbol:
        return called(function.__name__, (*args, *(options or {}).values()))

    def _same(self, *_: Any, **__: Any) -> Symbol:
        return self

    float = to = type = _same  # numbers have one precision

    def astype(self, dtype: Any, *_: Any) -> Symbol:
        if self.node.kind == FLOAT and "float" not in str(dtype):
            raise ArgumentError(f"astype: expected a dtype of floats, got {dtype}; use floor")
        return self


def node_of(x: Any) -> Node:
    """The tree of a symbol or of a number.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(x, Symbol):
        return x.node
    if isinstance(x, ArraySymbol):
        raise ArgumentError(f"{x.name}: expected an element of it, such as {x.name}[h], got the array")
    if hasattr(x, "item") and getattr(x, "shape", None) == ():
        x = _number_in(x)
    if not isinstance(x, (bool, int, float)):
        raise ArgumentError(f"expected symbols, numbers and elements of arrays, got a {type(x).__name__}")
    return number(x)


def _number_in(x: Any) -> Any:
    """That of an array of no dimensions."""
    try:
        return x.item()
    except Exception as e:
        raise ArgumentError(
            "expected a number that is known now, got an array of no dimensions that is followed; give x[None] in "
            "mod_arrays, and take x[0]"
        ) from e


def made(op: str, *args: Any) -> Symbol:
    """An operation as Python has it, on symbols and numbers."""
    nodes = [node_of(x) for x in args]
    if op == "//" and FLOAT in [x.kind for x in nodes]:
        return made("floor", made("divide", *map(Symbol, nodes)))
    if op == "%" and FLOAT in [x.kind for x in nodes]:
        a, b = map(Symbol, nodes)
        return made("-", a, made("*", b, made("//", a, b)))
    if op == "**" and nodes[1] == number(2):
        return made("*", *map(Symbol, (nodes[0], nodes[0])))
    return Symbol(apply(_OPERATORS.get(op, op), *nodes))


_OPERATORS = {"/": "divide", "//": "floordiv", "%": "floormod", "**": "pow"}


def where(condition: Any, yes: Any, no: Any) -> Symbol:
    """`yes` where the condition holds, else `no`."""
    return made("?", condition, yes, no)


def _reversed(op: str) -> Callable[[Any, Any], Symbol]:
    return lambda self, other: made(op, other, self)


def _forward(op: str) -> Callable[[Any, Any], Symbol]:
    return lambda self, other: made(op, self, other)


_DUNDERS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
            "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}  # fmt: skip
for _word, _op in _DUNDERS.items():
    setattr(Symbol, f"__{_word}__", _forward(_op))
    setattr(Symbol, f"__r{_word}__", _reversed(_op))
for _word, _op in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    setattr(Symbol, f"__{_word}__", _forward(_op))

# What functions of NumPy and torch are called, where that is another name than ours.
_CALLS: dict[str, str] = {f: f for f in FUNCTIONS} | {
    "absolute": "abs", "fabs": "abs", "minimum": "min", "maximum": "max", "fmin": "min", "fmax": "max",
    "power": "**", "pow": "**", "float_power": "**", "negative": "neg", "neg": "neg", "where": "?", "add": "+",
    "sub": "-", "subtract": "-", "mul": "*", "multiply": "*", "div": "/", "true_divide": "/", "divide": "/",
    "floor_divide": "//", "remainder": "%", "mod": "%", "eq": "==", "equal": "==", "ne": "!=",
    "not_equal": "!=", "lt": "<", "less": "<", "le": "<=", "less_equal": "<=", "gt": ">", "greater": ">",
    "ge": ">=", "greater_equal": ">=", "logical_and": "&&", "logical_or": "||", "logical_not": "!",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "invert": "~", "bitwise_not": "~",
}  # fmt: skip


def called(function: str, args: Any) -> Symbol:
    """A function of NumPy, torch or JAX, by its name."""
    word = function.strip("_")
    if function.startswith("__") and word in _DUNDERS:
        return made(_DUNDERS[word], *args)
    if function.startswith("__r") and word[1:] in _DUNDERS:
        return made(_DUNDERS[word[1:]], *args[::-1])
    op = _CALLS.get(word)
    if op is None:
        raise ArgumentError(f"{function}: expected one of the functions {', '.join(sorted(_CALLS))}")
    return made(op, *args)


class ArraySymbol:
    """An array of a mod: what is asked of it is an element."""

    def __init__(self, label: str, dtype: str, dims: int) -> None:
        self.name, self.dtype, self.dims = label, dtype, dims

    def __getitem__(self, indices: Any) -> Symbol:
        listed = indices if isinstance(indices, tuple) else (indices,)
        return Symbol(load(self.name, self.dtype, self.dims, *map(node_of, listed)))

    def __call__(self, *indices: Any) -> Symbol:
        return self[indices]
