"""What must be known of an additive bias to choose kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .operand import MASK_TILE

MAX_SEQLEN = 2**29  # positions and window bounds, added up, are 32-bit integers in the kernels


Own = tuple[bool, ...]  # of (batch, heads_q, seqlen_q, seqlen_k): elements of its own, or broadcast
WHOLE: Own = (True, True, True, True)


def own_of(shape: Sequence[int]) -> Own:
    """That of a bias of this shape, which need not fit the scores yet."""
    return _of_the_last(n != 1 for n in shape)


def own_of_mask(shape: Sequence[int], strides: Sequence[int] = ()) -> Own:
    """The same of a mask, which has no gradient: it is broadcast along dimensions of stride 0, too, and has nothing of
    its own along one of length 0."""
    return _of_the_last(n > 1 and step != 0 for n, step in zip(shape, strides or (1,) * len(shape), strict=True))


def _of_the_last(own: Iterable[bool]) -> Own:
    """Of four dimensions, of which the first may be missing."""
    found = [*own][-4:]
    return (*[False] * (4 - len(found)), *found)


def becomes_blocks(mask: Own, packed: bool) -> bool:
    """Whether a mask may become a block mask. Of packed sequences that share it along queries or keys its tiles would
    be as many as all rows have."""
    return not packed or (mask[2] and mask[3])


class Bias(NamedTuple):
    """What is added to the scores, but for its elements: a bias, a mask, or both.

    Attributes:
        dtype: that of q, or fp32; or bool: it is a mask.
        own: along which dimensions it has elements of its own.
        beside: along which the mask has that stands beside it; None: none does.
    """

    dtype: str
    own: Own = WHOLE
    beside: Own | None = None

    @property
    def masked(self) -> bool:
        """Whether a mask stands beside it."""
        return self.beside is not None

    @property
    def mask(self) -> Own | None:
        """Along which dimensions the mask, alone or beside a bias, has elements of its own; None: there is none."""
        return self.own if self.dtype == "bool" else self.beside

    @property
    def argument(self) -> str:
        """The argument that it came by."""
        return "mask" if self.dtype == "bool" else "bias"


def max_seqlens(shapes: Sequence[Sequence[int]], tiles: Sequence[int] | None = None) -> tuple[int, int]:
    """How many queries and keys a bias and a mask of these shapes, and a block mask of so many tiles, have of each of
    several sequences: as the first one says that is not broadcast along them; MAX_SEQLEN where all are."""
    found = []
    for i in (-2, -1):
        lengths = [shape[i] for shape in shapes if len(shape) >= -i and shape[i] != 1]
        lengths += [] if tiles is None else [MASK_TILE * tiles[i]]
        found.append(min([*lengths[:1], MAX_SEQLEN]))
    return found[0], found[1]


def room_of_mask(queries: int, keys: int) -> tuple[int, int]:
    """The same of a mask over a cache, of so many keys: queries that share a row have one tile of it."""
    return (MASK_TILE if queries == MAX_SEQLEN else queries), keys


def flags_of_added(bias: Bias | None, has_mods: bool) -> dict[str, bool]:
    """What a bias, a mask and mods that are added element by element say of kernels, by the names of fields."""
    return {
        "bias": bias is not None or has_mods,
        "wide_bias": bias is not None and bias.dtype == "fp32",
        "mask": bias is not None and (bias.dtype == "bool" or bias.masked),
        "masked_bias": bias is not None and bias.masked,
        "bias_beside_mods": bias is not None and has_mods,
    }
