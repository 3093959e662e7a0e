"""The emulator can fail: planted bugs in the shipped kernels are reported, with the kernel's own line."""

from __future__ import annotations

import functools

import pytest
from emulator import MODES, EmulatorError
from emulator.attention import Session, inputs_of
from emulator.mutants import BACKWARD, FORWARD, Bug
from emulator.require import require_compiler

from cupyflash.accuracy import Comparison, Oracle
from cupyflash.cases import case
from cupyflash.device import Device

require_compiler()


@functools.lru_cache(maxsize=8)
def oracle(name: str) -> Oracle:
    inputs, problem = inputs_of(case(name), "bf16")
    return Oracle(problem, *inputs)


def forward(bug: Bug) -> list[Comparison]:
    exact = oracle(bug.case)
    inputs, problem = inputs_of(case(bug.case), "bf16")
    session = Session(Device.synthetic(bug.arch), MODES["race"], headers=bug.headers())
    return exact.judge_forward(*session.forward(inputs, problem))


def backward(bug: Bug) -> list[Comparison]:
    exact = oracle(bug.case)
    inputs, problem = inputs_of(case(bug.case), "bf16")
    out, lse = exact.plain_forward
    session = Session(Device.synthetic(bug.arch), MODES["race"], headers=bug.headers())
    return exact.judge_backward(*session.backward(inputs, out, lse, problem))


@pytest.mark.parametrize("bug", [*FORWARD, *BACKWARD], ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug) -> None:
    run = forward if bug in FORWARD else backward
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            run(bug)
    else:
        assert not all(result.passed for result in run(bug))
