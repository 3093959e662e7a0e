"""The oracle itself: against finite differences, against loops written from the contract, and on special values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cupyflash.check import noise, reference
from cupyflash.check.accuracy import compare_lse
from cupyflash.check.features import Features
from cupyflash.problem import Problem
from cupyflash.sequences import Sequences

Array = np.ndarray
PROBLEMS = {
    "dense": Problem("fp64", 1, 5, 7, 2, 1, 8, 0.4),
    "causal": Problem("fp64", 2, 6, 6, 2, 2, 8, 0.4, (None, 0)),
    "more-queries": Problem("fp64", 1, 7, 4, 4, 2, 8, 0.4, (None, 0)),
    "window": Problem("fp64", 1, 6, 9, 1, 1, 8, -0.3, (3, 1)),
    "behind": Problem("fp64", 1, 6, 6, 1, 1, 8, 0.3, (4, -2)),
}


def draw(p: Problem, rng: np.random.Generator) -> dict[str, Array]:
    shape_q, shape_k = (p.batch, p.seqlen_q, p.heads_q, p.head_dim), (p.batch, p.seqlen_k, p.heads_k, p.head_dim)
    x = {"q": rng.standard_normal(shape_q), "k": rng.standard_normal(shape_k), "v": rng.standard_normal(shape_k)}
    x["dout"] = rng.standard_normal(shape_q)
    x["dlse"] = rng.standard_normal((p.batch, p.heads_q, p.seqlen_q))
    return x


def by_loops(x: dict[str, Array], p: Problem) -> dict[str, Array]:
    """The contract, pair by pair, in sums of products: nothing is shared with `reference`."""
    q, k, v, dout, dlse = x.values()
    result = {name: np.zeros(a.shape) for name, a in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    result["lse"] = np.full(dlse.shape, -np.inf)
    left, right = (np.inf if bound is None else bound for bound in p.window)
    for b, i, h in np.ndindex(p.batch, p.seqlen_q, p.heads_q):
        g, diagonal = h // (p.heads_q // p.heads_k), i + p.seqlen_k - p.seqlen_q
        seen = [j for j in range(p.seqlen_k) if diagonal - left <= j <= diagonal + right]
        if not seen:
            continue
        s = np.array([p.scale * sum(q[b, i, h, c] * k[b, j, g, c] for c in range(p.head_dim)) for j in seen])
        e = np.exp(s - max(s, key=lambda score: (np.isnan(score), score)))
        prob = e / sum(e)
        result["lse"][b, h, i] = s[0] - np.log(prob[0]) if np.isfinite(s).all() else np.log(sum(np.exp(s)))
        for j, weight in zip(seen, prob, strict=True):
            result["out"][b, i, h] += weight * v[b, j, g]
        d_prob = np.array([sum(dout[b, i, h, c] * v[b, j, g, c] for c in range(p.head_dim)) for j in seen])
        delta = sum(dout[b, i, h, c] * result["out"][b, i, h, c] for c in range(p.head_dim)) - dlse[b, h, i]
        d_s = prob * (d_prob - delta)
        for j, weight, d in zip(seen, prob, d_s, strict=True):
            result["dq"][b, i, h] += p.scale * d * k[b, j, g]
            result["dk"][b, j, g] += p.scale * d * q[b, i, h]
            result["dv"][b, j, g] += weight * dout[b, i, h]
    return result


def by_reference(x: dict[str, Array], p: Problem) -> dict[str, Array]:
    out, lse = reference.forward(x["q"], x["k"], x["v"], p)
    dq, dk, dv = reference.backward(x["dout"], x["q"], x["k"], x["v"], p, x["dlse"])
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_loops(name: str, rng: np.random.Generator) -> None:
    x = draw(PROBLEMS[name], rng)
    expected = by_loops(x, PROBLEMS[name])
    for result, value in by_reference(x, PROBLEMS[name]).items():
        np.testing.assert_allclose(value, expected[result], rtol=1e-12, atol=1e-13, err_msg=result)


def test_packed_sequences_equal_loops(rng: np.random.Generator) -> None:
    """Rows of 3, 0, 4 and 2 queries, one outside; 5, 2, 1 and 0 keys, of which 4, 2, 1 and 0 are used, two outside."""
    packed = Problem("fp64", 4, 10, 10, 2, 1, 8, 0.4, (None, 0), packed=True)
    x = {name: a[0] for name, a in draw(replace(packed, batch=1), rng).items()}
    sequences = Sequences.of(*(np.array(a, np.int32) for a in ([0, 3, 3, 7, 9], [0, 5, 7, 8, 8], [4, 2, 1, 0])))
    expected = {name: np.zeros(x[like].shape) for name, like in {"out": "q", "dq": "q", "dk": "k", "dv": "v"}.items()}
    expected["lse"] = np.full((2, 10), -np.inf)
    for rows, keys in (([0, 1, 2], [0, 1, 2, 3]), ([], [5, 6]), ([3, 4, 5, 6], [7]), ([7, 8], [])):
        one = {"q": x["q"][None, rows], "k": x["k"][None, keys], "v": x["v"][None, keys], "dout": x["dout"][None, rows]}
        p = Problem("fp64", 1, len(rows), len(keys), 2, 1, 8, 0.4, (None, 0))
        found = by_loops({**one, "dlse": x["dlse"][None, :, rows]}, p)
        expected["out"][rows], expected["lse"][:, rows], expected["dq"][rows] = (
            found[name][0] for name in ("out", "lse", "dq")
        )
        expected["dk"][keys], expected["dv"][keys] = found["dk"][0], found["dv"][0]
    of = Features(sequences=sequences)
    out, lse = reference.forward(x["q"], x["k"], x["v"], packed, of)
    grads = reference.backward(x["dout"], x["q"], x["k"], x["v"], packed, x["dlse"], of)
    for (name, value), got in zip(expected.items(), (out, *grads, lse), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-13, err_msg=name)
    noise_of_out, noise_of_grads = noise.noise(x["dout"], x["q"], x["k"], x["v"], packed, x["dlse"], of)
    for bound, value in zip((noise_of_out, *noise_of_grads), expected.values(), strict=False):
        assert (bound.shape, bound.any(axis=-1).tolist()) == (value.shape, value.any(axis=-1).tolist())


def poison_nan(x: dict[str, Array]) -> None:
    x["k"][0, -1, 0, 2] = np.nan
    x["v"][0, 1, 0, 3] = np.nan


def poison_inf(x: dict[str, Array]) -> None:
    x["v"][0, 1, 0, 3] = np.inf
    x["v"][0, 2, 0, 5] = -np.inf


def poison_query(x: dict[str, Array]) -> None:
    x["q"][0, 2, 0, 1] = np.nan
    x["dout"][0, -1, 0, 1] = np.inf


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the loops compute with inf and NaN
@pytest.mark.parametrize("poison", [poison_nan, poison_inf, poison_query])
@pytest.mark.parametrize("name", PROBLEMS)
def test_special_values_equal_loops(
    name: str, poison: Callable[[dict[str, Array]], None], rng: np.random.Generator
) -> None:
    x = draw(PROBLEMS[name], rng)
    poison(x)
    expected, results = by_loops(x, PROBLEMS[name]), by_reference(x, PROBLEMS[name])
    for result in expected:
        np.testing.assert_allclose(results[result], expected[result], rtol=1e-12, atol=1e-13, err_msg=result)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_equal_finite_differences(name: str, rng: np.random.Generator) -> None:
    p = PROBLEMS[name]
    x = draw(p, rng)

    def loss(**moved: Array) -> float:
        out, lse = reference.forward(*({**x, **moved}[name] for name in "qkv"), p)
        seen = np.isfinite(lse)
        return float((out * x["dout"]).sum() + (lse[seen] * x["dlse"][seen]).sum())

    gradients = reference.backward(x["dout"], x["q"], x["k"], x["v"], p, x["dlse"])
    for tensor, gradient in zip("qkv", gradients, strict=True):
        for _ in range(5):
            direction, step = rng.standard_normal(gradient.shape), 1e-5
            ahead, behind = (loss(**{tensor: x[tensor] + sign * step * direction}) for sign in (1, -1))
            np.testing.assert_allclose(
                (ahead - behind) / (2 * step), (gradient * direction).sum(), rtol=1e-7, atol=1e-8
            )


def test_hidden_keys_have_no_effect(rng: np.random.Generator) -> None:
    p = PROBLEMS["behind"]  # hides the last two keys from every query
    x = draw(p, rng)
    before = by_reference(x, p)
    x["k"][:, -2:], x["v"][:, -2:] = np.nan, np.inf
    after = by_reference(x, p)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-13, atol=1e-14, err_msg=name)
    assert not after["dk"][:, -2:].any()
    assert not after["dv"][:, -2:].any()


def test_query_without_keys_gives_zero_and_takes_no_part(rng: np.random.Generator) -> None:
    p = PROBLEMS["more-queries"]  # 7 queries, 4 keys: the first three see none
    x = draw(p, rng)
    before = by_reference(x, p)
    assert not before["out"][:, :3].any()
    assert not before["dq"][:, :3].any()
    assert np.isneginf(before["lse"][..., :3]).all()
    x["q"][:, :3], x["dout"][:, :3], x["dlse"][..., :3] = np.nan, np.inf, np.nan
    for name, value in by_reference(x, p).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-13, atol=1e-14, err_msg=name)


def test_row_of_minus_inf_scores_is_nan(rng: np.random.Generator) -> None:
    p = PROBLEMS["causal"]
    x = draw(p, rng)
    x["q"][..., 0], x["k"][:, :3, :, 0] = 1.0, -np.inf
    results = by_reference(x, p)
    assert np.isnan(results["out"][:, :3]).all()
    assert np.isneginf(results["lse"][..., :3]).all()  # the logarithm of a sum of zeros
    assert np.isfinite(results["out"][:, 3:]).all()
    assert np.isfinite(results["lse"][..., 3:]).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("name", PROBLEMS)
def test_plain_is_the_oracle_but_for_rounding(name: str, dtype: type, rng: np.random.Generator) -> None:
    p, u = PROBLEMS[name], float(ml_dtypes.finfo(dtype).eps)
    x = {key: value.astype(dtype) for key, value in draw(p, rng).items()}
    exact = by_reference(x, p)
    out, lse = reference.plain_forward(x["q"], x["k"], x["v"], p)
    dq, dk, dv = reference.plain_backward(x["dout"], x["q"], x["k"], x["v"], p, x["dlse"])
    assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    precision = "fp64" if dtype is np.float64 else "fp32"
    assert compare_lse(lse, exact["lse"], exact["lse"], precision).passed
    for result, value in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        assert value.dtype == dtype
        bound = 8 * u * max(1.0, float(np.abs(exact[result]).max()))
        np.testing.assert_allclose(value.astype(np.float64), exact[result], rtol=0, atol=bound, err_msg=result)


def test_plain_rounds_p_before_its_product() -> None:
    """Three equal scores: P is 1/3, which bf16 rounds to 0.333984375; three of those times 384 are 384.75, not 384."""
    p = Problem("bf16", 1, 1, 3, 1, 1, 8, 1.0)
    q, k, v = np.zeros((1, 1, 1, 8)), np.zeros((1, 3, 1, 8)), np.zeros((1, 3, 1, 8))
    v[...] = 384.0
    out, _ = reference.plain_forward(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)), p)
    assert float(out[0, 0, 0, 0]) == float(ml_dtypes.bfloat16(3 * 0.333984375 * 384.0))
    assert reference.forward(q, k, v, p)[0][0, 0, 0, 0] == pytest.approx(384.0)


def test_inputs_are_not_written(rng: np.random.Generator) -> None:
    x = draw(PROBLEMS["window"], rng)
    for array in x.values():
        array.flags.writeable = False
    by_reference(x, PROBLEMS["window"])
