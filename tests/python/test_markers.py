"""Markers of the kernels and planted bugs belong together: every bug finds its statements, every marker has its bug."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from emulator import markers, remove_sync
from emulator.markers import Edit, MarkerError, apply, change, postpone, without
from emulator.mutants import Bug

from cupyflash.plan.variant import kernel_sources

EMULATOR = Path(__file__).resolve().parents[1] / "emulator"


def bugs() -> list[Bug]:
    """All of them, from every module tests/emulator/mutants*.py."""
    modules = [importlib.import_module(f"emulator.{path.stem}") for path in sorted(EMULATOR.glob("mutants*.py"))]
    groups = [group for module in modules for group in vars(module).values() if isinstance(group, tuple)]
    return list(dict.fromkeys(bug for group in groups for bug in group if isinstance(bug, Bug)))


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name.replace(" ", "-"))
def test_bug_can_be_planted(bug: Bug) -> None:
    texts = kernel_sources()
    changed = bug.headers()
    assert changed
    for file, text in changed.items():
        assert text != texts[file]
        assert text.count("\n") == texts[file].count("\n"), "messages would name other lines"


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


def test_bug_without_its_marker() -> None:
    with pytest.raises(MarkerError, match="no header of kernels_cu has a marker @nowhere"):
        Bug("gone", without("nowhere"), "dense-d64").headers()
