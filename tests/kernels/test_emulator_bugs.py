"""The emulator can fail: planted bugs in the shipped kernels are reported, with the kernel's own line."""

from __future__ import annotations

import functools

import pytest
from emulator import MODES, EmulatorError, mutants
from emulator.attention import Session, find_case, inputs_of, small_device
from emulator.mutants import Bug
from emulator.mutants_bwd_sm90 import BACKWARD_SM90
from emulator.mutants_dropout import BACKWARD_DROPOUT, FORWARD_DROPOUT
from emulator.mutants_masks import BACKWARD_MASKS, FORWARD_MASKS
from emulator.mutants_mods import BACKWARD_MODS, FORWARD_MODS
from emulator.mutants_packed import BACKWARD_PACKED, FORWARD_PACKED
from emulator.mutants_range import BACKWARD_RANGE, FORWARD_RANGE
from emulator.mutants_shares import BACKWARD_SHARES
from emulator.mutants_sm90 import FORWARD_SM90
from emulator.mutants_wide import BACKWARD_WIDE
from emulator.mutants_widths import BACKWARD_WIDTHS, FORWARD_WIDTHS
from emulator.require import require_compiler

from cupyflash.check.accuracy import Comparison, Oracle

require_compiler()

FORWARD = (
    *mutants.FORWARD, *FORWARD_SM90, *FORWARD_PACKED, *FORWARD_RANGE, *FORWARD_MASKS, *FORWARD_DROPOUT, *FORWARD_MODS,
    *FORWARD_WIDTHS,
)  # fmt: skip
BACKWARD = (
    *mutants.BACKWARD, *BACKWARD_SM90, *BACKWARD_PACKED, *BACKWARD_RANGE, *BACKWARD_MASKS, *BACKWARD_DROPOUT,
    *BACKWARD_MODS, *BACKWARD_SHARES, *BACKWARD_WIDE, *BACKWARD_WIDTHS,
)  # fmt: skip


@functools.lru_cache(maxsize=8)
def oracle(name: str) -> Oracle:
    inputs, problem = inputs_of(find_case(name), "bf16")
    return Oracle(problem, *inputs)


def judged(bug: Bug) -> list[Comparison]:
    exact = oracle(bug.case)
    inputs, problem = inputs_of(find_case(bug.case), "bf16")
    session = Session(small_device(bug.arch, bug.sm_count), MODES["race"], headers=bug.headers(), left_over=3.0)
    if bug in FORWARD:
        return exact.judge_forward(*session.forward(inputs, problem))
    return exact.judge_backward(*session.backward(inputs, *exact.plain_forward, problem))


@pytest.mark.parametrize("bug", [*FORWARD, *BACKWARD], ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug) -> None:
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            judged(bug)
    else:
        assert not all(result.passed for result in judged(bug))
