"""What the emulator and the CPU path leave out of the table of cases is judged elsewhere."""

from __future__ import annotations

import pytest

from cupyflash.check.cases import CASES
from cupyflash.problem import DTYPES
from tests.emulator.cases import TABLE
from tests.table_turns import dtypes, families, traits
from tests.turns import in_turn


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_all_that_cases_have_is_judged_in_both_families(family: str) -> None:
    able = set().union(*(traits(case, family) for case in TABLE.values()))
    judged = set().union(*(traits(TABLE[name], family) for name, of in families().items() if family in of))
    assert {"forward", "backward"} == {which for which, _, _ in able}
    assert judged == able


def test_all_cases_are_run() -> None:
    assert set(families()) == set(TABLE)
    assert all(families().values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_that_cases_have_is_judged_in_all_dtypes_on_the_cpu(dtype: str) -> None:
    able = set().union(*(traits(case, "sm80") for case in CASES))
    assert set().union(*(traits(case, "sm80") for case in CASES if dtype in dtypes()[case.name])) == able
    assert set(dtypes()) == {case.name for case in CASES}
    assert all(dtypes().values())


def test_spare_cases_are_run_with_thorough_alone() -> None:
    parameters = in_turn(["a", "b", "c"], [(0,), (1,)], every=["b"], spare=["a"])
    run = [p.values for p in parameters if not p.marks]
    assert run == [("b", 0), ("b", 1), ("c", 1)]
