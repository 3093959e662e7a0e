"""Rounding of P where it adds up: rows that few keys decide, and values that hardly differ from key to key.

`delta = rowsum(dO * O)` and `dP` then cancel, and what rounding adds to O as a whole is left of dS. Two promises, and
where the second one ends:

- first order: each result is at most as far from float64 as one rounding each of P, dS, O and the result can take it,
  for any input whatever (`tests/fuzz/oracle.py` has the formulas);
- the 2x rule: for data whose roundings are independent of each other. Input can be made whose roundings all agree in
  the kernel and vanish in plain attention; the rule then allows nothing. True maxima do not help: they break on other
  input.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import NUMPY_DTYPE, Inputs
from cupyflash.problem import Problem
from tests.emulator import MODES
from tests.emulator.attention import Session, small_device
from tests.emulator.require import require_compiler
from tests.fuzz import oracle
from tests.fuzz.spec import Spec

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


def run(case: tuple[Inputs, Problem], family: str) -> tuple[np.ndarray, ...]:
    """out, lse, dq, dk and dv of the family's kernels."""
    given, problem = case
    session = Session(small_device("sm_90"), MODES["early"], family=family, backward_family=family)
    out, lse = session.forward(given, problem)
    return out, lse, *session.backward(given, out, lse, problem)


def shares_of_2x(case: tuple[Inputs, Problem], results: tuple[np.ndarray, ...]) -> dict[str, float]:
    """How much of what the 2x rule allows each result used."""
    given, problem = case
    exact = Oracle(problem, given.q, given.k, given.v, given.dout)
    return {c.name: c.share for c in exact.judge_forward(*results[:2]) + exact.judge_backward(*results[2:])}


def shares_of_first_order(case: tuple[Inputs, Problem], results: tuple[np.ndarray, ...]) -> dict[str, float]:
    """The same for the bounds of first order, element by element."""
    given, problem = case
    spec = Spec(problem.dtype, sq=problem.seqlen_q, sk=problem.seqlen_k, scale=problem.scale)
    bounds = (*oracle.forward(spec, given), *oracle.backward(spec, given, results[0]))
    return {
        name: float((np.abs(np.asarray(got, np.float64) - b.exact) / b.bound).max())
        for name, got, b in zip(("out", "lse", "dq", "dk", "dv"), results, bounds, strict=True)
    }


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
def test_no_input_takes_a_result_beyond_first_order(
    dtype: str, keys: int, share: float, in_use: float, family: str
) -> None:
    for steps in (0.51, 0.75):
        case = dominated(dtype, keys, share, in_use, steps)
        shares = shares_of_first_order(case, run(case, family))
        assert max(shares.values()) <= 1, shares


# Which of them the 2x rule does not hold for. P is exactly 1 at a true maximum, and then the sm80 family rounds nothing
# that counts; where no single key has the maximum, it does.
BEYOND_2X = (
    ("sm90", "bf16", 1, 31 / 32, 32.0), ("sm90", "fp16", 1, 31 / 32, 32.0), ("sm90", "bf16", 8, 255 / 256, 1.0),
    ("sm90", "fp16", 3, 0.9, 4.0), ("sm80", "bf16", 64, 0.97, 0.5), ("sm80", "fp16", 64, 0.97, 0.5),
)  # fmt: skip


@pytest.mark.parametrize(("family", "dtype", "keys", "share", "in_use"), BEYOND_2X)
def test_where_the_2x_rule_ends(family: str, dtype: str, keys: int, share: float, in_use: float) -> None:
    """A kernel that keeps the rule here keeps more than the docs say: say so there, and turn this test around."""
    case = dominated(dtype, keys, share, in_use, 0.51)
    shares = shares_of_2x(case, run(case, family))
    assert shares["dq"] > 1
    assert shares["dk"] > 1


# Later keys so far above the maximum in use that P itself, in fp16, or the sums of P V would not fit.
@pytest.mark.parametrize(("dtype", "exponent"), [("fp16", 14), ("fp16", 17), ("bf16", 63), ("bf16", 66), ("bf16", 120)])
def test_keys_far_above_the_first_ones(dtype: str, exponent: int) -> None:
    scores = np.zeros(5 * BLOCK)
    scores[3 * BLOCK :: 7] = exponent * np.log(2)
    rng = np.random.default_rng(exponent)
    case = inputs(dtype, scores, rng.standard_normal((1, len(scores), 1, 64)), rng.standard_normal((1, 64, 1, 64)))
    results = run(case, "sm90")
    for shares in (shares_of_2x(case, results), shares_of_first_order(case, results)):
        assert max(shares.values()) <= 1, shares
