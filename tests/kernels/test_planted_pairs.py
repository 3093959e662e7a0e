"""A sample of the bugs that show only where two axes meet; all of them: ``python -m tests.planted_pairs``."""

from __future__ import annotations

import pytest

from tests.fuzz import covering
from tests.planted.mutants_pairs import PAIRS, THRESHOLD, PairBug
from tests.planted_pairs import caught

SAMPLE = (*PAIRS[::9], *THRESHOLD)


@pytest.mark.parametrize("bug", PAIRS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_bug_has_its_case(bug: PairBug) -> None:
    assert bug.case in covering.cases()


@pytest.mark.needs("g++")
@pytest.mark.parametrize("bug", SAMPLE, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_caught(bug: PairBug) -> None:
    assert caught(bug, covering.cases()[bug.case])
