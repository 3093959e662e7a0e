"""The value of an expression on NumPy arrays, and its derivative by the score, or by an element that it reads: by dual
numbers, as in the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .expression import FLOAT, INT, Node, name

Dual = tuple[Any, Any]  # value, derivative; the int 0 where the value knows nothing of what it is taken by
SCORE = name("score")
_INT32 = -(2**31), 2**31 - 1


def evaluate(
    node: Node, names: Mapping[str, Any], arrays: Mapping[str, np.ndarray], dtype: Any, by: Node = SCORE
) -> Dual:
    """Value and derivative where `names` says what score and places are; floats of type `dtype`.

    `by`: what the derivative is taken by, the score or a read of an element.
    """
    return node.fold(lambda x, found: _evaluated(x, found, names, arrays, dtype, by))


def _evaluated(
    node: Node, found: list[Dual], names: Mapping[str, Any], arrays: Mapping[str, np.ndarray], dtype: Any, by: Node
) -> Dual:
    """Those of an operation, from those of its operands."""
    if node.op == "number":
        return (dtype(node.value) if node.kind == FLOAT else node.value), 0
    if node.op == "name":
        return (dtype(np.inf), 0) if node.value == "inf" else (names[str(node.value)], dtype(1) if node == by else 0)
    values, slopes = [x for x, _ in found], [d for _, d in found]
    if node.op == "load":
        x = arrays[str(node.value)]
        inside = _inside(values, x.shape)
        element = x[inside] if x.size else np.zeros(np.broadcast(*inside).shape, x.dtype)
        if node.kind == INT:  # of 32 bits, as kernels have it: what these do not hold is their end
            element = np.clip(element.astype(np.int64), *_INT32)
        return element.astype(dtype) if node.kind == FLOAT else element, dtype(1) if node == by else 0
    if node.op == "?":
        condition, yes, no = values
        slope = 0 if _are_constant(slopes) else np.where(condition, slopes[1], slopes[2])
        return np.where(condition, yes, no), slope
    if node.kind == FLOAT:
        values = [x if np.asarray(x).dtype == dtype else np.asarray(x).astype(dtype) for x in values]
        value, slope = _FLOATS[node.op](*values, *slopes)
        return value, 0 if _are_constant(slopes) else slope
    if node.kind == INT:
        values = [x.astype(np.int64) if x.dtype == bool else x for x in map(np.asarray, values)]
    return _OTHERS[node.op](*values), 0


def _are_constant(slopes: Iterable[Any]) -> bool:
    return all(isinstance(d, int) for d in slopes)


def _times(d: Any, x: Any) -> Any:
    """d * x; nothing of a constant, whatever x is."""
    return 0 if isinstance(d, int) else d * x


def _chain(d: Any, slope: Any) -> Any:
    """d * slope, but 0 where d is, whatever the slope is."""
    return 0 if isinstance(d, int) else np.where(d == 0, 0, d * slope)


def place_of(node: Node, names: Mapping[str, Any], arrays: Mapping[str, np.ndarray], dtype: Any) -> Any:
    """The numbers of the elements that a node reads of an array, which has some, as they lie one after the other."""
    indices = [evaluate(x, names, arrays, dtype)[0] for x in node.args]
    shape = arrays[str(node.value)].shape
    return np.ravel_multi_index(np.broadcast_arrays(*_inside(indices, shape)), shape)


def _inside(indices: Iterable[Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The nearest indices in an array."""
    return tuple(np.clip(i, 0, max(0, n - 1)) for i, n in zip(indices, shape, strict=True))


def _chosen(pick: Callable[[Any, Any], Any]) -> Callable[..., Dual]:
    def rule(a: Any, b: Any, da: Any, db: Any) -> Dual:
        takes_b = pick(a, b)
        return np.where(takes_b, b, a), np.where(takes_b, db, da)

    return rule


def _power(a: Any, b: Any, da: Any, db: Any) -> Dual:
    """x^0 has no slope by x, and 0^x none by x: not 0 * inf."""
    value = np.power(a, b)
    by_a = np.where((np.asarray(da) != 0) & (b != 0), da * b * np.power(a, b - 1), 0)
    return value, by_a + np.where((np.asarray(db) != 0) & ~((a == 0) & (b >= 0)), db * value * np.log(a), 0)


def _sigmoid(x: Any, d: Any) -> Dual:
    y = 1 / (1 + np.exp(-x))
    return y, _chain(d, y * (1 - y))


_FLOATS: dict[str, Callable[..., Dual]] = {
    "+": lambda a, b, da, db: (a + b, da + db),
    "-": lambda a, b, da, db: (a - b, da - db),
    "*": lambda a, b, da, db: (a * b, _times(da, b) + _times(db, a)),
    "divide": lambda a, b, da, db: (a / b, (da - _times(db, a / b)) / b),
    "neg": lambda a, da: (-a, -da),
    "abs": lambda a, da: (np.abs(a), np.where(a < 0, -da, da)),
    "min": _chosen(lambda a, b: b < a),
    "max": _chosen(lambda a, b: a < b),
    "floor": lambda a, da: (np.floor(a), 0),
    "exp": lambda a, da: (np.exp(a), _chain(da, np.exp(a))),
    "exp2": lambda a, da: (np.exp2(a), _chain(da, np.exp2(a) * a.dtype.type(np.log(2)))),
    "log": lambda a, da: (np.log(a), _chain(da, 1 / a)),
    "log2": lambda a, da: (np.log2(a), _chain(da, 1 / (a * a.dtype.type(np.log(2))))),
    "sqrt": lambda a, da: (np.sqrt(a), _chain(da, 1 / (2 * np.sqrt(a)))),
    "rsqrt": lambda a, da: (1 / np.sqrt(a), _chain(da, -1 / (2 * a * np.sqrt(a)))),
    "tanh": lambda a, da: (np.tanh(a), _chain(da, 1 - np.tanh(a) * np.tanh(a))),
    "sigmoid": _sigmoid,
    "sin": lambda a, da: (np.sin(a), _chain(da, np.cos(a))),
    "cos": lambda a, da: (np.cos(a), _chain(da, -np.sin(a))),
    "pow": _power,
}


def _truncated(a: Any, b: Any) -> Any:
    """a / b as C++ has it; 0 where b is."""
    safe = np.where(np.asarray(b) == 0, 1, b)
    return np.where(np.asarray(b) == 0, 0, np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe)))


def _floored(a: Any, b: Any) -> Any:
    safe = np.where(np.asarray(b) == 0, 1, b)
    return np.where(np.asarray(b) == 0, 0, a // safe)


_OTHERS: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "neg": np.negative, "abs": np.abs,
    "min": np.minimum, "max": np.maximum, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor,
    "~": np.invert, "<<": np.left_shift, ">>": np.right_shift,
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
    "&&": np.logical_and, "||": np.logical_or, "!": np.logical_not,
    "quotient": _truncated, "remainder": lambda a, b: a - b * _truncated(a, b),
    "floordiv": _floored, "floormod": lambda a, b: a - b * _floored(a, b),
}  # fmt: skip
