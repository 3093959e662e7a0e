"""How a call is divided among devices: by batch and by heads, each device a call of its own on its part. What the call
makes of all sequences or heads, such as the gradient of what they share, is the sum of the devices'.

Without this rule XLA would gather all arrays and compute the whole call on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Dims = tuple[str, ...]
_FACTORS = {
    "batch": "b",
    "seqlen_q": "s",
    "seqlen_k": "t",
    "head_dim": "d",
    "head_dim_v": "v",
    "heads_k": "h",
    "2": "e",
}


def _mapping(number: int, dims: Dims, group: int) -> ArrayMapping:
    """Of one array, which has that number among all.

    Grouped query heads have a factor of their own: as a product of key heads and those of a group, an axis of more
    devices than there are key heads would be split between the two, which JAX cannot write down, and one key head alone
    would make a factor of 1, which is an error.
    """
    found = [_FACTORS.get(d, f"own{number}_{i}") for i, d in enumerate(dims)]
    heads = "g" if group > 1 else "h"
    return ArrayMapping(*(heads if d == "heads_q" else factor for d, factor in zip(dims, found, strict=True)))


class _Axes(NamedTuple):
    """Along which axes of a mesh sequences and heads are divided; None: they are not.

    Attributes:
        shared: whether several devices have query heads of the same key head. Then k and v are whole on each device,
            which takes the key head of its query heads.
    """

    batch: Any
    heads: Any
    shared: bool

    def spec(self, dims: Dims) -> PartitionSpec:
        named = {"batch": self.batch, "heads_q": self.heads, "heads_k": None if self.shared else self.heads}
        return PartitionSpec(*(named.get(d) for d in dims))

    def own(self, x: Any, dims: Dims, devices: int, heads_k: int) -> Any:
        """Of k or v that are whole, the key head of this device, which is one of so many along the heads."""
        if not self._is_shared(dims):
            return x
        return jax.lax.dynamic_slice_in_dim(x, self._key_head(devices, heads_k), 1, dims.index("heads_k"))

    def sum(self, x: Any, dims: Dims, devices: int, heads_k: int) -> Any:
        """What each device has made of these dimensions, over the parts along those that it lacks."""
        is_shared = self._is_shared(dims)
        parts = [self.batch] * ("batch" not in dims)
        parts += [self.heads] * (is_shared or {"heads_q", "heads_k"}.isdisjoint(dims))
        names = tuple(name for axes in parts for name in _names(axes))
        if not names:
            return x
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if is_shared:
            axis = dims.index("heads_k")
            whole = jnp.zeros((*x.shape[:axis], heads_k, *x.shape[axis + 1 :]), wide.dtype)
            wide = jax.lax.dynamic_update_slice_in_dim(whole, wide, self._key_head(devices, heads_k), axis)
        return jax.lax.psum(wide, names).astype(x.dtype)

    def _is_shared(self, dims: Dims) -> bool:
        return self.shared and "heads_k" in dims

    def _key_head(self, devices: int, heads_k: int) -> Any:
        return jax.lax.axis_index(_names(self.heads)) * heads_k // devices


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def divided(
    call: Callable[..., Any], inputs: Sequence[Dims], results: Sequence[Dims], qk: tuple[int, int], group: int
) -> Callable[..., Any]:
    """`call`, divided where its arrays are.

    Args:
        call: of arrays with the dimensions `inputs`, gives some with those of `results`; of any batch and number of
            heads. A dimension without a name is whole on each device.
        qk: which of the inputs are q and k.
        group: query heads of a key head.
    """
    dims_of_q, dims_of_k = (inputs[i] for i in qk)

    def axes_of(mesh: Any, given: Sequence[Any]) -> tuple[_Axes, int, int]:
        """Also how many devices there are along the heads, and how many key heads."""
        q, k = (given[i] for i in qk)
        spec = getattr(q.sharding, "spec", ())  # of what is whole everywhere XLA may not give one
        found = dict(zip(dims_of_q, [*spec, None, None, None, None], strict=False))
        heads = found.get("heads_q")
        devices = math.prod(mesh.shape[name] for name in _names(heads))
        heads_k = k.shape[dims_of_k.index("heads_k")] if "heads_k" in dims_of_k else 1
        shared = bool(heads_k % devices)
        # Else query heads of a device would be of several key heads, and not of all of each; or there would be none for
        # some devices, where XLA has others that nobody gave.
        if shared and (devices % heads_k or q.shape[dims_of_q.index("heads_q")] % devices):
            heads, shared = None, False
        return _Axes(found.get("batch"), heads, shared), devices, heads_k

    def shardings(mesh: Any, axes: _Axes, of: Sequence[Dims]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, axes.spec(dims)) for dims in of)

    def infer(mesh: Any, given: Sequence[Any], shape: Any) -> Any:
        return shardings(mesh, axes_of(mesh, given)[0], results)

    def partition(mesh: Any, given: Sequence[Any], shape: Any) -> Any:
        axes, *counts = axes_of(mesh, given)

        def part(*arrays: Any) -> tuple[Any, ...]:
            own = [axes.own(x, dims, *counts) for x, dims in zip(arrays, inputs, strict=True)]
            return tuple(axes.sum(x, dims, *counts) for x, dims in zip(call(*own), results, strict=True))

        return mesh, part, shardings(mesh, axes, results), shardings(mesh, axes, inputs)

    found = custom_partitioning(call)
    mappings = [_mapping(i, dims, group) for i, dims in enumerate((*inputs, *results))]
    found.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=SdyShardingRule(tuple(mappings[: len(inputs)]), tuple(mappings[len(inputs) :])),
    )
    return found
