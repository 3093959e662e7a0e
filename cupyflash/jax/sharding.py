"""How a call is divided among devices: by batch and by heads, each device a call of its own on its part.

Without this rule XLA would gather all arrays and compute the whole call on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Dims = tuple[str, ...]
_FACTORS = {"batch": "b", "seqlen_q": "s", "seqlen_k": "t", "head_dim": "d", "heads_k": "h", "2": "e"}


def _mapping(number: int, dims: Dims, group: int) -> ArrayMapping:
    """Of one array, which has that number among all."""
    found: list[Any] = [_FACTORS.get(d, f"own{number}_{i}") for i, d in enumerate(dims)]
    heads = CompoundFactor("h", "g") if group > 1 else "h"
    return ArrayMapping(*(heads if d == "heads_q" else factor for d, factor in zip(dims, found, strict=True)))


def _axes(dims: Dims, batch: Any, heads: Any) -> PartitionSpec:
    named = {"batch": batch, "heads_q": heads, "heads_k": heads}
    return PartitionSpec(*(named.get(d) for d in dims))


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
    dims_of_q = inputs[qk[0]]
    has_group = group > 1 and "heads_q" in dims_of_q

    def shardings(mesh: Any, given: Sequence[Any], of: Sequence[Dims]) -> tuple[NamedSharding, ...]:
        q, k = (given[i] for i in qk)
        axes = dict(zip(dims_of_q, [*q.sharding.spec, None, None, None, None], strict=False))
        batch, heads = axes.get("batch"), axes.get("heads_q")
        if heads is not None and k.shape[dims_of_q.index("heads_q")] % _parts(mesh, heads):
            heads = None  # a key head is not divided
        return tuple(NamedSharding(mesh, _axes(dims, batch, heads)) for dims in of)

    def infer(mesh: Any, given: Sequence[Any], shape: Any) -> Any:
        return shardings(mesh, given, results)

    def partition(mesh: Any, given: Sequence[Any], shape: Any) -> Any:
        return mesh, call, shardings(mesh, given, results), shardings(mesh, given, inputs)

    found = custom_partitioning(call)
    mappings = [_mapping(i, dims, group) for i, dims in enumerate((*inputs, *results))]
    found.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=SdyShardingRule(
            tuple(mappings[: len(inputs)]), tuple(mappings[len(inputs) :]), **({"g": group} if has_group else {})
        ),
    )
    return found


def _parts(mesh: Any, axes: Any) -> int:
    """Into how many parts these axes of a mesh divide."""
    count = 1
    for axis in axes if isinstance(axes, tuple) else (axes,):
        count *= mesh.shape[axis]
    return count
