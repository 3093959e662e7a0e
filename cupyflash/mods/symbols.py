"""Symbols: values of each element that write down, as a tree, what is done to them.

NumPy's, torch's, JAX's and Python's own functions of symbols are known by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import FROM_ELSEWHERE, ArgumentError
from .expression import BOOL, INT, Node, load, number
from .functions import KNOWN, cast, constant, known, operation


class Unknown(ArgumentError, AttributeError):
    """A method or attribute that symbols do not have."""


class Symbol:
    """A value of each element: what is done to it is written down."""

    __array_priority__ = 1000

    def __init__(self, node: Node) -> None:
        self.node = node

    def __bool__(self) -> bool:
        raise ArgumentError(
            "expected an expression without if, and, or, not, min() and max(): a function is called once for all "
            "elements; use where(), &, |, ~, minimum() and maximum()"
        )

    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        raise ArgumentError(
            "expected no int(), float(), or index of a list, or of an array that neither mod_arrays nor the function "
            "itself names: it is called once for all elements"
        )

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
        return made("~", self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Symbol:
        if method != "__call__" or options:
            raise ArgumentError(f"np.{ufunc.__name__}: expected a plain call, without options and methods")
        return called(ufunc.__name__, inputs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Symbol:
        if function.__name__ in ("shape", "ndim", "size"):  # which JAX asks of what it does not know
            raise TypeError("a Symbol has no shape")
        return called(function.__name__, args, options)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Symbol:
        return called(function.__name__, args, options)

    def __getattr__(self, word: str) -> Any:
        if word.startswith("__"):
            raise AttributeError(word)
        if word not in KNOWN and word not in _FILLED:
            raise Unknown(
                f"{word}: symbols have no such method or attribute; expected one of {', '.join(sorted(KNOWN))}"
            )
        return lambda *args, **options: called(word, (self, *args), options)

    device = dtype = None  # where another value is made beside it, it may be made anywhere

    def where(self, condition: Any, other: Any) -> Symbol:
        return made("?", condition, self, other)

    def to(self, *args: Any, **options: Any) -> Symbol:
        """As another dtype; devices and the like say nothing."""
        found = self
        for x in (*args, *options.values()):
            found = Symbol(cast(found.node, _dtype_in(x)))
        return found

    astype = type = type_as = to

    def clone(self, *_: Any, **__: Any) -> Symbol:
        return self

    contiguous = clone


def _as(dtype: str) -> Callable[[Symbol], Symbol]:
    return lambda self: self.to(dtype)


_DTYPES = ("float", "double", "half", "bfloat16", "int", "long", "short", "bool")  # numbers have one precision
for _word in _DTYPES:
    setattr(Symbol, _word, _as(_word))


def _dtype_in(x: Any) -> str:
    """What an argument of `to` says of a dtype."""
    if isinstance(x, Symbol):
        return {BOOL: "bool", INT: "int"}.get(x.node.kind, "float")
    return str(x.dtype if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type) else x)


def node_of(x: Any) -> Node:
    """The tree of a symbol or of a number.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(x, Symbol):
        return x.node
    if isinstance(x, ArraySymbol):
        raise ArgumentError(f"{x.name}: expected an index for each of its {x.dims} dimensions, got {len(x._of[1])}")
    if hasattr(x, "item") and getattr(x, "shape", None) == ():
        x = _number_in(x)
    if not isinstance(x, (bool, int, float)):
        raise ArgumentError(f"expected symbols, numbers and elements of arrays, got a {type(x).__name__}")
    return number(x)


def _number_in(x: Any) -> Any:
    """That of an array of no dimensions."""
    try:
        return x.item()
    except FROM_ELSEWHERE:
        raise
    except Exception as e:
        raise ArgumentError(
            "expected a number that is known now, got an array of no dimensions that is followed; give x[None] in "
            "mod_arrays, and take x[0]"
        ) from e


def made(op: str, *args: Any) -> Symbol:
    """An operation as Python has it, on symbols and numbers."""
    return Symbol(operation(op, *map(node_of, args)))


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


def called(function: str, args: Any, options: Mapping[str, Any] | None = None) -> Symbol:
    """A function of NumPy, torch or JAX, by its name."""
    word, options = function.strip("_"), options or {}
    if function.startswith("__"):
        if word in _DUNDERS:
            return made(_DUNDERS[word], *args)
        if word[:1] == "r" and word[1:] in _DUNDERS:
            return made(_DUNDERS[word[1:]], *args[::-1])
        if word == "getitem":
            raise ArgumentError(
                "expected arrays of mod_arrays, or such that the function itself names, in its closure or module, got "
                "an element of another one; give it in mod_arrays, or a name of its own before"
            )
    if function in _FILLED:
        return _filled(function, *args, **options)
    return Symbol(known(function, [_given(x) for x in args], {word: _given(x) for word, x in options.items()}))


def _given(x: Any) -> Any:
    """A value as a tree; what says how to compute as it is."""
    return x if x is None or x is False or isinstance(x, str) else node_of(x)


# Values without dimensions that torch's functions and methods make beside others.
_FILLED = {"new_ones": 1, "new_zeros": 0, "ones_like": 1, "zeros_like": 0, "new_full": None, "full_like": None,
           "new_tensor": None}  # fmt: skip


def _filled(function: str, like: Any, *args: Any, size: Any = (), dtype: Any = None, **options: Any) -> Symbol:
    values = [*args, *(options[word] for word in ("fill_value", "data") if word in options)]
    if function in ("new_ones", "new_zeros", "new_full") and len(values) > (function == "new_full"):
        size = values.pop(0)
    values = values if _FILLED[function] is None else [_FILLED[function]]
    if not isinstance(size, (tuple, list)) or len(size) > 0 or len(values) != 1:
        raise ArgumentError(
            f"{function}: expected one value, of size (), got {size} and {values}; symbols have no shape"
        )
    if isinstance(values[0], Symbol):
        return values[0]
    return Symbol(constant(values[0], node_of(like), "" if dtype is None else str(dtype)))


class ArraySymbol:
    """An array of a mod, or a part of it: what is asked of it is an element."""

    def __init__(self, label: str, dtype: str, dims: int, *indices: Any) -> None:
        self.name, self.dims, self._of = label, dims, (dtype, indices)

    def __getitem__(self, indices: Any) -> Any:
        dtype, before = self._of
        listed = (*before, *(indices if isinstance(indices, tuple) else (indices,)))
        for i in listed:
            if not isinstance(i, Symbol) and isinstance(i, int) and i < 0:
                raise ArgumentError(
                    f"{self.name}: expected an index from 0 on, got {i}; it is not counted from the end"
                )
            if i is None or isinstance(i, (slice, type(...))):
                raise ArgumentError(f"{self.name}: expected an index for each of its {self.dims} dimensions, got {i}")
        if len(listed) < self.dims:
            return ArraySymbol(self.name, dtype, self.dims, *listed)
        return Symbol(load(self.name, dtype, self.dims, *map(node_of, listed)))

    def __call__(self, *indices: Any) -> Any:
        return self[indices]

    def __iter__(self) -> Any:
        raise ArgumentError(f"{self.name}: expected an element of it, such as {self.name}[h], got a loop over it")

    def __getattr__(self, word: str) -> Any:
        if word.startswith("__"):
            raise AttributeError(word)
        raise Unknown(
            f"{self.name}.{word}: expected elements alone, such as {self.name}[h]; lengths and the like are not known "
            "where a mod is compiled, and a number may be computed outside the function"
        )
