"""Names that torch keeps to itself and that arrays need: a function each, which does without where torch has it not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any


def raw_stream() -> Callable[[int], int]:
    """What gives the address of the stream that is current on a GPU."""
    torch = sys.modules["torch"]
    found: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return found or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def is_traced() -> bool:
    """Whether torch.jit.trace watches."""
    torch = sys.modules["torch"]
    get = getattr(torch._C, "_get_tracing_state", None)
    return bool(get() is not None if get else torch.jit.is_tracing())


def is_functional(x: Any) -> bool:
    """Whether torch.func.functionalize has wrapped x."""
    find = getattr(sys.modules["torch"], "_is_functional_tensor", None)
    return bool(find and find(x))


def without_rules() -> contextlib.AbstractContextManager[Any]:
    """Subclasses' __torch_function__, of those that torch's own classes have, is not asked inside."""
    found: Any = getattr(sys.modules["torch"]._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
    context: contextlib.AbstractContextManager[Any] = found()
    return context


def is_dual(x: Any) -> bool:
    """Whether x has a forward-mode derivative."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    return getattr(forward_ad, "_current_level", 0) >= 0 and forward_ad.unpack_dual(x).tangent is not None
