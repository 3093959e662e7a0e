"""Attention as a differentiable function of torch.

Plain tensors take the way that costs the host least: an autograd.Function around `run`, without an operator. All else
is the operators', whose rules stand here: for autograd, which torch.func's grad asks level by level, and vmap. There
is no derivative of gradients, and none forward; both are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..arrays.adapters import TORCH
from ..errors import UnsupportedError
from ..launch import run
from ..operands import BACKWARD, FORWARD
from ..options import Options
from . import ops, sharding
from .batching import batched
from .casting import cast
from .followed import (
    below_autograd,
    fast_apply,
    is_autocast_on,
    is_batched_by_autograd,
    is_compiling,
    is_followed,
    is_plain,
    one_level,
)
from .vetting import vet, vet_dual


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
        arrays = _to_backward(ctx, dout, dlse)
        if arrays is None:
            return (None,) * (2 + len(ctx.names))
        dout = arrays["dout"]
        of, optional = ops.gradients_of(ctx.names)
        wanted = tuple([of[i] for i in optional if ctx.needs_input_grad[2 + i]]) if optional else ()
        if is_compiling():  # by compiled autograd
            grads = ops.backward(arrays, ctx.options, wanted)
        else:
            followed = is_followed() or dout.is_neg() or is_batched_by_autograd(dout)
            grads = _gradients(arrays, ctx.options, wanted, followed)
        return None, None, *[grads.get(name) for name in of]


class _AttentionByOperator(torch.autograd.Function):
    """The same of the operator's arguments, on their way to what it does."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *values: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():  # for outer levels of torch.func
            out, lse = below_autograd(ops.FORWARD_OP, keys, values)
        arrays, ctx.options, _ = ops.read(FORWARD, values)
        ctx.names = tuple(arrays)
        ctx.save_for_backward(out, lse, *arrays.values())
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        arrays = _to_backward(ctx, dout, dlse)
        if arrays is None:
            return (None,) * len(ctx.needs_input_grad)
        of, optional = ops.gradients_of(ops.inputs_of(FORWARD))
        wanted = tuple([of[i] for i in optional if ctx.needs_input_grad[1 + i]])
        grads = ops.backward(arrays, ctx.options, wanted)
        return None, *[grads.get(name) for name in of], *[None for _ in ops.OPTIONS]


def _to_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Tensor] | None:
    """What the backward is given; None where there is no gradient."""
    out, lse, *inputs = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return None
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:  # an expanded gradient, as of out.sum()
        dout = dout.contiguous()
    arrays = {**dict(zip(ctx.names, inputs, strict=True)), "out": out, "dout": dout, "lse": lse}
    if dlse is not None:
        arrays["dlse"] = dlse
    return arrays


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


class _GradientsByOperator(_Gradients):
    """The same of an operator's arguments."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *values: Any) -> Any:
        with torch.enable_grad():
            return below_autograd(ops.BACKWARD_OP, keys, values)


# Function.apply without its Python half, which serves Functions that torch.func takes as one.
_apply, _apply_by_operator = fast_apply(_Attention), fast_apply(_AttentionByOperator)
_apply_gradients, _apply_gradients_by_operator = fast_apply(_Gradients), fast_apply(_GradientsByOperator)


def attention(arrays: Mapping[str, Tensor], options: Options, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of arrays by name; recorded by autograd if any of them asks for it."""
    if is_autocast_on():
        arrays = cast(arrays)
    if is_compiling():
        sharding.ready()
        return ops.forward(arrays, options)
    followed, needs_grad = is_followed(), False
    for x in arrays.values():
        kind = type(x)
        if (kind is not Tensor and kind is not Parameter) or x.is_neg():
            followed = True
        if x.requires_grad:
            needs_grad = True
    if followed:
        vet(arrays)
        sharding.ready()
        return ops.forward(arrays, options)
    if needs_grad and torch.is_grad_enabled():
        out, lse = _apply(tuple(arrays), options, *arrays.values())
        return out, lse
    return run.forward(TORCH, arrays, options, want_lse)


def backward(arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The gradients by name, of arrays by name.

    Where autograd would record what they depend on, it does, and a derivative of them is an error.
    """
    if is_compiling():
        return ops.backward(arrays, options, wanted)
    followed = is_followed()
    for x in arrays.values():
        if type(x) is not Tensor or x.is_neg():
            followed = True
    return _gradients(arrays, options, wanted, followed)


def _gradients(
    arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...], followed: bool
) -> dict[str, Tensor]:
    if followed:
        vet(arrays)
        sharding.ready()
        return ops.backward(arrays, options, wanted)
    if not _is_recorded(arrays):
        return run.backward(TORCH, arrays, options, wanted)
    with torch.no_grad():
        grads = run.backward(TORCH, arrays, options, wanted)
    return dict(zip(grads, _apply_gradients(len(grads), *grads.values(), *arrays.values()), strict=True))


def _is_recorded(arrays: Mapping[str, Tensor]) -> bool:
    """Whether autograd records what is computed with these."""
    if torch.is_grad_enabled():
        for x in arrays.values():
            if x.requires_grad:
                return True
    return False


# ---- The operators' rules ----


def _forward_rule(keys: Any, *values: Any) -> Any:
    arrays, options, _ = ops.read(FORWARD, values)
    vet_dual(arrays)
    recorded = _is_recorded(arrays)
    if is_plain(keys):  # so that what the dispatcher would do next costs nothing
        return _apply(tuple(arrays), options, *arrays.values()) if recorded else ops.compute_forward(arrays, options)
    if not recorded:
        return below_autograd(ops.FORWARD_OP, keys, values)
    with one_level():
        return _apply_by_operator(keys, *values)


def _backward_rule(keys: Any, *values: Any) -> Any:
    arrays, options, wanted = ops.read(BACKWARD, values)
    vet_dual(arrays)
    if not _is_recorded(arrays):
        if is_plain(keys):
            return ops.compute_backward(arrays, options, wanted)
        return below_autograd(ops.BACKWARD_OP, keys, values)
    with one_level():
        return _apply_gradients_by_operator(keys, *values)


def _forward_by_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    arrays, options, _ = ops.read(FORWARD, values)
    dims = dict(zip(ops.inputs_of(FORWARD), in_dims, strict=False))
    return batched(FORWARD, lambda x: ops.forward(x, options), info.batch_size, arrays, dims, (), bool(options.mods))


def _backward_by_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    arrays, options, wanted = ops.read(BACKWARD, values)
    dims = dict(zip(ops.inputs_of(BACKWARD), in_dims, strict=False))
    made = BACKWARD.made(arrays, wanted)
    call: Any = lambda x: tuple(ops.backward(x, options, wanted).values())  # noqa: E731
    found, _ = batched(BACKWARD, call, info.batch_size, arrays, dims, wanted, bool(options.mods))
    results = ops.all_of(BACKWARD, dict(zip(made, found, strict=True)), arrays["q"])
    return results, tuple(0 if name in made else None for name in ops.results_of(BACKWARD))


for _name, _rule, _by_vmap in (
    ("forward", _forward_rule, _forward_by_vmap),
    ("backward", _backward_rule, _backward_by_vmap),
):
    ops.LIBRARY.impl(_name, _rule, "Autograd", with_keyset=True)
    if hasattr(torch.library, "register_vmap"):  # torch 2.5; before, torch makes one call for each index
        torch.library.register_vmap(f"cupyflash::{_name}", _by_vmap, lib=ops.LIBRARY)
