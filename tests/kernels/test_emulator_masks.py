"""Block masks on the CPU, in both families, beyond the table of cases: planted bugs (`emulator/mutants_masks.py`), and
tiles that are left out.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulator import MODES, EmulatorError
from emulator.attention import Session, inputs_of, small_device
from emulator.cases import TABLE
from emulator.mutants import Bug
from emulator.mutants_masks import BACKWARD_MASKS, FORWARD_MASKS
from emulator.require import require_compiler

from cupyflash.check.accuracy import Comparison, Oracle
from cupyflash.check.cases import Case

require_compiler()


def session(arch: str, mode: str = "race", **more: object) -> Session:
    family = "sm90" if arch == "sm_90" else "sm80"
    return Session(small_device(arch, 2), MODES[mode], family=family, backward_family=family, **more)  # type: ignore[arg-type]


def planted(bug: Bug) -> list[Comparison]:
    inputs, problem = inputs_of(TABLE[bug.case], "bf16")
    exact, how = Oracle(problem, *inputs), session(bug.arch, headers=bug.headers())
    if bug in FORWARD_MASKS:
        return exact.judge_forward(*how.forward(inputs, problem))
    return exact.judge_backward(*how.backward(inputs, *exact.plain_forward, problem))


@pytest.mark.parametrize("bug", FORWARD_MASKS + BACKWARD_MASKS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug) -> None:
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            planted(bug)
    else:
        assert not all(result.passed for result in planted(bug))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_deterministic_gradients_repeat_in_any_order(arch: str, head_dim: int) -> None:
    case = Case("masked", "full", 200, 330, head_dim, heads_q=2, heads_k=1, mask="tiles_of_heads", deterministic=True)
    inputs, problem = inputs_of(case, "bf16")
    out, lse = Oracle(problem, *inputs).plain_forward
    found = [session(arch, "any", seed=seed).backward(inputs, out, lse, problem) for seed in (1, 2)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
