"""A torch that has not, or no longer, the names that it keeps to itself: what is done without them is the same."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import cupyflash
from cupyflash import UnsupportedError
from cupyflash.arrays import torch_private

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # which would be imported, in part, while names are missing
from cupyflash.torch import followed, recorded  # noqa: E402

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
NAMES = "_get_tracing_state", "DisableTorchFunctionSubclass", "_DisableFuncTorch"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)  # builds for the CPU have none
    for name in NAMES:
        monkeypatch.delattr(torch._C, name)
    for owner, name in ((torch, "_is_functional_tensor"), (torch, "_assert_async")):
        monkeypatch.delattr(owner, name)


def test_each_name_is_one_of_torchs() -> None:
    """Else the tests below would prove nothing."""
    for name in NAMES:
        assert hasattr(torch._C, name), name
    for name in ("_is_functional_tensor", "_assert_async"):
        assert hasattr(torch, name), name
    for name in ("TensorGuards", "_empty_strided_cpu", "_empty_strided_cuda"):  # test_last, test_torch_made
        assert hasattr(torch._C._dynamo.guards, name), name
    for name in ("_SingleLevelFunction", "Function"):
        assert hasattr(torch.autograd.function, name), name
    assert hasattr(torch.library.Library, "_destroy")
    assert hasattr(torch.autograd.forward_ad, "_current_level")


class Named(torch.Tensor):
    """A subclass without rules of its own."""


@pytest.mark.usefixtures("without")
def test_arrays_are_seen_for_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 9, 2, 8)
    want = cupyflash.attention(x, x, x)
    assert torch.equal(cupyflash.attention(*[x.as_subclass(Named)] * 3).as_subclass(torch.Tensor), want)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace would record"):
        torch.jit.trace(lambda x: cupyflash.attention(x, x, x), x, check_trace=False)
    assert not torch_private.is_functional(x)
    assert torch.func.vmap(cupyflash.attention)(x[None], x[None], x[None]).shape == (1, *x.shape)
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert torch_private.raw_stream()(0) == 7


def test_duals_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_ad = torch.autograd.forward_ad
    monkeypatch.setattr(torch_private.sys.modules["torch"].autograd, "forward_ad", Limited(forward_ad))
    x = torch.ones(1, 9, 2, 8)
    assert not torch_private.is_dual(x)
    with forward_ad.dual_level():
        assert torch_private.is_dual(forward_ad.make_dual(x, x))


class Limited:
    """A module without what it keeps to itself."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._module, name)


def test_without_names_all_is_taken_to_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computed by the operator, whose result is the same."""
    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    want = torch.autograd.grad(cupyflash.attention(x, x, x).sum(), x)[0]
    for name in ("are_transforms_active", "_dispatch_modes", "_function_modes", "_early_modes"):
        with monkeypatch.context() as patch:
            patch.setattr(followed, name, followed._or_else(lambda: torch.no_such_name, lambda: True))
            assert torch.equal(torch.autograd.grad(cupyflash.attention(x, x, x).sum(), x)[0], want)
    with monkeypatch.context() as patch:
        patch.setattr(followed, "_dual", importlib.import_module("types").SimpleNamespace(_current_level=0))
        assert followed.is_followed()
        assert torch.equal(torch.autograd.grad(cupyflash.attention(x, x, x).sum(), x)[0], want)
    assert followed._or_else(lambda: torch.no_such_name, max) is max


def under_a_mode(x: Any) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return cupyflash.attention(x, x, x)


@pytest.mark.parametrize("name", ["_AutoDispatchBelowAutograd", "_after_autograd_keyset"])
def test_what_operators_cannot_do_without_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 9, 2, 8)
    want = under_a_mode(x)
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, name)
        with pytest.raises(UnsupportedError, match=rf"torch {re.escape(torch.__version__)} has no {name} any more"):
            under_a_mode(x)
        assert torch.equal(cupyflash.attention(x, x, x), want)  # plain tensors ask for no operator


@pytest.mark.parametrize("verb", ["get", "set"])
def test_without_levels_of_transforms(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    want = torch.autograd.grad(under_a_mode(x).sum(), x)[0]
    monkeypatch.delattr(torch._C._functorch, f"{verb}_single_level_autograd_function_allowed")
    assert torch.equal(torch.autograd.grad(under_a_mode(x).sum(), x)[0], want)


def test_levels_of_transforms_are_recorded_by_what_torch_lets_do_so() -> None:
    """torch 2.14 refuses any other Function inside torch.func."""
    for function in (recorded._AttentionByOperator, recorded._GradientsByOperator):
        assert issubclass(function, torch.autograd.function._SingleLevelFunction)


WITHOUT_SINGLE_LEVELS = """
import torch, torch._dynamo, torch._functorch.autograd_function
from torch.utils.flop_counter import FlopCounterMode
base = torch.autograd.function._SingleLevelFunction
del torch.autograd.function._SingleLevelFunction
import cupyflash, cupyflash.torch
torch.autograd.function._SingleLevelFunction = base
assert issubclass(cupyflash.torch.recorded._apply_by_operator.__self__, torch.autograd.Function)
x = torch.randn(1, 9, 2, 8, requires_grad=True)
want, = torch.autograd.grad(cupyflash.attention(x, x, x).sum(), x)
with FlopCounterMode(display=False):
    got, = torch.autograd.grad(cupyflash.attention(x, x, x).sum(), x)
assert torch.equal(got, want)
"""


def test_without_functions_of_one_level() -> None:
    """As when torch had no other than autograd.Function."""
    environment = os.environ | {"CUPYFLASH_BACKEND": "cpu"}
    subprocess.run([sys.executable, "-c", WITHOUT_SINGLE_LEVELS], check=True, env=environment)


@pytest.mark.usefixtures("without")
def test_what_cannot_be_asserted_is_let_pass() -> None:
    followed.assert_later(torch.tensor(False), "wrong")
    followed.unregister(object())
