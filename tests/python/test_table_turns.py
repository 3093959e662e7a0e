"""What the emulator and the CPU path leave out of the table of cases is judged elsewhere."""

from __future__ import annotations

import dataclasses

import pytest

from cupyflash.check.cases import CASES, Case
from cupyflash.problem import DTYPES
from tests import table_turns
from tests.emulator.attention import EXTRA
from tests.emulator.cases import TABLE
from tests.table_turns import dtypes, families, pairs, taken_in_turn, traits
from tests.turns import in_turn


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_all_that_cases_have_is_judged_in_both_families(family: str) -> None:
    able = set().union(*(traits(case, family) for case in TABLE.values()))
    judged = set().union(*(traits(TABLE[name], family) for name, of in families().items() if family in of))
    assert {"forward", "backward"} == {which for which, _, _ in able}
    assert judged == able


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_what_is_left_out_shows_no_two_traits_that_others_do_not_show(family: str) -> None:
    runs = {name for name, of in taken_in_turn().items() if family in of}
    kept = {name for name, of in families().items() if family in of}
    assert kept <= runs
    assert len(runs - kept) <= len(runs) // 5
    shown = [set().union(*(pairs(name, family) for name in some)) for some in (runs, kept)]
    assert shown[0] == shown[1]
    assert any("lengths" in (a[1], b[1]) for a, b in shown[0])


def test_all_cases_are_run() -> None:
    """In a family, or by others that show all that they show; those that some barriers need, all in one."""
    assert set(families()) == set(taken_in_turn()) == set(TABLE)
    assert all(taken_in_turn().values())
    assert all(families()[name] for name in EXTRA)


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


def test_every_field_of_a_case_is_a_trait_or_known_to_be_none() -> None:
    """Else the emulator would leave cases of a new feature out."""
    known = {*table_turns._AS_THEY_ARE, *table_turns._WHETHER, *table_turns._OTHERWISE}
    assert known - {"packed"} == {field.name for field in dataclasses.fields(Case)}
