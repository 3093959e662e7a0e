"""Biases of the named cases, in a few words: along which of batch, heads, queries and keys they have elements of
their own, by the letters b, h, q, k, and then, in any order,

    fp32     not of q's dtype, unless that is fp64
    bool     it is a mask, which hides as "hides" does
    hides    -inf for a third of the elements, and for all of some rows
    tiles    of a mask: a third of its tiles of 64 by 64 hide all, and a third nothing
    all      of a mask: it shows every key
    none     of a mask: it hides every key
    masks    the least number of the dtype (of fp32, if that is fp64) in place of -inf, as models write masks
    far      also elements of hundreds, so that few keys decide a row
    turned   the last two dimensions lie in the other order: no stride is 1
    shifted  it begins one element behind an allocation
    whole    expanded to all four dimensions, with strides of 0

As in "hqk fp32 hides"; "hqk + bk bool" are a bias and a mask beside it. First dimensions without elements of their own
are left out of the shape; "-" has none. Packed, they have room for the longest sequence and a little more.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..operand import MASK_TILE
from ..problem import MAX_SEQLEN, Bias, Problem

Array = NDArray[Any]
WORDS = ("fp32", "bool", "hides", "tiles", "all", "none", "masks", "far", "turned", "shifted", "whole")


def form_of(words: str, dtype: str) -> Bias | None:
    """What a problem knows of a bias beside arrays of this dtype; None: there is none."""
    if not words:
        return None
    words, _, beside = words.partition(" + ")
    dims, *rest = words.split()
    assert set(dims) <= set("bhqk-"), words
    assert set(rest) <= set(WORDS), words
    kind = "bool" if "bool" in rest else "fp32" if "fp32" in rest and dtype != "fp64" else dtype
    is_whole = "whole" in rest and kind != "bool"  # whose strides of 0 say more (Bias.of)
    of_mask = form_of(beside, dtype)
    return Bias(kind, tuple(is_whole or d in dims for d in "bhqk"), None if of_mask is None else of_mask.own)


def room_of(words: str, room: tuple[int, int], has_tiles: bool = False) -> tuple[int, int]:
    """How many queries and keys of each of several sequences what these words say has, where `room` is made for so
    many; `has_tiles`: and a block mask."""
    dims = {d for part in words.split(" + ") if part for d in ("qk" if "whole" in part else part.split()[0])}
    others = [-(-n // MASK_TILE) * MASK_TILE if has_tiles else MAX_SEQLEN for n in room]
    queries, keys = (n if d in dims else other for d, n, other in zip("qk", room, others, strict=True))
    return queries, keys


def draw_added(
    words: str, rng: np.random.Generator, p: Problem, dtype: np.dtype[Any]
) -> tuple[Array | None, Array | None]:
    """A bias and a mask of a problem, or None; `dtype`: that of q."""
    drawn = [draw_bias(each, rng, p, dtype) for each in words.split(" + ") if each]
    is_mask = [x.dtype == bool for x in drawn]
    assert sorted(is_mask) == is_mask, words
    bias = drawn[0] if drawn and not is_mask[0] else None
    return bias, drawn[-1] if drawn and is_mask[-1] else None


def draw_bias(words: str, rng: np.random.Generator, p: Problem, dtype: np.dtype[Any]) -> Array:
    """One of a problem; `dtype`: that of q."""
    dims, *rest = words.split()
    lengths = (p.max_seqlen_q, p.max_seqlen_k) if p.packed else (p.seqlen_q, p.seqlen_k)
    whole = p.batch, p.heads_q, *lengths
    shape = [n if d in dims else 1 for d, n in zip("bhqk", whole, strict=True)]
    x = rng.standard_normal(shape)
    if "far" in rest:
        x *= np.where(rng.random(shape) < 0.2, 100, 1)
    single = np.dtype(np.float32)
    dtype = single if "fp32" in rest and dtype.itemsize < 8 else dtype
    if {"hides", "masks", "bool"} & set(rest):
        least = -np.inf if "masks" not in rest else float(ml_dtypes.finfo(single if dtype.itemsize == 8 else dtype).min)
        x[rng.random(shape) < 0.3] = least
        if x.shape[2] > 1:
            x[:, :, 3::7] = least
    x = _placed(_shown(rest, rng, x) if "bool" in rest else x.astype(dtype), rest)
    if "whole" in rest:
        return np.broadcast_to(x, whole)
    while x.ndim and x.shape[0] == 1 and dims[:1] != "bhqk"[4 - x.ndim]:
        x = x.reshape(x.shape[1:])
    return x


def _shown(rest: list[str], rng: np.random.Generator, x: Array) -> Array:
    """What a mask shows that hides where a bias is -inf."""
    if "all" in rest or "none" in rest:
        return np.full(x.shape, "all" in rest)
    shown: Array = ~np.isneginf(x)
    if "tiles" in rest:
        kinds = rng.integers(0, 3, (*x.shape[:2], *(-(-n // MASK_TILE) for n in x.shape[2:])))
        whole = np.repeat(np.repeat(kinds, MASK_TILE, 2), MASK_TILE, 3)[:, :, : x.shape[2], : x.shape[3]]
        shown = np.where(whole == 0, False, np.where(whole == 1, True, shown))
    return shown


def _placed(x: Array, rest: list[str]) -> Array:
    """The same elsewhere in memory."""
    if "turned" in rest:
        x = np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)
    if "shifted" in rest:
        buffer = np.full(x.size + 1, np.nan).astype(x.dtype)
        buffer[1:] = x.ravel()
        x = buffer[1:].reshape(x.shape)
    return x
