"""Arrays that only look like arrays: what neither a kernel nor the CPU path can read, or not as it is meant.

Such an array belongs to a library and has a shape and a dtype, but its elements lie elsewhere, or a mask, a unit or a
tracer goes with them. `vet_type` knows it by its type and is asked once a type. `vet_tensor` looks at the tensor itself
and is asked where kernels are new or something went wrong; `vet_memory` is the part of it for calls of new lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, UnsupportedError
from . import torch_private

# Of arrays that compute by rules of their own: what to give in their place.
_INSIDE = {
    "AsyncCollectiveTensor": "x.wait()",
    "MaskedArray": "x.filled(0), or x.data to ignore the mask",
    "MaskedTensor": "x.get_data() to ignore the mask",
    "NestedTensor": "the values() and, in int32, offsets() of its jagged form to attention_varlen",
    "matrix": "np.asarray(x)",
}

# Tensors of torch that compute by its operators alone, ours included.
_FOLLOWED = ("DTensor", "FakeTensor", "FunctionalTensor")


def is_followed_by_torch(kind: type) -> bool:
    """Whether tensors of this type must be answered by an operator."""
    return kind.__name__ in _FOLLOWED and kind.__module__.startswith("torch.")


def vet_type(name: str, kind: type, base: type, rules: Sequence[str]) -> None:
    """Refuse a subclass of a library's array class `base` that replaces one of the methods `rules`.

    Its elements need not lie in memory, or mean what those of others mean.

    Raises:
        ArgumentError, UnsupportedError: it does, or it is a parameter that has no shape yet.
    """
    full = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(kind, "materialize") and hasattr(kind, "cls_to_become"):  # torch.nn's lazy modules
        raise ArgumentError(f"{name}: a {full} has no data yet; run its module once before")
    own = [rule for rule in rules if getattr(kind, rule, None) is not getattr(base, rule, None)]
    if own or issubclass(kind, (np.ma.MaskedArray, np.matrix)):
        names = [c.__name__ for c in kind.__mro__]
        inside = next((_INSIDE[n] for n in names if n in _INSIDE), f"the plain {base.__name__} in it")
        error = UnsupportedError if "__torch_dispatch__" in own else ArgumentError
        raise error(f"{name}: expected a plain array, and a {full} has rules of its own; give {inside}")


def vet_tensor(name: str, x: Any) -> None:
    """Refuse a torch tensor whose elements do not lie where address, shape and strides say, or that a tracer watches.

    Raises:
        ArgumentError: another form of it will do.
        UnsupportedError: none does yet.
    """
    torch = sys.modules["torch"]
    vet_type(name, type(x), torch.Tensor, ("__torch_dispatch__",))
    vet_tracing(name)
    vet_transforms(name, x)
    if x.is_nested:
        raise UnsupportedError(f"{name}: expected a plain tensor, got a nested one; give {_INSIDE['NestedTensor']}")
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name}: expected a dense tensor, got layout {x.layout}; give x.to_dense()")
    if x.is_quantized:
        raise ArgumentError(f"{name}: expected a floating-point dtype, got {x.dtype}; give x.dequantize()")
    if x.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{name}: expected a tensor on the CPU or an NVIDIA GPU, got device {x.device}")
    if x.is_neg():
        raise ArgumentError(f"{name}: expected a tensor without the negative bit; give x.resolve_neg()")
    vet_memory(name, x)


def vet_tracing(name: str) -> None:
    """Refuse any call while torch.jit.trace watches.

    Raises:
        UnsupportedError: it does.
    """
    if torch_private.is_traced():
        raise UnsupportedError(f"{name}: torch.jit.trace would record the result as a constant; call outside of it")


def vet_memory(name: str, x: Any) -> None:
    """Refuse a torch tensor that reaches beyond its memory, or has none. Costs the host 0.4 us.

    Raises:
        ArgumentError: it does.
    """
    size, needed = x.untyped_storage().nbytes() if x.data_ptr() else 0, x.nbytes  # torch's zero tensors have no address
    if not needed:
        return
    if not x.is_contiguous():
        last = 0
        for n, step in zip(x.shape, x.stride(), strict=True):
            last += (n - 1) * step
        needed = (last + 1) * x.element_size()
    offset = x.storage_offset()
    if offset:
        needed += offset * x.element_size()
    if size < needed:
        raise ArgumentError(
            f"{name}: a tensor of shape {tuple(x.shape)} needs {needed} bytes of memory and has {size}: it was never "
            "given any, or gave it back (as FSDP does outside of a module's forward)"
        )


def vet_transforms(name: str, x: Any) -> None:
    """Refuse a tensor that is wrapped by a transform of torch for which there is no rule.

    Raises:
        UnsupportedError: it does.
    """
    if torch_private.is_functional(x):
        raise UnsupportedError(f"{name}: torch.func.functionalize is not supported; call outside of it")
