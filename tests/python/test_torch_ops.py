"""What torch's own tools make of a call: torch.compile, export, torch.func, modes, checkpoints, autocast."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError, attention, attention_varlen
from cupyflash.operands import BACKWARD, FORWARD, GRADIENT, INPUT, TABLE, Operand, Pass, Use
from cupyflash.options import Options

torch = pytest.importorskip("torch")
from cupyflash.torch import ops  # noqa: E402

# Of torch's own parts.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def compiler() -> Iterator[Any]:
    """torch's, with nothing compiled and nothing counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def make(*shape: int, grad: bool = False, dtype: Any = None) -> list[Any]:
    return [torch.randn(shape or (2, 5, 2, 8), requires_grad=grad, dtype=dtype) for _ in range(3)]


def exact(q: Any, k: Any, v: Any) -> Any:
    p = (torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("...hqk,...khd->...qhd", p, v)


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x: f(*x).square().sum()


def assert_same(f: Callable[..., Any], g: Callable[..., Any], inputs: list[Any]) -> None:
    """Results and gradients."""
    found, want = f(*inputs), g(*inputs)
    close(found, want)
    weights = [torch.randn_like(x) for x in want]
    grads = (torch.autograd.grad(x, inputs, weights) for x in (found, want))
    for a, b in zip(*grads, strict=True):
        close(a, b)


# ---- The operators ----


def test_the_schema_follows_the_table() -> None:
    """What each call has is an argument, what it may lack one of `more`, by their rows alone; gradients are results."""
    always = Operand("always", ("batch",), forward=Use(INPUT), backward=Use(INPUT))
    last = Operand("last", ("batch",), feature="last", forward=Use(INPUT), backward=Use(INPUT))
    dlast = Operand("dlast", ("batch",), like="last", feature="last", backward=Use(GRADIENT, optional=True))
    table = (*TABLE, always, last, dlast)
    for more in (False, True):
        forward, backward = (ops.schema(x, more) for x in (FORWARD, BACKWARD))
        forward = forward.replace(" Tensor v,", " Tensor v, Tensor always,")
        backward = backward.replace(" str[] wanted,", " Tensor always, str[] wanted,")
        if more:
            before, behind = " bool causal", " Tensor? last=None, bool causal"
            forward, backward = forward.replace(before, behind), backward.replace(before, behind)
        assert ops.schema(Pass("forward", table), more) == forward
        assert ops.schema(Pass("backward", table), more) == backward[:-1] + ", Tensor dlast)"


def test_options_survive_the_operator() -> None:
    assert {name.removesuffix("_left").removesuffix("_right") for name, *_ in ops.OPTIONS} == {*Options._fields} - {
        "of_8_bits"
    }
    assert Options(*[x for name, _, x in ops.OPTIONS if name != "window_right"]) == Options()
    q, k, v = make()
    given = {"q": q, "k": k, "v": v}
    back = {**given, "out": q, "dout": k, "lse": v}
    every = (Options(), Options(True, 0.5, (None, 3), "bhsd", True, 2.0), Options(window=(2, None)), Options(mods="x"))
    for options in every:
        for more in ({}, {"mask": q}, {"cu_seqlens_q": v, "mod_array_0": k}):
            forward, backward = given | more, back | more
            for whole in (False, True):
                values = ops.arguments(FORWARD, forward, options, whole=whole)
                assert ops.read(FORWARD, values) == ((*forward,), (*forward.values(),), options, ())
                assert ops.read_by_name(FORWARD, values) == (forward, options, ())
                assert (ops.operator(FORWARD, values) is torch.ops.cupyflash.forward.more) == bool(more)
                for wanted in ((), ("dbias",)):
                    values = ops.arguments(BACKWARD, backward, options, wanted, whole)
                    assert ops.read_by_name(BACKWARD, values) == (backward, options, wanted)
                    assert (ops.operator(BACKWARD, values) is torch.ops.cupyflash.backward.more) == bool(more)


def test_arguments_that_are_as_their_defaults_are_left_out() -> None:
    """By us and by torch: what a rule is given ends with the last that is not. Without them the call is the same."""
    q, k, v = make(1, 5, 2, 8)
    arrays, mask = {"q": q, "k": k, "v": v}, torch.ones(5, 5, dtype=torch.bool).tril()
    assert ops.arguments(FORWARD, arrays, Options()) == (q, k, v)
    assert ops.arguments(FORWARD, arrays, Options(True)) == (q, k, v, True)
    assert ops.arguments(BACKWARD, arrays | {"out": q, "dout": q, "lse": q}, Options()) == (q, k, v, q, q, q, [])
    assert ops.flat(Options()) == tuple([x for *_, x in ops.OPTIONS])
    call, none = torch.ops.cupyflash.forward, [None] * 16
    for options in (Options(), Options(True), Options(True, 0.5)):
        want = call(*ops.arguments(FORWARD, arrays, options))
        whole = [*arrays.values(), *ops.flat(options), "x"]
        assert [len(op._schema.arguments) for op in (call.default, call.more)] == [len(whole), len([*whole, *none])]
        for found in (call(*whole), call.more(q, k, v, *none, *whole[3:])):
            for x, y in zip(found, want, strict=True):
                assert torch.equal(x, y)
    assert torch.equal(call.more(q, k, v)[0], attention(q, k, v))
    want = attention(q, k, v, window=(1, None), mask=mask)
    assert torch.equal(call(q, k, v, window_left=1, mask=mask)[0], want)
    assert torch.equal(call(*ops.arguments(FORWARD, arrays | {"mask": mask}, Options(window=(1, None))))[0], want)


def test_what_stands_between_an_operator_and_its_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain tensors go on at once, all others by the dispatcher; results are the same."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from cupyflash.torch import autograd, recorded

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    hops: list[Any] = []
    below = autograd.below_autograd
    for module in (autograd, recorded):
        monkeypatch.setattr(module, "below_autograd", lambda op, *x: hops.append(op) or below(op, *x))
    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    call: Callable[..., Any] = lambda x: ops.forward({"q": x, "k": x, "v": x}, Options())[0]  # noqa: E731
    want = torch.autograd.grad(call(x).sum(), x)[0]
    assert not hops
    with Watch():
        call(x)
    assert ops.FORWARD_OP in seen
    assert len(hops) == 1
    assert torch.equal(torch.func.grad(lambda x: call(x).sum())(x.detach()), want)
    assert len(hops) > 1
    hops.clear()
    assert torch.equal(call(torch._neg_view(x.detach())), call(-x.detach()))
    assert len(hops) == 1
    monkeypatch.setattr(autograd, "is_plain", lambda keys: False)  # as in a torch that does not tell
    hops.clear()
    assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], want)
    assert hops == [ops.FORWARD_OP, ops.BACKWARD_OP]


LENGTHS = {"cu_seqlens_q": (0, 2, 5), "seqused_k": (1, 3)}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool, layout: str, recorded: bool) -> None:
    x = make(5, 2, 8) if packed else make(2, 5, 2, 8)
    x = [t.transpose(-3, -2) for t in x] if layout == "bhsd" else x  # whose strides no result has
    arrays = dict(zip("qkv", (t.requires_grad_(recorded) for t in x), strict=True))
    if packed:
        arrays |= {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in LENGTHS.items()}
    options = Options(causal=True, window=(3, None), layout=layout, softcap=3.0)
    given = ops.arguments(FORWARD, arrays, options)
    torch.library.opcheck(ops.operator(FORWARD, given), given)
    out, lse = (t.detach() for t in ops.forward(arrays, options))
    arrays = {name: t.detach() for name, t in arrays.items()} | {"out": out, "dout": out.clone(), "lse": lse}
    arrays |= {"dlse": lse.clone()} if recorded else {}
    given = ops.arguments(BACKWARD, arrays, options)
    torch.library.opcheck(ops.operator(BACKWARD, given), given)


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_of_the_operator(packed: bool) -> None:
    arrays = {} if not packed else {"cu_seqlens_q": torch.tensor((0, 2, 5), dtype=torch.int32)}
    x = make(*((5, 2, 8) if packed else (1, 5, 2, 8)), grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: ops.forward(dict(zip("qkv", x, strict=True)) | arrays, Options(True)), x)


# ---- torch.compile ----


def dense(q: Any, k: Any, v: Any) -> Any:
    out, lse = attention(2 * q, k, v, causal=True, scale=0.3, window=(3, None), return_lse=True)
    return out * 3, lse


def packed(q: Any, k: Any, v: Any, cu: Any, used: Any) -> Any:
    options: dict[str, Any] = {
        "seqused_k": used,
        "softcap": 2.0,
        "max_seqlen_q": 9,
        "layout": "bshd",
        "return_lse": True,
    }
    out, lse = attention_varlen(2 * q, k, v, cu, **options)
    return out * 3, lse


def lengths_of(total: int) -> tuple[Any, Any]:
    return torch.tensor([0, 3, total], dtype=torch.int32), torch.tensor([2, total - 4], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole_for_all_lengths(backend: str, compiler: Any) -> None:
    """No break, one program for all lengths, whatever else is called between; forward and backward."""
    one = torch.compile(dense, backend=backend, fullgraph=True, dynamic=True)
    several = torch.compile(packed, backend=backend, fullgraph=True, dynamic=True)
    for length in (9, 17, 33):
        assert_same(one, dense, make(2, length, 2, 8, grad=True))
        cu, used = lengths_of(length)
        assert_same(lambda *x: several(*x, cu, used), lambda *x: packed(*x, cu, used), make(length, 2, 8, grad=True))  # noqa: B023
        attention(*(x.detach().numpy() for x in make()))  # another kind of array
        attention(*make(), window=(-3, 5))
    assert compiler["stats"]["unique_graphs"] == 2
    assert not compiler["graph_break"]


def test_lengths_that_begin_as_numbers(compiler: Any) -> None:
    """The default: a second length makes a program for all."""
    compiled = torch.compile(dense, backend="aot_eager", fullgraph=True)
    for length in (9, 17, 33, 65):
        assert_same(compiled, dense, make(2, length, 2, 8, grad=True))
    assert compiler["stats"]["unique_graphs"] == 2


OPTIONS: dict[str, Any] = {
    "none": {"window": None, "softcap": None, "scale": None},
    "whole": {"scale": 1, "causal": 1},
    "list": {"window": [2, 0]},
    "left": {"window": (None, 1)},
    "layout": {"layout": "bhsd", "softcap": 30.0},
    "array": pytest.param({"window": (torch.tensor(2), None)}, marks=pytest.mark.needs("torch>=2.13")),  # not 2.6
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_are_compiled(options: dict[str, Any], compiler: Any) -> None:
    def function(*x: Any) -> Any:
        return attention(*x, **options, return_lse=True)

    assert_same(torch.compile(function, backend="aot_eager", fullgraph=True), function, make(grad=True))


def test_a_scale_in_a_tensor_breaks_the_graph_and_counts(compiler: Any) -> None:
    def function(q: Any, k: Any, v: Any, scale: Any) -> Any:
        return attention(q, k, v, scale=scale)

    x, compiled = make(), torch.compile(function, backend="eager")
    for scale in (0.5, 0.25):
        close(compiled(*x, torch.tensor(scale)), function(*x, scale))


def test_the_warning_of_minus_one_is_given_while_compiling(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyflash.options._minus_one_is_known", False)
    with pytest.warns(UserWarning, match="the bound of -1"):
        torch.compile(lambda *x: attention(*x, window=(-1, 3)), backend="aot_eager", fullgraph=True)(*make())


def test_modes_around_compiled_calls(compiler: Any) -> None:
    compiled, x = torch.compile(attention, backend="aot_eager", fullgraph=True), make(grad=True)
    with torch.inference_mode():
        assert compiled(*x).is_inference()
    with torch.no_grad():
        close(compiled(*x), attention(*x))
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(*x).dtype is torch.bfloat16
    close(compiled(torch.nn.Parameter(x[0].detach()), *x[1:]), attention(*x))


@pytest.mark.needs("torch>=2.6")
def test_the_backward_is_compiled_by_itself(compiler: Any) -> None:
    q, k, v = make()
    out, lse = attention(q, k, v, return_lse=True)

    def function(*x: Any) -> Any:
        return tuple(cupyflash.attention_backward(*x, dlse=lse))

    x = (out, q, k, v, out, lse)
    for a, b in zip(torch.compile(function, backend="aot_eager", fullgraph=True)(*x), function(*x), strict=True):
        close(a, b)


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's own look
def test_compiled_autograd(backend: str, compiler: Any) -> None:
    """It traces what autograd would run: of eager calls, and of compiled ones."""
    from torch.utils.flop_counter import FlopCounterMode

    ends = torch.tensor([0, 2, 5], dtype=torch.int32)

    def packed(q: Any, k: Any, v: Any) -> Any:
        return attention_varlen(q[0], k[0], v[0], ends, ends)

    def with_lse(q: Any, k: Any, v: Any) -> Any:
        return torch.cat([x.flatten() for x in attention(q, k, v, return_lse=True)])

    def followed(q: Any, k: Any, v: Any) -> Any:  # by a mode, for which it is the operator's
        with FlopCounterMode(display=False):
            return attention(q, k, v)

    for f in (attention, packed, with_lse, followed, torch.compile(attention, backend=backend, fullgraph=True)):
        x = make(grad=True)
        want = torch.autograd.grad(loss(f)(*x), x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
            loss(f)(*x).backward()
        close([t.grad for t in x], list(want))


def test_wrong_arguments_are_named_by_compiled_code(compiler: Any) -> None:
    x = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    with pytest.raises(RuntimeError, match="expected heads_k to divide heads_q = 2, got heads_k = 3"):
        torch.compile(attention, backend="aot_eager", fullgraph=True)(*x)
    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match="expected heads_k to divide heads_q = 2, got heads_k = 3"):
        torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)(*x)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dimensions_are_counted_where_lengths_are_symbols(layout: str, compiler: Any) -> None:
    names = "batch, seqlen, heads, head_dim" if layout == "bshd" else "batch, heads, seqlen, head_dim"
    x, row = torch.randn(2, 5, 3, 8), torch.randn(5, 3, 8)
    for name, arrays in (("q", (row, x, x)), ("v", (x, x, row))):
        program = torch.compile(
            lambda *x: cupyflash.attention(*x, layout=layout), backend="eager", fullgraph=True, dynamic=True
        )
        with pytest.raises(Exception, match=rf"{name}: expected 4 dimensions \({names}\), got shape \(.*\)"):
            program(*arrays)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_second_derivatives_of_compiled_code_are_errors(backend: str, compiler: Any) -> None:
    x = make(grad=True)
    (g,) = torch.autograd.grad(
        torch.compile(loss(attention), backend=backend, fullgraph=True)(*x), x[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"second derivatives are not supported|does not .*support double backward"):
        g.sum().backward()


@pytest.mark.needs("torch>=2.6")
def test_transforms_within_compiled_code(compiler: Any) -> None:
    x = make(3, 2, 5, 2, 8)
    compiled = torch.compile(torch.vmap(torch.func.grad(loss(attention))), backend="aot_eager", fullgraph=True)
    close(compiled(*x), torch.vmap(torch.func.grad(loss(exact)))(*x))
    second = torch.func.grad(lambda q: torch.func.grad(loss(attention))(q, *make()[1:]).sum())
    with pytest.raises(Exception, match="second derivatives are not supported"):
        torch.compile(second, backend="aot_eager", fullgraph=True)(make()[0])


def biased(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    return attention(q, k, v, alibi_slopes=slopes, return_lse=True)


def ranged(q: Any, k: Any, v: Any, kv_range: Any) -> Any:
    return attention(q, k, v, kv_range=kv_range, return_lse=True)


def sunk(q: Any, k: Any, v: Any, sink: Any) -> Any:
    return attention(q, k, v, sink=sink, return_lse=True)


def test_optional_arrays_and_their_gradients_are_compiled(compiler: Any) -> None:
    x, slopes = make(grad=True), torch.tensor([0.3, 0.1])
    ranges = torch.tensor([[1, 5], [0, 4]], dtype=torch.int32)
    for f, optional in ((biased, slopes), (ranged, ranges), (sunk, slopes)):
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        assert_same(lambda *x: compiled(*x, optional), lambda *x: f(*x, optional), x)  # noqa: B023
    for f in (biased, sunk):
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        assert_same(compiled, f, [*x, slopes.detach().requires_grad_()])


def test_transforms_of_what_is_learned() -> None:
    """Of slopes for all sequences and for each, and of sinks."""
    x = make(3, 2, 5, 2, 8)
    given = [(biased, torch.rand(2), None), (biased, torch.rand(3, 2), 0), (biased, torch.rand(3, 2, 2), 0)]
    for f, slopes, dim in [*given, (sunk, torch.rand(2), None), (sunk, torch.rand(3, 2), 0)]:
        gradient = torch.func.grad(lambda *x: f(*x)[0].square().sum(), (0, 3))  # noqa: B023
        found = torch.vmap(gradient, (0, 0, 0, dim))(*x, slopes)
        for i in range(3):
            leaves = [t[i].clone().requires_grad_() for t in x]
            own = (slopes if dim is None else slopes[i]).clone().requires_grad_()
            want = torch.autograd.grad(f(*leaves, own)[0].square().sum(), (leaves[0], own))
            close((found[0][i], found[1][i]), want)


# ---- torch.export and other tracers ----


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return attention(q * self.weight, k, v, causal=True, window=(3, None))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """A program for all lengths, which can be trained, and lowered."""
    model, length = Model(), torch.export.Dim("length")
    x = make()
    exported = torch.export.export(model, tuple(x), strict=strict, dynamic_shapes=({1: length},) * 3)
    assert "cupyflash.forward.default" in [str(node.target) for node in exported.graph.nodes]
    x = make(2, 11, 2, 8)
    found = exported.module()
    close(found(*x), model(*x))
    for m in (found, model):
        m(*x).square().sum().backward()
    close(found.weight.grad, model.weight.grad)
    close(exported.run_decompositions().module()(*x), model(*x))


class CausalSdpa(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return cupyflash.torch.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_lengths_that_differ(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal at the top left: a window of a number that only the program knows."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    rows, keys = torch.export.Dim("rows", min=2), torch.export.Dim("keys", min=2)
    x = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    shapes = {2: rows}, {2: keys}, {2: keys}
    exported = torch.export.export(CausalSdpa(), x, strict=strict, dynamic_shapes=shapes)
    x = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    close(exported.module()(*x), torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True))


@pytest.mark.parametrize("mode", ["real", "pre_dispatch", "fake", "symbolic"])
@pytest.mark.parametrize("recorded", [False, True])
def test_make_fx(mode: str, recorded: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    options = {"pre_dispatch": True} if mode == "pre_dispatch" else {"tracing_mode": mode}
    graph, x = make_fx(loss(attention), **options)(*make(grad=recorded)), make()
    close(graph(*x), loss(attention)(*x))


def test_make_fx_of_gradients() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = make()
    graph = make_fx(torch.func.grad(loss(attention)), tracing_mode="symbolic")(*x)
    assert {"cupyflash.forward.default", "cupyflash.backward.default"} <= {
        str(node.target) for node in graph.graph.nodes
    }
    y = make(3, 9, 2, 8)
    close(graph(*y), torch.func.grad(loss(exact))(*y))


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = make(2, 5, 4, 8, grad=True)
        out, lse = attention(x[0], *(t[:, :, :2] for t in x[1:]), return_lse=True)
        (out.sum() + lse.sum()).backward()
        with pytest.raises(ArgumentError, match="k: expected heads_k to divide heads_q"):
            attention(x[0], x[1][:, :, :3], x[2][:, :, :3])
    assert (out.shape, lse.shape, lse.dtype, x[1].grad.shape) == ((2, 5, 4, 8), (2, 4, 5), torch.float32, (2, 5, 4, 8))
    assert type(attention(*x)) is type(x[0])  # outside of its mode
    with mode, pytest.raises(ArgumentError, match="q: expected a FakeTensor in FakeTensorMode, got a tensor with data"):
        attention(*REAL)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attention(*REAL).shape == (2, 5, 2, 8)


REAL = make()


# ---- torch.func ----

TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": torch.vmap,
    "vmap of some": lambda f: lambda q, k, v: torch.vmap(f, (1, None, 0))(q.movedim(0, 1), k[0], v),
    "vmap of vmap": lambda f: lambda *x: torch.vmap(torch.vmap(f))(*(t[None] for t in x)),
    "grad": lambda f: lambda *x: torch.func.grad(loss(f), (0, 1, 2))(*(t[0] for t in x)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(loss(f), (0, 1, 2))),
    "grad of vmap": lambda f: torch.func.grad(loss(torch.vmap(f)), (0, 1, 2)),
    "shared keys": lambda f: lambda q, k, v: torch.func.grad(loss(torch.vmap(f, (0, None, 0))), 1)(q, k[0], v),
    "jacrev": lambda f: lambda q, k, v: torch.func.jacrev(f)(q[0, :1], k[0, :1], v[0, :1]),
    "vjp": lambda f: lambda *x: torch.func.vjp(torch.vmap(f), *x)[1](x[0]),
    "per sample": lambda f: (
        lambda q, k, v: torch.vmap(torch.func.grad(lambda w: loss(f)(w * q[0], k[0], v[0])))(q[0, 0, 0, 0])
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform: Callable[..., Any]) -> None:
    x = make(3, 2, 5, 2, 8)
    torch.utils._pytree.tree_map(close, transform(attention)(*x), transform(exact)(*x))


@pytest.mark.parametrize("size", [1, 2])
def test_a_mapped_dimension_may_be_the_last(size: int) -> None:
    x = [t[:size].movedim(0, -1) for t in make(3, 2, 5, 2, 8)]
    close(torch.vmap(attention, -1)(*x), torch.vmap(exact, -1)(*x))


def test_transforms_of_packed_sequences() -> None:
    x, cu = make(3, 9, 2, 8), torch.tensor([[0, 2, 9], [0, 3, 3], [0, 1, 8]], dtype=torch.int32)
    f = functools.partial(attention_varlen, causal=True)
    want = torch.stack([f(*(t[i] for t in x), cu[i]) for i in range(3)])
    close(torch.vmap(f)(*x, cu), want)
    leaves = [t.clone().requires_grad_() for t in x]
    sum(loss(f)(*(t[i] for t in leaves), cu[0]) for i in range(3)).backward()
    found = torch.vmap(torch.func.grad(loss(f), (0, 1, 2)), (0, 0, 0, None))(*x, cu[0])
    for a, leaf in zip(found, leaves, strict=True):
        close(a, leaf.grad)


def test_gradients_of_several_results_at_once() -> None:
    x = make(1, 3, 2, 8, grad=True)
    douts = torch.randn(4, 1, 3, 2, 8)
    for a, b in zip(
        *(torch.autograd.grad(f(*x), x, douts, is_grads_batched=True) for f in (attention, exact)), strict=True
    ):
        close(a, b)
    (q,), dlses = make(1, 3, 2, 8, grad=True)[:1], torch.randn(4, 1, 2, 3, dtype=torch.float64)
    lse = cupyflash.attention(q, q, q, return_lse=True)[1]
    want = torch.logsumexp(torch.einsum("bqhd,bkhd->bhqk", q, q) * 8**-0.5, -1)
    found = [torch.autograd.grad(y, q, dlses.to(y.dtype), is_grads_batched=True)[0] for y in (lse, want)]
    close(found[0], found[1])  # the gradient of lse alone
    jacobian = functools.partial(torch.autograd.functional.jacobian, vectorize=True)
    close(jacobian(lambda q: attention(q, *x[1:]), x[0]), jacobian(lambda q: exact(q, *x[1:]), x[0]))


# ---- Modes ----


@pytest.mark.needs("torch>=2.5")
@pytest.mark.parametrize("reentrant", [False, True])
def test_selective_checkpoints(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's name in a policy decides whether the forward runs once or twice."""
    from torch.utils import checkpoint

    calls = []
    real = ops.run.forward
    monkeypatch.setattr(ops.run, "forward", lambda *a, **k: calls.append(1) or real(*a, **k))
    x = make(grad=True)
    want = torch.autograd.grad(loss(exact)(*x), x)

    def count(**options: Any) -> int:
        calls.clear()
        checkpoint.checkpoint(loss(attention), *x, use_reentrant=reentrant, **options).backward()
        for t, g in zip(x, want, strict=True):
            close(t.grad, g)
            t.grad = None
        return len(calls)

    assert count() == 2
    if reentrant:
        return
    for policy, times in (("MUST_SAVE", 1), ("MUST_RECOMPUTE", 2)):

        def decide(_: Any, op: Any, *args: Any, policy: str = policy, **kwargs: Any) -> Any:
            is_ours = op is torch.ops.cupyflash.forward.default
            return checkpoint.CheckpointPolicy[policy if is_ours else "PREFER_RECOMPUTE"]

        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, decide)
        assert count(context_fn=contexts) == times


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: Any) -> None:
    """As of F.scaled_dot_product_attention; float64 stays, and gradients have their tensors' dtypes."""
    x = make(grad=True)
    with torch.autocast("cpu", dtype):
        out = attention(x[0], x[1].to(torch.bfloat16), x[2])
        assert attention(*(t.double() for t in x)).dtype is torch.float64
        assert attention_varlen(*(t[0] for t in x), torch.tensor([0, 5], dtype=torch.int32)).dtype is dtype
    assert out.dtype is dtype
    out.float().sum().backward()
    assert x[0].grad.dtype is torch.float32
    assert attention(*x).dtype is torch.float32


def test_inference_mode() -> None:
    with torch.inference_mode():
        out = attention(*REAL)
    assert out.is_inference()
    close(out, attention(*REAL))


def test_what_is_not_supported_is_named() -> None:
    x = make()
    with pytest.raises(UnsupportedError, match=r"q: torch\.func\.functionalize is not supported"):
        torch.func.functionalize(attention)(*x)
    for forward in (torch.func.jacfwd, torch.func.hessian, lambda f: lambda *x: torch.func.jvp(f, x, x)):
        with pytest.raises(UnsupportedError, match=r"q: forward-mode derivatives .* are not supported yet"):
            forward(loss(attention))(*x)
    for second in (torch.func.jacrev, torch.func.grad):
        with pytest.raises(UnsupportedError, match="second derivatives are not supported"):
            second(lambda q, second=second: second(loss(attention))(q, *x[1:]).sum())(x[0])


@pytest.mark.parametrize("packed", [False, True])
def test_flops(packed: bool) -> None:
    """Two products of matrices forward, five backward: of dense calls what torch counts of its own attention."""
    from torch.utils.flop_counter import FlopCounterMode

    lengths = {"cu_seqlens_q": torch.tensor([0, 2, 9], dtype=torch.int32)} if packed else {}
    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        if packed:
            attention_varlen(q, k, v, **lengths).sum().backward()
        else:
            attention(q[None], k[None], v[None]).sum().backward()
    pairs = 2 * 2 + 7 * 7 if packed else 81
    assert counter.get_total_flops() == (2 + 5) * 2 * pairs * 4 * 8


def test_a_program_may_call_them_first() -> None:
    """In a process in which nothing of them has been called: what they keep is made while they are compiled."""
    code = """if True:
        import torch
        import cupyflash
        outs, lses = torch.randn(3, 1, 8, 2, 16), torch.randn(3, 1, 2, 8)
        q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 9, 2, 16)
        lengths = torch.tensor([4, 9], dtype=torch.int32)
        def step(q, n):
            return cupyflash.attention_with_cache(q, *cache, cache_seqlens=n)
        for f, *x in ((cupyflash.combine, outs, lses), (step, q, lengths), (step, q, 5)):
            for a, b in zip(torch.compile(f, backend="eager", fullgraph=True)(*x), f(*x)):
                torch.testing.assert_close(a, b)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_programs_watch_no_module(compiler: Any) -> None:
    """A program that watches `sys.modules` fails to compile where one more is imported meanwhile."""
    mask, (q, k, v) = cupyflash.masks.local(5, left=3), make()
    calls: list[tuple[Callable[..., Any], Any]] = [
        (lambda x: attention(x, k, v, block_mask=mask), q),
        (lambda x: attention(x, k, v, score_mod="score + q - k"), q),
        (lambda x: cupyflash.combine(x, torch.zeros(3, 1, 2, 8)), torch.randn(3, 1, 8, 2, 16)),
    ]
    for f, x in calls:
        names = [str(guard.name) for guard in torch._dynamo.explain(f)(x).out_guards]
        assert names
        assert not any("sys.modules" in name for name in names)
