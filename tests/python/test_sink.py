"""Sinks through the public API: formula, gradient, rows that see nothing, what is asked for, and every error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.gpu.device import Device
from cupyflash.launch import run
from cupyflash.plan.families import plan_call
from cupyflash.plan.kernels_sm90 import BackwardSm90
from cupyflash.plan.sm80 import Backward
from cupyflash.problem import Problem
from tests import pretended_gpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SINK = np.array([0.5, -3.0, 4.0, -np.inf])


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    q, dout = rng.standard_normal((2, 2, 21, 4, 16))
    k, v = rng.standard_normal((2, 2, 33, 2, 16))
    return {"q": q, "k": k, "v": v, "dout": dout, "dlse": rng.standard_normal((2, 4, 21))}


def gradients(x: dict[str, Any], sink: Any, of: Any = "sink", **options: Any) -> cupyflash.Gradients:
    q, k, v = x["q"], x["k"], x["v"]
    out, lse = cupyflash.attention(q, k, v, sink=sink, return_lse=True, **options)
    more = {"dlse": x["dlse"], "sink": sink, "gradients_of": of}
    return cupyflash.attention_backward(x["dout"], q, k, v, out, lse, **more, **options)


def test_is_one_more_key_without_a_value(arrays: dict[str, Any]) -> None:
    """Written out: a column of scores more, whose v is 0."""
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = cupyflash.attention(q, k, v, sink=SINK, return_lse=True)
    for b in range(2):
        for h in range(4):
            s = np.append(q[b, :, h] @ k[b, :, h // 2].T / 4, np.full((21, 1), SINK[h]), axis=1)
            p = np.exp(s)
            values = np.append(v[b, :, h // 2], np.zeros((1, 16)), axis=0)
            np.testing.assert_allclose(out[b, :, h], p / p.sum(1, keepdims=True) @ values, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(lse[b, h], np.log(p.sum(1)), rtol=1e-9, atol=1e-12)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "softcap": 1.5}, {"window": (7, 3), "scale": -0.4}, {"window": (None, -25), "scale": 0.0}],
    ids=str,
)
def test_gradients_are_those_of_autograd_in_float64(options: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Of plain attention with one key more, whose score is the sink and whose v is 0."""
    import torch

    q, k, v = (torch.tensor(arrays[name], requires_grad=True) for name in "qkv")
    sink = torch.tensor([0.5, -3.0, 4.0, 1.0], dtype=torch.float64, requires_grad=True)
    scale = options.get("scale", 0.25)
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * scale
    if softcap := options.get("softcap"):
        s = softcap * torch.tanh(s / softcap)
    left, right = options.get("window", (None, 0 if options.get("causal") else None))
    behind = torch.arange(21)[:, None] + 12 - torch.arange(33)
    hidden = torch.zeros(21, 33, dtype=torch.bool)
    hidden |= behind > left if left is not None else hidden
    hidden |= -behind > right if right is not None else hidden
    s = torch.cat((s.masked_fill(hidden, -torch.inf), sink.reshape(1, 4, 1, 1).expand(2, 4, 21, 1)), -1)
    out = torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., :-1], v.repeat_interleave(2, 2))
    dout, dlse = (torch.tensor(arrays[name]) for name in ("dout", "dlse"))
    want = torch.autograd.grad([out, s.logsumexp(-1)], [q, k, v, sink], [dout, dlse])
    found = gradients(arrays, sink.detach().numpy(), **options)
    for got, exact in zip((*found, found.dsink), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-8, atol=1e-10)


def test_rows_that_see_nothing(arrays: dict[str, Any]) -> None:
    """out 0, lse the sink, and a gradient of it by lse alone."""
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = cupyflash.attention(q, k, v, window=(None, -40), sink=SINK, return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(SINK[:, None], (2, 4, 21)))
    found = gradients(arrays, SINK, window=(None, -40))
    assert not any(x.any() for x in found)
    want = np.where(np.isneginf(SINK), 0, arrays["dlse"].sum(axis=(0, 2)))
    np.testing.assert_allclose(found.dsink, want, rtol=1e-12)


def test_a_sink_of_minus_infinity_is_none(arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[name] for name in "qkv")
    none = np.full(4, -np.inf)
    for options in ({"causal": True}, {"window": (None, -25)}):
        with_none = cupyflash.attention(q, k, v, sink=none, return_lse=True, **options)
        for a, b in zip(with_none, cupyflash.attention(q, k, v, return_lse=True, **options), strict=True):
            assert a.tobytes() == b.tobytes()
        assert not gradients(arrays, none, **options).dsink.any()


def test_huge_sinks_neither_overflow_nor_vanish(arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[name].astype(np.float32) for name in "qkv")
    sink = np.array([1e5, -1e5, 300, -300], np.float32)
    out, lse = cupyflash.attention(q, k, v, sink=sink, return_lse=True)
    plain, plain_lse = cupyflash.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(out[:, :, 0], 0)
    np.testing.assert_array_equal(lse[:, 0], sink[0])
    np.testing.assert_allclose(out[:, :, 1::2], plain[:, :, 1::2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:, 1::2], plain_lse[:, 1::2], rtol=1e-5)
    assert np.isfinite(out).all()


def test_a_gradient_is_there_if_it_was_asked_for(arrays: dict[str, Any]) -> None:
    plain = gradients(arrays, SINK, ())
    assert not hasattr(plain, "dsink")
    found = gradients(arrays, SINK)
    assert (found.dsink.shape, found.dsink.dtype) == ((4,), np.float64)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, plain, strict=True))
    slopes = np.full(4, 0.25)
    both = gradients(arrays, SINK, ("sink", "alibi_slopes"), alibi_slopes=slopes)
    assert both.dsink.tobytes() == gradients(arrays, SINK, "sink", alibi_slopes=slopes).dsink.tobytes()
    assert both.dalibi_slopes.shape == (4,)


def test_a_gradient_stays_where_another_is_replaced(arrays: dict[str, Any]) -> None:
    found = gradients(arrays, np.ones(arrays["q"].shape[2]))
    new = found._replace(dq=found.dk)
    assert isinstance(new, cupyflash.Gradients)
    assert new.dq is found.dk
    assert new.dsink is found.dsink  # type: ignore[attr-defined]
    assert found._replace(dsink=1).dsink == 1  # type: ignore[attr-defined]
    with pytest.raises((TypeError, ValueError), match="dbias"):
        found._replace(dbias=1)


def test_strides_of_sinks(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    whole = rng.standard_normal((4, 8))
    for sink in (whole[0, ::-2], whole[:, 0], np.broadcast_to(whole[0, :1], (4,))):
        a, b = gradients(arrays, sink), gradients(arrays, sink.copy())
        for x, y in zip((*a, a.dsink), (*b, b.dsink), strict=True):
            assert x.tobytes() == y.tobytes()


WRONG: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda s: s.astype(np.float32), r"sink: expected shape \(heads_q,\) = \(4,\), dtype fp64, .*; got \(4,\), fp32"),
    (lambda s: s.astype(np.float16), "sink: expected .* dtype fp64, on the CPU; got .*, fp16"),
    (lambda s: s[:3], r"sink: expected shape \(heads_q,\) = \(4,\), .* got \(3,\)"),
    (lambda s: np.stack([s, s]), r"sink: expected shape \(heads_q,\) = \(4,\), .* got \(2, 4\)"),
    (lambda s: np.array(0.5), r"sink: expected shape .* got \(\)"),
    (lambda s: 0.5, "sink: expected an array of CuPy, NumPy, PyTorch or JAX"),
    (lambda s: [0.5] * 4, "sink: expected an array of CuPy, NumPy, PyTorch or JAX"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_refused(change: Callable[[Any], Any], message: str, arrays: dict[str, Any]) -> None:
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    sink = change(np.full(4, 0.5))
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention(q, k, v, sink=sink)
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention_backward(dout, q, k, v, q, arrays["dlse"], sink=sink)
    cu = np.array([0, 21], np.int32)
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention_varlen(q[0], k[0, :21], v[0, :21], cu, sink=sink)


def test_its_gradient_needs_it(arrays: dict[str, Any]) -> None:
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    with pytest.raises(
        ArgumentError, match="gradients_of: expected the names of arrays that are given, and sink is not"
    ):
        cupyflash.attention_backward(dout, q, k, v, q, arrays["dlse"], gradients_of="sink")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("learned", [False, True])
def test_autograd_computes_what_is_needed(
    learned: bool, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    asked, original = [], run.backward
    monkeypatch.setattr(run, "backward", lambda *x: (asked.append(x[3]), original(*x))[1])
    want = gradients(arrays, SINK, causal=True)
    q, k, v = (torch.tensor(arrays[name], requires_grad=True) for name in "qkv")
    s = torch.tensor(SINK, requires_grad=learned)
    asked.clear()
    out, lse = cupyflash.attention(q, k, v, causal=True, sink=s, return_lse=True)
    torch.autograd.backward([out, lse], [torch.tensor(arrays[name]) for name in ("dout", "dlse")])
    assert asked == [("dsink",) if learned else ()]
    np.testing.assert_array_equal(q.grad, want.dq)
    if learned:
        np.testing.assert_array_equal(s.grad, want.dsink)
    else:
        assert s.grad is None


def test_packed_sequences(rng: np.random.Generator) -> None:
    """As by a dense call for each; the gradient is their sum, without the rows of no sequence."""
    q, dout = rng.standard_normal((2, 30, 4, 16))
    k, v = rng.standard_normal((2, 41, 2, 16))
    cu_q, cu_k, used = (np.array(x, np.int32) for x in ((0, 11, 11, 28), (0, 20, 25, 41), (20, 5, 9)))
    given = {"seqused_k": used, "causal": True, "sink": SINK}
    out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **given)
    dlse = rng.standard_normal(lse.shape)
    more = {"gradients_of": "sink", "dlse": dlse}
    grads = cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **more, **given)
    total = np.zeros(4)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b] + used[b])
        x = {"q": q[None, rows], "k": k[None, keys], "v": v[None, keys], "dout": dout[None, rows]}
        x["dlse"] = dlse[None, :, rows]
        alone, alone_lse = cupyflash.attention(x["q"], x["k"], x["v"], causal=True, sink=SINK, return_lse=True)
        np.testing.assert_allclose(out[None, rows], alone, rtol=1e-12)
        np.testing.assert_allclose(lse[None, :, rows], alone_lse, rtol=1e-12)
        one = gradients(x, SINK, causal=True)
        np.testing.assert_allclose(grads.dq[None, rows], one.dq, rtol=1e-10, atol=1e-13)
        total += one.dsink
    np.testing.assert_allclose(grads.dsink, total, rtol=1e-10, atol=1e-13)
    assert not out[28:].any()
    assert np.isneginf(lse[:, 28:]).all()


# ---- Kernels ----


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plan(arch: str, head_dim: int) -> None:
    """The forward, what makes dk and what adds up its shares have kernels of their own, and so has a gradient; all else
    is as without a sink."""
    device, with_sink = Device.synthetic(arch), Problem("bf16", 2, 300, 500, 8, 2, head_dim, 0.5, sink=True)
    without = Problem("bf16", 2, 300, 500, 8, 2, head_dim, 0.5)
    (forward,) = plan_call(with_sink, device).launches
    assert forward.variant.symbol == plan_call(without, device).launches[0].variant.symbol + "_sink"
    plain, fixed = (plan_call(p, device, backward=True) for p in (without, with_sink))
    of_keys = plain.launches[1].variant
    assert isinstance(of_keys, (Backward, BackwardSm90))
    delta, main, last, shares = plain.launches
    own = [
        dataclasses.replace(x, variant=dataclasses.replace(x.variant, sink=True))  # type: ignore[call-arg]
        for x in (main, shares)
    ]
    assert fixed == dataclasses.replace(plain, launches=(delta, own[0], last, own[1]))
    learned = plan_call(with_sink, device, backward=True, dsink=True)
    assert learned.launches[:-1] == fixed.launches
    assert learned.workspace == plain.workspace
    assert (learned.launches[-1].variant.function, learned.launches[-1].grid) == ("bwd_sink", 8)
    assert plan_call(without, device, backward=True, dsink=True) == plain


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_launch_what_is_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, k = np.zeros((2, 40, 4, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    lse, sink = np.zeros((2, 4, 40), np.float32), np.zeros((4, 2), np.float32)[:, 0]
    for of in ((), "sink"):
        gpu.launched.clear()
        cupyflash.attention(q, k, k, sink=sink)
        found = cupyflash.attention_backward(q, q, k, k, q, lse, sink=sink, gradients_of=of)
        assert hasattr(found, "dsink") == bool(of)
        assert ["sink" in x.symbol for x in gpu.launched] == [True, False, True, False] + [True] * bool(of)
        if of:
            assert found.dsink.shape == (4,)
            assert gpu.launched[4].grid == 4
