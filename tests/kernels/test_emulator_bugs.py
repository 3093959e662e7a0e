"""The emulator can fail: planted bugs in the shipped kernels are reported, with the kernel's own line."""

from __future__ import annotations

import functools

import pytest
from emulator import MODES, EmulatorError
from emulator.attention import Session, find_case, inputs_of, small_device
from emulator.mutants import BACKWARD, FORWARD, Bug
from emulator.mutants_bwd_sm90 import BACKWARD_SM90
from emulator.mutants_sm90 import FORWARD_SM90
from emulator.require import require_compiler

from cupyflash.check.accuracy import Comparison, Oracle

require_compiler()


@functools.lru_cache(maxsize=8)
def oracle(name: str) -> Oracle:
    inputs, problem = inputs_of(find_case(name), "bf16")
    return Oracle(problem, *inputs)


def forward(bug: Bug) -> list[Comparison]:
    exact = oracle(bug.case)
    inputs, problem = inputs_of(find_case(bug.case), "bf16")
    session = Session(small_device(bug.arch, 2), MODES["race"], headers=bug.headers())
    return exact.judge_forward(*session.forward(inputs, problem))


def backward(bug: Bug) -> list[Comparison]:
    exact = oracle(bug.case)
    inputs, problem = inputs_of(find_case(bug.case), "bf16")
    out, lse = exact.plain_forward
    session = Session(small_device(bug.arch), MODES["race"], headers=bug.headers(), left_over=3.0)
    return exact.judge_backward(*session.backward(inputs, out, lse, problem))


@pytest.mark.parametrize(
    "bug", [*FORWARD, *BACKWARD, *FORWARD_SM90, *BACKWARD_SM90], ids=lambda bug: bug.name.replace(" ", "-")
)
def test_planted_bug_is_reported(bug: Bug) -> None:
    run = backward if bug in BACKWARD + BACKWARD_SM90 else forward
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            run(bug)
    else:
        assert not all(result.passed for result in run(bug))
