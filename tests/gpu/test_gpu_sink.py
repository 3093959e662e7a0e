"""Sinks on a GPU, through the public API; the cases of the table are in test_gpu.py.

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


def tensors(seqlen: int, d: int) -> list[Any]:
    """q, k, v and dout in bf16, and a sink of each head."""
    import torch

    torch.manual_seed(seqlen + d)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x = [torch.randn(2, seqlen, heads, d, **like) for heads in (HEADS, 2, 2, HEADS)]
    return [*x, torch.linspace(-2, 9, HEADS, device="cuda")]


def plain(q: Any, k: Any, v: Any, sink: Any, causal: bool) -> tuple[Any, Any]:
    """out and lse, written out in fp32, differentiable: a column of scores more."""
    import torch

    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // 2, dim=1) for x in (k, v))
    n = q.shape[2]
    score = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        score = score.masked_fill(torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    score = torch.cat((score, sink.reshape(1, -1, 1, 1).expand(2, -1, n, 1)), -1)
    return (score.softmax(-1)[..., :-1] @ v).transpose(1, 2), score.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_autograd_against_plain_fp32(d: int, causal: bool) -> None:
    import torch

    q, k, v, dout, sink = tensors(1500, d)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    out, lse = cupyflash.attention(q, k, v, causal=causal, sink=sink, return_lse=True)
    want, want_lse = plain(q, k, v, sink, causal)
    assert relative(out, want) < 1e-2
    assert relative(lse, want_lse) < 1e-4
    dlse = torch.randn_like(lse)
    found = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    expected = torch.autograd.grad([want, want_lse], leaves, [dout.float(), dlse])
    for got, exact in zip(found, expected, strict=True):
        assert got.shape == exact.shape
        assert relative(got, exact) < 2e-2


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_gradient_repeats_bitwise(d: int) -> None:
    """Deterministic or not: its sum has a fixed order. And a sink of -inf changes nothing at all."""
    import torch

    q, k, v, dout, sink = tensors(3000, d)
    out, lse = cupyflash.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    more = {"causal": True, "sink": sink, "gradients_of": "sink"}
    first, *others = (cupyflash.attention_backward(dout, q, k, v, out, lse, **more).dsink for _ in range(4))
    assert all(first.equal(other) for other in others)
    none = torch.full_like(sink, -torch.inf)
    for a, b in zip(
        cupyflash.attention(q, k, v, causal=True, sink=none, return_lse=True),
        cupyflash.attention(q, k, v, causal=True, return_lse=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)
    out, lse = cupyflash.attention(q, k, v, window=(None, -4000), sink=none, return_lse=True)
    more = {"window": (None, -4000), "sink": none, "gradients_of": "sink"}
    assert not cupyflash.attention_backward(dout, q, k, v, out, lse, **more).dsink.any()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the step that is not captured
def test_a_graph_reads_sinks_when_it_is_replayed() -> None:
    import torch

    q, k, v, dout, sink = tensors(700, 64)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]

    def step() -> tuple[Any, ...]:
        out = cupyflash.attention(q, k, v, causal=True, deterministic=True, sink=sink)
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, replayed = captured(step)
    with torch.no_grad():
        sink.mul_(0.3)
    graph.replay()
    for got, expected in zip(replayed, step(), strict=True):
        assert got.equal(expected)


def test_strides_of_sinks() -> None:
    import torch

    q, k, v, *_ = tensors(300, 64)
    whole = torch.rand(HEADS, 2, device="cuda")
    for sink in (whole[:, 0], whole[:1, 1].expand(HEADS)):
        found = cupyflash.attention(q, k, v, sink=sink)
        assert found.equal(cupyflash.attention(q, k, v, sink=sink.contiguous()))


def test_what_is_wrong_is_refused() -> None:
    q, k, v, _, sink = tensors(300, 64)
    for wrong, got in (
        (sink.cpu(), "on the CPU"),
        (sink.half(), "fp16"),
        (sink.bfloat16(), "bf16"),
        (sink[1:], r"\(7,\)"),
    ):
        for _ in range(2):
            with pytest.raises(ArgumentError, match=f"^sink: expected .* got .*{got}"):
                cupyflash.attention(q, k, v, sink=wrong)


@pytest.mark.usefixtures("numpy_on_gpu")
def test_cupy_and_numpy_arrays() -> None:
    """The same bits from arrays of either library."""
    x = Case("sinks", "full", 200, 300, 64, batch=2, causal=True, sink=True).inputs("bf16")
    found = []
    for to in (lambda a: a, lambda a: on_gpu(a, "cupy"), lambda a: on_gpu(a, "torch")):
        q, k, v, dout, sink = (to(a) for a in (*x[:4], x.features.sink))
        out, lse = cupyflash.attention(q, k, v, causal=True, sink=sink, return_lse=True)
        more = {"causal": True, "sink": sink, "gradients_of": "sink", "deterministic": True}
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **more)
        found.append([to_numpy(a) for a in (out, lse, *grads, grads.dsink)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
