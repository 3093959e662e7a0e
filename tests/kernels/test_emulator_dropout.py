"""Dropout on the CPU, in both families, beyond the table of cases: the mask itself, and planted bugs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.check.case import Case, Inputs
from cupyflash.dropout import kept, limit_of
from cupyflash.problem import Problem
from tests.emulator.attention import Session, inputs_of
from tests.emulator.cases import TABLE
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_dropout import OFFSET_DROPOUT

require_compiler()


def with_offset(inputs: Inputs, problem: Problem) -> tuple[Inputs, Problem]:
    """A seed with an offset."""
    assert inputs.features.dropout_seed is not None
    seed = np.stack([inputs.features.dropout_seed, np.array([3, -7], np.int32)])
    return inputs.having(dropout_seed=seed), dataclasses.replace(problem, dropout=2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_the_mask_is_exactly_that_of_the_reference(family: str, head_dim: int) -> None:
    """Read out by a v, and in the backward by a dout, that is the identity: each element by itself, no tolerance."""
    n = min(head_dim, 128)
    case = Case("mask", "full", n, n, head_dim, heads_q=2, heads_k=1, dropout_p=0.3)
    inputs, problem = with_offset(case.inputs("bf16"), case.problem("bf16"))
    for x in inputs[:4]:
        x[...] = 0
    inputs.v[0, np.arange(n), 0, np.arange(n)] = 1
    inputs.dout[0, np.arange(n), :, np.arange(n)] = 1
    how = Session.of_family(family)
    out, lse = how.forward(inputs, problem)
    want = [
        kept(inputs.features.dropout_seed, limit_of(0.3), np.zeros(1, int), np.array([h]), slice(0, n), slice(0, n))[0]
        for h in (0, 1)
    ]
    for h in (0, 1):
        np.testing.assert_array_equal(out[0, :, h, :n].astype(np.float32) > 0, want[h])
    _, _, dv, *_ = how.backward(inputs, out, lse, problem)
    counts = np.rint(dv[0, :, 0, :n].astype(np.float32) * n * (1 - 0.3)).astype(int)  # of the group's two heads
    np.testing.assert_array_equal(counts, want[0].T.astype(int) + want[1].T)


@pytest.mark.parametrize("bug", OFFSET_DROPOUT, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_offset_bug_is_caught(bug: Bug) -> None:
    inputs, problem = with_offset(*inputs_of(TABLE[bug.case], "bf16"))
    found = Session.of_family(bug.family, headers=bug.headers()).forward(inputs, problem)
    assert not all(r.passed for r in Oracle(problem, *inputs).judge_forward(*found))
