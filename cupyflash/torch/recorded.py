"""What autograd records of a call: its Functions, those for plain tensors and those around the operators.

There is no derivative of gradients, which is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..arrays.adapters import TORCH
from ..errors import UnsupportedError
from ..launch import run
from ..operands import BACKWARD, FORWARD
from ..options import Options
from . import ops, sharding
from .followed import (
    SingleLevelFunction,
    below_autograd,
    fast_apply,
    is_batched_by_autograd,
    is_compiling,
    is_followed,
)
from .vetting import vet

# What a call is but for its arrays: their names; the options; the names of their gradients, "" where there is none; the
# numbers of those arrays whose gradients are made only if wanted.
_Asked = tuple[tuple[str, ...], Options, tuple[str, ...], tuple[int, ...]]


_Given = tuple[_Asked, Mapping[str, Tensor]]


class _Attention(torch.autograd.Function):
    """out = attention of arrays, given what is asked of them, the arrays by name, and then themselves."""

    @staticmethod
    def forward(ctx: Any, given: _Given, *arrays: Tensor) -> Tensor:
        return _compute(ctx, given, arrays)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        names, options, of, optional = ctx.asked
        arrays = _to_backward(ctx, names, dout, dlse)
        if arrays is None:
            return (None,) * (1 + len(names))
        wanted = tuple([of[i] for i in optional if ctx.needs_input_grad[1 + i]]) if optional else ()
        if is_compiling():  # by compiled autograd
            found = ops.backward(arrays, options, wanted)
        else:
            dout = arrays["dout"]
            given = (dout,) if dlse is None else (dout, dlse)
            followed = is_followed() or any(x.is_neg() or is_batched_by_autograd(x) for x in given)
            if followed or torch.is_grad_enabled():
                found = gradients(arrays, options, wanted, followed)
            else:
                found = run.backward(TORCH, arrays, options, wanted)
        return None, *map(found.get, of)


class _AttentionWithLse(_Attention):
    """(out, lse), likewise; both are differentiable. A result that nobody has asked for would cost the host 10 us."""

    @staticmethod
    def forward(ctx: Any, given: _Given, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        return _compute(ctx, given, arrays)


def _compute(ctx: Any, given: _Given, arrays: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    asked, named = given
    ctx.asked = asked
    out, lse = run.forward(TORCH, named, asked[1])
    ctx.save_for_backward(*arrays, out, lse)
    ctx.set_materialize_grads(False)
    return out, lse


class _AttentionByOperator(SingleLevelFunction):
    """The same by the operator on its way to what it does, given what is asked, its keys and arguments."""

    @staticmethod
    def forward(ctx: Any, given: tuple[_Asked, Any, Any], *arrays: Tensor) -> tuple[Tensor, Tensor]:
        ctx.asked, keys, values = given
        with torch.enable_grad():  # for outer levels of torch.func
            out, lse = below_autograd(ops.operator(FORWARD, values), keys, values)
        ctx.save_for_backward(*arrays, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        names, options, of, optional = ctx.asked
        arrays = _to_backward(ctx, names, dout, dlse)
        if arrays is None:
            return (None,) * (1 + len(names))
        wanted = tuple([of[i] for i in optional if ctx.needs_input_grad[1 + i]])
        return None, *map(ops.backward(arrays, options, wanted).get, of)


def _to_backward(
    ctx: Any, names: tuple[str, ...], dout: Tensor | None, dlse: Tensor | None
) -> dict[str, Tensor] | None:
    """What the backward is given; None where there is no gradient."""
    if dout is None and dlse is None:
        return None
    *inputs, lse = ctx.saved_tensors  # and out, the last of inputs
    if dout is None:
        dout = torch.zeros_like(inputs[-1])
    elif dout.stride(-1) != 1:  # an expanded gradient, as of out.sum()
        dout = dout.contiguous()
    arrays = dict(zip((*names, "out", "dout", "lse"), (*inputs, dout, lse)))  # noqa: B905 (which costs the host)
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
        raise _no_second_derivatives()


def _no_second_derivatives() -> UnsupportedError:
    return UnsupportedError(
        "attention: second derivatives are not supported: gradients that were computed with create_graph=True (by "
        "a gradient penalty, a Hessian or torch.autograd.functional) cannot be differentiated again"
    )


class _GradientsByOperator(SingleLevelFunction):
    """The same by the operator on its way, given its keys and arguments, and the arrays among these."""

    @staticmethod
    def forward(ctx: Any, given: tuple[Any, Any], *arrays: Tensor) -> Any:
        with torch.enable_grad():
            return below_autograd(ops.operator(BACKWARD, given[1]), *given)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _no_second_derivatives()


# Function.apply without its Python half, which serves Functions that torch.func takes as one.
_apply, _apply_with_lse = fast_apply(_Attention), fast_apply(_AttentionWithLse)
_apply_by_operator = fast_apply(_AttentionByOperator)
_apply_gradients, _apply_gradients_by_operator = fast_apply(_Gradients), fast_apply(_GradientsByOperator)


@functools.lru_cache(maxsize=256)
def _asked(names: tuple[str, ...], options: Options) -> _Asked:
    return names, options, *ops.gradients_of(names)


def out_of(arrays: Mapping[str, Tensor], options: Options) -> Tensor:
    """out, recorded."""
    out: Tensor = _apply((_asked(tuple(arrays), options), arrays), *arrays.values())
    return out


def both_of(arrays: Mapping[str, Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), recorded."""
    out, lse = _apply_with_lse((_asked(tuple(arrays), options), arrays), *arrays.values())
    return out, lse


def by_operator(arrays: Mapping[str, Tensor], options: Options, keys: Any, values: Any) -> Any:
    """Likewise, by the operator, which was called under these keys with these arguments."""
    names = tuple(arrays)
    asked = names, options, *ops.gradients_of(names)  # where options are symbolic they are no key of a cache
    return _apply_by_operator((asked, keys, values), *arrays.values())


def gradients_by_operator(arrays: Mapping[str, Tensor], keys: Any, values: Any) -> Any:
    """What the operator of gradients returns, recorded, likewise."""
    return _apply_gradients_by_operator((keys, values), *arrays.values())


def gradients(
    arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...], followed: bool
) -> dict[str, Tensor]:
    """The gradients by name, recorded where autograd would; `followed`: the operator computes them."""
    if followed:
        vet(arrays)
        sharding.ready()
        return ops.backward(arrays, options, wanted)
    if not is_recorded(arrays):
        return run.backward(TORCH, arrays, options, wanted)
    with torch.no_grad():
        grads = run.backward(TORCH, arrays, options, wanted)
    return dict(zip(grads, _apply_gradients(len(grads), *grads.values(), *arrays.values()), strict=True))


def is_recorded(arrays: Mapping[str, Tensor]) -> bool:
    """Whether autograd records what is computed with these."""
    if torch.is_grad_enabled():
        for x in arrays.values():
            if x.requires_grad:
                return True
    return False
