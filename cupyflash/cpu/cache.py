"""Attention over a cache in NumPy: rows that are new are rotated and appended, then each sequence is dense attention.

    k_cache[row used + i] = rotated(k[i])        v_cache[row used + i] = v[i]        out = softmax(rotated(q) K^T) V

over the rows of the cache in use. A page is looked up for each row, and only rows that a query may see are read. Of
caches of 8 bits K = k_scale * k_cache, V = v_scale * v_cache, and new rows are quotients, rounded (`quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..cache.problem import CacheProblem
from ..cache.values import Part, parts, places
from ..mask_tiles import TILE
from ..operand import MOD_ARRAYS
from . import attention
from .features import Features, Place
from .quantized import dequantized, quantized

Array = NDArray[Any]
_FEATURES = "alibi_slopes", "sink", "bias", "mask"


def forward(arrays: Mapping[str, Array], p: CacheProblem) -> tuple[Array, Array]:
    """out and lse; the caches in `arrays` are written where there is a k.

    Args:
        arrays: by the names of `CACHE_ARRAYS`.
        p: shapes and options.

    Returns:
        out, shape and dtype of q but for head_dim, that of v, and lse, natural log, fp32 (fp64 for fp64). A query that
        sees no key has out 0 and lse -inf, or the sink.
    """
    q, cos, sin = arrays["q"], arrays.get("rotary_cos"), arrays.get("rotary_sin")
    out, lse = np.zeros((*q.shape[:-1], p.head_dim_v), q.dtype), np.full(p.rows, -np.inf, attention.accumulator(q))
    if "k" in arrays and any(np.may_share_memory(q, arrays[name]) for name in ("k_cache", "v_cache")):
        q = q.copy()  # before rows are written over it
    sequences = list(parts(p, arrays))
    given: dict[str, Any] = {name: arrays[name] for name in _FEATURES if name in arrays}
    read_by_mods = tuple(arrays[name] for name in MOD_ARRAYS if name in arrays)
    of = Features(by_element=True, mod_arrays=read_by_mods, **given)
    if "k" in arrays:
        _append(arrays, p, sequences)
    for part in sequences:
        b, rows = part.number, (part.rows if p.packed else part.number)
        Q = q[rows] if cos is None or sin is None else rotated(q[rows], cos, sin, part.used, p.rotary_interleaved)
        K, V = (_rows_of(x, p, arrays, part) for x in "kv")
        own = of.at(Place(slice(b, b + 1), keys=part.keys, rows=slice(0, len(Q))))
        if p.block_mask:
            shown = _shown(arrays, p, part, len(Q))
            own = replace(own, mask=shown if own.mask is None else own.mask & shown)
        found = attention.forward(Q[None], K[None], V[None], part.problem, own)
        out[rows], lse[(slice(None), rows) if p.packed else rows] = (x[0] for x in found)
    return out, lse


def _shown(arrays: Mapping[str, Array], p: CacheProblem, part: Part, queries: int) -> Array:
    """What a block mask shows to the queries of one sequence: (1, heads_q or 1, queries, keys)."""
    tiles = arrays["block_tiles"]
    own = tiles[part.number : part.number + 1] if len(tiles) > 1 else tiles
    mask = BlockMask(own, arrays["block_bits"], TILE * p.mask_tiles, TILE * p.mask_tiles)
    end = min(part.used + part.new, p.capacity)
    first = max(end - queries, 0)  # those that stand above row 0 see nothing
    found = mask.sees(slice(first, end), part.keys)
    return np.pad(found, ((0, 0), (0, 0), (queries - (end - first), 0), (0, 0)))


def _append(arrays: Mapping[str, Array], p: CacheProblem, sequences: Sequence[Part]) -> None:
    """Write the new rows of each sequence behind those in use, all or none: they are made before the first is written,
    and copied if they lie in a cache."""
    caches = [arrays[f"{name}_cache"] for name in "kv"]
    are_apart = not any(np.may_share_memory(arrays[name], x) for name in "kv" for x in caches)
    made = [_new_rows(arrays, p, part) for part in sequences]
    for at, rows in made if are_apart else [(at, [x.copy() for x in rows]) for at, rows in made]:
        for cache, x in zip(caches, rows, strict=True):
            cache.view(x.dtype)[at] = x


def _new_rows(arrays: Mapping[str, Array], p: CacheProblem, part: Part) -> tuple[tuple[Array, Array], list[Array]]:
    """Where the new rows of a sequence go in the caches, and those of k and of v."""
    new = part.rows if p.packed else part.number
    k, v = arrays["k"][new], arrays["v"][new]
    if p.stored:
        k, v = (x.astype(attention.accumulator(x)) for x in (k, v))
    if "rotary_cos" in arrays:
        k = rotated(k, arrays["rotary_cos"], arrays["rotary_sin"], part.used, p.rotary_interleaved)
    fit = min(part.new, p.capacity - part.used)
    at, rows = places(p, arrays, part.number, part.used + np.arange(fit)), [k[:fit], v[:fit]]
    if p.stored:
        rows = [quantized(x, _scales(name, p, arrays, at[0]), p.stored) for name, x in zip("kv", rows, strict=True)]
    return at, rows


def _scales(name: str, p: CacheProblem, arrays: Mapping[str, Array], slots: Array | int) -> Array:
    """Of rows that lie in these slots, (..., heads_k, 1)."""
    scale = arrays[f"{name}_scale"]
    return (scale[slots] if p.scale_dims == 2 else scale)[..., None]


def _rows_of(name: str, p: CacheProblem, arrays: Mapping[str, Array], part: Part) -> Array:
    """The keys or values of one sequence that a query may see: a view, of pages a copy; of 8 bits what they mean."""
    keys = part.keys
    cache = arrays[f"{name}_cache"]
    if keys.start == keys.stop:
        return np.empty((0, *cache.shape[2:]), arrays["q"].dtype)
    if p.page_size is None:
        slot = places(p, arrays, part.number, np.zeros(1, int))[0][0]
        found, slots = cache[slot, keys], slot
    else:
        at = places(p, arrays, part.number, np.arange(keys.start, keys.stop))
        found, slots = cache[at], at[0]
    if not p.stored:
        return found
    return dequantized(found, _scales(name, p, arrays, slots), attention.accumulator(arrays["q"]))


def rotated(x: Array, cos: Array, sin: Array, first: int, interleaved: bool) -> Array:
    """Rows (seqlen, heads, head_dim) from position `first` on, the first columns turned by rotary position embedding.

    Each pair (a, b) of columns becomes (a cos - b sin, a sin + b cos) (Su et al. 2021), in fp32, fp64 for fp64.
    Positions that the tables do not have are not turned.
    """
    half, known = cos.shape[1], min(max(len(cos) - first, 0), len(x))
    accumulate = attention.accumulator(x)
    c, s = (t[first : first + known, None].astype(accumulate) for t in (cos, sin))
    result = x.copy()
    pairs = [slice(0, 2 * half, 2), slice(1, 2 * half, 2)] if interleaved else [slice(half), slice(half, 2 * half)]
    a, b = (x[:known, :, columns].astype(accumulate) for columns in pairs)
    with np.errstate(all="ignore"):  # as the kernels do with NaN and inf
        result[:known, :, pairs[0]] = a * c - b * s
        result[:known, :, pairs[1]] = a * s + b * c
    return result
