"""DTensor: which shardings the operators keep, by the table of arrays. Sequences and heads are independent."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..arrays.imported import constant_in_programs
from ..operands import BACKWARD, FORWARD, Operand, Pass
from . import ops

BATCH, HEADS = ("batch",), ("heads_q", "heads_k")


@constant_in_programs
def ready() -> None:
    """Have DTensor know the operators, if anybody has imported it."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # before torch 2.5; DTensor then says that it does not know the operator
        return
    for which in (FORWARD, BACKWARD):
        register_sharding([*ops.operators(which)])(functools.partial(_shardings, which))


def _shardings(which: Pass, *values: Any) -> list[tuple[list[Any], list[Any]]]:
    """What results and arguments may be along one dimension of a mesh: whole, or split by sequences or heads.

    Packed sequences lie in the same rows, so they are split by heads alone.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    arrays, options, wanted = ops.read_by_name(which, values)
    names = ops.names_of(which, values)
    packed = "cu_seqlens_q" in arrays
    made = which.made(arrays, ("lse", *wanted))

    def dims(row: Operand) -> list[str]:
        found = ops.dims_of(row, options.layout, packed)
        like = arrays.get(row.name, arrays.get(row.like))
        return found[-like.ndim :] if like is not None else found  # without the batch, which some may lack

    def is_one(row: Operand, like: Any, i: int) -> bool:  # where it is broadcast it is not split
        return row.broadcasts and like is not None and like.shape[i] == 1

    def one(split: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
        def place(row: Operand, whole: Any) -> Any:
            like = arrays.get(row.name, arrays.get(row.like))
            return next((Shard(i) for i, d in enumerate(dims(row)) if d in split and not is_one(row, like, i)), whole)

        sums = Partial() if split and which is BACKWARD else Replicate()
        results = [place(which.rows[x], sums) if x in made else Replicate() for x in ops.results_of(which)]
        return results, [place(which.rows[x], Replicate()) if x in arrays else None for x in names]

    if "block_tiles" in arrays:  # of which one may serve all sequences or heads
        return [one(())]
    splits: list[tuple[str, ...]] = [()] if packed else [(), BATCH]
    if _are_groups_whole(arrays, lambda name: dims(which.rows[name])):
        splits.append(HEADS)
    return [one(split) for split in splits]


def _are_groups_whole(arrays: Mapping[str, Any], dims: Callable[[str], list[str]]) -> bool:
    """Whether heads that are split as these arrays are leave query heads with the key heads that they use."""

    def sizes() -> Iterator[int]:
        for i, size in enumerate(arrays["q"].mesh.shape):
            if any(x.placements[i].is_shard() and dims(n)[x.placements[i].dim] in HEADS for n, x in arrays.items()):
                yield size

    heads_k = arrays["k"].shape[dims("k").index("heads_k")]
    return bool(heads_k % math.prod(sizes()) == 0)
