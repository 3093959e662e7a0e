"""C++ expressions as trees: the operators of C, ?:, calls, and array(i, j) or array[i][j] for an element."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import ArgumentError
from .expression import FLOAT, FUNCTIONS, NAMES, Node, apply, load, name, number
from .functions import cast

Arrays = Mapping[str, tuple[str, int]]  # name -> dtype, dimensions

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIGITS = 20  # of an integer; Python refuses to read one of thousands
_KIND = "float|double|int|bool"
_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?)"
    rf"|(?P<cast>\(\s*(?:{_KIND})\s*\)|static_cast\s*<\s*(?:{_KIND})\s*>(?=\s*\())"
    r"|(?:std::)?(?P<word>[A-Za-z_]\w*)|(?P<op><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:()\[\],]))"
)
# From what binds least to what binds most, as in C. A choice binds less than all; what stands before a value, more.
_BINARY = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"),
           ("*", "/", "%"))  # fmt: skip
_BINDS = {op: i for i, ops in enumerate(_BINARY) for op in ops}
_OPEN, _CHOICE, _BEFORE = -2, -1, len(_BINARY)
_ENDS = {"(": ")", "[": "]", "?": ":"}
_SPELLED = {"fabs": "abs", "fabsf": "abs", "fmin": "min", "fminf": "min", "fmax": "max", "fmaxf": "max"} | {
    f"{f}f": f for f in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "pow", "floor")
}
_CASTS = tuple(_KIND.split("|"))
_OTHERS = {"kv": "k", "q_idx": "q", "kv_idx": "k", "INFINITY": "inf"}  # as FlexAttention and C name them


def taken(label: str) -> ArgumentError:
    """Of an array whose name stands for something else."""
    return ArgumentError(f"mod_arrays: expected names of their own, and {label!r} is taken; rename it")


def parse(text: str, what: str, arrays: Arrays) -> Node:
    """The tree of an expression.

    Args:
        what: the argument that it is, for messages.
        arrays: what it may read.

    Raises:
        ArgumentError: it is no expression of these names; the message shows where.
    """
    return _Parser(text, what, arrays).whole()


class _Open(NamedTuple):
    """What waits for values behind it: an operator, or something that is to be closed.

    Attributes:
        what: the operator, ":" of a choice, or "(", "[" and "?", which wait for their ends.
        binds: how much; what waits for an end, less than all.
        takes: how many values an operator takes; for what is closed, how many there were before its own.
        name: the function or the array whose list was opened; "" of mere parentheses.
    """

    what: str
    at: int
    binds: int
    takes: int
    name: str = ""


class _Parser:
    """By two stacks, one of values and one of what waits for more; without recursion, since chains are long."""

    def __init__(self, text: str, what: str, arrays: Arrays) -> None:
        self.text, self.what, self.arrays = text, what, arrays
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, where it begins
        text = _COMMENT.sub(lambda found: re.sub(r"\S", " ", found[0]), text)  # places stay what they are
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if not found:
                raise self.wrong("expected a C++ expression", at + len(text[at:]) - len(text[at:].lstrip()))
            kind = str(found.lastgroup)
            self.tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        self.tokens.append(("end", "", end))
        self.i = 0
        self.values: list[Node] = []
        self.open: list[_Open] = []

    def wrong(self, message: str, at: int | None = None) -> ArgumentError:
        """With the line, and a mark below the place."""
        at = self.tokens[self.i][2] if at is None else at
        start = self.text.rfind("\n", 0, at) + 1
        line = self.text[start:].split("\n")[0]
        return ArgumentError(f"{self.what}: {message}\n    {line}\n    {' ' * (at - start)}^")

    def expected(self, wanted: str) -> ArgumentError:
        return self.wrong(f"expected {wanted}, got {self.tokens[self.i][1] or 'the end'!r}")

    def make(self, at: int, make: Callable[..., Node], *args: Any) -> None:
        """A new value; what is wrong with it is wrong at this place."""
        try:
            self.values.append(make(*args))
        except ArgumentError as e:
            raise self.wrong(str(e), at) from None

    def whole(self) -> Node:
        self.value()
        while self.tokens[self.i][0] != "end":
            if self.goes_on():
                self.value()
        self.reduce(_CHOICE)
        if self.open:
            raise self.expected(repr(_ENDS[self.open[-1].what]))
        return self.values[0]

    def value(self) -> None:
        """One value, and what stands before it."""
        waits = True
        while waits:
            kind, text, at = self.tokens[self.i]
            if kind not in ("number", "word", "cast") and text not in ("-", "+", "!", "~", "("):
                raise self.expected("a value")
            self.i += 1
            waits = kind in ("op", "cast") or (kind == "word" and self.opens(text, at))
            if text == "(":
                self.open.append(_Open(text, at, _OPEN, len(self.values)))
            elif kind != "number" and kind != "word":
                self.open.append(_Open(text, at, _BEFORE, 1))
            elif kind == "number":
                self.make(at, _number, text)
            elif not waits:
                self.word(text, at)

    def opens(self, text: str, at: int) -> bool:
        """Whether a name stands before a list: of indices, or of arguments."""
        bracket, label = self.tokens[self.i][1], text if text in self.arrays else _SPELLED.get(text, text)
        found = bracket in ("(", "[") if text in self.arrays else bracket == "(" and label in (*FUNCTIONS, *_CASTS)
        if found:
            self.i += 1
            self.open.append(_Open(bracket, at, _OPEN, len(self.values), label))
        return found

    def word(self, text: str, at: int) -> None:
        """The value of a name alone."""
        if text in self.arrays:
            if text in NAMES:  # which of both does it mean?
                raise taken(text)
            return self.make(at, load, text, *self.arrays[text])
        text = _OTHERS.get(text, text)
        if text in ("true", "false"):
            return self.make(at, number, text == "true")
        if text not in NAMES:
            known = ", ".join((*NAMES, *self.arrays, *FUNCTIONS))
            raise self.wrong(f"{text!r}: expected one of {known}; name arrays by mod_arrays", at)
        if text == "inf" and self.tokens[self.i][1] == "(":
            self.i += 1
            if self.tokens[self.i][1] != ")":
                raise self.expected("')'")
            self.i += 1
        return self.make(at, name, text)

    def goes_on(self) -> bool:
        """What stands behind a value; whether another one is to follow."""
        _, text, at = self.tokens[self.i]
        if text in _BINDS:
            self.reduce(_BINDS[text])
            self.open.append(_Open(text, at, _BINDS[text], 2))
        elif text == "?":
            self.reduce(_CHOICE + 1)
            self.open.append(_Open(text, at, _OPEN, len(self.values)))
        else:
            self.reduce(_CHOICE)
            last = self.open[-1] if self.open else None
            wanted = _ENDS[last.what] if last else ""
            if last is None or (text != wanted and not (text == "," and last.name)):
                raise self.expected(repr(wanted) if last else "an operator or the end")
            if text == ":":
                self.open[-1] = _Open(text, last.at, _CHOICE, 3)
            elif text != ",":
                self.i += 1
                return self.close(last)
        self.i += 1
        return True

    def close(self, list_: _Open) -> bool:
        """The value of what was in brackets; whether more indices are to follow."""
        if list_.what == "[" and self.tokens[self.i][1] == "[":
            self.i += 1
            return True
        self.open.pop()
        if list_.name:
            args, self.values = self.values[list_.takes :], self.values[: list_.takes]
            of_array = (list_.name, *self.arrays[list_.name]) if list_.name in self.arrays else ()
            operation = (_cast, list_.name) if list_.name in _CASTS else (apply, list_.name)
            self.make(list_.at, *((load, *of_array) if of_array else operation), *args)
        return False

    def reduce(self, binds: int) -> None:
        """Do what binds at least so much."""
        while self.open and self.open[-1].binds >= binds:
            x = self.open.pop()
            args = self.values[-x.takes :]
            del self.values[-x.takes :]
            self.make(x.at, _applied, x, args)


def _applied(x: _Open, args: list[Node]) -> Node:
    """An operator of C, or a cast, on values."""
    if x.what not in _BINDS and (to := re.search(_KIND, x.what)):
        return _cast(to[0], *args)
    if x.what == "+" and x.takes == 1:
        return args[0]
    if x.what == "-" and x.takes == 1:
        return apply("neg", *args)
    if x.what == "/":
        return apply("divide" if FLOAT in (args[0].kind, args[1].kind) else "quotient", *args)
    return apply({":": "?", "%": "remainder"}.get(x.what, x.what), *args)


def _cast(to: str, *args: Node) -> Node:
    """A value as another kind of number; no float becomes an integer."""
    if len(args) != 1:
        raise ArgumentError(f"{to}: expected 1 value, got {len(args)}")
    is_whole = to in ("float", "double") and args[0].kind != FLOAT
    return apply("+", args[0], number(0.0)) if is_whole else cast(args[0], to, "floordiv() or /")


def _number(text: str) -> Node:
    """A constant as C writes it."""
    if text[:2] in ("0x", "0X"):
        return number(int(text, 16))
    if not text.isdigit():
        return number(float(text.rstrip("fF")))
    if len(text) > _DIGITS:
        raise ArgumentError(f"expected an integer of 32 bits, got one of {len(text)} digits")
    if text != "0" and text[0] == "0":
        raise ArgumentError(f"expected a number, and {text} is octal to C++; leave the first 0 out")
    return number(int(text))
