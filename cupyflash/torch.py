"""The differentiable form for PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import run
from .arrays import TORCH
from .prepare import Options


class _Attention(torch.autograd.Function):
    """(out, lse) = attention(q, k, v); both are differentiable."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run.forward(TORCH, q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _once(ctx, dout, dlse) if torch.is_grad_enabled() else _gradients(ctx, dout, dlse)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return None, None, None, None
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:  # an expanded gradient, as of out.sum()
        dout = dout.contiguous()
    return *run.backward(TORCH, dout, q, k, v, out, lse, dlse, ctx.options), None


# Under create_graph=True, which alone needs it: a second derivative is an error, not wrong. It costs 7 us.
_once = once_differentiable(_gradients)
# Function.apply without its Python half, which serves the transforms of torch.func and torch.compile.
_apply = super(torch.autograd.Function, _Attention).apply


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse); recorded by autograd if any input asks for it."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        whole = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
        out, lse = (_Attention.apply if whole else _apply)(q, k, v, options)
        return out, lse
    return run.forward(TORCH, q, k, v, options, want_lse)
