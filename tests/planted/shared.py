"""All planted bugs in one text of the headers, so that they share units: a launch's number says which one is alive.

An expression becomes ``(emu_planted(7) ? (changed) : (as it is))``, a statement ``if (emu_planted(7)) { changed } else
{ as it is }``. What fits neither has a text of its own.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from cupyflash.plan.variant import kernel_sources

from . import markers
from .markers import Edit, MarkerError

if TYPE_CHECKING:
    from .mutants import Bug

Edits = tuple[Edit, ...]
# Statements, lists in braces, types of their own, and what begins or ends among the arguments of a template.
_NO_EXPRESSION = re.compile(r"[#;]|^$|^{|^(if|for|while|else|const|constexpr|static|using)\b|\bInt<|^[^<]*>\(|<\w+$")
_NO_STATEMENT = re.compile(r"#|(else|const|constexpr|static|using|template|auto|int|float|__device__)\b")


class Planted(dict[str, str]):
    """Headers by name; which of their bugs is alive (0: none, or the only one), and the headers that it changes."""

    number = 0
    touched: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """What a bug makes of a piece of a header's text."""

    start: int
    end: int
    number: int
    new: str
    is_expression: bool = False

    def among(self, original: str) -> str:
        if self.is_expression:
            return f"(emu_planted({self.number}) ? ({self.new}) : ({original}))"
        rest = f" else {{ {original} }}" if original else ""
        return f"if (emu_planted({self.number})) {{ {self.new} }}{rest}"


def headers(edits: Edits) -> Planted:
    """For a launch with these edits: the shared text, if they stand there."""
    texts, numbers = shared()
    planted = Planted(texts if edits in numbers else markers.planted(edits))
    planted.number = numbers.get(edits, 0)
    planted.touched = frozenset(markers.files()[edit.marker] for edit in edits)
    return planted


def without_bugs() -> Planted:
    """The shared text, with none alive."""
    texts, _ = shared()
    planted = Planted(texts)
    planted.touched = frozenset(texts)
    return planted


@functools.cache
def bugs() -> list[Bug]:
    """All of them, from every module mutants*.py."""
    paths = sorted(Path(__file__).parent.glob("mutants*.py"))
    modules = [importlib.import_module(f"{__package__}.{path.stem}") for path in paths]
    groups = [group for module in modules for group in vars(module).values() if isinstance(group, tuple)]
    return list(dict.fromkeys(bug for group in groups for bug in group if hasattr(bug, "all_edits")))


@functools.cache
def shared() -> tuple[dict[str, str], dict[Edits, int]]:
    """The headers with all bugs that can share; and these, with their numbers."""
    sources, numbers = kernel_sources(), dict[Edits, int]()
    choices: dict[str, list[Choice]] = {}
    for edits in dict.fromkeys(bug.all_edits for bug in bugs()):
        files = [markers.files()[edit.marker] for edit in edits]
        number = len(numbers) + 1
        found = [choices_of(edit, sources[file], number) for edit, file in zip(edits, files, strict=True)]
        if all(found):
            numbers[edits] = number
            for file, some in zip(files, found, strict=True):
                choices.setdefault(file, []).extend(some)
    return {file: woven(sources[file], some) for file, some in choices.items()}, numbers


def choices_of(edit: Edit, text: str, number: int) -> list[Choice]:
    """Of an edit alone; none if it cannot share."""
    code = markers.without_comments(text)
    start, end = markers.span(text, edit.marker)
    new = ""
    if edit.old:
        old_start, old_end = markers.place(edit, text)
        old = code[old_start:old_end]
        depths = list(accumulate(old, _depth, initial=0))
        # Where it is several arguments, or ends them, the expression is all that they are arguments of.
        out = min(depths) < 0 or any(c == "," and not depth for c, depth in zip(old, depths, strict=False))
        first, last = _expression(code, start, old_start, out), _end(code, old_end, end, out + depths[-1])
        changed = code[first:old_start] + edit.new + code[old_end:last]
        constant = re.search(r"\b(constexpr|template)\b", code[start:first])
        if not constant and not any(_NO_EXPRESSION.search(x.strip()) for x in (changed, code[first:last])):
            return [Choice(first, last, number, " ".join(changed.split()), is_expression=True)]
        new = code[start:old_start] + edit.new + code[old_end:end]
    statement, rest = code[start:end], code[end:].lstrip()
    if not markers.is_whole(statement) or _NO_STATEMENT.match(statement) or rest.startswith("else") or "#" in statement:
        return []
    found = [Choice(start, end, number, " ".join(new.split()))]
    if edit.behind:
        at = markers.span(text, edit.behind)[1]
        found.append(Choice(at, at, number, " ".join(statement.split())))
    return found


def woven(text: str, choices: Sequence[Choice], start: int = 0, end: int | None = None) -> str:
    """A text in which one bug at a time can be alive: within a choice, what is as it was leaves the others theirs."""
    todo = sorted(choices, key=lambda choice: (choice.start, -choice.end))
    out, at = "", start
    while todo:
        first, *todo = todo
        inner = [choice for choice in todo if choice.start < first.end]
        if any(choice.end > first.end for choice in inner) or first.start < at:
            raise MarkerError(f"planted bugs overlap: {text[first.start : first.end]}")
        out += text[at : first.start] + first.among(woven(text, inner, first.start, first.end))
        at, todo = first.end, todo[len(inner) :]
    return out + text[at:end]


def _depth(depth: int, c: str) -> int:
    """Of brackets, behind one more character."""
    return depth + (c in "([{") - (c in ")]}")


def _expression(code: str, start: int, at: int, depth: int) -> int:
    """Where the expression begins that a place belongs to, so many brackets within it."""
    while at > start:
        c = code[at - 1]
        depth = -_depth(-depth, c)
        assigns = c == "=" and code[at] != "=" and code[at - 2] not in "=!<>"
        if depth < 0 or (depth == 0 and (c in ",;" or assigns)):
            break
        at -= 1
    at += len(code[at:]) - len(code[at:].lstrip())
    return at + len("return ") if code.startswith("return ", at) else at


def _end(code: str, at: int, end: int, depth: int) -> int:
    """And where it ends."""
    while at < end and (depth or code[at] not in ")]},;"):
        depth = _depth(depth, code[at])
        at += 1
    return at
