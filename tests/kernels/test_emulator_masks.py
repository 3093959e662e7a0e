"""Block masks on the CPU, in both families, beyond the table of cases: planted bugs (`emulator/mutants_masks.py`), and
tiles that are left out.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulator.attention import Session, inputs_of
from emulator.require import require_compiler

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case

require_compiler()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_deterministic_gradients_repeat_in_any_order(family: str, head_dim: int) -> None:
    case = Case("masked", "full", 200, 330, head_dim, heads_q=2, heads_k=1, mask="tiles_of_heads", deterministic=True)
    inputs, problem = inputs_of(case, "bf16")
    out, lse = Oracle(problem, *inputs).plain_forward
    found = [Session.of_family(family, "any", seed=seed).backward(inputs, out, lse, problem) for seed in (1, 2)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
