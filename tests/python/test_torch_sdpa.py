"""F.scaled_dot_product_attention: our function of its signature, and its own flash backend served by us."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
import cupyflash.torch as ours  # noqa: E402
from cupyflash.torch import aten, sdpa  # noqa: E402

F = torch.nn.functional
close = torch.testing.assert_close
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
has_registry = pytest.mark.needs("torch>=2.11")
# Before it, programs for the CPU take the lse of fp64 for one of fp32, whichever kernel makes it.
knows_fp64 = pytest.mark.needs("torch>=2.13")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    monkeypatch.setattr(sdpa, "_told", set())
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The passes that were run, by name."""
    found: list[str] = []
    for name in ("forward", "backward"):
        real = getattr(aten.run, name)

        def count(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            found.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(aten.run, name, count)
    yield found
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        ours.restore()


def make(
    lengths: tuple[int, int] = (9, 9), heads: tuple[int, int] = (4, 4), d: int = 8, turned: bool = False
) -> list[Any]:
    shapes = [(2, h, n, d) for h, n in zip((*heads, heads[1]), (*lengths, lengths[1]), strict=True)]
    if turned:
        x = [torch.randn(b, n, h, d, dtype=torch.float64).transpose(1, 2) for b, h, n, d in shapes]
    else:
        x = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [t.requires_grad_() for t in x]


def both(f: Any, x: list[Any], **options: Any) -> list[Any]:
    """Result and gradients."""
    out = f(*x, **options)
    return [out, *torch.autograd.grad(out.square().sum(), x)]


def close_all(found: list[Any], want: list[Any]) -> None:
    for a, b in zip(found, want, strict=True):
        close(a, b)


def of_torch(q: Any, k: Any, v: Any, enable_gqa: bool = True, **options: Any) -> Any:
    """F.scaled_dot_product_attention, which takes enable_gqa from torch 2.5 on."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5), (8, 9)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_it_is_torchs_function(turned: bool, is_causal: bool, lengths: tuple[int, int], calls: list[str]) -> None:
    x = make(lengths, (4, 2), turned=turned)
    options = {"is_causal": is_causal, "scale": 0.7, "enable_gqa": True}
    close_all(both(ours.scaled_dot_product_attention, x, **options), both(of_torch, x, **options))
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("turned", [False, True])
def test_the_result_lies_as_q_does(turned: bool) -> None:
    """As torch's: models look at it as rows of all heads."""
    out = ours.scaled_dot_product_attention(*make((5, 9), turned=turned))
    assert out.transpose(1, 2).is_contiguous() is turned
    assert out.is_contiguous() is not turned


def test_it_is_deterministic_where_torch_is_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], aten.run.backward
    monkeypatch.setattr(aten.run, "backward", lambda *x, **y: asked.append(x[2].deterministic) or real(*x, **y))
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            both(ours.scaled_dot_product_attention, make())
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


def test_it_is_compiled_for_all_lengths() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ours.scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ((9, 9), (17, 17), (33, 33)):
        x = make(lengths)
        close_all(both(compiled, x, is_causal=True), both(F.scaled_dot_product_attention, x, is_causal=True))
    with pytest.warns(UserWarning, match="this call is torch's own: .* a multiple of 8"):
        compiled(*make(d=12))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(9, 9), (4, 9, 9), (2, 1, 9, 9)])
def test_an_attn_mask_of_fewer_dimensions_is_compiled(shape: tuple[int, ...], calls: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ours.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    x, mask = make(), torch.randn(shape, dtype=torch.float64)
    close_all(both(compiled, x, attn_mask=mask), both(F.scaled_dot_product_attention, x, attn_mask=mask))
    assert calls == ["forward", "backward"]
    torch._dynamo.reset()


def test_compiling_leaves_globals_as_they_are() -> None:
    """Before 2.6, torch makes globals of its callers' modules of what is constant in programs."""
    namespace = {"cupyflash": cupyflash, "ours": ours, "tell": "tell", "ready": "ready"}
    exec("def f(q): return ours.scaled_dot_product_attention(q, q, q) + cupyflash.attention(q, q, q)", namespace)
    torch._dynamo.reset()
    torch.compile(namespace["f"], backend="eager", fullgraph=True)(make()[0].detach())
    assert (namespace["tell"], namespace["ready"]) == ("tell", "ready")
    torch._dynamo.reset()


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES = {"torch.device": lambda: torch.device("cpu"), "a mode of the user's": Watching}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_are_no_rules_of_a_tensor(mode: Any, calls: list[str]) -> None:
    """As one, torch keeps the default device, and the device of a `with`."""
    x = make()
    mask, bias = torch.rand(9, 9) < 0.7, torch.randn(9, 9, dtype=torch.float64)
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for attn_mask in (None, mask, bias):
            close_all(*[both(f, x, attn_mask=attn_mask) for f in (ours.scaled_dot_product_attention, of_torch)])
        ours.scaled_dot_product_attention(torch.nn.Parameter(x[0]), *x[1:])
    assert calls == ["forward", "backward"] * 3 + ["forward"]


def test_a_default_device_is_compiled(calls: list[str]) -> None:
    torch._dynamo.reset()
    x = make()
    with torch.device("cpu"):
        compiled = torch.compile(ours.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        close_all(both(compiled, x), both(of_torch, x))
    assert calls == ["forward", "backward"]
    torch._dynamo.reset()


# torch 2.4 compiles no function of such a tensor.
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.needs("torch>=2.11"))])
def test_a_subclass_that_stays_one_is_torchs(is_compiled: bool, calls: list[str]) -> None:
    class Named(torch.Tensor):
        pass

    torch._dynamo.reset()
    f = ours.scaled_dot_product_attention
    f = torch.compile(f, backend="eager", fullgraph=True) if is_compiled else f
    q, k, v = (x.detach() for x in make())
    with pytest.warns(UserWarning, match="this call is torch's own: a tensor has rules of its own"):
        out = f(q.as_subclass(Named), k, v)
    close(out.as_subclass(torch.Tensor), of_torch(q, k, v))
    assert type(out) is Named
    assert not calls
    torch._dynamo.reset()


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "head_dim": ({"d": 12}, {}, "a multiple of 8"),
    "dropout of all": ({}, {"dropout_p": 1.0}, "expected a dropout_p from 0 on and below 1"),
    "a scale of NaN": ({}, {"scale": float("nan")}, "expected a finite scale"),
    "an infinite scale": ({}, {"scale": float("inf")}, "expected a finite scale"),
}


@pytest.mark.parametrize(("arrays", "options", "reason"), OTHERS.values(), ids=OTHERS)
def test_what_we_do_not_take_is_torchs(arrays: Any, options: Any, reason: str, calls: list[str]) -> None:
    x = make(**arrays)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"scaled_dot_product_attention: this call is torch's own: .*{reason}"):
        found = ours.scaled_dot_product_attention(*x, **options)
    torch.manual_seed(1)
    close(found, F.scaled_dot_product_attention(*x, **options), equal_nan=True)
    ours.scaled_dot_product_attention(*x, **options)  # the reason is known now
    assert not calls


def test_tensors_without_memory_are_torchs() -> None:
    x = [t.detach().to("meta") for t in make()]
    with pytest.warns(UserWarning, match="this call is torch's own: expected plain tensors on the CPU or an NVIDIA"):
        found = ours.scaled_dot_product_attention(*x, is_causal=True)
    assert (found.device.type, found.shape) == ("meta", x[0].shape)


@pytest.mark.filterwarnings("ignore:scaled_dot_product_attention")
def test_a_wrong_dropout_is_torchs_error(calls: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"between 0 and 1, but got 2"):
        ours.scaled_dot_product_attention(*make(), dropout_p=2.0)
    assert not calls


def test_other_calls_of_torch(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """3 dimensions, heads that differ by mistake, broadcast batches, strides, and where torch is faster."""
    q, k, v = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(ours.scaled_dot_product_attention(q[0], k[0], v[0]), F.scaled_dot_product_attention(q[0], k[0], v[0]))
        close(ours.scaled_dot_product_attention(q, k[:1], v[:1]), F.scaled_dot_product_attention(q, k[:1], v[:1]))
        x = [
            t.detach().movedim(1, 3).contiguous().movedim(3, 1).movedim(2, 3).contiguous().movedim(3, 2)
            for t in (q, k, v)
        ]
        close(ours.scaled_dot_product_attention(*x), F.scaled_dot_product_attention(*x))
        with pytest.raises(RuntimeError, match="must match the size"):
            ours.scaled_dot_product_attention(q, k[:, :2], v[:, :2])
    monkeypatch.delenv("CUPYFLASH_BACKEND")
    with pytest.warns(UserWarning, match="host memory are faster there; CUPYFLASH_BACKEND=cpu"):
        ours.scaled_dot_product_attention(q, k, v)
    assert not calls


@has_registry
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5)])
def test_the_flash_backend_is_ours(lengths: tuple[int, int], turned: bool, calls: list[str]) -> None:
    x, registry = make(lengths, turned=turned), torch.nn.attention
    want = both(F.scaled_dot_product_attention, x, is_causal=True)
    assert not calls
    with ours.activate():
        assert registry.current_flash_attention_impl() == "cupyflash"
        found = both(F.scaled_dot_product_attention, x, is_causal=True)
        assert calls == ["forward", "backward"]
    close_all(found, want)
    assert registry.current_flash_attention_impl() is None
    calls.clear()
    both(F.scaled_dot_product_attention, x, is_causal=True)
    ours.restore()  # of nothing
    assert not calls


@has_registry
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=knows_fp64)])
def test_the_flash_backend_of_compiled_programs_is_ours(dtype: str, calls: list[str]) -> None:
    x = [t.detach().to(getattr(torch, dtype)).requires_grad_() for t in make(turned=True)]
    want = both(F.scaled_dot_product_attention, x, is_causal=True)
    torch._dynamo.reset()
    ours.activate()
    compiled = torch.compile(lambda *x, **options: F.scaled_dot_product_attention(*x, **options), fullgraph=True)
    found = both(compiled, x, is_causal=True)
    assert calls == ["forward", "backward"]
    close_all(found, want)
    torch._dynamo.reset()


@has_registry
def test_what_the_flash_backend_does_not_take_is_torchs(calls: list[str]) -> None:
    x = make(d=12)
    want = both(F.scaled_dot_product_attention, x)
    with ours.activate():
        found = both(F.scaled_dot_product_attention, x)
    assert not calls
    close_all(found, want)


@has_registry
def test_activations_within_each_other(calls: list[str]) -> None:
    with ours.activate():
        with ours.activate():
            pass
        F.scaled_dot_product_attention(*make())
        assert calls == ["forward"]
    F.scaled_dot_product_attention(*make())
    assert calls == ["forward"]


@has_registry
def test_layers_that_call_it(calls: list[str]) -> None:
    attention = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    want = attention(x, x, x, need_weights=False)[0]
    with ours.activate():
        close(attention(x, x, x, need_weights=False)[0], want)
    assert calls == ["forward"]


def test_a_torch_without_registry_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    for function in (ours.activate, ours.restore):
        with pytest.raises(UnsupportedError, match=r"expected torch 2\.11 or newer, .* in its place"):
            function()


def test_the_kernels_for_a_gpu() -> None:
    """What torch calls there, on CPU tensors, against plain attention: results, their strides, and gradients."""
    for turned in (False, True):
        q, k, v = (x.detach() for x in make((9, 9), (4, 2), turned=turned))
        out, lse, _, _, max_q, max_k, state, offset, mask = aten._sdpa(None, q, k, v, 0.0, True, scale=0.3)
        want = of_torch(q, k, v, is_causal=True, scale=0.3)
        close(out, want)
        assert out.stride() == torch.empty_like(q).stride()
        assert (lse.shape, max_q, max_k, state.shape, offset.shape, mask.numel()) == ((2, 4, 9), 9, 9, (2,), (), 0)
        grads = aten._sdpa_backward(None, out, q, k, v, out, lse, None, None, 9, 9, 0.0, True, state, offset, scale=0.3)
        leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)]
        again = of_torch(*leaves, is_causal=True, scale=0.3)
        for g, x, w in zip(grads, (q, k, v), torch.autograd.grad(again, leaves, out), strict=True):
            close(g, w)
            assert g.stride() == torch.empty_like(x).stride()


def test_the_packed_kernels_for_a_gpu() -> None:
    q, k, v = (torch.randn(9, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    for bounds, window in (((None, None), None), ((-1, -1), None), ((2, -1), (2, None))):
        options = {"causal": True, "window": window}
        want, want_lse = cupyflash.attention_varlen(q, k, v, cu, **options, return_lse=True)
        left, right = bounds
        sides = {"window_size_left": left, "window_size_right": right}
        x = [t.detach() for t in (q, k, v)]
        out, lse, *state, _ = aten._flash(None, *x, cu, cu, 6, 6, 0.0, True, False, **sides, num_splits=None)
        close((out, lse), (want.detach(), want_lse.detach()))
        grads = aten._flash_backward(None, out, *x, out, lse, cu, cu, 6, 6, 0.0, True, *state, **sides)
        close(list(grads), list(torch.autograd.grad(want, (q, k, v), out)))
    told = aten._flash(lambda reason: reason, *x, cu, cu, 6, 6, 0.1, True, False)
    assert told == "there is dropout"


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_dropout_beside_an_attn_mask_is_ours(kind: str, calls: list[str]) -> None:
    x, shown = make(), torch.rand(2, 1, 9, 9) < 0.7
    given = shown if kind == "mask" else torch.randn(4, 9, 9, dtype=torch.float64)
    torch.manual_seed(3)
    found = both(ours.scaled_dot_product_attention, x, attn_mask=given, dropout_p=0.5)
    assert calls == ["forward", "backward"]
    torch.manual_seed(3)
    close_all(found, both(cupyflash.attention, x, layout="bhsd", dropout_p=0.5, **{kind: given}))


def test_dropout_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a seed from torch's generator."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    q, k, v = make()
    torch.manual_seed(1)
    found = ours.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert found.equal(cupyflash.attention(q, k, v, layout="bhsd", dropout_p=0.5))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_arrays_of_another_library_are_named(name: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), torch.ones(1, 1, 4, 8)) | {name: torch.ones(1, 1, 4, 8).numpy()}
    with pytest.raises(ArgumentError, match=f"^{name}: expected a torch.Tensor, got ndarray; give torch.as_tensor"):
        ours.scaled_dot_product_attention(**given)
