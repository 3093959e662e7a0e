"""What of a call may be computed by itself, as a call of its own: on a device, or as one of those that vmap joins.

Sequences and heads are independent, but those of a part count from 0: where mods ask for their numbers, the call is not
divided along them. What mods read and the bits of a block mask are whole in each part.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..mods.description import read
from ..operands import Operand
from .call import PASSES, Static

Shape = Sequence[int]
Dims = tuple[str, ...]
_NUMBERS = {"b": ("batch",), "h": ("heads_q", "heads_k")}  # in mods, of what


def joined(static: Static, shapes: Sequence[Shape], mapped: Sequence[bool]) -> list[bool] | None:
    """In which arrays a mapped axis joins the batch, while the others stay as they are; None: it cannot.

    Args:
        shapes: of the arrays, without the mapped axis.
        mapped: which of them have it.
    """
    if "batch" in _numbered(static):
        return None
    rows = _rows(static)
    learned = {PASSES[static.which].rows[made].like for made in static.wanted}
    own = [
        is_mapped or not _is_shared(row, x) or row.name in learned
        for row, x, is_mapped in zip(rows, shapes, mapped, strict=True)
    ]
    have_batch = all(_has_batch(row, x, shapes[0]) for row, x, is_own in zip(rows, shapes, own, strict=True) if is_own)
    return own if have_batch else None


def divided_dims(static: Static, shapes: Sequence[Shape]) -> tuple[Dims, ...] | None:
    """The dimensions of the arrays in the caller's layout, "" for those that are whole in each part; None: there are no
    parts, since some arrays broadcast, or have no batch at all."""
    found, whole = [], _numbered(static)
    for row, x in zip(_rows(static), shapes, strict=True):
        if not _is_shared(row, x) and not _has_batch(row, x, shapes[0]):
            return None
        if row.broadcasts and 1 in x:
            return None
        dims = _dims_of(row, x, static.options.layout)
        found.append(
            tuple("" if d in whole or (n == 1 and d in row.single) else d for d, n in zip(dims, x, strict=True))
        )
    return tuple(found)


def made_dims(static: Static, dims: Sequence[Dims]) -> list[Dims]:
    """The same of what the call makes of arrays that have these. What lacks one of them is a sum over the parts."""
    which, whole = PASSES[static.which], _numbered(static)
    of, found = dict(zip(static.names, dims, strict=True)), []
    for name in which.made(static.names, static.wanted):
        row = which.rows[name]
        own = of[row.like] if row.like else row.dims
        own = (*own[:-1], of[row.width][-1]) if row.width else own
        found.append(tuple("" if d in whole else d for d in own))
    return found


def _dims_of(row: Operand, shape: Shape, layout: str) -> Dims:
    """Its dimensions as they lie in the caller's layout."""
    if layout == "bhsd" and row.has_layout:
        batch, seqlen, heads, head_dim = row.dims
        return batch, heads, seqlen, head_dim
    return row.dims[len(row.dims) - len(shape) :] if row.dims else ("",) * len(shape)


def _rows(static: Static) -> list[Operand]:
    return [PASSES[static.which].rows[name] for name in static.names]


def _numbered(static: Static) -> set[str]:
    """The dimensions whose numbers mods ask for."""
    mods = read(static.options.mods)
    return {d for place, dims in _NUMBERS.items() if mods.uses(place) for d in dims}


def _is_shared(row: Operand, shape: Shape) -> bool:
    """Whether it is the same for all sequences: what mods read, bits of masks, what each head has."""
    if "batch" in row.single:
        return shape[0] == 1
    return row.free or row.dims[-len(shape) :] in (("any", "tile_words"), ("heads_q",))


def _has_batch(row: Operand, shape: Shape, of_q: Shape) -> bool:
    return row.dims[:1] == ("batch",) and len(row.dims) == len(shape) and (
        not (row.broadcasts or row.single) or shape[0] == of_q[0]
    )  # fmt: skip
