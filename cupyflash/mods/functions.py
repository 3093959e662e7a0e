"""Functions and methods of NumPy, torch and JAX, by their names: what each computes, of trees.

Most are an operation of ours by another name; the others are made of several. Those that look at floats alone may be
asked of integers, too.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ArgumentError
from .expression import BOOL, FLOAT, FUNCTIONS, INT, Node, apply, name, number

_OPERATORS = {"/": "divide", "//": "floordiv", "%": "floormod", "**": "pow"}


# What libraries make of two booleans: one, where C++ counts.
_OF_BOOLEANS = {"+": "||", "*": "&&", "max": "||", "min": "&&"}


def operation(op: str, *x: Node) -> Node:
    """An operation as Python has it.

    Raises:
        ArgumentError: as of `apply`; booleans are subtracted, which no library does.
    """
    if len(x) == 2 and x[0].kind == x[1].kind == BOOL:
        if op == "-":
            raise ArgumentError("-: expected numbers, got two booleans; use ^ for those that differ")
        op = _OF_BOOLEANS.get(op, op)
    if op == "//" and FLOAT in (x[0].kind, x[1].kind):
        return apply("floor", apply("divide", *x))
    if op == "%" and FLOAT in (x[0].kind, x[1].kind):
        return apply("-", x[0], apply("*", x[1], operation("//", *x)))
    if op == "**" and x[1] == number(2):
        return apply("*", x[0], x[0])
    if op == "~" and x[0].kind == BOOL:
        return apply("!", *x)
    return apply(_OPERATORS.get(op, op), *x)


def _by_name(op: str) -> Callable[..., Node]:
    return lambda *x: operation(op, *x)


def _clamp(x: Node, min: Node | None = None, max: Node | None = None) -> Node:
    found = x if min is None else apply("max", x, min)
    return found if max is None else apply("min", found, max)


def _relu(x: Node) -> Node:
    return apply("?", apply("<=", x, number(0)), _zero(x), x)  # of slope 0 at 0, as torch has it


def _zero(x: Node) -> Node:
    return number(0.0 if x.kind == FLOAT else 0)


def _leaky_relu(x: Node, negative_slope: Node = number(0.01)) -> Node:  # noqa: B008
    return apply("?", apply(">", x, number(0)), x, apply("*", x, negative_slope))


def _softplus(x: Node, beta: Node = number(1), threshold: Node = number(20)) -> Node:  # noqa: B008
    scaled = x if beta == number(1) else apply("*", x, beta)
    found = _log1p(apply("exp", scaled))
    found = found if beta == number(1) else apply("divide", found, beta)
    return apply("?", apply(">", scaled, threshold), x, found)


def _log_sigmoid(x: Node) -> Node:
    return apply("neg", _softplus(apply("neg", x)))


def _log1p(x: Node) -> Node:
    return apply("log", apply("+", x, number(1)))


def _logaddexp(x: Node, other: Node) -> Node:
    apart = apply("neg", apply("abs", apply("-", x, other)))
    return apply("+", apply("max", x, other), _log1p(apply("exp", apart)))


def _sign(x: Node) -> Node:
    one, zero = number(1.0 if x.kind == FLOAT else 1), _zero(x)
    below = apply("?", apply("<", x, number(0)), apply("neg", one), zero)
    return apply("?", apply(">", x, number(0)), one, below)


def _whole(of_floats: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """What integers are already."""
    return lambda x: of_floats(x) if x.kind == FLOAT else x


def _ceil(x: Node) -> Node:
    return apply("neg", apply("floor", apply("neg", x)))


def _trunc(x: Node) -> Node:
    return apply("?", apply("<", x, number(0)), _ceil(x), apply("floor", x))


def _fmod(x: Node, other: Node) -> Node:
    if FLOAT not in (x.kind, other.kind):
        return apply("remainder", x, other)
    return apply("-", x, apply("*", other, _trunc(apply("divide", x, other))))


def _div(x: Node, other: Node, rounding_mode: str | None = None) -> Node:
    if rounding_mode is None:
        return operation("/", x, other)
    if rounding_mode == "floor":
        return operation("//", x, other)
    if rounding_mode != "trunc":
        raise ArgumentError(f"div: expected a rounding_mode of None, 'floor' or 'trunc', got {rounding_mode!r}")
    are_whole = FLOAT not in (x.kind, other.kind)
    return apply("quotient", x, other) if are_whole else _trunc(apply("divide", x, other))


def _scaled(op: str) -> Callable[..., Node]:
    def sum_(x: Node, other: Node, alpha: Node | None = None) -> Node:
        return operation(op, x, other if alpha is None else apply("*", alpha, other))

    return sum_


def _is(op: str, limit: Node, of: Callable[[Node], Node] = lambda x: x) -> Callable[[Node], Node]:
    return lambda x: apply(op, of(x), limit)


def _magnitude(x: Node) -> Node:
    return apply("abs", x)


_INF = name("inf")
# Other names of what expressions have.
_NAMES = {f: f for f in FUNCTIONS} | {
    "absolute": "abs", "fabs": "abs", "minimum": "min", "maximum": "max", "fmin": "min", "fmax": "max",
    "power": "**", "pow": "**", "float_power": "**", "integer_pow": "**", "negative": "neg", "neg": "neg", "where": "?",
    "mul": "*", "multiply": "*", "true_divide": "/", "floor_divide": "//", "remainder": "%",
    "mod": "%", "eq": "==", "equal": "==", "ne": "!=", "not_equal": "!=", "lt": "<", "less": "<", "le": "<=",
    "less_equal": "<=", "gt": ">", "greater": ">", "ge": ">=", "greater_equal": ">=", "logical_and": "&&",
    "logical_or": "||", "logical_not": "!", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "invert": "~",
    "bitwise_not": "~", "bitwise_left_shift": "<<", "left_shift": "<<", "bitwise_right_shift": ">>",
    "right_shift": ">>", "expit": "sigmoid",
}  # fmt: skip
KNOWN: dict[str, Callable[..., Node]] = {word: _by_name(op) for word, op in _NAMES.items()} | {
    "add": _scaled("+"), "sub": _scaled("-"), "subtract": _scaled("-"), "div": _div, "divide": _div, "fmod": _fmod,
    "rem": _fmod, "lax.div": lambda x, other: _div(x, other, None if FLOAT in (x.kind, other.kind) else "trunc"),
    "clamp": _clamp, "clip": _clamp, "lax.clamp": lambda min, x, max: _clamp(x, min, max),
    "clamp_min": lambda x, min: _clamp(x, min), "clamp_max": lambda x, max: _clamp(x, None, max),
    "relu": _relu, "relu6": lambda x: _clamp(_relu(x), None, number(6)), "leaky_relu": _leaky_relu,
    "softplus": _softplus, "silu": lambda x: apply("*", x, apply("sigmoid", x)), "logaddexp": _logaddexp,
    "square": lambda x: apply("*", x, x), "reciprocal": lambda x: apply("divide", number(1), x), "log1p": _log1p,
    "expm1": lambda x: apply("-", apply("exp", x), number(1)),
    "log10": lambda x: apply("*", apply("log", x), number(1 / math.log(10))),
    "tan": lambda x: apply("divide", apply("sin", x), apply("cos", x)), "sign": _sign, "positive": lambda x: x,
    "floor": _whole(_by_name("floor")), "ceil": _whole(_ceil), "trunc": _whole(_trunc), "fix": _whole(_trunc),
    "isinf": _is("==", _INF, _magnitude), "isfinite": _is("<", _INF, _magnitude), "isposinf": _is("==", _INF),
    "isneginf": _is("==", apply("neg", _INF)), "isnan": lambda x: apply("!=", x, x),
    "logical_xor": lambda x, other: apply("!=", apply("!", x), apply("!", other)),
    "masked_fill": lambda x, mask, value: apply("?", mask, value, x),
}  # fmt: skip
KNOWN |= {"swish": KNOWN["silu"], "log_sigmoid": _log_sigmoid}
# What libraries call their operands, in the order in which functions take them.
_FIRST, _SECOND = ("condition", "self", "input", "x", "x1", "a", "arr", "base"), ("other", "y", "x2", "b", "exponent")
_RANKS = dict.fromkeys(("condition",), 0) | dict.fromkeys(_FIRST[1:], 1) | dict.fromkeys(_SECOND, 2)
_SAME = {"a_min": "min", "a_max": "max"}


def known(function: str, args: Sequence[Any], options: Mapping[str, Any]) -> Node:
    """A function of this name.

    Args:
        args, options: as it was called; trees, or what is no value.

    Raises:
        ArgumentError: it is not known, or not with these.
    """
    make = KNOWN.get(function)
    if make is None:
        raise ArgumentError(f"{function}: expected one of the functions {', '.join(sorted(KNOWN))}")
    given = {_SAME.get(word, word): x for word, x in options.items() if x is not None and x is not False}
    operands = sorted((word for word in given if word in _RANKS), key=_RANKS.__getitem__)
    args = [*args, *(given.pop(word) for word in operands)]
    try:
        if make is not _clamp and not all(isinstance(x, Node) for x in args):
            raise TypeError(f"got {args}")
        _signature(make).bind(*args, **given)
    except TypeError as e:
        raise ArgumentError(f"{function}: expected values, and no options but those of a number; {e}") from None
    return make(*args, **given)


_signature = functools.lru_cache(maxsize=None)(inspect.signature)


_INTEGERS = ("int", "long", "short")  # in what dtypes are called


def cast(x: Node, to: str, quotients: str = "//") -> Node:
    """A value as one of another dtype: numbers have one precision, and no float becomes an integer.

    Args:
        quotients: of integers, as who reads the error writes them.

    Raises:
        ArgumentError: it would.
    """
    if "bool" in to:
        return x if x.kind == BOOL else apply("!=", x, number(0))
    if not any(word in to for word in _INTEGERS):
        return x
    if x.kind == FLOAT:
        raise ArgumentError(
            f"expected a dtype of floats for a float, got {to}; use floor, and {quotients} for quotients"
        )
    return apply("+", x, number(0)) if x.kind == BOOL else x


def constant(value: Any, like: Node, to: str = "") -> Node:
    """A number of the kind of another value, or of a dtype."""
    if not isinstance(value, (bool, int, float)):
        raise ArgumentError(f"expected a number, got a {type(value).__name__}")
    if "bool" in to or (not to and like.kind == BOOL):
        return number(bool(value))
    is_whole = any(word in to for word in _INTEGERS) if to else like.kind == INT
    if is_whole and not math.isfinite(value):
        raise ArgumentError(f"expected an integer, as what it is beside, got {value}")
    return number(int(value) if is_whole else float(value))
