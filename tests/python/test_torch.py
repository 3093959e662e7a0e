"""PyTorch beyond plain tensors and one backward: right, or an error that says what is not supported; never silent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad
functional = torch.autograd.functional

pytestmark = [
    # What torch itself says of its own parts when they are first used.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning"),
]
SECOND = "second derivatives are not supported"


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


@pytest.fixture
def qkv() -> tuple[Any, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, 5, 2, 8) for _ in range(3))


def exact(q: Any, k: Any, v: Any, layout: str = "bshd") -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


# ---- Second derivatives ----


@pytest.mark.parametrize(
    "loss", [lambda o: o.sum(), lambda o: o.pow(2).sum(), lambda o: o.mean(), lambda o: o[0, 1, 1, 3]]
)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=["q", "k", "v", "all"])
def test_a_gradient_penalty_is_an_error(loss: Callable[[Any], Any], which: tuple[int, ...], qkv: Any) -> None:
    inputs = [x.requires_grad_(i in which) for i, x in enumerate(qkv)]
    wanted = [inputs[i] for i in which]
    grads = torch.autograd.grad(loss(cupyflash.attention(*inputs)), wanted, create_graph=True)
    for g, want in zip(grads, torch.autograd.grad(loss(exact(*inputs)), wanted), strict=True):
        torch.testing.assert_close(g, want)
    penalty = sum(g.pow(2).sum() for g in grads)
    with pytest.raises(UnsupportedError, match=SECOND):
        penalty.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match=SECOND):
        torch.autograd.grad(penalty, wanted, retain_graph=True)
    for x in wanted:  # also where the rest of the loss depends on it
        with pytest.raises(UnsupportedError, match=SECOND):
            torch.autograd.grad(penalty + x.sum(), x, retain_graph=True, allow_unused=True)


def test_second_derivatives_through_lse_and_dout(qkv: Any) -> None:
    q, k, v = (x.requires_grad_() for x in qkv)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    weight = torch.ones_like(out).requires_grad_()
    for value, by in ((lse.sum(), q), (lse.pow(2).sum() + out.sum(), k), ((out * weight).sum(), weight)):
        (g,) = torch.autograd.grad(value, q, create_graph=True)
        with pytest.raises(UnsupportedError, match=SECOND):
            torch.autograd.grad(g.sum(), by)


def test_gradients_without_a_graph_have_none(qkv: Any) -> None:
    q, k, v = (x.requires_grad_() for x in qkv)
    out = cupyflash.attention(q, k, v)
    (g,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert not g.requires_grad
    out.sum().backward(create_graph=False)
    assert not q.grad.requires_grad


@pytest.mark.parametrize(
    "second",
    [
        lambda f, x: functional.hessian(f, x),
        lambda f, x: functional.hessian(f, x, vectorize=True),
        lambda f, x: functional.hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode"),
        lambda f, x: functional.hvp(f, x, x),
        lambda f, x: functional.vhp(f, x, x),
        lambda f, x: functional.jvp(f, x, x),
        lambda f, x: functional.vjp(f, x, create_graph=True)[1].sum().backward(),
        lambda f, x: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
        lambda f, x: functional.jacobian(f, x, create_graph=True).sum().backward(),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(f)(x),
        lambda f, x: torch.func.linearize(f, x),
        lambda f, x: torch.func.functionalize(f)(x),
    ],
)
@pytest.mark.parametrize("power", [1, 2])
def test_derivatives_that_are_not_supported(second: Callable[..., Any], power: int, qkv: Any) -> None:
    q, k, v = qkv
    with pytest.raises(UnsupportedError, match=r"^(attention|q|q, k, v|dout): .*not supported"):
        second(lambda x: cupyflash.attention(x, k, v).pow(power).sum(), q)


def test_jacobian_row_by_row_is_right(qkv: Any) -> None:
    q, k, v = qkv
    found = functional.jacobian(lambda x: cupyflash.attention(x, k, v), q)
    torch.testing.assert_close(found, functional.jacobian(lambda x: exact(x, k, v), q))


def test_calls_that_a_transform_does_not_reach_are_right(qkv: Any) -> None:
    want = exact(*qkv)
    found = torch.func.vmap(lambda s: s * cupyflash.attention(*qkv))(torch.arange(3.0))
    torch.testing.assert_close(found[2], 2 * want)
    q, k, v = (x.requires_grad_() for x in qkv)
    found = torch.func.vmap(lambda s: s * cupyflash.attention(q, k, v))(torch.arange(3.0))
    for a, b in zip(*(torch.autograd.grad(x.pow(2).sum(), qkv) for x in (found[2], 2 * exact(*qkv))), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(
        torch.func.grad(lambda s: (s * cupyflash.attention(*qkv)).sum())(torch.tensor(1.0)), want.sum()
    )


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_forward_mode_is_an_error(name: str, recorded: bool, qkv: Any) -> None:
    with forward_ad.dual_level():
        named = dict(zip("qkv", qkv, strict=True))
        torch.testing.assert_close(cupyflash.attention(**named), exact(**named))
        named[name] = forward_ad.make_dual(named[name].clone().requires_grad_(recorded), torch.ones_like(named[name]))
        with pytest.raises(UnsupportedError, match=f"^{name}: forward-mode derivatives"):
            cupyflash.attention(**named)


def test_forward_over_reverse_is_an_error(qkv: Any) -> None:
    q, k, v = (x.requires_grad_() for x in qkv)
    out = cupyflash.attention(q, k, v)
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(UnsupportedError, match=r"^dout: forward-mode derivatives"):
            torch.autograd.grad(out, q, dout)


def test_attention_backward_does_not_lose_what_it_depends_on(qkv: Any) -> None:
    q, k, v = qkv
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    plain = cupyflash.attention_backward(out, q, k, v, out, lse)
    assert not any(g.requires_grad for g in plain)
    for i in range(6):
        arrays = [x.clone().requires_grad_(i == j) for j, x in enumerate((out, q, k, v, out, lse))]
        grads = cupyflash.attention_backward(*arrays)
        for g, same in zip(grads, plain, strict=True):
            torch.testing.assert_close(g.detach(), same, rtol=0, atol=0)
        with pytest.raises(UnsupportedError, match=SECOND):
            torch.autograd.grad(grads.dk.sum(), arrays[i])
        with torch.no_grad():
            assert not cupyflash.attention_backward(*arrays).dq.requires_grad


def test_checkpoint_and_hooks(qkv: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = (x.requires_grad_() for x in qkv)
    want = torch.autograd.grad(exact(q, k, v).pow(2).sum(), (q, k, v))
    for reentrant in (False, True):
        out = checkpoint(lambda *x: cupyflash.attention(*x).pow(2), q, k, v, use_reentrant=reentrant)
        out.sum().backward()
        for x, g in zip((q, k, v), want, strict=True):
            torch.testing.assert_close(x.grad, g)
            x.grad = None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy):
        out = cupyflash.attention(q, k, v).pow(2)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], want[0])


# ---- Tracers ----


def test_the_old_tracer_is_refused(qkv: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"^q: torch\.jit\.trace"):
        torch.jit.trace(cupyflash.attention, qkv)
    out, lse = cupyflash.attention(*qkv, return_lse=True)
    with pytest.raises(UnsupportedError, match=r": torch\.jit\.trace"):
        torch.jit.trace(lambda q, k, v: tuple(cupyflash.attention_backward(out, q, k, v, out, lse)), qkv)


def test_symbolic_tracing_is_refused() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return cupyflash.attention(x, x, x)

    with pytest.raises(ArgumentError, match=r"q: expected an array .* got torch\.fx\.proxy\.Proxy"):
        torch.fx.symbolic_trace(Model())


def test_import_leaves_the_compiler_alone() -> None:
    """Importing torch's compiler takes seconds."""
    code = "import sys, torch, cupyflash; cupyflash.attention(*[torch.ones(1, 5, 2, 8)] * 3); "
    code += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


# ---- Subclasses and tensors without elements ----


class Harmless(torch.Tensor):
    """As fastai's and torchvision's are: a name for what is inside."""


class Strict(torch.Tensor):
    """Lets nobody compute with it by torch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(func)


class Wrapper(torch.Tensor):
    """As torchao's are: a shape in front of other tensors."""

    @staticmethod
    def __new__(cls, x: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, strides=x.stride())

    def __init__(self, x: Any) -> None:
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.x if isinstance(a, cls) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize(
    "kind",
    [torch.nn.Parameter, lambda x: x.as_subclass(Harmless), lambda x: x.as_subclass(Strict)],
    ids=["Parameter", "subclass", "strict"],
)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_subclasses_are_answered_as_plain_tensors(kind: Callable[[Any], Any], which: str, qkv: Any) -> None:
    want, want_lse = cupyflash.attention(*qkv, return_lse=True)
    q, k, v = (kind(x.clone()) if name in which else x for name, x in zip("qkv", qkv, strict=True))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    with torch.no_grad():
        grads = cupyflash.attention_backward(want, q, k, v, want, want_lse)
    plain = cupyflash.attention_backward(want, *qkv, want, want_lse)
    assert {type(x) for x in (out, lse, *grads)} == {torch.Tensor}
    for x, same in zip((out, lse, *grads), (want, want_lse, *plain), strict=True):
        torch.testing.assert_close(x.detach(), same, rtol=0, atol=0)


def test_gradients_reach_a_subclass(qkv: Any) -> None:
    q, k, v = qkv
    leaf = q.clone().as_subclass(Harmless).requires_grad_()
    cupyflash.attention(leaf, k, v).pow(2).sum().backward()
    plain = q.clone().requires_grad_()
    exact(plain, k, v).pow(2).sum().backward()
    torch.testing.assert_close(leaf.grad.as_subclass(torch.Tensor), plain.grad)


def _resized(x: Any, size: int) -> Any:
    x = x.clone()
    x.untyped_storage().resize_(size)
    return x


def _fake(x: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


STRANGE: dict[str, Callable[[Any], Any]] = {
    "wrapper": Wrapper,
    "fake": _fake,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.flatten(0, -2).to_sparse_csr(),
    "mkldnn": lambda x: x.contiguous().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "functional": torch._to_functional_tensor,
    "negative": torch._neg_view,
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "freed": lambda x: _resized(x, 0),
    "partly freed": lambda x: _resized(x, 16),
    "uninitialized": lambda x: torch.nn.parameter.UninitializedParameter(),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "complex": lambda x: x.to(torch.complex64).conj(),
    "imaginary": lambda x: x.to(torch.complex64).conj().imag,
    "integer": lambda x: x.to(torch.int32),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "storage": lambda x: x.untyped_storage(),
    "class": lambda x: torch.Tensor,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("argument", ["q", "k", "v", "out", "dout", "lse", "dlse"])
def test_strange_tensors_are_refused_by_name(argument: str, name: str, qkv: Any) -> None:
    q, k, v = qkv
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    named = {"q": q, "k": k, "v": v, "out": out, "dout": out.clone(), "lse": lse, "dlse": lse.clone()}
    named[argument] = STRANGE[name](named[argument])
    refused = pytest.raises((ArgumentError, UnsupportedError), match=f"^{argument}: ")
    with refused:
        cupyflash.attention_backward(**named)
    if argument in "qkv":
        with refused:
            cupyflash.attention(*(named[n] for n in "qkv"))
        if named[argument] is not torch.Tensor and getattr(named[argument], "is_leaf", False):
            others = {n: named[n].requires_grad_() for n in "qkv" if n != argument}
            with refused:
                cupyflash.attention(**others, **{argument: named[argument]})


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.needs("torch>=2.5")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_distributed_tensors_beside_plain_ones_are_refused(group: None, qkv: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    q, k, v = (distribute_tensor(x, init_device_mesh("cpu", (1,)), [Replicate()]) for x in qkv)
    with pytest.raises(ArgumentError, match=r"q: expected a plain tensor as k is, got a DTensor; give all alike"):
        cupyflash.attention(q, *qkv[1:])
    torch.testing.assert_close(cupyflash.attention(q, k, v).to_local(), exact(*qkv))
    compiled = torch.compile(cupyflash.attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v).to_local(), exact(*qkv))
    torch._dynamo.reset()


def test_other_states_of_torch_change_nothing(qkv: Any) -> None:
    """Modes that only watch, a default device, inference mode."""
    from torch.utils.flop_counter import FlopCounterMode

    want = exact(*qkv)
    contexts = (torch.inference_mode, torch.no_grad, lambda: torch.device("meta"),
                lambda: FlopCounterMode(display=False), torch.overrides.BaseTorchFunctionMode)  # fmt: skip
    for context in contexts:
        with context():
            found = cupyflash.attention(*qkv)
        torch.testing.assert_close(found, want)
