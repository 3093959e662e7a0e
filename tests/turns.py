"""Cases that are run in one of several ways each, in turn: all ways of all cases would take an hour."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest


def in_turn(
    cases: Iterable[str], ways: Sequence[tuple[Any, ...]], every: Container[str] = (), spare: Container[str] = ()
) -> list[Any]:
    """Parameters (case, *way): one way of each case is run always, the others with --thorough.

    Two neighbours have the same way: what a test takes in turn from case to case meets all ways.

    Args:
        every: cases that are run in all ways.
        spare: cases that are run with --thorough alone.
    """

    def is_run(case: str, i: int, j: int) -> bool:
        return case in every or (case not in spare and j == i // 2 % len(ways))

    return [
        pytest.param(case, *way, marks=() if is_run(case, i, j) else pytest.mark.thorough)
        for i, case in enumerate(cases)
        for j, way in enumerate(ways)
    ]
