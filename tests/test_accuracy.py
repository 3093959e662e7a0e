"""The 2x rule: passes rounding, finds mistakes, and puts NaN and inf first."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import reference
from cupyflash.accuracy import Oracle, compare, compare_lse
from cupyflash.cases import NUMPY_DTYPE, case
from cupyflash.problem import DTYPES

EXACT = np.linspace(-2, 2, 100).reshape(4, 25)


def test_bound_is_twice_plain_plus_one_rounding() -> None:
    plain = EXACT.copy()
    plain[1, 2] += 1e-2
    got = EXACT.copy()
    got[3, 4] -= 2e-2
    result = compare("out", got, EXACT, plain, "fp16")
    assert result.passed
    assert result.index == (3, 4)
    assert result.ratio == pytest.approx(2)
    assert result.share < 1
    assert result.max_bound == pytest.approx(2e-2 + 2 * 2.0**-11)
    got[3, 4] -= 2e-3
    result = compare("out", got, EXACT, plain, "fp16")
    assert not result.passed
    assert "max error above the bound" in str(result)
    assert "(3, 4)" in str(result)


def test_rms_counts_too() -> None:
    plain = EXACT.copy()
    plain[0, 0] += 1e-2
    result = compare("out", EXACT + 1e-2, EXACT, plain, "fp32")
    assert result.reason == "rms error above the bound"


@pytest.mark.parametrize("got", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("exact", [1.0, np.nan, np.inf, -np.inf])
def test_nonfinite_positions_come_first(got: float, exact: float) -> None:
    ours, truth = EXACT.copy(), EXACT.copy()
    ours[2, 2], truth[2, 2] = got, exact
    result = compare("dq", ours, truth, EXACT, "bf16")
    same = (np.isnan(got) and np.isnan(exact)) or got == exact
    assert result.passed == same
    assert same or result.index == (2, 2)


def test_values_beyond_the_dtype_may_be_inf() -> None:
    truth = EXACT.copy()
    truth[0, 0] = -1e5
    for value, passes in ((-np.inf, True), (-65504.0, True), (np.inf, False), (np.nan, False), (1.0, False)):
        ours = EXACT.copy()
        ours[0, 0] = value
        assert compare("dk", ours, truth, EXACT, "fp16").passed == passes


def test_float64_alone_decides_where_plain_overflows() -> None:
    plain = EXACT.copy()
    plain[0, 0] = np.nan
    assert compare("dk", EXACT + 16 * 2.0**-11, EXACT, plain, "fp16").passed
    assert not compare("dk", EXACT + 48 * 2.0**-11, EXACT, plain, "fp16").passed


def test_empty_results_pass_and_wrong_shapes_fail() -> None:
    empty = np.zeros((0, 3))
    result = compare("out", empty, empty, empty, "bf16")
    assert result.passed
    assert result.index is None
    assert result.ratio == result.share == 0
    assert "shape" in compare("out", EXACT[:2], EXACT, EXACT, "bf16").reason


def test_lse_is_judged_by_its_magnitude() -> None:
    exact = np.array([[[1e6, -np.inf, 3.0]]])
    assert compare_lse(exact + 0.5, exact, exact, "fp16").passed
    assert not compare_lse(exact + 2.0, exact, exact, "fp16").passed
    assert not compare_lse(np.array([[[1e6, 0, 3.0]]]), exact, exact, "fp16").passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_rule_finds_mistakes(dtype: str) -> None:
    """A wrong scale, a mask that is off by one and a forgotten dlse fail, in every dtype."""
    c = case("dlse")
    p, x = c.problem(dtype), c.inputs(dtype)
    oracle = Oracle(p, *x)
    assert all(r.passed for r in oracle.judge_forward(*oracle.plain_forward))
    assert all(r.passed for r in oracle.judge_backward(*oracle.plain_backward))
    wrong_scale = type(p)(**{**vars(p), "scale": p.scale * 1.02})
    off_by_one = type(p)(**{**vars(p), "window": (None, -1)})
    for wrong in (wrong_scale, off_by_one):
        assert not all(r.passed for r in oracle.judge_forward(*reference.plain_forward(x.q, x.k, x.v, wrong)))
        gradients = reference.plain_backward(x.dout, x.q, x.k, x.v, wrong, x.dlse)
        assert not all(r.passed for r in oracle.judge_backward(*gradients))
    forgotten = reference.plain_backward(x.dout, x.q, x.k, x.v, p)
    assert [r.name for r in oracle.judge_backward(*forgotten) if not r.passed] == ["dq", "dk"]


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 2.0**-9), ("bf16", 2.0**-6), ("fp32", 2.0**-17)])
def test_rule_finds_lost_digits(dtype: str, error: float) -> None:
    """A result that is a few bits less exact than its dtype allows is not rounding."""
    c = case("dense-d64")
    oracle = Oracle(c.problem(dtype), *c.inputs(dtype))
    noisy = oracle.forward[0] * (1 + error * np.sign(np.sin(np.arange(oracle.forward[0].size)))).reshape(
        oracle.forward[0].shape
    )
    out, _ = oracle.judge_forward(noisy.astype(NUMPY_DTYPE[dtype]), oracle.plain_forward[1])
    assert not out.passed
