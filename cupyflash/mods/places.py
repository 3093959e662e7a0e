"""A tree in C++, with what it makes of query and key as kernels have them.

A lane's scores lie at queries and keys that differ by what the compiler knows: `Place` in mod_places.cuh. Sums of them
are compared, and become floats, at the cost of one instruction a score.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .expression import BOOL, COMPARE, FLOAT, Node, written

_BEYOND = 2**24  # numbers from here on stay integers: differences of others have 32 bits


class _Text(NamedTuple):
    """An operation in C++; of integers also as a Place, and as a float that no integer is made for, or empty.

    Attributes:
        rounded: the score is a part of its value, which so has been rounded; others may be exact.
    """

    plain: str
    place: str = ""
    real: str = ""
    rounded: bool = False


def of_places(node: Node) -> str:
    """The C++ of a tree beside `q` and `k`, and `at_q` and `at_k`, which are these as Places."""
    are_terms = iter(_are_terms(node))
    return node.fold(lambda x, of: _text(x, of, next(are_terms))._replace(rounded=_is_rounded(x, of))).plain


def _are_terms(node: Node) -> list[bool]:
    """Of each of its `nodes`, in their order, whether it is added to the value as it is."""
    found, left = [], [(node, node.kind == FLOAT)]
    while left:
        x, is_term = left.pop()
        found.append(is_term)
        sums = is_term and x.op in ("+", "-", "neg", "?")
        left += [(y, sums and y.kind == FLOAT and (i > 0 or x.op != "?")) for i, y in enumerate(x.args)]
    return found[::-1]


def _is_small(node: Node) -> bool:
    """A number of at most 1 that is known."""
    number = node.args[0] if node.op == "neg" else node
    return number.op == "number" and abs(float(number.value)) <= 1


def _is_rounded(node: Node, of: list[_Text]) -> bool:
    """Not of whole numbers, nor by the condition of a choice."""
    if node.kind != FLOAT or node.op == "floor":
        return False
    return node.value == "score" or any(x.rounded for x in of[node.op == "?" :])


def _by_number(node: Node, left: str, is_rounded: bool) -> str:
    """A power or a quotient by a number that is known: what is less work. Empty: it is none, or nothing is."""
    if node.op not in ("pow", "divide"):
        return ""
    number, sign = (node.args[1].args[0], -1) if node.args[1].op == "neg" else (node.args[1], 1)
    value = sign * float(number.value) if number.op == "number" else 0.0
    if node.op == "pow":
        value = float(np.float32(value)) if abs(value) < 20 else 0.0
        if value == int(value):
            return f"mods::whole_power<{int(value)}>({left})" if 1 < value < 17 else ""
        return f"mods::known_power({left}, {value!r}f)" if 2**-10 < abs(value) < 4 else ""
    if not 2**-100 < abs(value) < 2**100:
        return ""
    if is_rounded or abs(math.frexp(value)[0]) == 0.5:
        return written(Node("*"), [left, f"{1 / value!r}f"])
    return f"mods::divide_by({left}, {value!r}f, 1.f / {value!r}f)"


def _text(node: Node, of: list[_Text], is_term: bool) -> _Text:
    places, reals = [x.place for x in of], [x.real or x.plain for x in of]
    moves, plain = all(places) and any("at_" in x for x in places), written(node, [x.plain for x in of])
    if node.op == "load":
        return _Text(plain)
    if node.kind == FLOAT:
        if node.op == "*" and is_term and any(x.real and x.place for x in of):
            at = 0 if of[1].place else 1
            if _is_small(node.args[at]):
                return _Text(f"times({of[at].plain}, {of[1 - at].place})")
        return _Text((of and _by_number(node, reals[0], of[0].rounded)) or written(node, reals))
    if node.kind == BOOL:
        return _Text(written(node, places) if moves and node.op in COMPARE else plain)
    if node.op == "name" and node.value in ("q", "k"):
        return _Text(plain, f"at_{node.value}", f"real(at_{node.value})")
    if node.op == "number" and node.value < _BEYOND:  # type: ignore[operator]
        return _Text(plain, f"Place({plain})")
    if node.op in ("+", "-", "neg") and all(places):
        place = written(node, places)
        return _Text(plain, place, f"real({place})" if moves else "")
    if node.op in ("abs", "min", "max") and any(x.real for x in of):
        return _Text(plain, real=written(node, reals))
    return _Text(plain)
