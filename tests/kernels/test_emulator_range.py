"""Ranges of keys on the CPU, in both families, beyond the table of cases: ranges that contradict, and planted bugs
(`planted/mutants_range.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash.check.cases import Case, Inputs
from tests.emulator import EmulatorError
from tests.emulator.attention import Session
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_range import CLAMPED_RANGE

require_compiler()

FAMILIES = ("sm80", "sm90")
BEYOND = 2**31 - 1
# Of six sequences with 203 keys: what kernels clamp, and what is left of it.
CONTRADICT = ((-200, 70), (-1, BEYOND), (130, 9000), (100, 20), (BEYOND, -BEYOND - 1), (-90, -1))
NEAR = ((-200, 70), (-1, 300), (130, 500), (100, 20), (300, -1), (-90, -1))  # of which a loop too long comes to an end
CLAMPED = ((0, 70), (0, 203), (130, 203), (0, 0), (0, 0), (0, 0))


def six(head_dim: int, **more: Any) -> Case:
    return Case("six", "full", 75, 203, head_dim, 6, 1, 1, ranges=CLAMPED, **more)


def contradicting(inputs: Inputs, ranges: tuple[tuple[int, int], ...] = CONTRADICT) -> Inputs:
    assert inputs.features.sequences is not None
    return inputs.having(sequences=inputs.features.sequences._replace(kv_range=np.array(ranges, np.int32)))


def everything(how: Session, inputs: Inputs, case: Case) -> list[np.ndarray]:
    """out, lse, dq, dk and dv."""
    problem = case.problem("bf16")
    out, lse = how.forward(inputs, problem)
    return [out, lse, *how.backward(inputs, out, lse, problem)]


@pytest.mark.parametrize("options", [{"causal": True}, {"deterministic": True}], ids=["causal", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_ranges_that_contradict_are_clamped(family: str, head_dim: int, options: dict[str, Any]) -> None:
    """To the same bits, in the same order."""
    case = six(head_dim, **options)
    inputs = case.inputs("bf16")
    found = everything(Session.of_family(family), contradicting(inputs), case)
    for name, a, b in zip(
        ("out", "lse", "dq", "dk", "dv"), found, everything(Session.of_family(family), inputs, case), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert np.isneginf(found[1][3:]).all()
    for x in (found[0], *found[2:]):
        assert not x[3:].astype(np.float32).any()


@pytest.mark.parametrize("bug", CLAMPED_RANGE, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_missing_clamp_is_reported(bug: Bug) -> None:
    case = six(64)
    inputs = case.inputs("bf16")
    right = everything(Session.of_family(bug.family), inputs, case)
    try:
        found = everything(Session.of_family(bug.family, headers=bug.headers()), contradicting(inputs, NEAR), case)
    except EmulatorError:
        return
    assert any(a.tobytes() != b.tobytes() for a, b in zip(found, right, strict=True))
