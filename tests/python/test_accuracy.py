"""The 2x rule: passes rounding, finds mistakes, and puts NaN and inf first."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.check import reference
from cupyflash.check.accuracy import Oracle, compare, compare_lse
from cupyflash.check.cases import NUMPY_DTYPE, case
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


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.0075), ("fp16", 0.00094)])
def test_a_factor_is_found_by_rms(dtype: str, error: float, rng: np.random.Generator) -> None:
    """The largest value is four times the rms value, and may be rounded: a small relative error of all hides there."""
    exact = rng.standard_normal((100, 64))
    plain = exact.astype(NUMPY_DTYPE[dtype])
    assert compare("dv", plain, exact, plain, dtype).passed
    assert compare("dv", exact * (1 + error), exact, plain, dtype).reason == "rms error above the bound"


def test_float64_alone_decides_in_rows_where_plain_overflows() -> None:
    """And in no other row."""
    plain, one_row, other_row = EXACT.copy(), EXACT.copy(), EXACT.copy()
    plain[0, 0] = np.nan
    one_row[0] += 16 * 2.0**-11
    other_row[1] += 3 * 2.0**-11
    assert compare("dk", one_row, EXACT, plain, "fp16").passed
    assert compare("dk", other_row, EXACT, plain, "fp16").reason == "max and rms error above the bound"
    one_row[0] += 32 * 2.0**-11
    assert not compare("dk", one_row, EXACT, plain, "fp16").passed


def test_noise_excuses_its_elements_only() -> None:
    noise, got = np.zeros_like(EXACT), EXACT.copy()
    noise[2], got[2] = 0.5, EXACT[2] + 0.5
    result = compare("dq", got, EXACT, EXACT, "fp16", noise)
    assert result.passed
    assert result.max_error == pytest.approx(0)
    got[1, 1] += 0.01
    result = compare("dq", got, EXACT, EXACT, "fp16", noise)
    assert not result.passed
    assert (result.index, result.max_error) == ((1, 1), pytest.approx(0.01))


def test_empty_results_pass_and_wrong_shapes_fail() -> None:
    empty = np.zeros((0, 3))
    result = compare("out", empty, empty, empty, "bf16")
    assert result.passed
    assert result.index is None
    assert result.ratio == result.share == 0
    assert "shape" in compare("out", EXACT[:2], EXACT, EXACT, "bf16").reason


def test_lse_is_judged_by_its_magnitude() -> None:
    """Each by its own."""
    exact = np.array([[[1e6, -np.inf, 3.0]]])
    assert compare_lse(exact + np.array([0.5, 0, 1e-6]), exact, exact, "fp16").passed
    assert not compare_lse(exact + np.array([2.0, 0, 0]), exact, exact, "fp16").passed
    assert not compare_lse(exact + np.array([0, 0, 1e-5]), exact, exact, "fp16").passed
    assert not compare_lse(np.array([[[1e6, 0, 3.0]]]), exact, exact, "fp16").passed
    assert "shape" in compare_lse(exact[0], exact, exact, "fp16").reason


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", ["overflow", "overflow-causal"])
def test_huge_scores_excuse_little(name: str, dtype: str) -> None:
    """lse is 2e5 to 4e5 there, rounded by some 0.01 thrice: no gradient may be off by 12 %."""
    c = case(name)
    x = c.inputs(dtype)
    oracle = Oracle(c.problem(dtype), *x)
    plain = oracle.plain_backward
    assert all(r.passed for r in oracle.judge_backward(*plain))
    for i, gradient in enumerate(plain):
        wrong = list(plain)
        wrong[i] = (gradient * 1.12).astype(gradient.dtype)
        assert [r.name for r in oracle.judge_backward(*wrong) if not r.passed] == [("dq", "dk", "dv")[i]]


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 0.01), ("bf16", 0.025), ("fp32", 0.002)])
def test_rows_with_huge_scores_excuse_no_other_row(dtype: str, error: float) -> None:
    c = case("dense-d64")
    x, p = c.inputs(dtype), c.problem(dtype)
    x.q[:, 0] *= 12000
    oracle = Oracle(p, *x)
    (out, lse), gradients = oracle.plain_forward, oracle.plain_backward
    assert all(r.passed for r in (*oracle.judge_forward(out, lse), *oracle.judge_backward(*gradients)))
    dq, lse = gradients[0].copy(), lse.copy()
    largest = np.abs(oracle.backward[0]).max()
    dq[0, 5] += dq.dtype.type(error * largest)
    lse[0, 1, 7] += 1e-4
    assert [r.name for r in oracle.judge_forward(out, lse) if not r.passed] == ["lse"]
    assert [r.name for r in oracle.judge_backward(dq, *gradients[1:]) if not r.passed] == ["dq"]


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
