"""A tree in C++, with what it makes of query and key as kernels have them.

A lane's scores lie at queries and keys that differ by what the compiler knows: `Place` in mod_places.cuh. Sums of them
are compared, and become floats, at the cost of one instruction a score.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .expression import BOOL, COMPARE, FLOAT, INT, Node, written

_BEYOND = 2**24  # numbers from here on stay integers: differences of others have 32 bits


class _Text(NamedTuple):
    """An operation in C++; of integers also as a Place, and as a float that no integer is made for, or empty."""

    plain: str
    place: str = ""
    real: str = ""


def of_places(node: Node) -> str:
    """The C++ of a tree beside `q` and `k`, and `at_q` and `at_k`, which are these as Places."""
    return node.fold(_text).plain


def _by_number(node: Node, of: list[str]) -> str:
    """Of a float by a number that is known, what is less work; empty: there is nothing.

    What is made of places may be exact, so that a quotient is, too; a score has been rounded.
    """
    value = float(node.args[1].value) if len(node.args) == 2 and node.args[1].op == "number" else 0.0
    if node.op == "pow" and value == 2:
        return f"mods::squared(float({of[0]}))" if node.args[0].kind == INT else f"mods::squared({of[0]})"
    if node.op != "divide" or not 2**-100 < value < 2**100:
        return ""
    if math.frexp(value)[0] == 0.5 or node.args[0].uses("score"):
        return written(Node("*"), [of[0], f"{1 / value!r}f"])
    return f"mods::divide_by({of[0]}, {value!r}f, 1.f / {value!r}f)"


def _text(node: Node, of: list[_Text]) -> _Text:
    places, reals = [x.place for x in of], [x.real or x.plain for x in of]
    moves, plain = all(places) and any("at_" in x for x in places), written(node, [x.plain for x in of])
    if node.op == "load":
        return _Text(plain)
    if node.kind == FLOAT:
        if node.op == "*" and any(x.real and x.place for x in of):
            factor, moving = of if of[1].place else of[::-1]
            if "inf()" not in factor.plain:  # times the part that is 0 that would be NaN
                return _Text(f"times({factor.plain}, {moving.place})")
        return _Text(_by_number(node, reals) or written(node, reals))
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
