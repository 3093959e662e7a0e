"""Whether torch follows what is computed, by means that see its own operators alone: modes, transforms, tracers.

Names that torch keeps to itself stand here and nowhere else; without one of them all is taken to be followed, which
costs some microseconds a call and nothing else. Of those that operators cannot do without, an error says which is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import UnsupportedError


def _or_else(find: Callable[[], Any], substitute: Callable[..., Any]) -> Callable[..., Any]:
    """What is found, or in a torch that has it no longer, or not yet, its substitute."""
    try:
        found = find()
    except AttributeError:
        return substitute
    return found if callable(found) else substitute


is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling  # dynamo puts a constant in its place
are_transforms_active = _or_else(lambda: torch._C._are_functorch_transforms_active, lambda: True)
_dispatch_modes = _or_else(lambda: torch._C._len_torch_dispatch_stack, lambda: 1)
_function_modes = _or_else(lambda: torch._C._len_torch_function_stack, lambda: 1)  # torch.device as a context is one
_early_modes = _or_else(lambda: torch._ops._len_torch_dispatch_stack_pre_dispatch, lambda: 1)
is_autocast_on = _or_else(lambda: torch._C._is_any_autocast_enabled, lambda: True)  # for any kind of device
# Of a gradient in a call with is_grads_batched, which has a vmap of its own.
is_batched_by_autograd = _or_else(lambda: torch._C._functorch.is_legacy_batchedtensor, lambda x: False)

_dual: Any = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)


def is_followed() -> bool:
    """Whether torch may be following what is computed with any tensor. Costs 0.2 us."""
    return (
        are_transforms_active() or _dispatch_modes() > 0 or _dual._current_level >= 0
        or (_function_modes() > 0 and _early_modes() > 0)
    )  # fmt: skip


def has_rules(*tensors: Any) -> bool:
    """Whether a tensor answers torch's functions by rules of its own. torch's question counts modes, too, one of which
    stands for `torch.set_default_device`; only then are types asked. A Parameter's rules are none."""
    return torch.overrides.has_torch_function(tensors) and any(_is_ruled(type(x)) for x in tensors)


def _is_ruled(kind: type) -> bool:
    none = torch.nn.Parameter.__torch_function__
    return kind is not torch.Tensor and getattr(kind, "__torch_function__", None) is not none


def is_dual_level() -> bool:
    """Whether there may be dual tensors, which have forward-mode derivatives."""
    return bool(_dual._current_level >= 0)


def fake_mode() -> Any | None:
    """The FakeTensorMode in which we are."""
    get, keys = getattr(torch._C, "_get_dispatch_mode", None), getattr(torch._C, "_TorchDispatchModeKey", None)
    return get(keys.FAKE) if get and keys else None


_of_one_level: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


class SingleLevelFunction(_of_one_level):
    """Records for one level of torch.func at a time; from 2.14 on torch lets no other Function do so."""

    # Compiled autograd asks for it, which the base lacks.
    _compiled_autograd_key = staticmethod(getattr(torch.autograd.Function, "_compiled_autograd_key", lambda ctx: ()))


def fast_apply(function: Any) -> Callable[..., Any]:
    """Its `apply` without the Python half, which serves transforms and torch.compile and costs 15 us."""
    if not issubclass(function, torch.autograd.Function):  # has no such half
        found: Callable[..., Any] = function.apply
        return found
    return _or_else(lambda: super(torch.autograd.Function, function).apply, function.apply)


def below_autograd(op: Any, keys: Any, values: Sequence[Any]) -> Any:
    """What an operator's rule for autograd hands on, as torch.library's own rules do."""
    try:
        below, after = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    except AttributeError as error:
        raise UnsupportedError(
            f"attention: torch {torch.__version__} has no {error.name} any more, which calls need that torch follows "
            "(a mode, a transform, a compiler or a subclass); give plain tensors, or use torch 2.13"
        ) from error
    with below():
        return op.redispatch(keys & after, *values)


def _plain() -> Callable[[Any], bool]:
    kernels, below = {torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA}, torch._C._after_autograd_keyset

    def ask(keys: Any) -> bool:
        return (keys & below).highestPriorityTypeId() in kernels

    def remember(keys: Any) -> bool:
        bits = keys.raw_repr()
        found = known.get(bits)
        if found is None:
            found = known[bits] = ask(keys)
        return found

    known: dict[int, bool] = {}
    return remember if hasattr(torch._C.DispatchKeySet, "raw_repr") else ask  # torch 2.4 does not tell bits


# Whether below an operator's rule for autograd, called under these keys, there is nothing but the device's kernel: no
# mode, transform or subclass. Costs 0.1 us.
is_plain: Callable[[Any], bool] = _or_else(_plain, lambda keys: False)


def assert_later(condition: torch.Tensor, message: str) -> None:
    """An error of the device where it is False, for which nothing waits; none in a torch that cannot do that."""
    check = getattr(torch, "_assert_async", None)
    if check:
        check(condition, message)


def unregister(library: torch.library.Library) -> None:
    """Take back what a library registered, at once, or where nobody has it any more."""
    getattr(library, "_destroy", lambda: None)()


def numbers_as_indices() -> AbstractContextManager[Any]:
    """Lets what vmap maps index arrays by its numbers, as flex_attention lets mask_mods: torch 2.9 would read them."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:
        return nullcontext()
    mode: AbstractContextManager[Any] = TransformGetItemToIndex()
    return mode


@contextmanager
def one_level() -> Iterator[None]:
    """Lets a `SingleLevelFunction` record for the level of torch.func that asks, which the levels below do likewise."""
    functorch, name = getattr(torch._C, "_functorch", None), "single_level_autograd_function_allowed"
    get, allow = (getattr(functorch, f"{verb}_{name}", None) for verb in ("get", "set"))
    if not get or not allow:  # torch.func says so itself, should it need them
        yield
        return
    before = get()
    allow(True)
    try:
        yield
    finally:
        allow(before)
