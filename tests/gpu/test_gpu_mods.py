"""Gradients of the arrays that mods read, on a GPU; the cases of the table are in test_gpu.py.

CUPYFLASH_FAMILY is set for each family in turn; sm90 is left out where the GPU has none.
"""

from __future__ import annotations

from typing import Any

import pytest

import cupyflash
from cupyflash import UnsupportedError
from cupyflash.compile import jit, nvrtc
from cupyflash.gpu.device import Device
from cupyflash.plan.variant import kernel_sources
from tests import elementary
from tests.gpu_arrays import relative

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch"), pytest.mark.usefixtures("family")]
BATCH, HEADS, SEQLEN = 2, 8, 1100
# What becomes of scores, the same in torch, and which arrays there are: name -> shape, dtype.
MODS: dict[str, tuple[str, Any, dict[str, tuple[tuple[int, ...], str]]]] = {
    "distances": (
        "score + table[h, max(0, q - k)]",
        lambda t, s, b, h, q, k, table: s + table[h, (q - k).clamp(0, 127)],
        {"table": ((HEADS, 128), "float32")},
    ),
    "heads": (
        "score * scale[h] + 0.1f * scale[h]",
        lambda t, s, b, h, q, k, scale: s * scale[h] + 0.1 * scale[h],
        {"scale": ((HEADS,), "bfloat16")},
    ),
    "queries": (
        "score * exp(0.2f * heat[b][h][q])",
        lambda t, s, b, h, q, k, heat: s * t.exp(0.2 * heat[b, h, q]),
        {"heat": ((BATCH, HEADS, SEQLEN), "float16")},
    ),
    "keys-and-distances": (
        "tanh(score / 4) * 4 + near[abs(q - k)] + weight[b, k]",
        lambda t, s, b, h, q, k, near, weight: t.tanh(s / 4) * 4 + near[(q - k).abs().clamp(max=39)] + weight[b, k],
        {"near": ((40,), "float32"), "weight": ((BATCH, SEQLEN), "float32")},
    ),
}


def tensors(d: int, heads_k: int = 2) -> list[Any]:
    """q, k, v and dout in bf16."""
    import torch

    torch.manual_seed(d)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(BATCH, SEQLEN, heads, d, **like) for heads in (HEADS, heads_k, heads_k, HEADS)]


def given(name: str) -> dict[str, Any]:
    import torch

    torch.manual_seed(len(name))
    return {
        label: torch.randn(shape, device="cuda").to(getattr(torch, dtype)).requires_grad_()
        for label, (shape, dtype) in MODS[name][2].items()
    }


def plain(q: Any, k: Any, v: Any, name: str, arrays: dict[str, Any], causal: bool) -> Any:
    """Written out in fp32, differentiable."""
    import torch

    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    i, j = torch.arange(SEQLEN, device="cuda")[:, None], torch.arange(SEQLEN, device="cuda")
    b, h = torch.arange(BATCH, device="cuda").view(-1, 1, 1, 1), torch.arange(HEADS, device="cuda").view(-1, 1, 1)
    score = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    score = MODS[name][1](torch, score, b, h, i, j, **{label: x.float() for label, x in arrays.items()})
    if causal:
        score = score.masked_fill(j > i, float("-inf"))
    return (score.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", MODS)
def test_autograd_against_plain_fp32(name: str, d: int, causal: bool) -> None:
    import torch

    q, k, v, dout = tensors(d)
    arrays = given(name)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *arrays.values()]
    out = cupyflash.attention(q, k, v, causal=causal, score_mod=MODS[name][0], mod_arrays=arrays)
    want = plain(q, k, v, name, arrays, causal)
    assert relative(out, want) < 1e-2
    found, expected = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, want))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in leaves]
    for got, exact in zip(found, expected, strict=True):
        assert relative(got, exact) < 2e-2


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor that is not a leaf"
)
@pytest.mark.parametrize("d", [64, 128])
def test_flex_attention_agrees(d: int) -> None:
    """A second oracle, for a function whose closure has what is learned."""
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    q, k, v, dout = tensors(d, HEADS)
    table, scale = (torch.rand(n, device="cuda", requires_grad=True) for n in (2 * SEQLEN, HEADS))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale[h] + table[q_idx - kv_idx + SEQLEN]

    leaves = [*(x.requires_grad_() for x in (q, k, v)), table, scale]
    found = torch.autograd.grad(cupyflash.attention(q, k, v, score_mod=mod), leaves, dout)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    want = torch.autograd.grad(flex(*turned, score_mod=mod).transpose(1, 2), leaves, dout)
    for got, expected in zip(found, want, strict=True):
        assert relative(got, expected) < 2e-2


def test_functions_of_fp32_against_float64() -> None:
    """By the GPU's own instructions, whose powers and reciprocals are approximations."""
    import cupy

    module = cupy.cuda.Module()
    options = jit._options(Device.of(0).arch)
    module.load(nvrtc.find().compile(elementary.SOURCE, "elementary.cu", kernel_sources(), options)[0])
    x, y = elementary.given(1024)
    given = [cupy.asarray(a) for a in (x, y)]
    out = cupy.full(len(elementary.FUNCTIONS) * x.size, cupy.nan, cupy.float32)
    module.get_function(elementary.NAME)((1024,), (elementary.THREADS,), (*given, out))
    assert elementary.wrong(x, y, out.get()) == []


def test_packed_sequences() -> None:
    """As those of each sequence by itself, b counted up."""
    import torch

    q, k, v, dout = (x[0] for x in tensors(128))
    scale, lengths = torch.rand(3, HEADS, device="cuda", requires_grad=True), (500, 7, 593)
    edges = [0, 500, 507, SEQLEN]
    text, places = "score * scale[b, h]", torch.tensor(edges, device="cuda", dtype=torch.int32)
    out = cupyflash.attention_varlen(q, k, v, places, causal=True, score_mod=text, mod_arrays={"scale": scale})
    (found,) = torch.autograd.grad(out, [scale], dout)
    for i, n in enumerate(lengths):
        own = slice(edges[i], edges[i] + n)
        one = scale[i : i + 1].detach().requires_grad_()
        alone = cupyflash.attention(
            *(x[None, own] for x in (q, k, v)), causal=True, score_mod=text, mod_arrays={"scale": one}
        )
        (want,) = torch.autograd.grad(alone, [one], dout[None, own])
        assert relative(found[i], want[0]) < 1e-2


def test_graphs_replay_them_and_other_gradients_repeat() -> None:
    """Sums are cleared in each replay; dq, dk and dv do not depend on what else is asked for."""
    import torch

    q, k, v, dout = tensors(64)
    table = given("distances")["table"].detach()
    options: dict[str, Any] = {"score_mod": MODS["distances"][0], "mod_arrays": {"table": table}, "causal": True}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)

    def gradients(**more: Any) -> Any:
        return cupyflash.attention_backward(dout, q, k, v, out, lse, **options, **more)

    want = gradients(gradients_of="table").dmod_arrays["table"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(gradients_of="table").dmod_arrays["table"]
    for _ in range(3):
        graph.replay()
        assert relative(found, want) < 1e-5
    assert gradients(deterministic=True).dk.equal(gradients(deterministic=True).dk)
    with pytest.raises(UnsupportedError, match="deterministic: expected False"):
        gradients(deterministic=True, gradients_of="table")
