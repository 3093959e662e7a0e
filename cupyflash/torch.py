"""The differentiable form for PyTorch, and what of PyTorch it does not follow, refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arrays.adapters import TORCH
from .arrays.vetting import vet_transforms
from .errors import ArgumentError, UnsupportedError
from .launch import run
from .options import Options
from .sequences import Sequences

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


_NO_MORE = (None,) * 4  # gradients of options and lengths; torch drops those of lengths where there are none


class _Attention(torch.autograd.Function):
    """(out, lse) = attention(q, k, v); both are differentiable. `lengths`: what `_lengths` says of packed sequences."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, *lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = run.forward(TORCH, q, k, v, options, True, Sequences.of(*lengths) if lengths else None)
        ctx.save_for_backward(q, k, v, out, lse, *lengths)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return None, None, None, *_NO_MORE
            dout = torch.zeros_like(out)
        elif dout.stride(-1) != 1:  # an expanded gradient, as of out.sum()
            dout = dout.contiguous()
        if _is_followed() or dout.is_neg():
            _refuse(dout=dout, q=q, k=k, v=v, dlse=dlse)
        grads = _gradients((dout, q, k, v, out, lse, dlse), ctx.options, Sequences.of(*lengths) if lengths else None)
        return *grads, *_NO_MORE


class _Gradients(torch.autograd.Function):
    """(dq, dk, dv), given them and all that they depend on; there is no derivative of them."""

    @staticmethod
    def forward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *sources: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return dq.detach(), dk.detach(), dv.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            "attention: second derivatives are not supported: gradients that were computed with create_graph=True (by "
            "a gradient penalty, a Hessian or torch.autograd.functional) cannot be differentiated again"
        )


# Function.apply without its Python half, which serves the transforms of torch.func and torch.compile.
_apply = super(torch.autograd.Function, _Attention).apply


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, want_lse: bool, sequences: Sequences | None = None
) -> tuple[Tensor, Tensor | None]:
    """(out, lse); recorded by autograd if any input asks for it. Packed with `sequences`."""
    if _compiling():
        if not _outside:
            _leave_graphs()
        return _outside["attention"](q, k, v, options, want_lse, sequences)
    if _is_followed() or q.is_neg() or k.is_neg() or v.is_neg():
        _refuse(q=q, k=k, v=v, **_named(sequences))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _apply(q, k, v, options) if sequences is None else _apply(q, k, v, options, *_lengths(sequences))
        return out, lse
    return run.forward(TORCH, q, k, v, options, want_lse, sequences)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    options: Options,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); where autograd would record what they depend on, so that a derivative of them is an error."""
    if _compiling():
        if not _outside:
            _leave_graphs()
        return _outside["backward"](dout, q, k, v, out, lse, dlse, options, sequences)
    sources = (dout, q, k, v, out, lse, dlse)
    if _is_followed() or any(x is not None and x.is_neg() for x in sources):
        _refuse(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, **_named(sequences))
    return _gradients(sources, options, sequences)


def _gradients(sources: Sequence[Any], options: Options, sequences: Sequences | None) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the arguments of `backward`; they remember what they depend on where autograd records it."""
    dout, q, k, v, out, lse, dlse = sources
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in sources)):
        return run.backward(TORCH, dout, q, k, v, out, lse, dlse, options, sequences)
    with torch.no_grad():
        grads = run.backward(TORCH, dout, q, k, v, out, lse, dlse, options, sequences)
    return _Gradients.apply(*grads, *sources)


def _lengths(sequences: Sequences) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The arguments of `Sequences.of`."""
    cu_seqlens_q, cu_seqlens_k, seqused_k = sequences
    return cu_seqlens_q, None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k, seqused_k


def _named(sequences: Sequences | None) -> dict[str, Tensor]:
    return {} if sequences is None else sequences.named()


_outside: dict[str, Any] = {}


def _leave_graphs() -> None:
    """Under torch.compile a call is a break of the graph and runs as it does without. This imports torch's compiler."""
    _outside.update(attention=torch.compiler.disable(attention), backward=torch.compiler.disable(backward))


def _refuse(**tensors: Tensor | None) -> None:
    """Raise if a transform or mode of torch follows what is computed with these tensors, or if one is a negative view.

    Raises:
        UnsupportedError: torch would not see what happens here.
        ArgumentError: the memory holds other values than the tensor.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
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
