"""Whether arrays of a call have the shapes that they must have, and what is said where one has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bias import MAX_SEQLEN, Bias, own_of, own_of_mask
from ..errors import ArgumentError
from ..operand import MASK_TILE, broadcasts_to, has_lengths
from .arrays import BY_NAME, MAY_LACK, CacheArray, length_of
from .problem import CacheProblem

Shape = tuple[int, ...]


def check_dims(name: str, shape: Shape, given: Mapping[str, Any]) -> None:
    """Refuse an array that has not as many dimensions as it must, beside those that are given."""
    array, packed = BY_NAME[name], "cu_seqlens_q" in given
    dims = array.packed if packed else array.dims
    if name in MAY_LACK:
        fits = len(shape) in (1, 2)
    else:
        fits = array.broadcasts or array.free or len(shape) == len(dims)
    if not fits:
        words = "pages, page_size" if "block_table" in given else "batch of the cache, capacity"
        shown = ", ".join(dims).replace("slots, slot_rows", words).replace("seqlen", "total" if packed else "seqlen")
        shown = shown.replace("slots", words.split(", ")[0])
        more = f" or ({dims[-1]},)" if name in MAY_LACK else ""
        raise ArgumentError(f"{name}: expected shape ({shown}){more}, got {tuple(shape)}")


def check_shape(array: CacheArray, shape: Shape, p: CacheProblem) -> None:
    """Refuse an array that has not the shape that the problem gives it."""
    dims = array.packed if p.packed else array.dims
    wanted = tuple(length_of(d, p) for d in dims)
    if array.free:
        return
    if array.broadcasts:
        if not broadcasts_to(shape, wanted):
            words = f"({', '.join(dims)}) = {wanted}".replace(str(MAX_SEQLEN), "any")
            raise ArgumentError(f"{array.name}: expected a shape that broadcasts to {words}, got {tuple(shape)}")
        return
    if has_lengths(shape, wanted, dims, array.single) or (array.name in MAY_LACK and tuple(shape) == wanted[1:]):
        return
    words = ", ".join(dims) + ("," if len(dims) == 1 else "")
    words = words.replace("seqlen", "total") if p.packed else words
    more = f" or ({dims[-1]},) = {wanted[1:]}" if array.name in MAY_LACK else ""
    raise ArgumentError(f"{array.name}: expected shape ({words}) = {wanted}{more}, got {tuple(shape)}")


def mask_tiles_of(shapes: Mapping[str, Shape], capacity: int) -> int:
    """Of a block mask, which must have room for all rows of a sequence; 0 without one."""
    if "block_tiles" not in shapes:
        return 0
    tiles = shapes["block_tiles"][-1]
    if tiles * MASK_TILE < capacity:
        raise ArgumentError(f"block_tiles: expected tiles for at least {capacity} rows, got {tiles} of {MASK_TILE}")
    return tiles


def bias_of(shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> Bias | None:
    """What is added to scores."""
    if "bias" in shapes:
        return Bias(dtypes["bias"], own_of(shapes["bias"]), own_of_mask(shapes["mask"]) if "mask" in shapes else None)
    return Bias("bool", own_of_mask(shapes["mask"])) if "mask" in shapes else None
