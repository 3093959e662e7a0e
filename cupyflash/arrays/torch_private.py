"""Names that torch keeps to itself and that arrays need: a function each, which does without where torch has it not."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection
from typing import Any


def version() -> tuple[int, ...]:
    """Of torch: the first two numbers."""
    return tuple(int(n) for n in sys.modules["torch"].__version__.split(".")[:2])


def raw_stream() -> Callable[[int], int]:
    """What gives the address of the stream that is current on a GPU."""
    torch = sys.modules["torch"]
    found: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return found or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


@functools.cache
def _tracing_state() -> Callable[[], Any]:
    """What gives None or False unless torch.jit.trace watches."""
    torch = sys.modules["torch"]
    found: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", torch.jit.is_tracing)
    return found


def is_traced() -> bool:
    """Whether torch.jit.trace watches."""
    return _tracing_state()() not in (None, False)


def is_functional(x: Any) -> bool:
    """Whether torch.func.functionalize has wrapped x."""
    find = getattr(sys.modules["torch"], "_is_functional_tensor", None)
    return bool(find and find(x))


def without_rules() -> contextlib.AbstractContextManager[Any]:
    """Subclasses' __torch_function__, of those that torch's own classes have, is not asked inside."""
    found: Any = getattr(sys.modules["torch"]._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
    context: contextlib.AbstractContextManager[Any] = found()
    return context


def without_transforms() -> contextlib.AbstractContextManager[Any]:
    """What is made inside is no tensor of one of torch.func's levels."""
    found: Any = getattr(sys.modules["torch"]._C, "_DisableFuncTorch", contextlib.nullcontext)
    context: contextlib.AbstractContextManager[Any] = found()
    return context


def is_dual(x: Any) -> bool:
    """Whether x has a forward-mode derivative. torch.compile, which follows this, cannot look into `sys.modules`."""
    import torch.autograd.forward_ad

    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None  # also where there is no level


def is_differentiated(x: Any) -> bool:
    """Whether torch would differentiate what is computed with x, forwards or backwards. (Likewise.)"""
    import torch

    return bool(is_dual(x) or (x.requires_grad and torch.is_grad_enabled()))


@functools.cache
def _of_programs(name: str) -> Any | None:
    """What programs of torch.compile are served by."""
    return getattr(getattr(getattr(sys.modules["torch"]._C, "_dynamo", None), "guards", None), name, None)


def empty_strided(kind: str) -> Callable[..., Any] | None:
    """What makes a new tensor of (size, strides, dtype) on the current device of this kind, at half of what torch's
    functions take."""
    return _of_programs(f"_empty_strided_{kind}")


def comparison(
    tensors: Collection[Any], sizes: list[list[int | None]] | None, strides: list[list[int | None]] | None
) -> Callable[..., bool] | None:
    """What says whether other tensors agree with these in type, dtype, device, shape, strides, and in how torch follows
    them. It does not keep them. None also where one of these comes twice, to which it always says no.

    Args:
        sizes, strides: of each tensor, None where others may have any; None: nowhere.
    """
    kind = _of_programs("TensorGuards")  # by which torch.compile asks whether a program is good for tensors
    if kind is None or len({*map(id, tensors)}) < len(tensors):
        return None
    found: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return found
