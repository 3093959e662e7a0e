"""Dropout on a GPU, through the public API; the cases of the table are in test_gpu.py.

CUPYFLASH_FAMILY is set for each family in turn; sm90 is left out where the GPU has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.dropout import STEPS, kept, limit_of, words_of
from tests.gpu_arrays import relative

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch"), pytest.mark.usefixtures("family")]


def tensors(seqlen: int, d: int, heads: int = 4) -> list[Any]:
    """q, k, v and dout in bf16."""
    import torch

    torch.manual_seed(seqlen + d)
    return [torch.randn(2, seqlen, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def mask(n: int, heads: int, p: float, seed: int) -> Any:
    """Z of a batch of two."""
    import torch

    sequence, head = np.repeat(np.arange(2), heads), np.tile(np.arange(heads), 2)
    Z = kept(words_of(seed), limit_of(p), sequence, head, slice(0, n), slice(0, n))
    return torch.tensor(Z, device="cuda").reshape(2, heads, n, n).float() * (STEPS / (STEPS - limit_of(p)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_autograd_against_plain_fp32_with_the_same_mask(d: int, causal: bool) -> None:
    import torch

    q, k, v, dout = tensors(700, d)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cupyflash.attention(q, k, v, causal=causal, dropout_p=0.2, dropout_seed=77)
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * d**-0.5
    if causal:
        s = s.masked_fill(torch.ones(700, 700, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    want = torch.einsum("bhij,bjhd->bihd", s.softmax(-1) * mask(700, 4, 0.2, 77), v.float())
    assert relative(out, want) < 1e-2
    found, expected = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, want))
    for got, exact in zip(found, expected, strict=True):
        assert relative(got, exact) < 2e-2


@pytest.mark.parametrize("d", [64, 128])
def test_the_mask_is_exact(d: int) -> None:
    import torch

    q = torch.zeros(2, d, 3, d, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(d, device="cuda", dtype=torch.bfloat16)[None, :, None].expand(2, d, 3, d).contiguous()
    out = cupyflash.attention(q, q, v, dropout_p=0.5, dropout_seed=2**40 + 1)
    assert (out.transpose(1, 2) > 0).equal(mask(d, 3, 0.5, 2**40 + 1) > 0)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("drawn", [True, False])
def test_each_replay_of_a_graph_drops_others(drawn: bool) -> None:
    """By torch's generator, or by a seed on the device that somebody advances."""
    import torch

    q, k, v, _ = tensors(300, 64)
    seed = None if drawn else torch.tensor([5, 0], device="cuda")
    cupyflash.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cupyflash.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
        if seed is not None:
            seed[1] += 1
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not found[0].equal(found[1])
    assert not found[1].equal(found[2])
    if not drawn:
        want = cupyflash.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([5, 2], device="cuda"))
        assert found[2].equal(want)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("names", [("bias",), ("mask",), ("bias", "mask"), ("bias", "block_mask")], ids="-".join)
def test_beside_other_features_against_plain_fp32_with_the_same_mask(names: tuple[str, ...], d: int) -> None:
    """A learned bias of heads, as T5 has it; a mask of padding; a block mask."""
    import torch

    n = 700
    q, k, v, dout = tensors(n, d)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    s, given = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * d**-0.5, {}
    if "bias" in names:
        given["bias"] = torch.randn(4, n, n, device="cuda", dtype=torch.bfloat16).requires_grad_()
        leaves, s = [*leaves, given["bias"]], s + given["bias"].float()
    if "mask" in names:
        lengths = torch.tensor([n, 501], device="cuda").reshape(2, 1, 1, 1)
        given["mask"] = torch.arange(n, device="cuda").expand(2, 1, 1, n) < lengths
        s = s.masked_fill(~given["mask"], float("-inf"))
    if "block_mask" in names:
        given["block_mask"] = cupyflash.masks.strided(n, stride=50)
        s = s.masked_fill(~torch.tensor(given["block_mask"].of(0, 0), device="cuda"), float("-inf"))
    out = cupyflash.attention(q, k, v, dropout_p=0.2, dropout_seed=77, **given)
    want = torch.einsum("bhij,bjhd->bihd", s.softmax(-1) * mask(n, 4, 0.2, 77), v.float())
    assert relative(out, want) < 1e-2
    found, expected = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, want))
    for got, exact in zip(found, expected, strict=True):
        assert relative(got, exact) < 2e-2
