"""A boolean mask through the public API: as a bias of 0 and -inf, in every library, and every error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from tests import pretended_gpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")

B, SQ, SK, H = 2, 21, 34, 4
SHAPES = ((B, H, SQ, SK), (H, SQ, SK), (B, 1, SQ, SK), (SQ, SK), (B, 1, 1, SK), (SK,), (B, H, SQ, 1), ())


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    q, dout = rng.standard_normal((2, B, SQ, H, 16))
    k, v = rng.standard_normal((2, B, SK, 2, 16))
    return {"q": q, "k": k, "v": v, "dout": dout, "dlse": rng.standard_normal((B, H, SQ))}


def everything(x: dict[str, Any], **options: Any) -> list[Any]:
    """out, lse, dq, dk and dv."""
    out, lse = cupyflash.attention(x["q"], x["k"], x["v"], return_lse=True, **options)
    more = {"dlse": x["dlse"], **options}
    return [out, lse, *cupyflash.attention_backward(x["dout"], x["q"], x["k"], x["v"], out, lse, **more)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 1.5}, {"window": (9, 3), "scale": -0.4}], ids=str)
def test_is_a_bias_of_minus_inf(
    options: dict[str, Any], shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator
) -> None:
    """To the same bits; also of rows and keys that nobody sees."""
    mask = np.asarray(rng.random(shape) < 0.7)
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask[..., 5, :] = False
    bias = np.where(mask, 0.0, -np.inf)
    for a, b in zip(everything(arrays, mask=mask, **options), everything(arrays, bias=bias, **options), strict=True):
        assert a.tobytes() == b.tobytes()


def test_written_out(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """softmax over the visible keys; 0 and -inf where there are none."""
    mask = rng.random((B, H, SQ, SK)) < 0.3
    mask[:, :, 4] = False
    out, lse, *grads = everything(arrays, mask=mask)
    for b in range(B):
        for h in range(H):
            for i in range(SQ):
                seen = mask[b, h, i]
                s = arrays["k"][b, seen, h // 2] @ arrays["q"][b, i, h] / 4
                p = np.exp(s)
                want = p / p.sum() @ arrays["v"][b, seen, h // 2] if seen.any() else 0
                np.testing.assert_allclose(out[b, i, h], want, rtol=1e-9)
                np.testing.assert_allclose(lse[b, h, i], np.log(p.sum()) if seen.any() else -np.inf, rtol=1e-9)
    assert not grads[0][:, 4].any()
    assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_has_no_effect(value: float, arrays: dict[str, Any], rng: np.random.Generator) -> None:
    mask = rng.random((SQ, SK)) < 0.7
    mask[:, 20:] = False
    x = {name: a.copy() for name, a in arrays.items()}
    x["k"][:, 20:, :, 3], x["v"][:, 25:, :, 5] = value, value
    for a, b in zip(everything(x, mask=mask), everything(arrays, mask=mask), strict=True):
        assert a.tobytes() == b.tobytes()


def test_strides(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    whole = rng.random((B, H, 2 * SK, 2 * SK)) < 0.6
    one = whole[0, 0, :SQ, :SK]
    for mask in (whole[:, :, :SQ, ::-2], whole[:, :, :SK, :SQ].swapaxes(2, 3), np.broadcast_to(one, (B, H, SQ, SK))):
        for a, b in zip(everything(arrays, mask=mask), everything(arrays, mask=mask.copy()), strict=True):
            assert a.tobytes() == b.tobytes()


WRONG: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda m: m.astype(np.uint8), r"mask: expected shape one that broadcasts to .*, dtype bool, .*; got .*, uint8"),
    (lambda m: m.astype(np.float64), r"mask: expected .* dtype bool, on the CPU; got \(21, 34\), fp64"),
    (lambda m: m[1:], r"mask: expected .* got \(20, 34\)"),
    (lambda m: True, "mask: expected an array of CuPy, NumPy, PyTorch or JAX"),
)


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_refused(change: Callable[[Any], Any], message: str, arrays: dict[str, Any]) -> None:
    mask = change(np.ones((SQ, SK), bool))
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention(arrays["q"], arrays["k"], arrays["v"], mask=mask)


def test_a_mask_has_no_gradient(arrays: dict[str, Any]) -> None:
    q, k, v, mask = arrays["q"], arrays["k"], arrays["v"], np.ones((SQ, SK), bool)
    with pytest.raises(ArgumentError, match=r"gradients_of: expected .*, got 'mask'"):
        cupyflash.attention_backward(q, q, k, v, q, arrays["dlse"], mask=mask, gradients_of="mask")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch(shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Under autograd, compiled, under vmap; and as torch's own function has it."""
    import torch

    import cupyflash.torch

    mask = torch.tensor(rng.random(shape) < 0.7)
    if mask.ndim:
        mask[..., :1] = True  # torch gives NaN or 0, by version, where nothing is seen
    else:
        mask = torch.tensor(True)
    q, k, v = (torch.tensor(arrays[name], requires_grad=True) for name in "qkv")

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return cupyflash.attention(q, k, v, mask=mask)

    out = attend(q, k, v, mask)
    turned = [x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    theirs = mask if mask.ndim > 1 else mask.expand(SQ, SK)
    want = torch.nn.functional.scaled_dot_product_attention(*turned, attn_mask=theirs).transpose(1, 2)
    torch.testing.assert_close(out, want)
    ours = cupyflash.torch.scaled_dot_product_attention(*turned, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(ours, want)
    dout = torch.tensor(arrays["dout"])
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout, retain_graph=True) for x in (out, want)), strict=True):
        torch.testing.assert_close(a, b)
    three = torch.stack([q.detach(), -q.detach()])
    mapped = torch.vmap(attend, in_dims=(0, None, None, None))(three, k.detach(), v.detach(), mask)
    torch.testing.assert_close(mapped[1], attend(-q, k, v, mask).detach())
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask), out)


@pytest.mark.needs("jax")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax(shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    x = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    mask = jnp.asarray(rng.random(shape) < 0.7)
    attend = jax.jit(lambda q, mask: cupyflash.attention(q, x["k"], x["v"], mask=mask))
    bias = jnp.where(mask, 0.0, -jnp.inf).astype(jnp.float32)
    want = cupyflash.attention(x["q"], x["k"], x["v"], bias=bias)
    np.testing.assert_array_equal(attend(x["q"], mask), want)
    grad = jax.grad(lambda q: (attend(q, mask) * x["dout"]).sum())(x["q"])
    np.testing.assert_allclose(grad, everything({**x, "dlse": 0 * x["dlse"]}, bias=bias)[2], rtol=1e-6, atol=1e-6)
    two = jax.vmap(attend, in_axes=(None, 0))(x["q"], jnp.stack([mask, ~mask]))
    np.testing.assert_allclose(two[1], attend(x["q"], ~mask), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_launch_what_is_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, k = np.zeros((2, 40, 4, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    whole, lse = np.zeros((2, 4, 40, 100), bool), np.zeros((2, 4, 40), np.float32)
    for mask, is_paired in ((whole[..., :50], True), (whole[..., ::2], False), (whole[0, 0, 0, :50], True)):
        for paired in (False, True):  # beside a bias they are read in pairs if both can be
            gpu.launched.clear()
            bias = np.zeros((40, 50), np.float16) if paired else np.zeros((40, 1), np.float16)
            cupyflash.attention(q, k, k, mask=mask, bias=bias)
            (symbol,) = (launch.symbol for launch in gpu.launched)
            assert "_masked_bias" in symbol
            assert ("paired_bias" in symbol) == (paired and is_paired)
        gpu.launched.clear()
        cupyflash.attention(q, k, k, mask=mask)
        cupyflash.attention_backward(q, q, k, k, q, lse, mask=mask)
        symbols = [launch.symbol for launch in gpu.launched]
        assert len(symbols) == 4
        assert all("_bias" in symbol for symbol in symbols)
        assert all("_mask" in s for s in symbols if "delta" not in s)
        assert {"paired_bias" in s for s in symbols if s.startswith(("fwd", "bwd_sm"))} == {is_paired}
