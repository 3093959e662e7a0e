"""A bias on a GPU, through the public API; the cases of the table are in test_gpu.py.

CUPYFLASH_FAMILY is set for each family in turn; sm90 is left out where the GPU has none.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.check.cases import Case
from tests.gpu_arrays import captured, on_gpu, relative, to_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch"), pytest.mark.usefixtures("family")]
BATCH, HEADS, SEQLEN = 2, 8, 1100
SHAPES = (
    (BATCH, HEADS, SEQLEN, SEQLEN), (1, HEADS, SEQLEN, SEQLEN), (SEQLEN, SEQLEN), (BATCH, 1, 1, SEQLEN),
    (HEADS, SEQLEN, 1),
)  # fmt: skip


def tensors(seqlen: int, d: int, heads_k: int = 2) -> list[Any]:
    """q, k, v and dout in bf16."""
    import torch

    torch.manual_seed(seqlen + d)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(BATCH, seqlen, heads, d, **like) for heads in (HEADS, heads_k, heads_k, HEADS)]


def plain(q: Any, k: Any, v: Any, bias: Any, causal: bool) -> Any:
    """Written out in fp32, differentiable; a row of -inf gives 0."""
    import torch

    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    n = q.shape[2]
    score = q @ k.transpose(2, 3) * q.shape[3] ** -0.5 + bias.float()
    if causal:
        score = score.masked_fill(torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    nothing = score.isneginf().all(-1, keepdim=True)
    weights = score.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_autograd_against_plain_fp32(dtype: str, shape: tuple[int, ...], d: int, causal: bool) -> None:
    """What is summed over all keys of a row is nothing, so that its gradient is compared by its size alone."""
    import torch

    q, k, v, dout = tensors(SEQLEN, d)
    bias = torch.randn(shape, device="cuda", dtype=getattr(torch, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out, want = cupyflash.attention(q, k, v, causal=causal, bias=bias), plain(q, k, v, bias, causal)
    assert relative(out, want) < 1e-2
    found, expected = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, want))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in leaves]
    for got, exact in zip(found[:3], expected[:3], strict=True):
        assert relative(got, exact) < 2e-2
    if shape[-1] != 1:
        assert relative(found[3], expected[3]) < 2e-2
    else:
        assert float(found[3].float().abs().max()) < 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [40, 64, 128])
@pytest.mark.parametrize("seqlen", [200, 1104])
def test_rows_in_chunks(seqlen: int, d: int, causal: bool, deterministic: bool) -> None:
    """Rows of a bias in chunks of 16 bytes, fixed or learned, are as good as rows that are not."""
    import torch

    q, k, v, dout = tensors(seqlen, d)
    bias = torch.randn(1, HEADS, seqlen, seqlen, device="cuda", dtype=torch.bfloat16)
    bias[:, :, 3, 7] = bias[:, :, 70:90, 0] = float("-inf")
    odd = torch.zeros(1, HEADS, seqlen, seqlen + 2, device="cuda", dtype=torch.bfloat16)[..., :seqlen].copy_(bias)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(plain(*leaves, bias, causal), leaves, dout.float())
    more = {"causal": causal, "deterministic": deterministic}
    with torch.no_grad():
        found = cupyflash.attention(q, k, v, causal=causal, bias=bias, return_lse=True)
        expected = cupyflash.attention_backward(dout, q, k, v, *found, bias=odd, **more)
        for wanted in ((), "bias"):
            grads = cupyflash.attention_backward(dout, q, k, v, *found, bias=bias, gradients_of=wanted, **more)
            for one, other, x in zip(grads, expected, exact, strict=True):
                assert relative(one, x) <= 1.1 * relative(other, x)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_minus_inf_hides(d: int) -> None:
    """Padding on the right, and rows of nothing: no NaN, and 0 where nothing is seen."""
    import torch

    q, k, v, dout = tensors(SEQLEN, d)
    bias = torch.zeros(BATCH, 1, SEQLEN, SEQLEN, device="cuda", dtype=torch.bfloat16)
    bias[0, :, :, 700:], bias[:, :, 13::17] = float("-inf"), float("-inf")
    k.data[0, 700:], v.data[0, 800:] = float("nan"), float("inf")
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out, lse = cupyflash.attention(q, k, v, bias=bias, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout)
    assert all(x.isfinite().all() for x in (out, *grads))
    for x in (out[:, 13::17], grads[0][:, 13::17], grads[1][0, 700:], grads[2][0, 700:], grads[3][0, :, :, 700:]):
        assert not x.any()
    assert lse[:, :, 13::17].isneginf().all()
    k.data[0, 700:], v.data[0, 700:] = 0, 0
    assert relative(out, plain(q, k, v, bias, False)) < 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_mask_is_a_bias_of_minus_inf(shape: tuple[int, ...], d: int, causal: bool) -> None:
    """Against plain fp32; odd lengths, too, of which bytes are read one by one."""
    import torch

    for seqlen in (SEQLEN, SEQLEN - 1):
        q, k, v, dout = tensors(seqlen, d)
        mask = torch.rand([seqlen if n == SEQLEN else n for n in shape], device="cuda") < 0.6
        mask[..., 5::11] = False
        bias = torch.where(mask, 0.0, float("-inf"))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, want = cupyflash.attention(q, k, v, causal=causal, mask=mask), plain(q, k, v, bias, causal)
        assert relative(out, want) < 1e-2
        found, expected = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, want))
        for got, exact in zip(found, expected, strict=True):
            assert relative(got, exact) < 2e-2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_gradient_of_a_bias_repeats_bitwise(d: int, shape: tuple[int, ...], deterministic: bool) -> None:
    """Deterministic or not: no sum of it depends on the order of blocks."""
    import torch

    q, k, v, dout = tensors(SEQLEN, d)
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    out, lse = cupyflash.attention(q, k, v, causal=True, bias=bias, return_lse=True)
    more = {"causal": True, "bias": bias, "gradients_of": "bias", "deterministic": deterministic}
    first, *others = (cupyflash.attention_backward(dout, q, k, v, out, lse, **more) for _ in range(4))
    for other in others:
        assert first.dbias.equal(other.dbias)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("d", [64, 128, 256])
def test_flex_attention_agrees(d: int) -> None:
    """A second oracle; not compiled, so that it runs on any GPU."""
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    q, k, v, _ = tensors(500, d, HEADS)
    bias = torch.randn(HEADS, 500, 500, device="cuda")
    want = flex(
        *(x.transpose(1, 2) for x in (q, k, v)), score_mod=lambda score, b, h, i, j: score + bias[h, i, j]
    ).transpose(1, 2)
    assert relative(cupyflash.attention(q, k, v, bias=bias), want) < 1e-2


def test_strides() -> None:
    """Odd lengths, odd addresses, the last two dimensions turned, dimensions of stride 0: as of a contiguous copy."""
    import torch

    for seqlen in (300, 301):
        q, k, v, dout = tensors(seqlen, 64)
        whole = torch.randn(BATCH, HEADS, seqlen, 2 * seqlen + 1, device="cuda", dtype=torch.bfloat16)
        for bias in (
            whole[..., :seqlen], whole[..., 1 : seqlen + 1], whole[..., : 2 * seqlen : 2],
            whole[..., :seqlen].transpose(2, 3), whole[0, 0, :, :seqlen].expand(BATCH, HEADS, seqlen, seqlen),
        ):  # fmt: skip
            copy = bias.contiguous()
            found, want = (cupyflash.attention(q, k, v, bias=x, return_lse=True) for x in (bias, copy))
            assert relative(found[0], want[0]) < 1e-2
            grads, wanted = (
                cupyflash.attention_backward(dout, q, k, v, *found, bias=x, gradients_of="bias") for x in (bias, copy)
            )
            for a, b in zip((*grads, grads.dbias), (*wanted, wanted.dbias), strict=True):
                assert relative(a, b) < 1e-2


def test_elements_further_apart_than_32_bits_count() -> None:
    """Heads, queries or keys 2^25 and 2^32 elements apart: the bits of a copy whose elements are near each other."""
    import torch

    n, far = 130, torch.empty(130 << 25, device="cuda", dtype=torch.bfloat16)  # 8.7 GB
    places = ((2, n, n), (1 << 32, 144, 1)), ((n, n), (1 << 25, 1)), ((n, n), (1, 1 << 25))
    for d, (shape, strides) in itertools.product((64, 128, 256), places):
        q, k, v, dout = (x[..., :2, :] for x in tensors(n, d, HEADS))
        for name, memory in (("bias", far), ("mask", far.view(torch.bool))):
            x = memory.as_strided(shape, strides)
            x.copy_(torch.randn(shape, device="cuda") if name == "bias" else torch.rand(shape, device="cuda") < 0.8)
            copy, results = torch.empty(2 * n * 144, device="cuda", dtype=x.dtype), []
            copy = copy.as_strided(shape, [min(step, 144 * n if step >> 32 else 144) for step in strides]).copy_(x)
            for given in (x, copy):
                more = {name: given, "deterministic": True}
                out, lse = cupyflash.attention(q, k, v, return_lse=True, **more)
                of = "bias" if name == "bias" else ()
                grads = cupyflash.attention_backward(dout, q, k, v, out, lse, gradients_of=of, **more)
                results.append([out, lse, *grads, *([grads.dbias] if of else [])])
            assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the step that is not captured
def test_a_graph_reads_the_bias_when_it_is_replayed() -> None:
    import torch

    q, k, v, dout = tensors(700, 64)
    bias = torch.randn(HEADS, 700, 700, device="cuda", dtype=torch.bfloat16).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]

    def step() -> tuple[Any, ...]:
        out = cupyflash.attention(q, k, v, causal=True, deterministic=True, bias=bias)
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, replayed = captured(step)
    with torch.no_grad():
        bias.mul_(0.3)
    graph.replay()
    for got, expected in zip(replayed, step(), strict=True):
        assert got.equal(expected)


@pytest.mark.parametrize("of_bool", [False, True])
def test_sdpa_takes_masks(of_bool: bool) -> None:
    import torch

    q, k, v, _ = (x.transpose(1, 2) for x in tensors(300, 64, HEADS))
    mask = torch.randn(BATCH, 1, 300, 300, device="cuda", dtype=torch.bfloat16)
    mask = mask > -1 if of_bool else mask
    found = cupyflash.torch.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert relative(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)) < 1e-2


def test_what_is_wrong_is_refused() -> None:
    import torch

    q, k, v, _ = tensors(300, 64)
    good = torch.zeros(300, 300, device="cuda", dtype=torch.bfloat16)
    for wrong, got in (
        (good.cpu(), "on the CPU"),
        (good.half(), "fp16"),
        (good.double(), "fp64"),
        (good[1:], r"\(299, 300\)"),
        (good.expand(3, 300, 300), r"\(3, 300, 300\)"),
    ):
        for _ in range(2):
            with pytest.raises(ArgumentError, match=f"^bias: expected .* got .*{got}"):
                cupyflash.attention(q, k, v, bias=wrong)


def test_no_scores_in_memory() -> None:
    """A bias of keys alone, and its gradient, take no more than the rest: nothing is expanded."""
    import torch

    peaks = []
    for learned in (False, True):
        q, k, v, dout = tensors(4096, 64)
        bias = torch.zeros(BATCH, 1, 1, 4096, device="cuda").requires_grad_(learned)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = cupyflash.attention(q, k, v, bias=bias)
        torch.autograd.grad(out, [*leaves, bias] if learned else leaves, dout)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] < 1 << 20


@pytest.mark.usefixtures("numpy_on_gpu")
def test_cupy_and_numpy_arrays() -> None:
    """The same bits from arrays of either library."""
    x = Case("bias", "full", 200, 300, 64, batch=2, causal=True, bias="hqk").inputs("bf16")
    found = []
    for to in (lambda a: a, lambda a: on_gpu(a, "cupy"), lambda a: on_gpu(a, "torch")):
        q, k, v, dout, bias = (to(a) for a in (*x[:4], x.features.bias))
        out, lse = cupyflash.attention(q, k, v, causal=True, bias=bias, return_lse=True)
        more = {"causal": True, "bias": bias, "gradients_of": "bias", "deterministic": True}
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **more)
        found.append([to_numpy(a) for a in (out, lse, *grads, grads.dbias)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
