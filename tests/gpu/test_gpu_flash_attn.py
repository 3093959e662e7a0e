"""cupyflash.compat.flash_attn on a GPU: what its functions do to arguments and results, and that nothing waits.

Attention itself is judged in test_gpu.py; here results of the public functions are those of our own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cupyflash import attention, attention_backward, attention_varlen, attention_varlen_backward

torch = pytest.importorskip("torch")
from cupyflash.compat import flash_attn  # noqa: E402
from cupyflash.compat.flash_attn import bert_padding, flash_attn_interface  # noqa: E402
from cupyflash.compat.flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402
from tests.torch_exact import exact  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: Any = torch.bfloat16, grad: bool = False) -> Any:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An error for each call that waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [59, 64, 128])
def test_dense(head_dim: int, dtype: Any) -> None:
    q = random(2, 300, 8, head_dim, dtype=dtype, grad=True)
    kv = random(2, 257, 2, 2, head_dim, dtype=dtype, grad=True)
    dout = random(2, 300, 8, head_dim, dtype=dtype)
    options = {"causal": True, "window_size": (100, -1), "softcap": 20.0, "deterministic": True}
    out, lse, _ = flash_attn.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True)
    padded = [torch.nn.functional.pad(x.detach(), (0, -head_dim % 8)).requires_grad_() for x in (q, *kv.unbind(2))]
    options = {"causal": True, "window": (100, None), "softcap": 20.0, "deterministic": True, "scale": head_dim**-0.5}
    want, want_lse = attention(*padded, **options, return_lse=True)
    assert torch.equal(out, want[..., :head_dim])
    assert torch.equal(lse, torch.where(want_lse == -torch.inf, torch.inf, want_lse))
    assert torch.isposinf(lse[:, :, :43]).all()
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    found = torch.autograd.grad(want[..., :head_dim], padded, dout)
    assert torch.equal(dq, found[0][..., :head_dim])
    assert torch.equal(dkv, torch.stack(found[1:], 2)[..., :head_dim])


@pytest.mark.parametrize("is_packed", [False, True])
def test_private(is_packed: bool) -> None:
    """Gradients land in the caller's tensors, also in slices; queries without keys give 0, and no NaN."""
    shape_q, shape_k = ((300, 8, 64), (257, 8, 64)) if is_packed else ((1, 300, 8, 64), (1, 257, 8, 64))
    q, k, v, dout = random(*shape_q), random(*shape_k), random(*shape_k), random(*shape_q)
    lengths = (int32(0, 300), int32(0, 257), 300, 257) if is_packed else ()
    names = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
    forward, backward = (getattr(flash_attn_interface, n if is_packed else n.replace("varlen_", "")) for n in names)
    rest = 0.0, 0.1, True, -1, -1, 0.0, None
    out, lse, *_ = forward(q, k, v, *lengths, *rest, False)
    assert torch.isposinf(lse[..., :43]).all()
    packed = torch.full((3, *shape_q), torch.nan, device=DEVICE, dtype=q.dtype)
    places = [packed[0], *(x.narrow(-3, 0, 257) for x in packed[1:])]
    softmax_d = backward(dout, q, k, v, out, lse, *places, *lengths, *rest, True)
    options = {"causal": True, "scale": 0.1, "deterministic": True}
    ours = (attention_varlen, attention_varlen_backward) if is_packed else (attention, attention_backward)
    want, want_lse = ours[0](q, k, v, *lengths[:2], **options, return_lse=True)
    grads = ours[1](dout, q, k, v, want, want_lse, *lengths[:2], **options)
    assert torch.equal(out, want)
    for place, grad in zip(places, grads, strict=True):
        assert torch.equal(place, grad)
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    torch.testing.assert_close(softmax_d[..., :300], delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["integer", "tensor", "pages", "left-padded", "chosen"])
def test_cache(kind: str) -> None:
    """Rows are appended and attended to, by the 2x rule; also captured in a graph and replayed with other lengths."""
    q, k, v = random(2, 3, 8, 64), random(2, 3, 2, 64), random(2, 3, 2, 64)
    caches = [random(32, 16, 2, 64) if kind == "pages" else random(3, 256, 2, 64) for _ in range(2)]
    used: Any = 100 if kind == "integer" else int32(100, 37)
    more: dict[str, Any] = {}
    if kind == "pages":
        more["block_table"] = torch.randperm(32, device=DEVICE).to(torch.int32).view(2, 16)
    elif kind == "left-padded":
        more["cache_leftpad"] = int32(10, 0)
    elif kind == "chosen":
        more["cache_batch_idx"] = int32(2, 0)
    if kind != "chosen" and kind != "pages":
        caches = [x[:2] for x in caches]

    def call() -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=used, causal=True, return_softmax_lse=True, **more
        )

    check_cache(call(), q, k, v, caches, used, more)
    with nothing_waits():
        call()
    if kind == "integer":
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call()
        used.copy_(int32(201, 64))
        k.normal_()
        graph.replay()
    stream.synchronize()
    check_cache(captured, q, k, v, caches, used, more)


def check_cache(got: Any, q: Any, k: Any, v: Any, caches: Any, used: Any, more: dict[str, Any]) -> None:
    out, lse = got
    lengths = [used] * 2 if isinstance(used, int) else used.tolist()
    if "block_table" in more:
        caches = [x[more["block_table"].long()].flatten(1, 2) for x in caches]
    caches = [x[more["cache_batch_idx"].long()] for x in caches] if "cache_batch_idx" in more else caches
    pads = more["cache_leftpad"].tolist() if "cache_leftpad" in more else [0, 0]
    for b, length in enumerate(lengths):
        for cache, new in zip(caches, (k, v), strict=True):
            assert torch.equal(cache[b, length : length + 3], new[b])
        seen = [q[b : b + 1], *(x[b : b + 1, pads[b] : length + 3] for x in caches)]
        want, want_lse = exact(*(x.double() for x in seen), causal=True)
        plain, _ = exact(*(x.float() for x in seen), causal=True, stored=q.dtype)
        error, plain_error = (x.double() - want for x in (out[b : b + 1], plain))
        for size in (torch.amax, lambda x: x.pow(2).mean().sqrt()):
            assert size(error.abs()) <= 2 * size(plain_error.abs()) + 2.0**-8 * size(want.abs())
        torch.testing.assert_close(lse[b : b + 1].double(), want_lse, rtol=1e-5, atol=1e-5)


def test_nothing_waits() -> None:
    q, k, v = random(96, 4, 64, grad=True), random(96, 2, 64, grad=True), random(96, 2, 64, grad=True)
    cu, table, used = int32(0, 40, 96), int32(0, 1, 2, 3).view(2, 2), int32(30, 50)
    pages = random(6, 32, 2, 64)
    cos, sin = (torch.rand(128, 16, device=DEVICE) for _ in range(2))
    rest = 0.0, 0.1, True, -1, -1, 0.0, None

    def calls() -> None:
        out = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 56, 56, causal=True)
        out.sum().backward()
        flash_attn.flash_attn_varlen_func(q, pages, pages, cu, cu, 56, 56, return_attn_probs=True, block_table=table)
        flash_attn.flash_attn_func(q[None], k[None], v[None], window_size=(9, 9), return_attn_probs=True)
        apply_rotary_emb(q, cos, sin, seqlen_offsets=used, cu_seqlens=cu, max_seqlen=56)
        out, lse, *_ = flash_attn_interface._flash_attn_varlen_forward(q, k, v, cu, cu, 56, 56, *rest)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        flash_attn_interface._flash_attn_varlen_backward(out, q, k, v, out, lse, *grads, cu, cu, 56, 56, *rest, False)

    calls()
    with nothing_waits():
        calls()


def test_rotary_and_padding_are_those_of_the_cpu() -> None:
    x, offsets = random(3, 40, 4, 64, dtype=torch.float32), int32(0, 60, 5)
    cos, sin = (torch.rand(64, 16, device=DEVICE) for _ in range(2))
    for interleaved in (False, True):
        got = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        want = apply_rotary_emb(x.cpu(), cos.cpu(), sin.cpu(), interleaved, seqlen_offsets=offsets.cpu())
        torch.testing.assert_close(got.cpu(), want)
    mask = torch.rand(3, 40, device=DEVICE) < 0.5
    rows, *found = bert_padding.unpad_input(x, mask)
    want_rows, *want = bert_padding.unpad_input(x.cpu(), mask.cpu())
    assert torch.equal(rows.cpu(), want_rows)
    assert all(torch.equal(torch.as_tensor(a).cpu(), torch.as_tensor(b)) for a, b in zip(found, want, strict=True))
    assert torch.equal(bert_padding.pad_input(rows, found[0], 3, 40), x * mask[..., None, None])
