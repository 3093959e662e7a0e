"""The vmap rule: a mapped dimension becomes part of the batch, where there is one; else one call for each index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..operands import Pass

# Where one of these is, sequences of several calls are no batch: it has none, or dropout counts its sequences.
_ALONE = frozenset(("cu_seqlens_q", "block_tiles", "dropout_seed"))

Call = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]


def batched(
    which: Pass, call: Call, size: int, arrays: Mapping[str, Tensor], dims: Mapping[str, int | None],
    wanted: tuple[str, ...] = (), one_by_one: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
    """The results of calls for each index of a mapped dimension, and where they have it.

    Args:
        call: the pass, of arrays by name.
        size: the length of the mapped dimension.
        dims: where each array has it; None: nowhere.
        wanted: optional gradients.
        one_by_one: since the number of a sequence means something.
    """
    mapped = {name: dim for name in arrays if (dim := dims[name]) is not None}
    first = {name: _moved(x, mapped[name]) if name in mapped else x for name, x in arrays.items()}
    batch = first["q"].shape[int("q" in mapped)]
    batched = {
        name
        for name, x in first.items()
        if not one_by_one and _has_batch(which, name, x.shape[int(name in mapped) :], batch)
    }
    if (
        one_by_one
        or not _ALONE.isdisjoint(arrays)
        or not all(name in batched or (name not in mapped and f"d{name}" not in wanted) for name in first)
    ):
        if not size:  # results have the shapes of one call's
            none = call({name: x.new_zeros(x.shape[1:]) if name in mapped else x for name, x in first.items()})
            return tuple(x.new_empty((0, *x.shape)) for x in none), (0,) * len(none)
        found = [call({name: x[i] if name in mapped else x for name, x in first.items()}) for i in range(size)]
        return tuple(torch.stack(same) for same in zip(*found, strict=True)), (0,) * len(found[0])
    folded = {name: _fold(x, size, name in mapped) if name in batched else x for name, x in first.items()}
    results = call(folded)
    return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results), (0,) * len(results)


def _moved(x: Tensor, dim: int) -> Tensor:
    """With its dimension `dim` first; where that was the last, rows are laid together again."""
    moved = x.movedim(dim, 0)
    return moved.contiguous() if dim in (-1, x.dim() - 1) else moved


def _has_batch(which: Pass, name: str, shape: Sequence[int], batch: int) -> bool:
    """Whether an array of this shape begins with the batch, which some may lack."""
    row = which.rows[name]
    return row.dims[0] == "batch" and len(shape) == len(row.dims) and (not row.broadcasts or shape[0] == batch)


def _fold(x: Tensor, size: int, is_mapped: bool) -> Tensor:
    """(size, batch, ...) or, of one that is not mapped, (batch, ...), as (size * batch, ...)."""
    x = x if is_mapped else x.expand(size, *x.shape)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
