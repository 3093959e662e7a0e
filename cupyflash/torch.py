"""The differentiable form for PyTorch, and what of PyTorch it does not follow, refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arrays.adapters import TORCH
from .arrays.vetting import vet_transforms
from .errors import ArgumentError, UnsupportedError
from .launch import run
from .operands import BACKWARD, GRADIENT
from .options import Options

_compiling = torch.compiler.is_dynamo_compiling  # dynamo puts a constant in its place
_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack  # torch.device as a context is one
_early_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch


def _is_followed() -> bool:
    """Whether torch may be following what is computed by means that see its own operators alone. Costs 0.2 us."""
    return (
        _transforms() or _dispatch_modes() > 0 or forward_ad._current_level >= 0
        or (_function_modes() > 0 and _early_modes() > 0)
    )  # fmt: skip


class _Attention(torch.autograd.Function):
    """(out, lse) = attention of arrays, given their names and then themselves; both are differentiable."""

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], options: Options, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run.forward(TORCH, dict(zip(names, arrays, strict=True)), options)
        ctx.save_for_backward(out, lse, *arrays)
        ctx.names, ctx.options = names, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *inputs = ctx.saved_tensors
        names = ctx.names
        if dout is None:
            if dlse is None:
                return (None,) * (2 + len(names))
            dout = torch.zeros_like(out)
        elif dout.stride(-1) != 1:  # an expanded gradient, as of out.sum()
            dout = dout.contiguous()
        arrays = {**dict(zip(names, inputs, strict=True)), "out": out, "dout": dout, "lse": lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        if _is_followed() or dout.is_neg():
            _refuse(arrays)
        of = [_GRADIENT_OF.get(name, "") for name in names]
        needed = zip(of, ctx.needs_input_grad[2:], strict=True)
        wanted = tuple(gradient for gradient, is_needed in needed if is_needed and gradient in BACKWARD.optional)
        grads = _gradients(arrays, ctx.options, wanted)
        return None, None, *[grads.get(gradient) for gradient in of]


_GRADIENT_OF = {BACKWARD.rows[name].like: name for name in BACKWARD.names(GRADIENT)}


class _Gradients(torch.autograd.Function):
    """So many gradients, given them and all that they depend on; there is no derivative of them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            "attention: second derivatives are not supported: gradients that were computed with create_graph=True (by "
            "a gradient penalty, a Hessian or torch.autograd.functional) cannot be differentiated again"
        )


# Function.apply without its Python half, which serves the transforms of torch.func and torch.compile.
_apply = super(torch.autograd.Function, _Attention).apply


def attention(arrays: Mapping[str, Tensor], options: Options, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of arrays by name; recorded by autograd if any of them asks for it."""
    if _compiling():
        if not _outside:
            _leave_graphs()
        return _outside["attention"](arrays, options, want_lse)
    is_wrong, needs_grad = _is_followed(), False
    for x in arrays.values():
        is_wrong, needs_grad = is_wrong or x.is_neg(), needs_grad or x.requires_grad
    if is_wrong:
        _refuse(arrays)
    if needs_grad and torch.is_grad_enabled():
        out, lse = _apply(tuple(arrays), options, *arrays.values())
        return out, lse
    return run.forward(TORCH, arrays, options, want_lse)


def backward(arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The gradients by name, of arrays by name.

    Where autograd would record what they depend on, it does, and a derivative of them is an error.
    """
    if _compiling():
        if not _outside:
            _leave_graphs()
        return _outside["backward"](arrays, options, wanted)
    if _is_followed() or any(x.is_neg() for x in arrays.values()):
        _refuse(arrays)
    return _gradients(arrays, options, wanted)


def _gradients(arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """The same; they remember what they depend on where autograd records it."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in arrays.values())):
        return run.backward(TORCH, arrays, options, wanted)
    with torch.no_grad():
        grads = run.backward(TORCH, arrays, options, wanted)
    return dict(zip(grads, _Gradients.apply(len(grads), *grads.values(), *arrays.values()), strict=True))


_outside: dict[str, Any] = {}


def _leave_graphs() -> None:
    """Under torch.compile a call is a break of the graph and runs as it does without. This imports torch's compiler."""
    _outside.update(attention=torch.compiler.disable(attention), backward=torch.compiler.disable(backward))


def _refuse(given: Mapping[str, Tensor]) -> None:
    """Raise if a transform or mode of torch follows what is computed with these tensors, or if one is a negative view.

    Raises:
        UnsupportedError: torch would not see what happens here.
        ArgumentError: the memory holds other values than the tensor.
    """
    for name, x in given.items():
        vet_transforms(name, x)
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(f"{name}: forward-mode derivatives (dual tensors, jvp) are not supported yet")
        if x.is_neg():
            raise ArgumentError(f"{name}: expected a tensor without the negative bit; give x.resolve_neg()")
    if _transforms():  # of other tensors; but some wrap what is new all the same, and none lets us record
        vet_transforms("q, k, v", given["q"].new_empty(0))
        if torch.is_grad_enabled() and any(x.requires_grad for x in given.values()):
            raise UnsupportedError("q, k, v: gradients inside torch.func and vmap are not supported yet; call outside")
    modes = torch._C._TorchDispatchModeKey
    found = [torch._C._get_dispatch_mode(key) for key in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL)]
    if any(found) or _early_modes():
        raise UnsupportedError(
            "q, k, v: tracing (make_fx, torch.export, FakeTensorMode, functionalize) is not supported yet: it would "
            "record the result as a constant; call outside of it"
        )
