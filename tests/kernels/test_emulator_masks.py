"""Block masks on the CPU, in both families, beyond the table of cases: planted bugs (`planted/mutants_masks.py`), and
tiles that are left out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyflash import masks
from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case
from tests.emulator.attention import Session, inputs_of
from tests.emulator.require import require_compiler

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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_packed_sequence_beyond_the_mask(family: str, deterministic: bool) -> None:
    """Its results are of no use; the others are right, nothing is read that is not there, and nobody waits for ever."""
    lengths = {"lengths_q": (30, 200, 100), "lengths_k": (60, 150, 64), "deterministic": deterministic}
    case = Case("short", "full", 330, 274, 64, batch=3, heads_q=2, heads_k=1, mask="tiles_of_heads", **lengths)
    x, _ = inputs_of(case, "bf16")
    assert x.features.block_mask is not None
    short = masks.from_dense(x.features.block_mask.sees(slice(0, 128), slice(0, 64)))
    problem = replace(case.problem("bf16"), max_seqlen_q=128, max_seqlen_k=64)
    exact = Oracle(case.problem("bf16"), *x)
    session, given = Session.of_family(family), x.having(block_mask=short)
    out, lse = session.forward(given, problem)
    found, want = [out, *session.backward(given, out, lse, problem)], [exact.plain_forward[0], *exact.plain_backward]
    queries, keys = np.r_[0:30, 230:330], np.r_[0:60, 210:274]
    for a, b, rows in zip(found, want, (queries, queries, keys, keys), strict=True):
        np.testing.assert_allclose(*(y[rows].astype(np.float32) for y in (a, b)), atol=0.06, rtol=0.05)
