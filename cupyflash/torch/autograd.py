"""Attention as a differentiable function of torch.

Plain tensors take the way that costs the host least: an autograd.Function around `run` (recorded.py), without an
operator. All else is the operators', whose rules stand here: for autograd, which torch.func's grad asks level by level,
and vmap. There is no derivative of gradients, and none forward; both are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..arrays.adapters import TORCH
from ..launch import run
from ..operands import BACKWARD, FORWARD
from ..options import Options
from . import ops, sharding
from .batching import batched
from .casting import cast
from .followed import below_autograd, is_autocast_on, is_compiling, is_dual_level, is_followed, is_plain, one_level
from .recorded import both_of, by_operator, gradients, gradients_by_operator, is_recorded, out_of
from .vetting import vet, vet_dual
from .vetting import vet_mods as vet_mods


def attention(arrays: Mapping[str, Tensor], options: Options, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of arrays by name; recorded by autograd if any of them asks for it."""
    if is_autocast_on():
        arrays = cast(arrays)
    if is_compiling():
        sharding.ready()
        return ops.forward(arrays, options)
    followed, needs_grad = is_followed(), False
    if not followed and not arrays["q"].requires_grad:
        found = run.forward_again(tuple(arrays), arrays.values(), options, want_lse)
        if found is not None:
            return found
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
        return both_of(arrays, options) if want_lse else (out_of(arrays, options), None)
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
    return gradients(arrays, options, wanted, followed)


# ---- The operators' rules ----


def _forward_rule(keys: Any, *values: Any) -> Any:
    names, tensors, options, _ = ops.read(FORWARD, values)
    plain = is_plain(keys)
    if plain and not is_dual_level():
        found = run.forward_again(names, tensors, options, want_lse=True)
        if found is not None:
            return found
    arrays = dict(zip(names, tensors, strict=True))
    vet_dual(arrays)
    recorded = is_recorded(arrays)
    if plain:  # so that what the dispatcher would do next costs nothing
        return both_of(arrays, options) if recorded else ops.compute_forward(arrays, options)
    if not recorded:
        return below_autograd(ops.operator(FORWARD, values), keys, values)
    with one_level():
        return by_operator(arrays, options, keys, values)


def _backward_rule(keys: Any, *values: Any) -> Any:
    arrays, options, wanted = ops.read_by_name(BACKWARD, values)
    vet_dual(arrays)
    if not is_recorded(arrays):
        if is_plain(keys):
            return ops.compute_backward(arrays, options, wanted)
        return below_autograd(ops.operator(BACKWARD, values), keys, values)
    with one_level():
        return gradients_by_operator(arrays, keys, values)


def _forward_by_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    arrays, options, _ = ops.read_by_name(FORWARD, values)
    dims = dict(zip(ops.names_of(FORWARD, values), in_dims, strict=True))
    return batched(FORWARD, lambda x: ops.forward(x, options), info.batch_size, arrays, dims, (), bool(options.mods))


def _backward_by_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    arrays, options, wanted = ops.read_by_name(BACKWARD, values)
    dims = dict(zip(ops.names_of(BACKWARD, values), in_dims, strict=True))
    made = BACKWARD.made(arrays, wanted)
    call: Any = lambda x: tuple(ops.backward(x, options, wanted).values())  # noqa: E731
    found, _ = batched(BACKWARD, call, info.batch_size, arrays, dims, wanted, bool(options.mods))
    results = ops.all_of(BACKWARD, dict(zip(made, found, strict=True)), arrays["q"])
    return results, tuple(0 if name in made else None for name in ops.results_of(BACKWARD))


for _which, _rule, _by_vmap in (
    (FORWARD, _forward_rule, _forward_by_vmap),
    (BACKWARD, _backward_rule, _backward_by_vmap),
):
    for _name in ops.overloads(_which):
        ops.LIBRARY.impl(_name, _rule, "Autograd", with_keyset=True)
        if hasattr(torch.library, "register_vmap"):  # torch 2.5; before, torch makes one call for each index
            torch.library.register_vmap(f"cupyflash::{_name}", _by_vmap, lib=ops.LIBRARY)
