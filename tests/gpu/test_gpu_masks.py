"""Block masks on a GPU: nothing waits, a captured call is replayed, empty tiles are not read, FlexAttention agrees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import mask_arrays, masks
from tests.gpu_arrays import nothing_waits

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch")]


def tensors(seqlen: int, head_dim: int, heads: int = 4) -> list[Any]:
    import torch

    torch.manual_seed(0)
    shape = (1, seqlen, heads, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_mask_agrees_with_the_same_booleans(head_dim: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch, in float32; long lists, and heads with masks of their own."""
    import torch

    if family == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    n = 2100
    mask = masks.bigbird(n, heads=4, random_blocks=4) & masks.causal_document(np.arange(n) // 700)
    seen = torch.from_numpy(mask.sees(slice(0, n), slice(0, n))).cuda()
    q, k, v = tensors(n, head_dim)
    out = cupyflash.attention(q, k, v, block_mask=mask)
    dout = torch.randn_like(out)
    wide = [x.detach().float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    exact = torch.autograd.grad(wanted, wide, dout.float().transpose(1, 2))
    torch.testing.assert_close(out.float(), wanted.transpose(1, 2), atol=2e-2, rtol=2e-2)
    for a, b in zip(grads, exact, strict=True):
        torch.testing.assert_close(a.float(), b.transpose(1, 2), atol=4e-2, rtol=4e-2)


@pytest.mark.filterwarnings("ignore")  # of torch itself, as it compiles, and of flex_attention, which is not compiled
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("head_dim", "size"), [(64, 128), (128, (64, 256)), (256, 96)])
def test_flex_attention_agrees(head_dim: int, size: Any, compiled: bool) -> None:
    """A second oracle, of its own mask on the GPU as it is, also where a compiled program is the first to see it."""
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    n, documents = 1000, torch.arange(1000, device="cuda") // 230

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (documents[i] == documents[j]) & (i >= j) | (h == 1) & (j < 70)

    mask = flex.create_block_mask(mod, None, 4, n, n, device="cuda", BLOCK_SIZE=size)
    q, k, v = tensors(n, head_dim)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, block_mask=mask, layout="bhsd")

    torch._dynamo.reset()
    if not mask_arrays._takes_objects():
        masks.from_torch(mask)
    attend = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    wide = [x.detach().float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    wanted = flex.flex_attention(
        *(x.detach() for x in wide), block_mask=mask
    )  # not compiled, so that it runs on any GPU
    out = attend(*(x.transpose(1, 2) for x in (q, k, v)))
    dout = torch.randn_like(out)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *wide, attn_mask=flex.create_mask(mod, 1, 4, n, n, device="cuda")
    )
    grads, exact = torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(dense, wide, dout.float())
    for a, b in zip(grads, exact, strict=True):
        torch.testing.assert_close(a.float(), b.transpose(1, 2), atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_captured_call_is_replayed(head_dim: int) -> None:
    import torch

    n = 1000
    mask = masks.strided(n, stride=64) | masks.local(n, left=10)
    q, k, v = (x.detach() for x in tensors(n, head_dim))
    first = cupyflash.attention(q, k, v, block_mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cupyflash.attention(q, k, v, block_mask=mask)
    v.neg_()
    graph.replay()
    torch.testing.assert_close(out, -first, atol=0, rtol=0)


def test_nothing_waits() -> None:

    mask = masks.local(1000, left=100)
    q, k, v = tensors(1000, 128)
    cupyflash.attention(q, k, v, block_mask=mask).sum().backward()
    with nothing_waits():
        cupyflash.attention(q, k, v, block_mask=mask).sum().backward()


def test_deterministic_gradients_repeat() -> None:
    import torch

    mask = masks.bigbird(3000, heads=4)
    q, k, v = tensors(3000, 128)
    out = cupyflash.attention(q, k, v, block_mask=mask, deterministic=True)
    dout = torch.randn_like(out)
    found = [torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for _ in range(3)]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
