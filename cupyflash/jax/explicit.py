"""Meshes with explicit axes, of which JAX's types say how arrays lie along them: the call is XLA's to divide, as along
axes that are not explicit (`sharding.py`), and its results lie as the arrays do whose shapes they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..operands import BACKWARD
from .call import PASSES, Static

_OF_GRADIENT = {gradient: name for name, gradient in BACKWARD.gradient_of.items()}


def as_auto(call: Callable[..., Any], static: Static, arrays: Sequence[Any]) -> Any:
    """What `call` makes of these arrays, traced as if the axes of the mesh that is set were not explicit."""
    axes = _explicit_axes()
    if not axes:
        return call(*arrays)
    specs = {name: jax.typeof(x).sharding.spec for name, x in zip(static.names, arrays, strict=True)}
    made = PASSES[static.which].made(static.names, static.wanted)
    placed = tuple(_spec(name, specs, static.options.layout) for name in made)
    return jax.sharding.auto_axes(call, axes=axes, out_sharding=placed)(*arrays)


def _spec(name: str, specs: dict[str, Any], layout: str) -> Any:
    """How a result lies."""
    if name in _OF_GRADIENT:
        return specs[_OF_GRADIENT[name]]
    of_q = specs["q"]
    if name == "out":
        return of_q
    if len(of_q) < 4:  # lse of packed sequences: (heads, total)
        return PartitionSpec(*of_q[1::-1])
    batch, a, b, _ = of_q
    return PartitionSpec(batch, a, b) if layout == "bhsd" else PartitionSpec(batch, b, a)


def _explicit_axes() -> tuple[str, ...]:
    """Of the mesh that `jax.set_mesh` has set: JAX from 0.7.1 on, whose transforms know what happens to them here."""
    if not hasattr(jax, "set_mesh"):
        return ()
    return tuple(jax.sharding.get_abstract_mesh().explicit_axes)
