"""Rounding of P where it could add up: rows that few keys decide, and values that hardly differ from key to key.

`delta = rowsum(dO * O)` and `dP` then cancel, and whatever rounding adds to O as a whole would be left of dS.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulator import MODES
from emulator.attention import Session, small_device
from emulator.require import require_compiler

from cupyflash.accuracy import Oracle
from cupyflash.cases import NUMPY_DTYPE, Inputs
from cupyflash.problem import Problem

require_compiler()

BLOCK = 64  # keys that a Hopper kernel takes together; the first of them give the row its maximum
LOW = -24.0  # of scores that do not count


def inputs(
    dtype: str, scores: np.ndarray, v: np.ndarray, dout: np.ndarray, queries: int = 64
) -> tuple[Inputs, Problem]:
    """One head whose every query has these scores, up to 2^-16: three columns of k add up to them."""
    to = NUMPY_DTYPE[dtype]
    q, k = np.zeros((1, queries, 1, 64)), np.zeros((1, len(scores), 1, 64))
    q[..., :3] = 1
    rest = scores
    for column in range(3):
        k[0, :, 0, column] = rest.astype(to)
        rest = rest - k[0, :, 0, column]
    problem = Problem(dtype, 1, queries, len(scores), 1, 1, 64, 1.0)
    tensors = (np.broadcast_to(x, y.shape) for x, y in ((q, q), (k, k), (v, k), (dout, q)))
    return Inputs(*(np.ascontiguousarray(x, to) for x in tensors), None), problem


def judge(case: tuple[Inputs, Problem], family: str) -> dict[str, float]:
    """How much of what the 2x rule allows each result used."""
    given, problem = case
    exact = Oracle(problem, given.q, given.k, given.v, given.dout)
    session = Session(small_device("sm_90"), MODES["early"], family=family, backward_family=family)
    out, lse = session.forward(given, problem)
    found = exact.judge_forward(out, lse) + exact.judge_backward(*session.backward(given, out, lse, problem))
    return {c.name: c.share for c in found}


def dominated(dtype: str, keys: int, share: float, in_use: float, steps: float) -> tuple[Inputs, Problem]:
    """`keys` equal ones in later blocks have `share` of every row and P = `in_use` plus some steps of the dtype there.

    The first key has P = 1: the maximum in use while those are met. All values are the same number just below a power
    of two, whose rounding step is the smallest, so that an error of O shows; dout is 1.
    """
    step = 2.0**-7 if dtype == "bf16" else 2.0**-10
    scores = np.full(5 * BLOCK, LOW)
    first = in_use * (1 + steps * step)
    others = keys * first * (1 - share) / share - 1
    scores[np.random.default_rng(keys).choice(np.arange(BLOCK, 5 * BLOCK), keys, replace=False)] = np.log(first)
    scores[0] = 0.0
    if others > 0:
        scores[1 : BLOCK // 2] = np.log(others / (BLOCK // 2 - 1))
    return inputs(dtype, scores, np.full(64, 2 - step), np.full(64, 1.0))


# keys, share, P: what is far above the maximum in use, just above it, and below a true maximum.
DOMINATED = (
    (1, 31 / 32, 32.0), (1, 31 / 32, 1.0), (8, 255 / 256, 1.0), (8, 255 / 256, 32.0), (64, 2047 / 2048, 1.0),
    (1, 0.5, 1.0), (3, 0.9, 4.0), (64, 0.97, 0.5), (200, 0.99, 0.5), (1, 1 - 2.0**-14, 2.0**14),
)  # fmt: skip


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("keys", "share", "in_use"), DOMINATED)
def test_rows_that_few_keys_decide(dtype: str, keys: int, share: float, in_use: float, family: str) -> None:
    """The exact gradients of q and k are 0: dP is the same for all keys, and delta too."""
    for steps in (0.51, 0.75):
        shares = judge(dominated(dtype, keys, share, in_use, steps), family)
        assert max(shares.values()) <= 1, shares


# Later keys so far above the maximum in use that P itself, in fp16, or the sums of P V would not fit.
@pytest.mark.parametrize(("dtype", "exponent"), [("fp16", 14), ("fp16", 17), ("bf16", 63), ("bf16", 66), ("bf16", 120)])
def test_keys_far_above_the_first_ones(dtype: str, exponent: int) -> None:
    scores = np.zeros(5 * BLOCK)
    scores[3 * BLOCK :: 7] = exponent * np.log(2)
    rng = np.random.default_rng(exponent)
    case = inputs(dtype, scores, rng.standard_normal((1, len(scores), 1, 64)), rng.standard_normal((1, 64, 1, 64)))
    shares = judge(case, "sm90")
    assert max(shares.values()) <= 1, shares
