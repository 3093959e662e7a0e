"""A bias through the public API: formula, gradient, shapes and strides, what is hidden, every library, and every
error."""

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
from cupyflash.problem import Bias, Problem
from tests import pretended_gpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")

B, SQ, SK, H = 2, 21, 34, 4
SHAPES = (
    (B, H, SQ, SK), (1, H, SQ, SK), (H, SQ, SK), (B, 1, SQ, SK), (SQ, SK), (B, 1, 1, SK), (SK,), (B, H, SQ, 1),
    (H, 1, 1), (1,), (),
)  # fmt: skip


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    q, dout = rng.standard_normal((2, B, SQ, H, 16))
    k, v = rng.standard_normal((2, B, SK, 2, 16))
    return {"q": q, "k": k, "v": v, "dout": dout, "dlse": rng.standard_normal((B, H, SQ))}


def forward(x: dict[str, Any], bias: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = cupyflash.attention(x["q"], x["k"], x["v"], bias=bias, return_lse=True, **options)
    return out, lse


def gradients(x: dict[str, Any], bias: Any, of: Any = "bias", **options: Any) -> cupyflash.Gradients:
    out, lse = forward(x, bias, **options)
    more = {"dlse": x["dlse"], "bias": bias, "gradients_of": of}
    return cupyflash.attention_backward(x["dout"], x["q"], x["k"], x["v"], out, lse, **more, **options)


def loss(x: dict[str, Any], bias: np.ndarray, **options: Any) -> float:
    out, lse = forward(x, bias, **options)
    return float((out * x["dout"]).sum() + (np.where(np.isfinite(lse), lse, 0) * x["dlse"]).sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_added_to_the_scores(shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Written out: softmax(softcap(scale * q k^T) - slope * distance + bias) v."""
    bias, slopes = np.asarray(rng.standard_normal(shape)), rng.uniform(0, 0.2, H)
    out, lse = forward(arrays, bias, alibi_slopes=slopes, softcap=2.0)
    whole, distance = np.broadcast_to(bias, (B, H, SQ, SK)), np.abs(np.arange(SQ)[:, None] + SK - SQ - np.arange(SK))
    for b in range(B):
        for h in range(H):
            s = 2 * np.tanh(arrays["q"][b, :, h] @ arrays["k"][b, :, h // 2].T / 4 / 2)
            p = np.exp(s - slopes[h] * distance + whole[b, h])
            np.testing.assert_allclose(out[b, :, h], p / p.sum(1, keepdims=True) @ arrays["v"][b, :, h // 2], rtol=1e-9)
            np.testing.assert_allclose(lse[b, h], np.log(p.sum(1)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "softcap": 1.5}, {"window": (7, 3), "scale": -0.4}, {"window": (None, -25), "scale": 0.0}],
    ids=str,
)
def test_gradient_by_finite_differences(
    options: dict[str, Any], shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator
) -> None:
    """Along some directions, one of which is a single element."""
    bias = np.asarray(rng.standard_normal(shape))
    found = gradients(arrays, bias, **options).dbias  # type: ignore[attr-defined]
    assert (found.shape, found.dtype) == (shape, np.float64)
    one = np.zeros(bias.size)
    one[bias.size // 3] = 1
    for direction in (one.reshape(shape), *(np.asarray(rng.standard_normal(shape)) for _ in range(3))):
        up, down = (np.asarray(bias + step * direction) for step in (1e-5, -1e-5))
        expected = (loss(arrays, up, **options) - loss(arrays, down, **options)) / 2e-5
        assert (found * direction).sum() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_kv_range_reads_the_bias_of_its_keys(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """As NaN in the bias of other keys shows, and as each sequence by itself."""
    ranges = np.array([[3, 30], [0, 17]], np.int32)
    for shape in ((B, H, SQ, SK), (1, H, SQ, SK), (SK,)):
        bias = rng.standard_normal(shape)
        options = {"kv_range": ranges, "causal": True}
        out, _ = forward(arrays, bias, **options)
        found = gradients(arrays, bias, **options).dbias  # type: ignore[attr-defined]
        total = np.zeros((B, H, SQ, SK))
        for b, (start, end) in enumerate(ranges):
            one = {name: x[b : b + 1] for name, x in arrays.items()}
            hidden = np.full(SK, -np.inf)
            hidden[start:end] = 0
            own = np.broadcast_to(bias, (B, H, SQ, SK))[b : b + 1] + hidden
            np.testing.assert_allclose(out[b : b + 1], forward(one, own, causal=True)[0], rtol=1e-12, atol=1e-14)
            total[b] = gradients(one, own, causal=True).dbias[0]  # type: ignore[attr-defined]
        shared = tuple(i for i, n in enumerate((1,) * (4 - len(shape)) + shape) if n == 1)
        np.testing.assert_allclose(found, total.sum(shared, keepdims=True).reshape(shape), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_minus_inf_hides_has_no_effect(value: float, arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """As if the keys were not there; their gradients are 0."""
    bias = rng.standard_normal((H, SQ, SK))
    bias[:, :, 20:] = -np.inf
    x = {name: a.copy() for name, a in arrays.items()}
    x["k"][:, 20:, :, 3], x["v"][:, 25:, :, 5] = value, value
    short = {**x, "k": x["k"][:, :20], "v": x["v"][:, :20]}
    for a, b in zip(forward(x, bias), forward(short, bias[..., :20]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    found, want = gradients(x, bias), gradients(short, bias[..., :20])
    np.testing.assert_allclose(found.dq, want.dq, rtol=1e-10, atol=1e-13)
    for name, axis in (("dk", 1), ("dv", 1), ("dbias", 2)):
        got, exact = getattr(found, name), getattr(want, name)
        np.testing.assert_allclose(np.take(got, range(20), axis), exact, rtol=1e-10, atol=1e-13)
        assert not np.take(got, range(20, SK), axis).any()


def test_a_query_whose_scores_are_all_minus_inf_sees_nothing(arrays: dict[str, Any]) -> None:
    bias = np.zeros((SQ, SK))
    bias[5] = -np.inf
    out, lse = forward(arrays, bias)
    assert not out[:, 5].any()
    assert np.isneginf(lse[:, :, 5]).all()
    found = gradients(arrays, bias)
    assert not found.dq[:, 5].any()
    assert not found.dbias[5].any()  # type: ignore[attr-defined]
    assert all(np.isfinite(x).all() for x in (*found, found.dbias))  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks_of_the_least_number(dtype: str, arrays: dict[str, Any]) -> None:
    """As models write them: a row of nothing else is the mean of all values."""
    import ml_dtypes

    kind = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    x = {name: a.astype(kind) for name, a in arrays.items()}
    for bias_dtype in (kind, np.dtype(np.float32)):
        bias = np.zeros((SQ, SK), bias_dtype)
        bias[5], bias[6, 3:] = ml_dtypes.finfo(bias_dtype).min, ml_dtypes.finfo(bias_dtype).min
        out = forward(x, bias)[0].astype(np.float64)
        mean = x["v"].astype(np.float64).mean(1).repeat(2, axis=1)
        least = forward({**x, "k": x["k"][:, :3], "v": x["v"][:, :3]}, None)[0]
        np.testing.assert_allclose(out[:, 6], least[:, 6].astype(np.float64), rtol=2e-2, atol=2e-2)
        if float(ml_dtypes.finfo(bias_dtype).min) < -1e30:
            np.testing.assert_allclose(out[:, 5], mean, rtol=2e-2, atol=2e-2)


def test_zeros_change_nothing(arrays: dict[str, Any]) -> None:
    with_zeros = forward(arrays, np.zeros((SQ, SK)), causal=True)
    for a, b in zip(with_zeros, forward(arrays, None, causal=True), strict=True):
        assert a.tobytes() == b.tobytes()


def test_strides(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    whole = rng.standard_normal((B, H, 2 * SQ, 2 * SK))
    turned = rng.standard_normal((B, H, SK, SQ)).swapaxes(2, 3)
    for bias in (
        whole[:, :, ::2, ::-2],
        whole[:, :1, :SQ, :SK],
        turned,
        np.broadcast_to(whole[0, 0, :SQ, :SK], (B, H, SQ, SK)),
    ):
        a, b = gradients(arrays, bias), gradients(arrays, bias.copy())
        for x, y in zip((*a, a.dbias), (*b, b.dbias), strict=True):  # type: ignore[attr-defined]
            assert x.tobytes() == y.tobytes()


def test_layout_is_that_of_q_alone(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    bias = rng.standard_normal((H, SQ, SK))
    turned = {name: x.swapaxes(1, 2) if name != "dlse" else x for name, x in arrays.items()}
    np.testing.assert_array_equal(forward(turned, bias, layout="bhsd")[0].swapaxes(1, 2), forward(arrays, bias)[0])
    np.testing.assert_array_equal(
        gradients(turned, bias, layout="bhsd").dbias, gradients(arrays, bias).dbias  # type: ignore[attr-defined]
    )  # fmt: skip


def test_gradients_that_are_asked_for(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    bias, slopes = rng.standard_normal((SQ, SK)), rng.uniform(0, 0.3, H)
    for of in ((), "bias", "alibi_slopes", ("bias", "alibi_slopes")):
        found = gradients(arrays, bias, of, alibi_slopes=slopes)
        assert hasattr(found, "dbias") == ("bias" in of)
        assert hasattr(found, "dalibi_slopes") == ("alibi_slopes" in of)


WRONG: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda b: b.astype(np.float32), r"bias: expected shape one that broadcasts to \(batch, heads_q, seqlen_q, "
                                     r"seqlen_k\) = \(2, 4, 21, 34\), dtype fp64, on the CPU; got \(21, 34\), fp32"),
    (lambda b: b > 0, r"bias: expected .* dtype fp64, .*; got \(21, 34\), bool"),
    (lambda b: b[1:], r"bias: expected .* got \(20, 34\)"),
    (lambda b: b.T, r"bias: expected .* got \(34, 21\)"),
    (lambda b: b[None, None, None], r"bias: expected .* got \(1, 1, 1, 21, 34\)"),
    (lambda b: np.stack([b] * 2), r"bias: expected .* got \(2, 21, 34\)"),
    (lambda b: 0.5, "bias: expected an array of CuPy, NumPy, PyTorch or JAX"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_refused(change: Callable[[Any], Any], message: str, arrays: dict[str, Any]) -> None:
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    bias = change(np.zeros((SQ, SK)))
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention(q, k, v, bias=bias)
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention_backward(dout, q, k, v, q, arrays["dlse"], bias=bias)


def test_of_16_bits_or_32(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    x = {name: a.astype(np.float16) for name, a in arrays.items()} | {"dlse": arrays["dlse"].astype(np.float32)}
    bias = rng.standard_normal((SQ, SK)).astype(np.float16)
    half, single = gradients(x, bias), gradients(x, bias.astype(np.float32))
    assert (half.dbias.dtype, single.dbias.dtype) == (np.float16, np.float32)  # type: ignore[attr-defined]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(half, single, strict=True))
    with pytest.raises(ArgumentError, match=r"bias: expected .*, dtype fp16 or fp32, on the CPU; got \(21, 34\), fp64"):
        forward(x, bias.astype(np.float64))


# ---- Libraries ----


@pytest.mark.needs("torch")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("learned", [False, True])
def test_autograd_computes_what_is_needed(
    shape: tuple[int, ...], learned: bool, arrays: dict[str, Any], rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import torch

    asked, original = [], run.backward
    monkeypatch.setattr(run, "backward", lambda *x: (asked.append(x[3]), original(*x))[1])
    values = rng.standard_normal(shape)
    want = gradients(arrays, np.asarray(values), causal=True)
    q, k, v = (torch.tensor(arrays[name], requires_grad=True) for name in "qkv")
    bias = torch.tensor(values, requires_grad=learned)
    asked.clear()
    out, lse = cupyflash.attention(q, k, v, causal=True, bias=bias, return_lse=True)
    torch.autograd.backward([out, lse], [torch.tensor(arrays[name]) for name in ("dout", "dlse")])
    assert asked == [("dbias",) if learned else ()]
    np.testing.assert_array_equal(q.grad, want.dq)
    if learned:
        np.testing.assert_array_equal(bias.grad, want.dbias)  # type: ignore[attr-defined]
    else:
        assert bias.grad is None


@pytest.mark.needs("torch")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_sdpa(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """A floating attn_mask is ours, forward and backward, as torch has it; a boolean one is torch's."""
    import torch

    import cupyflash.torch

    ours = cupyflash.torch.scaled_dot_product_attention
    q, k, v = (torch.tensor(rng.standard_normal((B, H, n, 16)), requires_grad=True) for n in (SQ, SK, SK))
    mask = torch.tensor(rng.standard_normal(shape), requires_grad=True)
    found, want = (f(q, k, v, attn_mask=mask) for f in (ours, torch.nn.functional.scaled_dot_product_attention))
    torch.testing.assert_close(found, want)
    dout = torch.tensor(rng.standard_normal(found.shape))
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v, mask), dout) for x in (found, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.needs("torch")
def test_torch_compile_export_and_vmap(rng: np.random.Generator) -> None:
    import torch

    q, k, v = (torch.tensor(rng.standard_normal((3, B, n, H, 16))) for n in (SQ, SK, SK))

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return cupyflash.attention(q, k, v, bias=bias, causal=True)

    for shape in ((3, B, H, SQ, SK), (3, SQ, SK), (3, 1, H, SQ, SK)):
        bias = torch.tensor(rng.standard_normal(shape))
        want = torch.stack([attend(q[i], k[i], v[i], bias[i]) for i in range(3)])
        torch.testing.assert_close(torch.vmap(attend)(q, k, v, bias), want)
        shared = torch.stack([attend(q[i], k[i], v[i], bias[0]) for i in range(3)])
        torch.testing.assert_close(torch.vmap(attend, in_dims=(0, 0, 0, None))(q, k, v, bias[0]), shared)
        grad = torch.func.grad(lambda bias, *x: attend(*x, bias).sum())
        want = torch.stack([grad(bias[0], q[i], k[i], v[i]) for i in range(3)])
        torch.testing.assert_close(torch.vmap(grad, in_dims=(None, 0, 0, 0))(bias[0], q, k, v), want)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    learned = bias[0].clone().requires_grad_()
    out = compiled(q[0], k[0], v[0], learned)
    torch.testing.assert_close(out, attend(q[0], k[0], v[0], bias[0]))
    (found,) = torch.autograd.grad(out.sum(), learned)
    torch.testing.assert_close(found, grad(bias[0], q[0], k[0], v[0]))


@pytest.mark.needs("torch")
def test_autocast_keeps_a_bias_of_fp32() -> None:
    import torch

    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    for dtype in (torch.float32, torch.float16):
        bias = torch.randn(8, 8, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = cupyflash.attention(q, k, v, bias=bias)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert bias.grad is not None
        assert bias.grad.dtype == dtype


@pytest.mark.needs("jax")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax(shape: tuple[int, ...], arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Inside jit, its gradient too, and under vmap."""
    import jax
    import jax.numpy as jnp

    x = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    bias = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    want = gradients({name: np.asarray(a) for name, a in x.items()}, np.asarray(bias))

    def value(bias: Any) -> Any:
        out, lse = forward(x, bias)
        return (out * x["dout"]).sum() + (lse * x["dlse"]).sum()

    found = jax.jit(jax.grad(value))(bias)
    np.testing.assert_allclose(found, want.dbias, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
    three = jnp.stack([bias, 2 * bias, -bias])
    mapped = jax.vmap(lambda b: forward(x, b)[0])(three)
    grads = jax.vmap(jax.grad(value))(three)
    for i in range(3):
        np.testing.assert_allclose(mapped[i], forward(x, three[i])[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(grads[i], jax.grad(value)(three[i]), rtol=1e-5, atol=1e-5)
    queries = jnp.stack([x["q"], -x["q"]])

    def of_q(q: Any, b: Any) -> Any:
        return (cupyflash.attention(q, x["k"], x["v"], bias=b) ** 2).sum()

    found = jax.vmap(jax.grad(of_q, 1), in_axes=(0, None))(queries, bias)
    for i in range(2):
        np.testing.assert_allclose(found[i], jax.grad(of_q, 1)(queries[i], bias), rtol=1e-5, atol=1e-5)


@pytest.mark.needs("jax")
def test_jax_sdpa(rng: np.random.Generator) -> None:
    import jax

    q, k, v = (jax.numpy.asarray(rng.standard_normal((B, n, H, 16)), "float32") for n in (SQ, SK, SK))
    for shape in ((B, H, SQ, SK), (1, H, SQ, SK), (1, 1, SQ, SK)):
        bias = jax.numpy.asarray(rng.standard_normal(shape), "float32")
        want = jax.nn.dot_product_attention(q, k, v, bias)
        np.testing.assert_allclose(cupyflash.jax.dot_product_attention(q, k, v, bias), want, rtol=1e-4, atol=1e-5)


# ---- Kernels ----


def problem(head_dim: int = 64, dtype: str = "bf16", own: tuple[bool, ...] = (True,) * 4, **more: Any) -> Problem:
    return Problem("bf16", 2, 300, 500, 8, 2, head_dim, **{"scale": 0.5, "bias": Bias(dtype, own), **more})


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plan_of_a_gradient(arch: str, head_dim: int) -> None:
    """One launch more, and no workspace: a tile along each dimension along which the bias is broadcast."""
    device = Device.synthetic(arch)
    plain = plan_call(problem(head_dim), device, backward=True)
    for own in ((True,) * 4, (False, True, True, True), (True, False, False, True), (False,) * 4):
        learned = plan_call(problem(head_dim, own=own), device, backward=True, dbias=True)
        assert [x.variant for x in learned.launches[:-1]] == [x.variant for x in plain.launches]
        assert learned.workspace == plain.workspace
        variant, grid = learned.launches[-1].variant, learned.launches[-1].grid
        m, n = variant.tile.block_m, variant.tile.block_n  # type: ignore[attr-defined]
        assert variant.function == "bwd_dbias"
        tiles = np.prod([x if o else 1 for x, o in zip((2, 8, -(-300 // m), -(-500 // n)), own, strict=True)])
        assert grid == (min(tiles, device.sm_count) if variant.persistent else tiles)
        assert variant.persistent == (arch == "sm_90" and head_dim <= 128)  # Hopper's own
        assert variant.smem_bytes <= device.smem_bytes
    without = plan_call(problem(head_dim, bias=None), device, backward=True, dbias=True)
    assert without == plan_call(problem(head_dim, bias=None), device, backward=True)
    assert all("bias" not in x.variant.symbol for x in without.launches)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_launch_what_is_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By dtype and by how neighbours lie: in pairs, or in a row that queries share; others are read one by one."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, k = np.zeros((2, 40, 4, 64), np.float16), np.zeros((2, 50, 2, 64), np.float16)
    odd, lse = np.zeros((2, 51, 2, 64), np.float16), np.zeros((2, 4, 40), np.float32)
    whole = np.zeros((2, 4, 40, 100), np.float16)
    buffer = np.zeros(2001, np.float16)
    cases = (
        (k, whole[..., :50].copy(), "pairs"), (k, whole[..., :50], "pairs"), (k, whole[..., ::2], ""),
        (odd, whole[..., :51].copy(), ""), (k, whole[..., :1], ""), (k, whole[..., :1, :1], ""),
        (k, buffer[:2000].reshape(40, 50), "pairs"), (k, buffer[1:].reshape(40, 50), ""),
        (k, whole[0, 0, 0, :50].copy(), "one row"), (odd, whole[:, :1, :1, :51], "one row"),
        (k, buffer[1:201].reshape(4, 1, 50), "one row"),
    )  # fmt: skip
    for keys, bias, lies in cases:
        for kind in (np.float16, np.float32):
            if kind is np.float32 and (bias.base is buffer or not bias.flags.c_contiguous):
                continue  # a copy lies elsewhere
            x = bias.astype(kind, copy=False)
            for of in ((), "bias"):
                gpu.launched.clear()
                cupyflash.attention(q, keys, keys, bias=x)
                found = cupyflash.attention_backward(q, q, keys, keys, q, lse, bias=x, gradients_of=of)
                symbols = [launch.symbol for launch in gpu.launched]
                assert all("_bias" in symbol for symbol in symbols)
                main = [s for s in symbols if s.startswith(("fwd", "bwd_sm"))]
                assert {"paired_bias" in s for s in main} == {lies == "pairs"}
                assert {"bias_of_keys" in s for s in main} == {lies == "one row"}
                assert {"wide_bias" in s for s in symbols if "delta" not in s} == {kind is np.float32}
                assert [s.startswith("bwd_dbias") for s in symbols[4:]] == [True] * bool(of)
                if of:
                    assert (found.dbias.shape, found.dbias.dtype) == (x.shape, x.dtype)  # type: ignore[attr-defined]
