"""Packed sequences of PyTorch tensors: derivatives, and what torch would lose sight of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, UnsupportedError, attention_varlen, attention_varlen_backward

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own parts


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture
def qkv() -> tuple[Any, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v


LENGTHS: dict[str, dict[str, Any]] = {
    "alike": {"cu_seqlens_q": int32(0, 3, 3, 8)},
    "not-alike": {"cu_seqlens_q": int32(0, 3, 3, 8), "cu_seqlens_k": int32(0, 0, 4, 9)},
    "used": {"cu_seqlens_q": int32(0, 3, 7), "cu_seqlens_k": int32(0, 5, 9), "seqused_k": int32(4, 2)},
}


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 1), "scale": -0.3}, {"softcap": 1.1}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_gradcheck(lengths: dict[str, Any], options: dict[str, Any], qkv: Any) -> None:
    def function(*x: Any) -> Any:
        out, lse = attention_varlen(*x, **lengths, **options, return_lse=True)
        return out, torch.where(torch.isfinite(lse), lse, 0)  # -inf has no differences

    one_group = (x.detach()[:, : x.shape[1] // 2].clone().requires_grad_() for x in qkv)
    assert torch.autograd.gradcheck(function, tuple(one_group))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autograd_is_attention_varlen_backward(dtype: Any, qkv: Any) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in qkv)
    lengths = LENGTHS["used"]
    out, lse = attention_varlen(q, k, v, **lengths, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    want = attention_varlen_backward(dout, q, k, v, out, lse, dlse=dlse, **lengths)
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a, b)
    by_lse = torch.autograd.grad(lse, (q, k, v), dlse, retain_graph=True)
    want = attention_varlen_backward(torch.zeros_like(out), q, k, v, out, lse, dlse=dlse, **lengths)
    for a, b in zip(by_lse, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0][7:], torch.zeros(2, 4, 8, dtype=dtype))


def test_layout_and_strides(qkv: Any) -> None:
    q, k, v = qkv
    lengths, turned = LENGTHS["not-alike"], [x.detach().transpose(0, 1) for x in qkv]
    want, want_lse = attention_varlen(q, k, v, **lengths, causal=True, return_lse=True)
    out, lse = attention_varlen(*turned, **lengths, causal=True, layout="bhsd", return_lse=True)
    assert out.is_contiguous()
    assert torch.equal(out.transpose(0, 1), want)
    assert torch.equal(lse, want_lse)
    grads = attention_varlen_backward(out, *turned, out, lse, **lengths, causal=True, layout="bhsd")
    for a, b in zip(grads, torch.autograd.grad(want, qkv, want.detach()), strict=True):
        assert torch.equal(a.transpose(0, 1), b)


def test_nothing_is_recorded_without_need(qkv: Any) -> None:
    cu = int32(0, 3, 9)
    with torch.no_grad():
        assert attention_varlen(*qkv, cu).grad_fn is None
    assert attention_varlen(*(x.detach() for x in qkv), cu).grad_fn is None
    assert attention_varlen(*qkv, cu).grad_fn is not None
    parameters = [torch.nn.Parameter(x.detach()) for x in qkv]
    assert type(attention_varlen(*parameters, cu)) is torch.Tensor


def test_second_derivatives_are_errors(qkv: Any) -> None:
    out = attention_varlen(*qkv, int32(0, 3, 9))
    (g,) = torch.autograd.grad(out.pow(2).sum(), qkv[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives are not supported"):
        g.sum().backward()


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_lengths_that_change_before_the_backward_are_noticed(name: str, qkv: Any) -> None:
    lengths = {key: x.clone() for key, x in LENGTHS["used"].items()}
    out = attention_varlen(*qkv, **lengths)
    lengths[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpoint_and_hooks(qkv: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    for lengths in LENGTHS.values():
        want = torch.autograd.grad(attention_varlen(*qkv, **lengths).pow(2).sum(), qkv)

        def function(*x: Any, lengths: dict[str, Any] = lengths) -> Any:
            return attention_varlen(*x, **lengths).pow(2)

        out = checkpoint(function, *qkv, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy):
            hooked = function(*qkv)
        for found in (out, hooked):
            for a, b in zip(torch.autograd.grad(found.sum(), qkv), want, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda cu: cu.long(), ArgumentError, r"expected dtype int32, got int64; give cu_seqlens_q.to\(torch.int32\)"),
        (lambda cu: cu.to("meta"), ArgumentError, "got device meta"),
        (lambda cu: cu.to_sparse(), ArgumentError, "expected a dense tensor"),
        (lambda cu: cu[1:], ArgumentError, r"expected 0 as its first entry, got cu_seqlens_q\[0\] = 3"),
    ],
    ids=["dtype", "meta", "sparse", "values"],
)
def test_what_is_wrong_is_named(make: Callable[[Any], Any], kind: type[Exception], message: str, qkv: Any) -> None:
    with pytest.raises(kind, match=f"cu_seqlens_q: .*{message}"):
        attention_varlen(*qkv, make(int32(0, 3, 9)))


def test_forward_mode_is_an_error(qkv: Any) -> None:
    q, k, v = (x.detach() for x in qkv)
    with pytest.raises(UnsupportedError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        attention_varlen(torch.autograd.forward_ad.make_dual(q, q), k, v, int32(0, 3, 9))


def test_subclasses_are_plain(qkv: Any) -> None:
    class Named(torch.Tensor):
        pass

    x = [x.detach() for x in qkv]
    cu = int32(0, 3, 9)
    out = attention_varlen(x[0].as_subclass(Named), *x[1:], cu.as_subclass(Named))
    assert type(out) is torch.Tensor
    assert torch.equal(out, attention_varlen(*x, cu))


def test_numpy_gives_the_same(qkv: Any) -> None:
    for lengths in LENGTHS.values():
        out = attention_varlen(*(x.detach().numpy() for x in qkv), **{name: x.numpy() for name, x in lengths.items()})
        np.testing.assert_array_equal(out, attention_varlen(*qkv, **lengths).detach().numpy())
