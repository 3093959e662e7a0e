"""Expressions of scores: trees of what a mod computes of a score and its place, typed when they are made.

`text` of a tree is C++ as `kernels_cu/attention/mods.cuh` knows it, and is also what `parse` reads: the one form in
which a mod is kept, compared and compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ..errors import ArgumentError

# Kinds of values.
BOOL, INT, FLOAT = "bool", "int", "float"
PLACES = ("b", "h", "q", "k")  # of a score: sequence, head of q, query, key
NAMES = {"score": FLOAT, **dict.fromkeys(PLACES, INT), "inf": FLOAT}

_ARITHMETIC = ("+", "-", "*")
_BITS = ("&", "|", "^")
COMPARE = ("<", "<=", ">", ">=", "==", "!=")
_LOGIC = ("&&", "||")
# Functions of numbers that are floats: name -> how many arguments.
OF_FLOATS = {
    "exp": 1, "exp2": 1, "log": 1, "log2": 1, "sqrt": 1, "rsqrt": 1, "tanh": 1, "sigmoid": 1, "sin": 1, "cos": 1,
    "floor": 1, "pow": 2, "divide": 2,
}  # fmt: skip
OF_INTEGERS = ("quotient", "remainder", "floordiv", "floormod", "<<", ">>")  # of two
OF_ANY = {"abs": 1, "min": 2, "max": 2}
# What a function costs, in those of a few dozen instructions; other operations are a sixteenth of that.
_COSTS = dict.fromkeys((*OF_FLOATS, *OF_INTEGERS[:4]), 1.0) | {"sin": 3.0, "cos": 3.0, "pow": 3.0}
FUNCTIONS = (*OF_FLOATS, "quotient", "remainder", "floordiv", "floormod", *OF_ANY)
INT_LIMIT = 2**31
SIZE_LIMIT = 4096  # of a tree: NVRTC takes seconds for so many, and the host some 30 ms a call
_LEAST, _MOST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))  # of normal numbers in fp32
T = TypeVar("T")


class Node:
    """An operation, its operands, and the kind of its value; never changed.

    Attributes:
        op: an operator or function; "name", "number" or "load", of an array.
        value: the number, the name, or the array's name.
        size: how many operations and values it consists of; those that are used twice count twice.
        cost: about how much code it is, in functions of a few dozen instructions.
    """

    __slots__ = ("args", "cost", "kind", "op", "size", "value")

    def __init__(self, op: str, args: tuple[Node, ...] = (), kind: str = FLOAT, value: str | float = "") -> None:
        self.op, self.args, self.kind, self.value = op, args, kind, value
        self.size, self.cost = 1, _COSTS.get(op, 1 / 16)
        for x in args:
            self.size += x.size
            self.cost += x.cost
        if self.size > SIZE_LIMIT:
            raise ArgumentError(
                f"expected at most {SIZE_LIMIT} operations and values, each counted wherever it is used, got "
                f"{self.size}; read what depends on places alone from mod_arrays"
            )

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Node) or self._own != other._own:
            return self is other
        return all(x._own == y._own for x, y in zip(self.nodes(), other.nodes(), strict=True))

    @property
    def _own(self) -> tuple[str, str, str | float, int, int]:
        return self.op, self.kind, self.value, len(self.args), self.size

    def __repr__(self) -> str:
        return self.text

    def nodes(self) -> list[Node]:
        """All that it consists of, operands before their operation. Without recursion: chains are long."""
        found, left = [], [self]
        while left:
            x = left.pop()
            found.append(x)
            left.extend(x.args)
        return found[::-1]

    def fold(self, value: Callable[[Node, list[T]], T]) -> T:
        """What `value` makes of it and of what it made of each operand."""
        made: list[T] = []
        for x in self.nodes():
            first = len(made) - len(x.args)
            made[first:] = [value(x, made[first:])]
        return made[0]

    @property
    def text(self) -> str:
        """In C++."""
        return self.seeded()

    def seeded(self, seed: Node | None = None) -> str:
        """The same, of dual numbers whose derivative is that by what `seed` reads, if it is given."""

        def of_node(node: Node, a: list[str]) -> str:
            text = written(node, a)
            return f"Dual({text}, 1.f)" if node.op == "load" and node == seed else text

        return self.fold(of_node)

    def uses(self, word: str) -> bool:
        """Whether it asks for the score, or for one of the places."""
        return any((x.op, x.value) == ("name", word) for x in self.nodes())


def written(node: Node, a: list[str]) -> str:
    """An operation in C++ on operands in C++."""
    if node.op == "number":
        return _number_text(node.value)  # type: ignore[arg-type]
    if node.op == "name":
        return "inf()" if node.value == "inf" else str(node.value)
    if node.op == "?":
        return f"({a[0]} ? {a[1]} : {a[2]})"
    if node.op in ("neg", "!", "~"):
        return f"({'-' if node.op == 'neg' else node.op}{a[0]})"
    if node.op == "load":
        return f"{node.value}({', '.join(a)})"
    if node.op in FUNCTIONS:
        return f"{node.op}({', '.join(a)})"
    return f"({a[0]} {node.op} {a[1]})"


def _number_text(value: float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.f"


def name(word: str) -> Node:
    """`score`, a place or inf."""
    return Node("name", (), NAMES[word], word)


def number(value: float) -> Node:
    """A constant: True, 1 or 1.0. What is beyond fp32 or too small for it is what a kernel would hold: inf, 0 or the
    nearest number.

    Raises:
        ArgumentError: it is NaN, or an integer beyond 32 bits.
    """
    if isinstance(value, bool):
        return Node("number", (), BOOL, value)
    if isinstance(value, int):
        if not -INT_LIMIT < value < INT_LIMIT:
            raise ArgumentError(f"expected an integer of 32 bits, got {value}")
        return Node("number", (), INT, value) if value >= 0 else apply("neg", number(-value))
    if math.isnan(value):
        raise ArgumentError("expected a number, got nan")
    if value < 0:
        return apply("neg", number(-value))
    if value and not _LEAST <= value <= _MOST:
        with np.errstate(over="ignore", under="ignore"):
            value = float(np.float32(value))
    return name("inf") if value == math.inf else Node("number", (), FLOAT, float(value))


def apply(op: str, *args: Node) -> Node:
    """An operation on values.

    Raises:
        ArgumentError: the operation does not take values of these kinds, or so many.
    """
    if op not in _RULES:
        raise ArgumentError(f"{op}: expected one of {', '.join(FUNCTIONS)}")
    count, kind = _RULES[op]
    if len(args) != count:
        raise ArgumentError(f"{op}: expected {count} values, got {len(args)}")
    return Node(op, args, kind(op, [x.kind for x in args]))


def _numbers(op: str, kinds: list[str]) -> str:
    """float if one is, else int."""
    return FLOAT if FLOAT in kinds else INT


def _integers(op: str, kinds: list[str]) -> str:
    if FLOAT in kinds:
        raise ArgumentError(f"{op}: expected integers, got a float")
    return INT


def _bits(op: str, kinds: list[str]) -> str:
    _integers(op, kinds)
    return BOOL if set(kinds) == {BOOL} else INT


def _choice(op: str, kinds: list[str]) -> str:
    return kinds[1] if kinds[1] == kinds[2] else _numbers(op, kinds[1:])


def _bool(op: str, kinds: list[str]) -> str:
    return BOOL


def _float(op: str, kinds: list[str]) -> str:
    return FLOAT


# Of each operation: how many values it takes, and of which kind is what it makes of kinds.
_RULES: dict[str, tuple[int, Callable[[str, list[str]], str]]] = {
    **dict.fromkeys(_ARITHMETIC, (2, _numbers)),
    **dict.fromkeys(OF_INTEGERS, (2, _integers)),
    **dict.fromkeys(_BITS, (2, _bits)),
    **dict.fromkeys((*COMPARE, *_LOGIC), (2, _bool)),
    "neg": (1, _numbers),
    "~": (1, _integers),
    "!": (1, _bool),
    "?": (3, _choice),
    **{op: (count, _numbers) for op, count in OF_ANY.items()},
    **{op: (count, _float) for op, count in OF_FLOATS.items()},
}


def load(array: str, dtype: str, dims: int, *indices: Node) -> Node:
    """An element of an array.

    Raises:
        ArgumentError: as many indices are not given as it has dimensions, or one is no integer.
    """
    if len(indices) != dims:
        raise ArgumentError(f"{array}: expected an index for each of its {dims} dimensions, got {len(indices)}")
    if any(x.kind == FLOAT for x in indices):
        raise ArgumentError(f"{array}: expected integers as indices, got a float")
    kind = BOOL if dtype == "bool" else INT if dtype.startswith("int") else FLOAT
    return Node("load", indices, kind, array)
