"""How a call is divided among devices: by batch and by heads, each device a call of its own on its part.

Without this rule XLA would gather all arrays and compute the whole call on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ..operands import Operand

_FACTORS = {"batch": "b", "seqlen_q": "s", "seqlen_k": "t", "head_dim": "d", "heads_k": "h"}


def dims_of(row: Operand, layout: str) -> tuple[str, ...]:
    """Its dimensions as they lie in the caller's layout."""
    if layout == "bhsd" and row.has_layout:
        batch, seqlen, heads, head_dim = row.dims
        return batch, heads, seqlen, head_dim
    return row.dims


def _mapping(row: Operand, layout: str, group: int) -> ArrayMapping:
    heads = CompoundFactor("h", "g") if group > 1 else "h"
    return ArrayMapping(*(heads if d == "heads_q" else _FACTORS[d] for d in dims_of(row, layout)))


def _axes(row: Operand, layout: str, batch: Any, heads: Any) -> PartitionSpec:
    named = {"batch": batch, "heads_q": heads, "heads_k": heads}
    return PartitionSpec(*(named.get(d) for d in dims_of(row, layout)))


def divided(
    call: Callable[..., Any], inputs: Sequence[Operand], results: Sequence[Operand], layout: str, group: int
) -> Callable[..., Any]:
    """`call`, divided where its arrays are.

    Args:
        call: of the arrays `inputs`, gives those of `results`; of any batch and number of heads.
        group: query heads of a key head.
    """
    where = {d: i for i, d in enumerate(dims_of(inputs[0], layout))}  # of q, or of dout's like

    def shardings(mesh: Any, given: Sequence[Any], rows: Sequence[Operand]) -> tuple[NamedSharding, ...]:
        q, k = (next(x for x, row in zip(given, inputs, strict=True) if row.name == name) for name in "qk")
        axes = [*q.sharding.spec, None, None, None, None]
        batch, heads = axes[where["batch"]], axes[where["heads_q"]]
        if heads is not None and k.shape[where["heads_q"]] % _parts(mesh, heads):
            heads = None  # a key head is not divided
        return tuple(NamedSharding(mesh, _axes(row, layout, batch, heads)) for row in rows)

    def infer(mesh: Any, given: Sequence[Any], shape: Any) -> Any:
        return shardings(mesh, given, results)

    def partition(mesh: Any, given: Sequence[Any], shape: Any) -> Any:
        return mesh, call, shardings(mesh, given, results), shardings(mesh, given, inputs)

    found = custom_partitioning(call)
    found.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=SdyShardingRule(
            tuple(_mapping(row, layout, group) for row in inputs),
            tuple(_mapping(row, layout, group) for row in results),
            **({"g": group} if group > 1 else {}),
        ),
    )
    return found


def _parts(mesh: Any, axes: Any) -> int:
    """Into how many parts these axes of a mesh divide."""
    count = 1
    for axis in axes if isinstance(axes, tuple) else (axes,):
        count *= mesh.shape[axis]
    return count
