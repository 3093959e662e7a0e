"""Programs of torch.compile: what Inductor writes for a call, and what such a program then computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import cupyflash
from cupyflash import attention
from cupyflash.launch import run
from tests import pretended_gpu

torch = pytest.importorskip("torch")
inductor = pytest.importorskip("cupyflash.torch.inductor")
programs = pytest.importorskip("cupyflash.torch.programs")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
compiles = pytest.mark.needs("torch>=2.11", "g++")
NO_OPTIONS = False, None, None, None, "bshd", False, None, 0.0, "", False


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What compiles a function, and the list of programs that were written."""
    from torch._inductor import config, graph

    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    torch._dynamo.reset()
    texts: list[str] = []
    monkeypatch.setattr(graph.GraphLowering, "save_output_code", staticmethod(texts.append))
    with config.patch(fx_graph_cache=False):
        yield lambda f, **options: torch.compile(f, backend="inductor", fullgraph=True, **options), texts
    torch._dynamo.reset()


def calls_in(texts: list[str]) -> list[tuple[str, str]]:
    """Who is called with what, in the place of an operator."""
    return re.findall(r"buf\d+ = (cupyflash_\w+|torch\.ops\.cupyflash\.\w+\.default)\((.*)\)\n", "".join(texts))


def both(f: Any, inputs: list[Any]) -> list[Any]:
    out = f(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), [x for x in inputs if x.requires_grad])]


@compiles
def test_arrays_alone_are_given(compiled: Any) -> None:
    """As they lie, no copy of what is broadcast; names and options once, where the program begins. Of the gradients
    those that are wanted."""

    def region(q: Any, k: Any, v: Any, bias: Any) -> Any:
        k, v = ((2 * x).expand(2, 5, 2, 8) for x in (k, v))
        return attention(2 * q.transpose(0, 1), k, v, bias=(2 * bias).expand(2, 2, 5, 5), causal=True) + 1

    shapes = (5, 2, 2, 8), (2, 5, 1, 8), (2, 5, 1, 8), (5, 5)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    of, texts = compiled
    for found, want in zip(both(of(region), inputs), both(region, inputs), strict=True):
        torch.testing.assert_close(found, want)
    made = dict(re.findall(r"^ *(cupyflash_\w+) = (cupyflash_\w+\(.*\))$", "".join(texts), re.M))
    (forward, given), (backward, _) = calls_in(texts)
    options = (True, *NO_OPTIONS[1:])
    assert made[forward] == f"cupyflash_forward(('q', 'k', 'v', 'bias'), {options!r}, ())"
    names = "q", "k", "v", "out", "dout", "lse", "bias"
    assert made[backward] == f"cupyflash_backward({names!r}, {options!r}, ('dbias',))"
    assert re.findall(r"reinterpret_tensor\(\w+, (\(.*?\)), (\(.*?\))", given)[-1] == ("(2, 2, 5, 5)", "(0, 0, 5, 1)")


@compiles
def test_what_is_not_known_beforehand_is_an_operators(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arguments are given, none by its name, which would cost more; and so where Inductor has other names."""
    from torch._inductor import lowering

    def region(x: Any, n: int) -> Any:
        return attention(2 * x, x, x, window=(n, n)) + 1

    of, texts = compiled
    x = torch.randn(1, 9, 2, 8)
    program = of(region, dynamic=True)
    for n in (2, 3):
        torch.testing.assert_close(program(x, n), region(x, n))
    ((name, given),) = calls_in(texts)
    assert name == "torch.ops.cupyflash.forward.default"
    assert given.endswith(f", {cupyflash.__version__!r}")
    assert "=" not in given

    texts.clear()
    monkeypatch.setattr(inductor, "_ready", set())
    monkeypatch.delitem(lowering.lowerings, torch.ops.cupyflash.forward.default)
    monkeypatch.delattr(lowering, "tag_to_layout_constraint")
    torch._dynamo.reset()
    of(lambda x: attention(2 * x, x, x) + 1)(x)
    assert [name for name, _ in calls_in(texts)] == ["torch.ops.cupyflash.forward.default"]


def test_where_torch_looks_on_it_is_the_operator() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(1, 9, 2, 8, device="meta")
    with FlopCounterMode(display=False) as counted:
        out, lse = programs.forward(("q", "k", "v"), NO_OPTIONS, ())(x, x, x)
        programs.backward(("q", "k", "v", "out", "dout", "lse"), NO_OPTIONS, ())(x, x, x, out, x, lse)
    assert {str(op) for op in counted.flop_counts["Global"]} == {"cupyflash.forward", "cupyflash.backward"}


@pytest.mark.parametrize("graph", [{"cpp_wrapper": True}, {"cpp_wrapper": False, "fx_wrapper": True}])
def test_programs_that_are_not_of_python_call_operators(graph: dict[str, bool]) -> None:
    assert not inductor.writes_python(SimpleNamespace(**graph))
    assert inductor.writes_python(SimpleNamespace(cpp_wrapper=False))


@pytest.mark.needs("cupy")
def test_a_call_that_comes_again_asks_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """And launches what an eager call does; what is made stands where the operator has it."""
    gpu, asked = pretended_gpu.pretend(monkeypatch), []
    for name in ("forward", "backward"):
        ask = getattr(run, name)
        monkeypatch.setattr(run, name, lambda *x, name=name, ask=ask: asked.append(name) or ask(*x))
    q, k, v, out, dout = (torch.zeros(2, 64, 4, 64, dtype=torch.float16) for _ in range(5))
    bias, lse = torch.zeros(64, 64, dtype=torch.float16).expand(2, 4, 64, 64), torch.zeros(2, 4, 64)
    forward = programs.forward(("q", "k", "v", "bias"), NO_OPTIONS, ())
    backward = programs.backward(("q", "k", "v", "out", "dout", "lse", "bias"), NO_OPTIONS, ("dbias",))
    launched, made = [], []
    for _ in range(4):
        asked.clear()
        gpu.launched.clear()
        made.append([*forward(q, k, v, bias), *backward(q, k, v, out, dout, lse, bias)])
        launched.append(pretended_gpu.found_in(gpu.launched, gpu))
    assert asked == []
    assert launched[-1] == launched[0]
    for found in made:
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in made[0]]
    assert [x.numel() for x in made[0]].count(0) > 0  # an empty tensor for each gradient that is not made


def test_a_call_in_host_memory_is_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    out, lse = programs.forward(("q", "k", "v"), NO_OPTIONS, ())(q, k, v)
    want = attention(q, k, v, return_lse=True)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    names = "q", "k", "v", "out", "dout", "lse"
    found = programs.backward(names, NO_OPTIONS, ())(q, k, v, out, q, lse)
    for x, y in zip(found, cupyflash.attention_backward(q, q, k, v, out, lse), strict=False):
        assert torch.equal(x, y)
