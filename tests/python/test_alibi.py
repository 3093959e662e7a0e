"""ALiBi's slopes through the public API: formula, gradient, what is asked for and what is not, and every error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.gpu.device import Device
from cupyflash.launch import run
from cupyflash.plan.families import plan_call
from cupyflash.plan.spec import LEAST_UNIT, Spec
from cupyflash.problem import Problem
from tests import pretended_gpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SHAPES = ((4,), (2, 4))  # of slopes: heads_q, batch and heads_q


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    q, dout = rng.standard_normal((2, 2, 21, 4, 16))
    k, v = rng.standard_normal((2, 2, 33, 2, 16))
    return {"q": q, "k": k, "v": v, "dout": dout, "dlse": rng.standard_normal((2, 4, 21))}


def loss(x: dict[str, Any], slopes: np.ndarray, **options: Any) -> float:
    out, lse = cupyflash.attention(x["q"], x["k"], x["v"], alibi_slopes=slopes, return_lse=True, **options)
    return float((out * x["dout"]).sum() + (np.where(np.isfinite(lse), lse, 0) * x["dlse"]).sum())


def gradients(x: dict[str, Any], slopes: Any, of: Any = "alibi_slopes", **options: Any) -> cupyflash.Gradients:
    q, k, v = x["q"], x["k"], x["v"]
    out, lse = cupyflash.attention(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
    more = {"dlse": x["dlse"], "alibi_slopes": slopes, "gradients_of": of}
    return cupyflash.attention_backward(x["dout"], q, k, v, out, lse, **more, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_bias_that_it_says(shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Written out: softmax(scale * q k^T - slope * |i + seqlen_k - seqlen_q - j|) v."""
    slopes, (q, k, v) = rng.uniform(-0.1, 0.5, shape), (arrays[name] for name in "qkv")
    out, lse = cupyflash.attention(q, k, v, alibi_slopes=slopes, return_lse=True)
    distance = np.abs(np.arange(21)[:, None] + 33 - 21 - np.arange(33))
    for b in range(2):
        for h in range(4):
            of = slopes[h] if len(shape) == 1 else slopes[b, h]
            s = q[b, :, h] @ k[b, :, h // 2].T / 4 - of * distance
            p = np.exp(s)
            np.testing.assert_allclose(out[b, :, h], p / p.sum(1, keepdims=True) @ v[b, :, h // 2], rtol=1e-9)
            np.testing.assert_allclose(lse[b, h], np.log(p.sum(1)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "softcap": 1.5}, {"window": (7, 3), "scale": -0.4}, {"window": (None, -25), "scale": 0.0}],
    ids=str,
)
def test_gradient_by_finite_differences(
    options: dict[str, Any], shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator
) -> None:
    slopes = rng.uniform(-0.1, 0.4, shape)
    found = gradients(arrays, slopes, **options).dalibi_slopes
    assert (found.shape, found.dtype) == (shape, np.float64)
    for i in np.ndindex(shape):
        up, down = slopes.copy(), slopes.copy()
        up[i] += 1e-5
        down[i] -= 1e-5
        expected = (loss(arrays, up, **options) - loss(arrays, down, **options)) / 2e-5
        assert found[i] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_gradient_is_there_if_it_was_asked_for(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    slopes = rng.uniform(0, 1, 4)
    plain = gradients(arrays, slopes, ())
    dq, dk, dv = plain
    assert not hasattr(plain, "dalibi_slopes")
    for of in ("alibi_slopes", ["alibi_slopes"], ("alibi_slopes", "alibi_slopes"), iter(["alibi_slopes"])):
        found = gradients(arrays, slopes, of)
        assert len(found) == 3
        assert found.dalibi_slopes.shape == (4,)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, (dq, dk, dv), strict=True))


def test_slopes_of_zero_change_nothing(arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[name] for name in "qkv")
    with_zeros = cupyflash.attention(q, k, v, causal=True, alibi_slopes=np.zeros(4))
    assert with_zeros.tobytes() == cupyflash.attention(q, k, v, causal=True).tobytes()


def test_strides_of_slopes(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    whole = rng.uniform(0, 1, (4, 8))
    for slopes in (whole[::2, ::-2], whole[0, ::2], np.broadcast_to(whole[0, :4], (2, 4)), whole.T[:2]):
        a, b = gradients(arrays, slopes), gradients(arrays, slopes.copy())
        for x, y in zip((*a, a.dalibi_slopes), (*b, b.dalibi_slopes), strict=True):
            assert x.tobytes() == y.tobytes()


def test_shared_slopes_have_the_sum_of_gradients(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    slopes = rng.uniform(0, 1, 4)
    each = gradients(arrays, np.stack([slopes] * 2)).dalibi_slopes
    np.testing.assert_allclose(gradients(arrays, slopes).dalibi_slopes, each.sum(0), rtol=1e-12)


WRONG: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda s: s.astype(np.float32), r"alibi_slopes: expected shape .*, dtype fp64, on the CPU; got \(4,\), fp32"),
    (lambda s: s.astype(np.int64), "alibi_slopes: expected shape .*, dtype fp64, on the CPU; got .*, int64"),
    (lambda s: s[:3], r"expected shape \(batch, heads_q\) = \(2, 4\) or \(heads_q,\) = \(4,\), .* got \(3,\)"),
    (lambda s: s.reshape(1, 4), r"alibi_slopes: expected shape .* got \(1, 4\)"),
    (lambda s: s.reshape(1, 1, 4), r"alibi_slopes: expected shape .* got \(1, 1, 4\)"),
    (lambda s: np.array(0.5), r"alibi_slopes: expected shape .* got \(\)"),
    (lambda s: 0.5, "alibi_slopes: expected an array of CuPy, NumPy, PyTorch or JAX"),
    (lambda s: [0.5] * 4, "alibi_slopes: expected an array of CuPy, NumPy, PyTorch or JAX"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_refused(change: Callable[[Any], Any], message: str, arrays: dict[str, Any]) -> None:
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    slopes = change(np.full(4, 0.5))
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention_backward(dout, q, k, v, q, arrays["dlse"], alibi_slopes=slopes)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("q", 'gradients_of: expected "alibi_slopes" or "sink" or "bias", got \'q\''),
        (("alibi_slopes", "softcap"), "gradients_of: expected .*, got 'softcap'"),
        (3, 'gradients_of: expected "alibi_slopes" or "sink" or "bias", got 3'),
        ("alibi_slopes", "gradients_of: expected the names of arrays that are given, and alibi_slopes is not"),
    ],
)
def test_gradients_that_there_are_not(of: Any, message: str, arrays: dict[str, Any]) -> None:
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention_backward(dout, q, k, v, q, arrays["dlse"], gradients_of=of)


@pytest.mark.parametrize("of", [(), [], set()])
def test_no_gradients_may_be_asked_for(of: Any, arrays: dict[str, Any]) -> None:
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, lse = cupyflash.attention(q, k, v, alibi_slopes=np.full(4, 0.5), return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, alibi_slopes=np.full(4, 0.5), gradients_of=of)
    assert not hasattr(grads, "dalibi_slopes")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("learned", [False, True])
def test_autograd_computes_what_is_needed(
    shape: tuple[int, ...], learned: bool, arrays: dict[str, Any], rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import torch

    asked, original = [], run.backward
    monkeypatch.setattr(run, "backward", lambda *x: (asked.append(x[3]), original(*x))[1])
    slopes = rng.uniform(0, 1, shape)
    want = gradients(arrays, slopes, causal=True)
    q, k, v = (torch.tensor(arrays[name], requires_grad=True) for name in "qkv")
    s = torch.tensor(slopes, requires_grad=learned)
    asked.clear()
    out, lse = cupyflash.attention(q, k, v, causal=True, alibi_slopes=s, return_lse=True)
    torch.autograd.backward([out, lse], [torch.tensor(arrays[name]) for name in ("dout", "dlse")])
    assert asked == [("dalibi_slopes",) if learned else ()]
    np.testing.assert_array_equal(q.grad, want.dq)
    if learned:
        np.testing.assert_array_equal(s.grad, want.dalibi_slopes)
    else:
        assert s.grad is None
    with torch.no_grad():
        assert not cupyflash.attention(q, k, v, alibi_slopes=s).requires_grad


@pytest.mark.needs("torch")
def test_slopes_alone_are_learned(arrays: dict[str, Any]) -> None:
    import torch

    q, k, v = (torch.tensor(arrays[name]) for name in "qkv")
    s = torch.full((4,), 0.25, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(cupyflash.attention(q, k, v, alibi_slopes=s).sum(), s)
    x = {**arrays, "dout": np.ones_like(arrays["dout"]), "dlse": np.zeros_like(arrays["dlse"])}
    np.testing.assert_allclose(grad, gradients(x, np.full(4, 0.25)).dalibi_slopes, rtol=1e-12)


@pytest.mark.needs("jax")
def test_jax(arrays: dict[str, Any]) -> None:
    import jax.numpy as jnp

    x = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    slopes = np.linspace(0, 0.5, 4, dtype=np.float32)
    found = gradients(x, jnp.asarray(slopes))
    want = gradients({name: np.asarray(a) for name, a in x.items()}, slopes)
    assert found.dalibi_slopes.tobytes() == want.dalibi_slopes.tobytes()
    assert type(found.dalibi_slopes) is type(x["q"])


def test_packed_sequences(rng: np.random.Generator) -> None:
    """As by a dense call for each, with its own slopes; and the gradient of shared ones is their sum."""
    q, dout = rng.standard_normal((2, 30, 4, 16))
    k, v = rng.standard_normal((2, 41, 2, 16))
    cu_q, cu_k, used = (np.array(x, np.int32) for x in ((0, 11, 11, 28), (0, 20, 25, 41), (20, 5, 9)))
    slopes = rng.uniform(0, 0.5, (3, 4))
    given = {"seqused_k": used, "causal": True}

    def both(slopes: np.ndarray) -> tuple[Any, cupyflash.Gradients]:
        out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, alibi_slopes=slopes, return_lse=True, **given)
        more = {"alibi_slopes": slopes, "gradients_of": "alibi_slopes"}
        return out, cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **more, **given)

    out, grads = both(slopes)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b] + used[b])
        x = {"q": q[None, rows], "k": k[None, keys], "v": v[None, keys], "dout": dout[None, rows], "dlse": None}
        alone = cupyflash.attention(x["q"], x["k"], x["v"], causal=True, alibi_slopes=slopes[b])
        np.testing.assert_allclose(out[None, rows], alone, rtol=1e-12)
        one = gradients(x, slopes[b], causal=True)
        np.testing.assert_allclose(grads.dalibi_slopes[b], one.dalibi_slopes, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(grads.dq[None, rows], one.dq, rtol=1e-10, atol=1e-13)
    shared, split = both(slopes[0])[1], both(np.stack([slopes[0]] * 3))[1]
    np.testing.assert_allclose(shared.dalibi_slopes, split.dalibi_slopes.sum(0), rtol=1e-12)
    with pytest.raises(ArgumentError, match=r"alibi_slopes: expected shape \(batch, heads_q\) = \(3, 4\)"):
        both(slopes[:2])


# ---- Kernels ----


def problem(head_dim: int = 64, **more: Any) -> Problem:
    return Problem("bf16", 2, 300, 500, 8, 2, head_dim, **{"scale": 0.5, "alibi": 2, **more})


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plan_of_a_gradient(arch: str, head_dim: int) -> None:
    """One launch and one workspace more, of O(seqlen) numbers, where it is wanted; the others say so in their names."""
    device = Device.synthetic(arch)
    plain = plan_call(problem(head_dim), device, backward=True)
    learned = plan_call(problem(head_dim), device, backward=True, dalibi=True)
    assert (len(plain.launches), len(learned.launches)) == (4, 5)
    assert learned.launches[3].variant.function == "bwd_slopes"
    assert learned.launches[3].grid == 16
    assert plan_call(problem(head_dim, alibi=1), device, backward=True, dalibi=True).launches[3].grid == 8
    assert set(learned.workspace) - set(plain.workspace) == {"dalibi_parts"}
    shape, dtype = learned.workspace["dalibi_parts"]
    assert (shape[:2], dtype) == ((2, 8), "fp32")
    assert shape[2] * shape[3] <= 500 / 8 + 8
    assert sum("dalibi" in launch.variant.symbol for launch in learned.launches) == 1
    assert not any("dalibi" in launch.variant.symbol for launch in plain.launches)
    without = plan_call(problem(head_dim, alibi=0), device, backward=True, dalibi=True)
    assert without == plan_call(problem(head_dim, alibi=0), device, backward=True)


def test_a_tiny_scale_is_applied_first() -> None:
    """Slopes over a scale of 1e-30 would not fit fp32."""
    assert Spec.of(problem(scale=LEAST_UNIT)).scale_first
    assert not Spec.of(problem(scale=2 * LEAST_UNIT)).scale_first
    assert not Spec.of(problem(scale=LEAST_UNIT, alibi=0)).scale_first


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_launch_what_is_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes of both shapes, of any strides, with and without a gradient, are calls and specs of their own."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, k = np.zeros((2, 40, 4, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    lse = np.zeros((2, 4, 40), np.float32)
    for shape in SHAPES:
        slopes = np.zeros((*shape, 2), np.float32)[..., 0]
        for of in ((), "alibi_slopes"):
            gpu.launched.clear()
            cupyflash.attention(q, k, k, alibi_slopes=slopes)
            found = cupyflash.attention_backward(q, q, k, k, q, lse, alibi_slopes=slopes, gradients_of=of)
            assert hasattr(found, "dalibi_slopes") == bool(of)
            assert ["alibi" in x.symbol for x in gpu.launched[:4]] == [True, False, True, True]
            assert [x.symbol.startswith("bwd_slopes") for x in gpu.launched[4:]] == [True] * bool(of)
            if of:
                assert found.dalibi_slopes.shape == shape
                assert gpu.launched[4].grid == np.prod(shape)
