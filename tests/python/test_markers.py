"""Markers of the kernels and planted bugs belong together: every bug finds its statements, every marker has its bug."""

from __future__ import annotations

import re

import pytest

from cupyflash.plan.variant import kernel_sources
from tests.planted import markers, remove_sync
from tests.planted.markers import Edit, MarkerError, apply, change, postpone, without
from tests.planted.mutants import Bug
from tests.planted.shared import bugs, choices_of, shared, woven


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name.replace(" ", "-"))
def test_bug_can_be_planted(bug: Bug) -> None:
    texts = kernel_sources()
    changed = markers.planted(bug.all_edits)
    assert changed
    for file, text in changed.items():
        assert text != texts[file]
        assert text.count("\n") == texts[file].count("\n"), "messages would name other lines"


_CHOICE = re.compile(r"(?P<expression>\()emu_planted\((\d+)\) \? \(|if \(emu_planted\((\d+)\)\) \{")


def alive(text: str, number: int) -> str:
    """What the compiler would see if a bug of the shared text were all that stands there; without comments."""
    text, at = markers.without_comments(text), 0
    while match := _CHOICE.search(text, at):
        new = _inside(text, match.end())
        behind = match.end() + len(new) + 1
        between = re.compile(r" : \(" if match["expression"] else r" else \{").match(text, behind)
        original = _inside(text, between.end()) if between else ""
        end = between.end() + len(original) + 1 + bool(match["expression"]) if between else behind
        chosen = new if int(match[2] or match[3]) == number else original
        at = match.start()
        text = text[:at] + chosen + text[end:]
    return text


def _inside(text: str, start: int) -> str:
    """Up to the bracket that closes the one before, of a text without comments."""
    depth, at = 1, start
    while depth:
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return text[start : at - 1]


def _tokens(text: str) -> str:
    return "".join(markers.without_comments(text).split())


def test_shared_text_is_the_shipped_one_without_bugs() -> None:
    texts, _ = shared()
    for file, text in texts.items():
        assert text.count("\n") == kernel_sources()[file].count("\n"), "messages would name other lines"
        assert _tokens(alive(text, 0)) == _tokens(kernel_sources()[file])


def test_each_bug_of_the_shared_text_is_the_bug_itself() -> None:
    texts, numbers = shared()
    assert len(numbers) > 500
    for edits, number in numbers.items():
        own = markers.planted(edits)
        assert {file for file, text in texts.items() if f"emu_planted({number})" in text} == set(own)
        for file, text in own.items():
            assert _tokens(alive(texts[file], number)) == _tokens(text), edits


def test_bugs_have_names_of_their_own() -> None:
    names = [bug.name for bug in bugs()]
    assert sorted(names) == sorted(set(names))


def test_every_marker_has_a_bug() -> None:
    found = set(markers.find(kernel_sources()))
    wanted = {marker for bug in bugs() for marker in bug.markers} | set(remove_sync.EXPLAINED)
    assert found - wanted == set(), "nothing plants a bug there: plant one, or take the marker away"
    assert wanted - found == set(), "no header has these markers"


def test_every_marker_stands_once() -> None:
    assert {name: at for name, at in markers.find(kernel_sources()).items() if len(at) > 1} == {}


def test_comments_say_at_for_markers_only() -> None:
    for file, text in kernel_sources().items():
        for comment in markers.comments(text):
            assert "@" not in markers.NAME.sub("", comment[1]), f"{file}: {comment[1]}"
            assert "bug" not in comment[1], f"{file}: {comment[1]}"


CODE = """\
    // Waits. @first
    wait(a,
         b);
    use(a);  // it is here @second
    if (x)  // @third
        #pragma unroll
    for (;;) {  // @fourth
"""


@pytest.mark.parametrize(
    ("edit", "line", "wanted"),
    [
        (without("second"), 3, "             // it is here @second"),
        (change("first", "a, b", "b"), 1, "    wait(b"),
        (change("second", "use ( a )", "use(b)"), 3, "    use(b);  // it is here @second"),
        (postpone("first", behind="second"), 3, "    use(a); wait(a, b);  // it is here @second"),
        (change("third", "x", "y"), 4, "    if (y)  // @third"),
    ],
)
def test_edit(edit: Edit, line: int, wanted: str) -> None:
    assert apply(edit, CODE).split("\n")[line] == wanted


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("fourth"), "a part of a block"),
        (without("fifth"), "@fifth stands 0 times"),
        (change("second", "b", "a"), "'b' stands 0 times in the statement of @second"),
        (change("first", "us", "a"), "'us' stands 0 times"),
    ],
)
def test_edit_that_finds_nothing(edit: Edit, message: str) -> None:
    with pytest.raises(MarkerError, match=message):
        apply(edit, CODE)


@pytest.mark.parametrize(
    ("line", "old", "wanted"),
    [
        ("x = f(a + b, c);", "b", "x = f((emu_planted(1) ? (a + NEW) : (a + b)), c);"),
        ("x = f(a, b);", "a, b)", "x = (emu_planted(1) ? (f(NEW) : (f(a, b)));"),
        ("const int x = a;", "a", "const int x = (emu_planted(1) ? (NEW) : (a));"),
        ("if (a <= b) c();", "b", "if ((emu_planted(1) ? (a <= NEW) : (a <= b))) c();"),
        ("if (a) c();", "if (a)", "if (emu_planted(1)) { NEW c(); } else { if (a) c(); }"),
        ("f<2>(Int<a>{});", "a", "if (emu_planted(1)) { f<2>(Int<NEW>{}); } else { f<2>(Int<a>{}); }"),
        ("if constexpr (a) b;", "a", "if (emu_planted(1)) { if constexpr (NEW) b; } else { if constexpr (a) b; }"),
        ("static constexpr int a = b;", "b", None),
        ("else if constexpr (a) f();", "a", None),
        ("const auto [a, b] = f<c, d>();", "d", None),
    ],
)  # fmt: skip
def test_choice(line: str, old: str, wanted: str | None) -> None:
    text = f"    {line}  // @first\n    next();\n"
    found = choices_of(change("first", old, "NEW"), text, 1)
    assert (woven(text, found) if found else None) == (wanted and text.replace(line, wanted))


def test_bug_without_its_marker() -> None:
    with pytest.raises(MarkerError, match="no header of kernels_cu has a marker @nowhere"):
        Bug("gone", without("nowhere"), "dense-d64").headers()
