"""Mods on the CPU, beyond the table of cases: planted bugs."""

from __future__ import annotations

import pytest
from emulator import MODES, EmulatorError
from emulator.attention import Session, inputs_of, small_device
from emulator.cases import TABLE
from emulator.mutants import Bug
from emulator.mutants_mods import BACKWARD_MODS, FORWARD_MODS
from emulator.require import require_compiler

from cupyflash.check.accuracy import Oracle

require_compiler()


def wrong(bug: Bug, *, backward: bool) -> bool:
    family = "sm90" if bug.arch == "sm_90" else "sm80"
    how = Session(small_device(bug.arch), MODES["race"], family=family, backward_family=family, headers=bug.headers())
    inputs, problem = inputs_of(TABLE[bug.case], "bf16")
    exact = Oracle(problem, *inputs)
    try:
        if backward:
            results = exact.judge_backward(*how.backward(inputs, *exact.plain_forward, problem))
        else:
            results = exact.judge_forward(*how.forward(inputs, problem))
    except EmulatorError:
        return True
    return not all(r.passed for r in results)


@pytest.mark.parametrize("bug", FORWARD_MODS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_forward_bug_is_caught(bug: Bug) -> None:
    assert wrong(bug, backward=False)


@pytest.mark.parametrize("bug", BACKWARD_MODS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_backward_bug_is_caught(bug: Bug) -> None:
    assert wrong(bug, backward=True)
