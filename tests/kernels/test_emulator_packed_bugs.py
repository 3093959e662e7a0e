"""Bugs planted in what packed sequences bring are reported: `emulator/mutants_packed.py`."""

from __future__ import annotations

import functools

import pytest
from emulator import MODES, EmulatorError
from emulator.attention import Session, inputs_of, small_device
from emulator.cases import TABLE
from emulator.mutants import Bug
from emulator.mutants_packed import BACKWARD_PACKED, CLAMPS, FORWARD_PACKED
from emulator.require import require_compiler

from cupyflash.check.accuracy import Comparison, Oracle
from tests.packed_lengths import WRONG, given, three

require_compiler()


@functools.lru_cache(maxsize=4)
def oracle(name: str) -> Oracle:
    inputs, problem = inputs_of(TABLE[name], "bf16")
    return Oracle(problem, *inputs)


def run(bug: Bug) -> list[Comparison]:
    exact = oracle(bug.case)
    inputs, problem = inputs_of(TABLE[bug.case], "bf16")
    session = Session(small_device(bug.arch, 2), MODES["race"], headers=bug.headers())
    if bug in FORWARD_PACKED:
        return exact.judge_forward(*session.forward(inputs, problem))
    return exact.judge_backward(*session.backward(inputs, *exact.plain_forward, problem))


@pytest.mark.parametrize("bug", FORWARD_PACKED + BACKWARD_PACKED, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug) -> None:
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            run(bug)
    else:
        assert not all(result.passed for result in run(bug))


@pytest.mark.parametrize("bug", CLAMPS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_missing_clamp_is_reported(bug: Bug) -> None:
    case = three(64, causal=True)
    inputs, problem = case.inputs("bf16")._replace(sequences=given(*WRONG[bug.case])), case.problem("bf16")
    session = Session(small_device(bug.arch), MODES["any"], headers=bug.headers())
    with pytest.raises(EmulatorError, match=bug.finds):
        session.backward(inputs, *session.forward(inputs, problem), problem)
