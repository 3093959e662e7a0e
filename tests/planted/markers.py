"""Markers in the kernels, and edits of the statements that they mark.

A marker is ``@name`` in a comment of a header: a name for what the line guarantees. It marks the statement of its line,
or the one below if the line is a comment only. A planted bug names markers and what becomes of their statements, so it
outlives any rework of a kernel that keeps the guarantee.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cupyflash.plan.variant import kernel_sources

NAME = re.compile(r"@([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])")
_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|(//[^\n]*)')


class MarkerError(ValueError):
    """A marker or an expression that is not where an edit looks for it."""


@dataclass(frozen=True)
class Edit:
    """What becomes of a marked statement. Made by `without`, `change` and `postpone`."""

    marker: str
    old: str = ""  # "": the whole statement
    new: str = ""
    behind: str = ""  # another marker, behind whose statement the whole one goes

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.marker, self.behind) if self.behind else (self.marker,)


def without(marker: str) -> Edit:
    """The statement is removed."""
    return Edit(marker)


def change(marker: str, old: str, new: str) -> Edit:
    """In the statement `new` stands for `old`, which it has once; space between tokens does not count."""
    return Edit(marker, old, new)


def postpone(marker: str, behind: str) -> Edit:
    """The statement comes only after that of another marker."""
    return Edit(marker, behind=behind)


def comments(text: str) -> list[re.Match[str]]:
    """The comments of a header, without strings that look like one; group 1."""
    return [match for match in _COMMENT.finditer(text) if match[1]]


def find(sources: Mapping[str, str]) -> dict[str, list[tuple[str, int]]]:
    """Each marker, and all the places where it stands: header and offset."""
    places: dict[str, list[tuple[str, int]]] = {}
    for file, text in sources.items():
        for comment in comments(text):
            for name in NAME.findall(comment[1]):
                places.setdefault(name, []).append((file, comment.start()))
    return places


@functools.cache
def files() -> dict[str, str]:
    """Each marker's header."""
    return {name: places[0][0] for name, places in find(kernel_sources()).items()}


def planted(edits: tuple[Edit, ...]) -> dict[str, str]:
    """The headers that edits change, with their new texts."""
    sources = kernel_sources()
    changed: dict[str, str] = {}
    for edit in edits:
        if edit.marker not in files():
            raise MarkerError(f"no header of kernels_cu has a marker @{edit.marker}")
        file = files()[edit.marker]
        changed[file] = apply(edit, changed.get(file, sources[file]))
    return changed


def apply(edit: Edit, text: str) -> str:
    """A header's text with an edit."""
    code = without_comments(text)
    start, end = place(edit, text)
    if edit.old:
        lines = code.count("\n", start, end) - edit.new.count("\n")  # they keep their numbers
        return text[:start] + edit.new + "\n" * lines + text[end:]
    statement = code[start:end]
    if not is_whole(statement):
        raise MarkerError(f"@{edit.marker} marks a part of a block: its whole statement cannot be taken away")
    # Lines and comments stay.
    rest = "".join(" " if c.strip() else t for c, t in zip(statement, text[start:end], strict=True))
    text = text[:start] + rest + text[end:]
    if edit.behind:
        at = span(text, edit.behind)[1]
        text = text[:at] + " " + " ".join(statement.split()) + text[at:]
    return text


def place(edit: Edit, text: str) -> tuple[int, int]:
    """Where the text stands that an edit replaces."""
    start, end = span(text, edit.marker)
    if not edit.old:
        return start, end
    found = list(_pattern(edit.old).finditer(without_comments(text), start, end))
    if len(found) != 1:
        raise MarkerError(f"{edit.old!r} stands {len(found)} times in the statement of @{edit.marker}")
    return found[0].span()


def is_whole(statement: str) -> bool:
    """Whether it is no part of a block."""
    return statement.count("{") == statement.count("}") and statement.rstrip().endswith((";", "}"))


def span(text: str, marker: str) -> tuple[int, int]:
    """Where the statement of a marker begins and ends, without the comments around it."""
    places = find({"": text}).get(marker, [])
    if len(places) != 1:
        raise MarkerError(f"@{marker} stands {len(places)} times, not once")
    lines = without_comments(text).split("\n")
    first = text.count("\n", 0, places[0][1])
    while not lines[first].strip() or lines[first].lstrip().startswith("#"):
        first += 1
    last = first
    while _goes_on(lines[first - 1]):
        first -= 1
    while _goes_on(lines[last]):
        last += 1
    start = sum(len(line) + 1 for line in lines[:first])
    indented = len(lines[first]) - len(lines[first].lstrip())
    return start + indented, start + len("\n".join(lines[first : last + 1]).rstrip())


def without_comments(text: str) -> str:
    """Spaces for comments: offsets stay."""
    for comment in comments(text):
        text = text[: comment.start()] + " " * len(comment[0]) + text[comment.end() :]
    return text


def _pattern(expression: str) -> re.Pattern[str]:
    """Its tokens, whatever space a formatter puts between them."""
    tokens = re.findall(r"\w+|[^\w\s]", expression)
    words = [rf"\b{token}\b" if re.match(r"\w", token) else re.escape(token) for token in tokens]
    return re.compile(r"\s*".join(words))


def _goes_on(line: str) -> bool:
    """Whether the next line belongs to the statement of this one."""
    line = line.strip()
    return bool(line) and line[0] != "#" and line[-1] not in ";{}" and line not in ("public:", "private:")
