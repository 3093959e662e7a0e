"""PyTorch on a GPU: compiled programs, CUDA graphs of them and by hand, bit by bit what eager calls give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupyflash
from tests.gpu_arrays import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("torch"),
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")),
]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    import torch

    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def make(*shape: int) -> list[Any]:
    import torch

    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def dense(q: Any, k: Any, v: Any) -> Any:
    out, lse = cupyflash.attention(2 * q, k, v, causal=True, window=(30, 0), return_lse=True, deterministic=True)
    return out * 3, lse


def packed(q: Any, k: Any, v: Any, cu: Any) -> Any:
    out, lse = cupyflash.attention_varlen(2 * q, k, v, cu, causal=True, return_lse=True, deterministic=True)
    return out * 3, lse


def assert_same(f: Callable[..., Any], g: Callable[..., Any], x: list[Any], *more: Any) -> None:
    """Results and gradients, bit by bit."""
    import torch

    found, want = ([t.clone() for t in h(*x, *more)] for h in (f, g))
    weights = [torch.randn_like(t) for t in want]
    again = f(*x, *more)
    grads = [t.clone() for t in torch.autograd.grad(again, x, weights)]
    for a, b in zip((*found, *grads), (*want, *torch.autograd.grad(g(*x, *more), x, weights)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_whole_for_all_lengths(mode: str) -> None:
    import torch

    one = torch.compile(dense, mode=mode, fullgraph=True, dynamic=True)
    several = torch.compile(packed, mode=mode, fullgraph=True, dynamic=True)
    for length in (65, 129, 300):
        for _ in range(3):  # eager, captured, replayed
            torch.compiler.cudagraph_mark_step_begin()
            assert_same(one, dense, make(2, length, 4, 64))
            torch.compiler.cudagraph_mark_step_begin()
            cu = torch.tensor([0, 30, length - 1], dtype=torch.int32, device="cuda")
            assert_same(several, packed, make(length, 4, 64), cu)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    if mode == "reduce-overhead":
        assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("backward", [False, True])
def test_captured_by_hand(backward: bool) -> None:
    import torch

    x, weight = make(2, 130, 4, 64), torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> list[Any]:
        out = cupyflash.attention(*x, causal=True, deterministic=True)
        return [out.detach(), *(torch.autograd.grad(out, x, weight) if backward else ())]

    graph, replayed = captured(step)
    for _ in range(3):
        with torch.no_grad():
            for t in x:
                t.normal_()
        for t in replayed:
            t.fill_(float("nan"))
        graph.replay()
        for a, b in zip(replayed, step(), strict=True):
            assert torch.equal(a, b)


def test_the_operators_on_the_gpu() -> None:
    import torch

    from cupyflash.operands import BACKWARD, FORWARD
    from cupyflash.options import Options
    from cupyflash.torch import ops

    arrays = dict(zip("qkv", (t.transpose(1, 2) for t in make(2, 65, 4, 64)), strict=True))
    options = Options(causal=True, layout="bhsd", deterministic=True)
    names = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = ops.arguments(FORWARD, arrays, options)
    torch.library.opcheck(ops.operator(FORWARD, given), given, test_utils=names)
    out, lse = (t.detach() for t in ops.forward(arrays, options))
    arrays = {name: t.detach() for name, t in arrays.items()} | {"out": out, "dout": out.clone(), "lse": lse}
    given = ops.arguments(BACKWARD, arrays, options)
    torch.library.opcheck(ops.operator(BACKWARD, given), given, test_utils=names)


def test_autocast() -> None:
    import torch

    x = [t.detach().float().requires_grad_() for t in make(2, 65, 4, 64)]
    with torch.autocast("cuda", torch.bfloat16):
        out = cupyflash.attention(*x)
    assert torch.equal(out, cupyflash.attention(*(t.bfloat16() for t in x)))
    out.float().sum().backward()
    assert x[0].grad.dtype is torch.float32


def test_func_and_vmap() -> None:
    import torch

    x = [t.detach() for t in make(3, 2, 65, 4, 64)]

    def loss(*x: Any) -> Any:
        return cupyflash.attention(*x, deterministic=True).float().square().sum()

    leaves = [t.flatten(0, 1).requires_grad_() for t in x]
    want = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*x), want, strict=True):
        assert torch.equal(a.flatten(0, 1), b)


def assert_close(found: Any, want: Any) -> None:
    import torch

    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


def sdpa(f: Callable[..., Any], x: list[Any], **options: Any) -> list[Any]:
    import torch

    out = f(*x, **options)
    return [out, *torch.autograd.grad(out, x, torch.ones_like(out))]


@pytest.mark.parametrize("lengths", [(130, 130), (65, 130), (130, 65)])
def test_sdpa(lengths: tuple[int, int]) -> None:
    import torch

    import cupyflash.torch

    x = [
        torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (lengths[0], *lengths[1:] * 2)
    ]
    own = torch.nn.functional.scaled_dot_product_attention
    for a, b in zip(
        *(sdpa(f, x, is_causal=True) for f in (cupyflash.torch.scaled_dot_product_attention, own)), strict=True
    ):
        assert_close(a, b)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_the_flash_backend_is_ours(turned: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import cupyflash.torch
    from cupyflash.torch import aten

    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry of backends")
    calls, forward, backward = [], aten.run.forward, aten.run.backward
    monkeypatch.setattr(aten.run, "forward", lambda *a, **k: calls.append("forward") or forward(*a, **k))
    monkeypatch.setattr(aten.run, "backward", lambda *a, **k: calls.append("backward") or backward(*a, **k))
    q, k, v = make(2, 130, 4, 64)
    x = [(t.transpose(1, 2) if turned else t.view(2, 4, 130, 64)).detach().requires_grad_() for t in (q, k, v)]
    own = torch.nn.functional.scaled_dot_product_attention

    def call(*x: Any, **options: Any) -> Any:
        return own(*x, **options)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        want = sdpa(own, x, is_causal=True)
        with cupyflash.torch.activate():
            found = sdpa(torch.compile(call, fullgraph=True) if compiled else own, x, is_causal=True)
            assert calls == ["forward", "backward"]
            own(*x, dropout_p=0.1)  # torch's own kernel
            assert len(calls) == 2
        sdpa(own, x, is_causal=True)
    assert len(calls) == 2
    for a, b in zip(found, want, strict=True):
        assert_close(a, b)
        assert a.stride() == b.stride()
