"""ALiBi's slopes on a GPU, through the public API; the cases of the table are in test_gpu.py.

CUPYFLASH_FAMILY is set for each family in turn; sm90 is left out where the GPU has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.check.cases import Case
from tests.gpu_arrays import captured, on_gpu, relative, to_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch"), pytest.mark.usefixtures("family")]
HEADS = 8


def tensors(seqlen: int, d: int, heads_k: int = 2) -> list[Any]:
    """q, k, v and dout in bf16."""
    import torch

    torch.manual_seed(seqlen + d)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(2, seqlen, heads, d, **like) for heads in (HEADS, heads_k, heads_k, HEADS)]


def slopes(steepest: float = 0.5) -> Any:
    """Geometric, as the paper has them."""
    import torch

    return steepest * 2.0 ** -torch.arange(HEADS, device="cuda", dtype=torch.float32)


def plain(q: Any, k: Any, v: Any, s: Any, causal: bool) -> Any:
    """Written out in fp32, differentiable."""
    import torch

    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    n = q.shape[2]
    distance = (torch.arange(n, device="cuda")[:, None] - torch.arange(n, device="cuda")).abs()
    score = q @ k.transpose(2, 3) * q.shape[3] ** -0.5 - s.reshape(-1, HEADS, 1, 1) * distance
    if causal:
        score = score.masked_fill(torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    return (score.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("steepest", [0.5, 8.0])
def test_autograd_against_plain_fp32(steepest: float, shared: bool, d: int, causal: bool) -> None:
    """Also slopes so steep that scores climb by hundreds from one block to the next."""
    import torch

    q, k, v, dout = tensors(1500, d)
    s = slopes(steepest) if shared else torch.stack([slopes(steepest), slopes(steepest).flip(0)])
    leaves = [x.requires_grad_() for x in (q, k, v, s)]
    out = cupyflash.attention(q, k, v, causal=causal, alibi_slopes=s)
    want = plain(q, k, v, s, causal)
    assert relative(out, want) < 1e-2
    found, expected = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, want))
    assert [x.shape for x in found] == [x.shape for x in leaves]
    for got, exact in zip(found, expected, strict=True):
        assert relative(got, exact) < 2e-2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("d", [64, 128, 256])
def test_flex_attention_agrees(d: int) -> None:
    """A second oracle; not compiled, so that it runs on any GPU."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    q, k, v, _ = tensors(500, d, HEADS)
    s = slopes()
    want = flex(
        *(x.transpose(1, 2) for x in (q, k, v)), score_mod=lambda score, b, h, i, j: score - s[h] * (i - j).abs()
    ).transpose(1, 2)
    assert relative(cupyflash.attention(q, k, v, alibi_slopes=s), want) < 1e-2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_gradient_of_slopes_repeats_bitwise(d: int, deterministic: bool) -> None:
    """Deterministic or not: no sum of it depends on the order of blocks."""
    q, k, v, dout = tensors(3000, d)
    s = slopes()
    out, lse = cupyflash.attention(q, k, v, causal=True, alibi_slopes=s, return_lse=True)
    more = {"causal": True, "alibi_slopes": s, "gradients_of": "alibi_slopes", "deterministic": deterministic}
    first, *others = (cupyflash.attention_backward(dout, q, k, v, out, lse, **more) for _ in range(4))
    for other in others:
        assert first.dalibi_slopes.equal(other.dalibi_slopes)
        if deterministic:
            assert all(a.equal(b) for a, b in zip(first, other, strict=True))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the step that is not captured
def test_a_graph_reads_slopes_when_it_is_replayed() -> None:
    import torch

    q, k, v, dout = tensors(700, 64)
    s = slopes().requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v, s)]

    def step() -> tuple[Any, ...]:
        out = cupyflash.attention(q, k, v, causal=True, deterministic=True, alibi_slopes=s)
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, replayed = captured(step)
    with torch.no_grad():
        s.mul_(0.3)
    graph.replay()
    for got, expected in zip(replayed, step(), strict=True):
        assert got.equal(expected)


def test_strides_of_slopes() -> None:
    import torch

    q, k, v, _ = tensors(300, 64)
    whole = torch.rand(HEADS, 2, device="cuda")
    for s in (whole.T, whole[:, 0], whole[:, 1].expand(2, HEADS)):
        found = cupyflash.attention(q, k, v, alibi_slopes=s)
        assert found.equal(cupyflash.attention(q, k, v, alibi_slopes=s.contiguous()))


def test_what_is_wrong_is_refused() -> None:
    import torch

    q, k, v, _ = tensors(300, 64)
    for wrong, got in (
        (slopes().cpu(), "on the CPU"),
        (slopes().half(), "fp16"),
        (slopes().bfloat16(), "bf16"),
        (slopes()[1:], r"\(7,\)"),
        (torch.rand(3, HEADS, device="cuda"), r"\(3, 8\)"),
    ):
        for _ in range(2):
            with pytest.raises(ArgumentError, match=f"^alibi_slopes: expected .* got .*{got}"):
                cupyflash.attention(q, k, v, alibi_slopes=wrong)


@pytest.mark.usefixtures("numpy_on_gpu")
def test_cupy_and_numpy_arrays() -> None:
    """The same bits from arrays of either library."""
    x = Case("slopes", "full", 200, 300, 64, batch=2, causal=True, alibi=2).inputs("bf16")
    found = []
    for to in (lambda a: a, lambda a: on_gpu(a, "cupy"), lambda a: on_gpu(a, "torch")):
        q, k, v, dout, s = (to(a) for a in (*x[:4], x.features.alibi_slopes))
        out, lse = cupyflash.attention(q, k, v, causal=True, alibi_slopes=s, return_lse=True)
        more = {"causal": True, "alibi_slopes": s, "gradients_of": "alibi_slopes", "deterministic": True}
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **more)
        found.append([to_numpy(a) for a in (out, lse, *grads, grads.dalibi_slopes)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
