"""C++ expressions as trees: the operators of C, ?:, calls, and array(i, j) or array[i][j] for an element."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import ArgumentError
from .expression import FLOAT, FUNCTIONS, NAMES, Node, apply, load, name, number

Arrays = Mapping[str, tuple[str, int]]  # name -> dtype, dimensions

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?)|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<op><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:()\[\],]))"
)
# From what binds least to what binds most, as in C.
_BINARY = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"),
           ("*", "/", "%"))  # fmt: skip
_SPELLED = {"fabs": "abs", "fabsf": "abs", "fmin": "min", "fminf": "min", "fmax": "max", "fmaxf": "max"} | {
    f"{f}f": f for f in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "pow", "floor")
}
_OTHERS = {"kv": "k", "q_idx": "q", "kv_idx": "k"}  # as FlexAttention names them


def parse(text: str, what: str, arrays: Arrays) -> Node:
    """The tree of an expression.

    Args:
        what: the argument that it is, for messages.
        arrays: what it may read.

    Raises:
        ArgumentError: it is no expression of these names; the message shows where.
    """
    return _Parser(text, what, arrays).whole()


class _Parser:
    def __init__(self, text: str, what: str, arrays: Arrays) -> None:
        self.text, self.what, self.arrays = text, what, arrays
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, where it begins
        at = 0
        while at < len(text.rstrip()):
            found = _TOKEN.match(text, at)
            if not found:
                raise self.wrong("expected a C++ expression", at + len(text[at:]) - len(text[at:].lstrip()))
            kind = str(found.lastgroup)
            self.tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        self.tokens.append(("end", "", len(text.rstrip())))
        self.i = 0

    def wrong(self, message: str, at: int | None = None) -> ArgumentError:
        """With the line, and a mark below the place."""
        at = self.tokens[self.i][2] if at is None else at
        start = self.text.rfind("\n", 0, at) + 1
        line = self.text[start:].split("\n")[0]
        return ArgumentError(f"{self.what}: {message}\n    {line}\n    {' ' * (at - start)}^")

    def take(self, *wanted: str) -> str:
        """The next token if it is one of these operators, else ""."""
        kind, text, _ = self.tokens[self.i]
        if kind == "op" and text in wanted:
            self.i += 1
            return text
        return ""

    def expect(self, wanted: str) -> None:
        if not self.take(wanted):
            raise self.wrong(f"expected {wanted!r}, got {self.tokens[self.i][1] or 'the end'!r}")

    def made(self, at: int, op: str, *args: Node) -> Node:
        try:
            return apply(op, *args)
        except ArgumentError as e:
            raise self.wrong(str(e), at) from None

    def whole(self) -> Node:
        found = self.choice()
        if self.tokens[self.i][0] != "end":
            raise self.wrong(f"expected an operator or the end, got {self.tokens[self.i][1]!r}")
        return found

    def choice(self) -> Node:
        condition, at = self.binary(0), self.tokens[self.i][2]
        if not self.take("?"):
            return condition
        yes = self.choice()
        self.expect(":")
        return self.made(at, "?", condition, yes, self.choice())

    def binary(self, level: int) -> Node:
        if level == len(_BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while True:
            at = self.tokens[self.i][2]
            op = self.take(*_BINARY[level])
            if not op:
                return left
            right = self.binary(level + 1)
            if op == "/":
                op = "divide" if FLOAT in (left.kind, right.kind) else "quotient"
            left = self.made(at, "remainder" if op == "%" else op, left, right)

    def unary(self) -> Node:
        at = self.tokens[self.i][2]
        op = self.take("-", "+", "!", "~")
        if not op:
            return self.primary()
        operand = self.unary()
        return operand if op == "+" else self.made(at, "neg" if op == "-" else op, operand)

    def primary(self) -> Node:
        kind, text, at = self.tokens[self.i]
        if self.take("("):
            found = self.choice()
            self.expect(")")
            return found
        self.i += 1
        if kind == "number":
            is_int = text.isdigit()
            try:
                return number(int(text) if is_int else float(text.rstrip("fF")))
            except ArgumentError as e:
                raise self.wrong(str(e), at) from None
        if kind == "word":
            return self.word(text, at)
        self.i -= 1
        raise self.wrong(f"expected a value, got {text or 'the end'!r}")

    def word(self, text: str, at: int) -> Node:
        if text in self.arrays:
            try:
                return load(text, *self.arrays[text], *self.indices())
            except ArgumentError as e:
                raise e if "\n" in str(e) else self.wrong(str(e), at) from None
        text = _OTHERS.get(text, text)
        if text in ("true", "false"):
            return number(text == "true")
        if text in NAMES:
            if text == "inf" and self.take("("):
                self.expect(")")
            return name(text)
        function = _SPELLED.get(text, text)
        if function in FUNCTIONS and self.tokens[self.i][:2] == ("op", "("):
            return self.made(at, function, *self.indices())
        known = ", ".join((*NAMES, *self.arrays, *FUNCTIONS))
        raise self.wrong(f"{text!r}: expected one of {known}; name arrays by mod_arrays", at)

    def indices(self) -> list[Node]:
        """(i, j), [i, j] or [i][j]."""
        if self.take("("):
            return self.listed(")")
        found = []
        while self.take("["):
            found += self.listed("]")
        return found

    def listed(self, end: str) -> list[Node]:
        found = [self.choice()]
        while self.take(","):
            found.append(self.choice())
        self.expect(end)
        return found
