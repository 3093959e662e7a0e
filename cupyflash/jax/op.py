"""Attention as operations of JAX: inside jit, differentiable, under vmap, and sharded over batch and heads."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, UnsupportedError
from ..launch.passes import WITH_LSE
from ..operands import BACKWARD
from ..options import Options
from . import parts
from . import trees as trees  # registers gradients
from .call import Static, call, results_of
from .explicit import as_auto
from .sharding import divided


def _own_axes(*arrays: Any) -> frozenset[str]:
    """Inside shard_map: the axes of the mesh along which each device has its own part of these arrays."""
    found: set[str] = set()
    for x in arrays:
        kind: Any = jax.typeof(x) if hasattr(jax, "typeof") else None
        manual: Any = getattr(kind, "manual_axis_type", None)
        own: set[str] = getattr(kind, "vma", set()) if manual is None else manual.varying
        found |= own
    return frozenset(found)


def _as_parts(found: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """What was made of such parts is such parts, which custom calls do not say."""
    axes = _own_axes(*arrays)
    return tuple(_vary(x, tuple(axes - _own_axes(x))) for x in found) if axes else tuple(found)


def _shared_by_all(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The same arrays, inside shard_map as parts along the axes of any of them: what devices share has as its gradient
    the sum of theirs, which is the derivative of this."""
    return dict(zip(arrays, _as_parts(list(arrays.values()), list(arrays.values())), strict=True))


def _vary(x: Any, axes: tuple[str, ...]) -> Any:
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)


def _group(static: Static, arrays: Sequence[Any]) -> int:
    """Query heads of a key head; 1 where the call is refused anyway."""
    axis = 2 if static.options.layout == "bshd" else 1
    named = dict(zip(static.names, arrays, strict=True))
    shapes = [named[name].shape for name in "qk"]
    if min(map(len, shapes)) < 4 or not shapes[1][axis]:
        return 1
    return max(1, int(shapes[0][axis] // shapes[1][axis]))


@functools.lru_cache(maxsize=1024)
def _divided(static: Static, dims: tuple[parts.Dims, ...], group: int) -> Callable[..., Any]:
    where = static.names.index("q"), static.names.index("k")
    return divided(lambda *arrays: tuple(call(static, *arrays)), dims, parts.made_dims(static, dims), where, group)


@functools.lru_cache(maxsize=1024)
def _mapped(static: Static) -> Callable[..., Any]:
    """The call, under vmap: the mapped axis joins the batch, where it can; else one after the other."""

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def one(*arrays: Any) -> Any:
        results_of(static, arrays)  # all checks
        dims = None if _own_axes(*arrays) else parts.divided_dims(static, [x.shape for x in arrays])
        if dims is None:
            return tuple(call(static, *arrays))
        return _divided(static, dims, _group(static, arrays))(*arrays)

    @one.def_vmap  # type: ignore[untyped-decorator]
    def rule(size: int, mapped: Sequence[bool], *arrays: Any) -> Any:
        shapes = [x.shape[1:] if m else x.shape for x, m in zip(arrays, mapped, strict=True)]
        own = parts.joined(static, shapes, mapped)
        if own is None:
            of_each = {i: x for i, (x, m) in enumerate(zip(arrays, mapped, strict=True)) if m}
            found = jax.lax.map(lambda some: one(*[some.get(i, x) for i, x in enumerate(arrays)]), of_each)
            return found, (True,) * len(found)
        found = one(*[_folded(x, size, m) if is_own else x for x, m, is_own in zip(arrays, mapped, own, strict=True)])
        of_one = results_of(static, [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, arrays, strict=True)])
        return tuple(x.reshape(size, *y.shape) for x, y in zip(found, of_one, strict=True)), (True,) * len(found)

    return one


def _folded(x: Any, size: int, is_mapped: bool) -> Any:
    """(size, batch, ...) or, of one that is not mapped, (batch, ...), as (size * batch, ...)."""
    x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sealed(static: Static, *arrays: Any) -> Any:
    """The call; a derivative of it is an error that says what is missing."""
    return as_auto(_mapped(static), static, arrays)


def _no_derivative(static: Static, kept: Any, given: Any) -> Any:
    raise UnsupportedError(
        "attention: second derivatives are not supported: gradients of it cannot be differentiated again"
    )


_sealed.defvjp(lambda static, *arrays: (as_auto(_mapped(static), static, arrays), None), _no_derivative)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _forward(static: Static, want_lse: bool, *arrays: Any) -> Any:
    out, lse = _as_parts(_sealed(static, *arrays), arrays)
    return (out, lse) if want_lse else out


def _forward_rule(static: Static, want_lse: bool, *given: Any) -> Any:
    arrays = [x.value for x in given]
    out, lse = _as_parts(_sealed(static, *arrays), arrays)
    return ((out, lse) if want_lse else out), (out, lse, arrays, _flag(static, given))


def _flag(static: Static, given: Sequence[Any]) -> Any:
    """An array whose length says which of `_watched` JAX follows, as bits. Of what a forward hands to the backward, JAX
    remembers shapes for each trace, but what pytrees say for the last one alone."""
    followed = {name for name, x in zip(static.names, given, strict=True) if x.perturbed}
    watched = _watched(static)
    return jnp.zeros(1 + sum((name in followed) << i for i, name in enumerate(watched)), bool) if watched else None


def _followed(static: Static, flag: Any) -> list[str]:
    """Which they were."""
    return [name for i, name in enumerate(_watched(static)) if (flag.shape[0] - 1) >> i & 1]


def _watched(static: Static) -> list[str]:
    """The arrays for which it matters whether JAX asks for their gradients."""
    optional = {name for name, made in BACKWARD.gradient_of.items() if made in BACKWARD.optional}
    return [name for name in static.names if name in optional]


_IS_ZERO = jax.custom_derivatives.SymbolicZero


def _backward_rule(static: Static, want_lse: bool, kept: Any, given: Any) -> Any:
    out, lse, inputs, flag = kept
    followed = _followed(static, flag)
    dout, dlse = given if want_lse else (given, None)
    named = {**dict(zip(static.names, inputs, strict=True)), "out": out, "lse": lse}
    named["dout"] = jnp.zeros_like(out) if isinstance(dout, _IS_ZERO) else dout
    if dlse is not None and not isinstance(dlse, _IS_ZERO):
        named["dlse"] = dlse
    of = BACKWARD.gradient_of
    wanted = tuple(made for name, made in of.items() if name in followed and made in BACKWARD.optional)
    grads = backward_of(named, static.options, wanted)
    found = []
    for name, x in zip(static.names, inputs, strict=True):
        grad = grads.get(of.get(name, ""))
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        nothing = jnp.zeros_like(x) if is_float else np.zeros(x.shape, jax.dtypes.float0)
        found.append(nothing if grad is None else _as_parts([grad], [x])[0])
    return tuple(found)


_forward.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


_jit_forward = jax.jit(_forward, static_argnums=(0, 1))
_jit_backward = jax.jit(_sealed, static_argnums=0)


def attention_of(arrays: Mapping[str, Any], options: Options, want_lse: bool) -> tuple[Any, Any | None]:
    """(out, lse) of arrays by name, concrete or traced."""
    _vet(arrays)
    arrays, static = _shared_by_all(arrays), Static.of("forward", tuple(arrays), options, WITH_LSE)
    with _wide(arrays):
        found = _jit_forward(static, want_lse, *arrays.values())
    return found if want_lse else (found, None)


def backward_of(arrays: Mapping[str, Any], options: Options, wanted: tuple[str, ...] = ()) -> dict[str, Any]:
    """The gradients by name, of arrays by name."""
    _vet(arrays)
    arrays, static = _shared_by_all(arrays), Static.of("backward", tuple(arrays), options, wanted)
    with _wide(arrays):
        found = _jit_backward(static, *arrays.values())
    return dict(zip(BACKWARD.made(arrays, wanted), found, strict=True))


def _wide(arrays: Mapping[str, Any]) -> Any:
    """Without it jit would narrow arrays of 64 bits where JAX_ENABLE_X64 is not set."""
    if all(x.dtype not in (np.float64, np.int64) for x in arrays.values()):
        return contextlib.nullcontext()
    return with_x64()


def with_x64() -> contextlib.AbstractContextManager[Any]:
    """Arrays of 64 bits stay so inside, whatever JAX_ENABLE_X64 says."""
    wide: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    found: contextlib.AbstractContextManager[Any] = wide.enable_x64(True)
    return found


def _vet(arrays: Mapping[str, Any]) -> None:
    """Refuse by name what jit would refuse in other words.

    Raises:
        ArgumentError: an array was deleted, or lies elsewhere than the first, or has a dtype that nothing takes.
    """
    first, where = None, None
    for name, x in arrays.items():
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise ArgumentError(f"{name}: expected a floating-point dtype, got {x.dtype}")
        if isinstance(x, jax.core.Tracer):
            continue
        if x.is_deleted():
            raise ArgumentError(f"{name}: this JAX array was deleted, or donated to a jitted function; give a live one")
        if not getattr(x, "committed", True):
            continue
        if where is None:
            first, where = name, x.devices()
        elif x.devices() != where:
            raise ArgumentError(f"{name}: expected the device of {first}, {_words(where)}, got {_words(x.devices())}")


def _words(devices: Any) -> str:
    return ", ".join(sorted(map(str, devices)))
