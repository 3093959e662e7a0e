"""A boolean mask through the public API: as a bias of 0 and -inf, in every library, and every error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.bias import Bias, own_of_mask
from cupyflash.gpu.device import Device
from cupyflash.plan.extents import Extents
from cupyflash.plan.families import kernels_of, plan_of
from cupyflash.plan.spec import CHUNKS, Spec
from cupyflash.problem import MAX_SEQLEN, Problem
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


def test_a_query_all_of_whose_scores_are_minus_inf(arrays: dict[str, Any]) -> None:
    """It sees keys where a mask alone says so, as a block mask does; beside a bias it counts as one that sees none."""
    arrays["q"][..., 0], arrays["k"][..., 0] = 1, -np.inf
    mask = np.ones((SQ, SK), bool)
    mask[6] = False
    of_query = np.where(np.arange(SQ) == 6, 0, np.nan)[:, None, None]
    for options, wanted in (({}, of_query), ({"bias": np.zeros(SK)}, 0.0)):
        out, lse, dq, *_ = everything(arrays, mask=mask, **options)
        assert np.isneginf(lse).all()
        for found in (out, dq):
            np.testing.assert_array_equal(found, np.broadcast_to(wanted, found.shape))


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
    block_mask = cupyflash.masks.from_dense(np.ones((40, 50), bool))
    kinds = ["mask_tiles", "key_lists", "fwd", "mask_tiles", "key_lists", "query_lists", "bwd", "bwd", "bwd"]
    for mask, is_paired in ((whole[..., :50], True), (whole[..., ::2], False), (whole[0, 0, 0, :50], True)):
        for paired in (False, True):  # beside a block mask both are read in pairs if both can be
            gpu.launched.clear()
            bias = np.zeros((40, 50), np.float16) if paired else np.zeros((40, 1), np.float16)
            cupyflash.attention(q, k, k, mask=mask, bias=bias, block_mask=block_mask)
            *_, symbol = (launch.symbol for launch in gpu.launched)
            assert "_masked_bias" in symbol
            assert ("paired_bias" in symbol) == (paired and is_paired)
            gpu.launched.clear()
            cupyflash.attention(q, k, k, mask=mask, bias=bias)
            *before, symbol = (launch.symbol for launch in gpu.launched)
            assert [name[:9] for name in before] == ["mask_tile", "key_lists"]
            assert "_masked_bias" not in symbol
            assert ("paired_bias" in symbol) == paired
        gpu.launched.clear()
        cupyflash.attention(q, k, k, mask=mask)
        cupyflash.attention_backward(q, q, k, k, q, lse, mask=mask)
        symbols = [launch.symbol for launch in gpu.launched]
        assert [next(x for x in kinds if symbol.startswith(x)) for symbol in symbols] == kinds
        assert not any("bias" in symbol for symbol in symbols)
        assert all("_block_mask" in s for s in symbols if not s.startswith(("mask_tiles", "bwd_delta")))


@pytest.mark.parametrize(("keys", "fits"), [(14400, False), (640, True)])
@pytest.mark.parametrize("at", [0, 1])
def test_which_packed_masks_calls_read_by_element(
    keys: int, fits: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches follow the plan. The address of a mask that becomes a block mask has no say in how a bias is read."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    gpu = pretended_gpu.pretend(monkeypatch, "sm_90")
    cu = np.arange(301, dtype=np.int32)
    q = np.zeros((300, 1, 64), np.float16)
    buffer = np.ones(300 * 2 * keys + 64, bool)
    start = -buffer.ctypes.data % 16 + at
    mask = buffer[start : start + 300 * 2 * keys].reshape(300, 1, 2, keys)
    bias = np.zeros((2, keys), np.float16)
    cupyflash.attention_varlen(q, q, q, cu, mask=mask, bias=bias)
    *before, symbol = (launch.symbol for launch in gpu.launched)
    assert [name[:9] for name in before] == (["mask_tile", "key_lists"] if fits else [])
    assert ("_masked_bias" in symbol, "paired_bias" in symbol) == (not fits, fits or not at)


@pytest.mark.parametrize("name", ["mask", "bias and mask"])
def test_a_packed_query_all_of_whose_scores_are_minus_inf(name: str) -> None:
    """NaN where a mask alone becomes a block mask, 0 where it is read by element, or beside a bias."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 21, 2, 16))
    q[..., 0], k[..., 0] = 1, -np.inf
    cu, bias = np.array([0, 20, 21], np.int32), {"bias": np.zeros((20, 20))} if "bias" in name else {}
    for mask, wanted in ((np.ones((20, 20), bool), 0 if bias else np.nan), (np.ones((2, 1, 1, 20), bool), 0)):
        out = cupyflash.attention_varlen(q, k, v, cu, mask=mask, **bias)
        np.testing.assert_array_equal(out, np.full_like(out, wanted))


def spec_of(mask: np.ndarray, *, backward: bool = False, **options: Any) -> Spec:
    problem = Problem("bf16", 3, 200, 330, 4, 2, 64, 0.1, bias=Bias("bool", own_of_mask(mask.shape, mask.strides)))
    return Spec.of(replace(problem, **options), backward=backward, paired_bias=CHUNKS)


@pytest.mark.parametrize(
    ("shape", "code", "own"),
    [
        ((3, 4, 200, 330), 4, (3, 4, 4, 6)),
        ((3, 1, 200, 330), 2, (3, 1, 4, 6)),
        ((4, 200, 330), 3, (1, 4, 4, 6)),
        ((200, 330), 1, (1, 1, 4, 6)),
        ((3, 1, 1, 330), 2, (3, 1, 1, 6)),
        ((200, 1), 1, (1, 1, 4, 1)),
        ((), 1, (1, 1, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_mask_alone_becomes_a_block_mask(
    arch: str, backward: bool, shape: tuple[int, ...], code: int, own: tuple[int, ...]
) -> None:
    """Each of its tiles that differ has room for bits: a quarter of its bytes. What is expanded has no more of them."""
    whole = np.broadcast_to(np.zeros(shape, bool), (3, 4, 200, 330))
    for mask in (np.zeros(shape, bool), whole):
        spec = spec_of(mask, backward=backward)
        assert (spec.block_mask, spec.bias, spec.mask, spec.paired_bias) == (code, False, False, 0)
        plan = plan_of(kernels_of(spec, Device.synthetic(arch)), Extents(3, 200, 330, 4, 2, MAX_SEQLEN, MAX_SEQLEN))
        assert plan.block_mask == code
        assert plan.workspace["block_tiles"] == ((*own[:2], 4, 6), "int32")
        assert plan.workspace["block_bits"] == ((math.prod(own), 256), "int32")
        assert (plan.launches[0].variant.function, plan.launches[0].grid) == ("mask_tiles", math.prod(own))
        lists = {name: shape[:2] for name, (shape, _) in plan.workspace.items() if name.endswith("_lists")}
        assert lists == dict.fromkeys(("key_lists", *["query_lists"] * backward), own[:2])


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_beside_a_bias_becomes_a_block_mask(packed: bool) -> None:
    own, room = own_of_mask((3, 1, 200, 330)), {"max_seqlen_q": 200, "max_seqlen_k": 330} if packed else {}
    spec = spec_of(np.zeros((), bool), bias=Bias("bf16", beside=own), packed=packed, **room)
    assert (spec.mask_tiles, spec.block_mask) == (own, 2)
    assert (spec.bias, spec.mask, spec.masked_bias, spec.paired_bias) == (True, False, False, CHUNKS)


LARGE = {"packed": True, "batch": 300, "max_seqlen_q": 4096, "max_seqlen_k": 4096}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((200, 330), {"block_mask": 1}),
        ((330,), {"packed": True}),
        ((3, 4, 200, 1), {"packed": True}),
        ((0, 44), {"packed": True}),
        ((71, 0), {"packed": True}),
        ((300, 1, 4096, 4096), LARGE),
    ],
    ids=str,
)
def test_masks_that_are_read_by_element(shape: tuple[int, ...], options: dict[str, Any], beside: bool) -> None:
    """Beside a block mask; and of packed sequences that share one along queries or keys, or for whose tiles there is no
    room: of each sequence, however short, it would be that of the longest."""
    own = own_of_mask(shape)
    bias = Bias("bf16", beside=own) if beside else Bias("bool", own)
    spec = spec_of(np.zeros((), bool), bias=bias, **options)
    assert (spec.mask_tiles, spec.bias, spec.mask, spec.masked_bias) == (None, True, True, beside)
    assert spec.block_mask == options.get("block_mask", 0)
