"""How the CPU path cuts attention into tiles of queries and keys.

The first axis of a tile runs over pairs of batch and head of k; the heads of q that share such a head are rows of one
tile, so K and V are never repeated and dK and dV sum over the group by themselves. Tiles that no query sees are left
out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..problem import Problem

Array = NDArray[Any]

# On an AMD EPYC with 1 MiB of L2 a core (2026-11-23, fp32, NumPy 2.4 with OpenBLAS 0.3.31): tiles of 2^15 and 2^16
# scores are equally fast, with 2^17 short sequences take 1.2 (forward) to 1.6 (backward) of the time. Fewer rows
# compute less of a causal mask's diagonal in vain; more keys make reductions along a row cheaper.
TILE_ROWS = 128  # queries of a tile, times heads of q that share a head of k
BLOCK_M_MIN = 16  # queries of a tile at least, however large the group
BLOCK_N = 512  # keys of a tile
CHUNK_SCORES = 2**16  # scores that exist at a time: tiles of as many heads as fit share one NumPy call
CHUNK_KEYS = 2**24  # elements of K converted to the accumulator's dtype at a time: 64 MiB in fp32
CUT = 64  # keys that all rows of a tile see, from which on they have tiles of their own, without a mask
TRANSPOSE_ROWS = 256  # queries of a sequence from which on a transposed copy of its keys pays


def query_tiles(p: Problem) -> Iterator[slice]:
    block_m = max(BLOCK_M_MIN, TILE_ROWS * p.heads_k // p.heads_q) if p.heads_q else TILE_ROWS
    for first in range(0, p.seqlen_q, block_m):
        yield slice(first, min(first + block_m, p.seqlen_q))


def key_tiles(rows: slice, p: Problem, mask: BlockMask | None = None) -> Iterator[tuple[slice, Array | None]]:
    """The tiles of keys that a tile of queries sees at least in part, and which of them each row sees (None: all).

    The rows of the mask repeat for each head of the group, unless each has a block mask of its own.
    """
    group = p.heads_q // p.heads_k
    first_key, end_key = bounds(np.arange(rows.start, rows.stop)[:, None], p)
    for keys in _key_slices(first_key, end_key, p):
        start, stop = keys.start, keys.stop
        visible = None
        if start < first_key[-1, 0] or end_key[0, 0] < stop:
            left, right = (None if bound is None else int(edge[0, 0]) - start
                           for bound, edge in zip(p.window, (first_key, end_key), strict=True))  # fmt: skip
            visible = _band(rows.stop - rows.start, stop - start, left, right, group)
        if mask is not None:
            if mask.is_empty(rows, keys):
                continue
            seen = np.broadcast_to(mask.sees(rows, keys)[0], (group, rows.stop - rows.start, stop - start))
            seen = seen.reshape(-1, stop - start)
            visible = seen if visible is None else visible & seen
        yield keys, visible


def _key_slices(first_key: Array, end_key: Array, p: Problem) -> Iterator[slice]:
    """The keys that any row sees; those that all rows see are cut off from the others, whose tiles need a mask."""
    first, end = max(0, int(first_key[0, 0])), min(p.seqlen_k, int(end_key[-1, 0]))
    whole, partial = max(first, int(first_key[-1, 0])), min(end, int(end_key[0, 0]))
    cuts = (first, whole, partial, end) if partial - whole >= CUT else (first, end)
    for a, b in pairwise(cuts):
        for start in range(a, b, BLOCK_N):
            yield slice(start, min(start + BLOCK_N, b))


@functools.lru_cache(maxsize=16)
def _band(m: int, n: int, left: int | None, right: int | None, group: int) -> Array:
    """Whether row i of m sees key j of n: left + i <= j < right + i; once for each head of the group.

    Not to be written: the tiles of a window share a few of them, 64 KiB each up to 8 heads a group.
    """
    row, key = np.arange(m, dtype=np.int32)[:, None], np.arange(n, dtype=np.int32)
    band = np.ones((m, n), bool)
    if left is not None:
        band &= key >= row + left
    if right is not None:
        band &= key < row + right
    found = np.tile(band, (group, 1))
    found.flags.writeable = False
    return found


def sees_a_key(rows: slice, p: Problem, mask: BlockMask | None = None) -> Array:
    """Which rows of a tile of queries see any key."""
    if mask is not None:
        sees = np.zeros((rows.stop - rows.start) * (p.heads_q // p.heads_k), bool)
        for _, visible in key_tiles(rows, p, mask):
            sees |= True if visible is None else visible.any(axis=1)
        return sees
    first_key, end_key = bounds(np.arange(rows.start, rows.stop), p)
    sees = np.maximum(first_key, 0) < np.minimum(end_key, p.seqlen_k)
    return np.tile(sees, p.heads_q // p.heads_k)


def bounds(query: Array, p: Problem) -> tuple[Array, Array]:
    """First visible key and the one behind the last, as `Problem.visible` but not clipped to the keys there are.

    Both grow with the query: the first and the last row of a tile bound what it sees.
    """
    left, right = p.window
    own = query + p.diagonal
    first = np.zeros_like(own) if left is None else own - left
    end = np.full_like(own, p.seqlen_k) if right is None else own + right + 1
    return first, end


def chunks(p: Problem) -> Iterator[tuple[slice, slice]]:
    """Ranges of batch and of heads of k whose tiles are computed together."""
    if not (p.batch and p.heads_q):
        return
    rows = next((t.stop - t.start for t in query_tiles(p)), 1) * (p.heads_q // p.heads_k)
    scores = CHUNK_SCORES // (rows * max(1, min(p.seqlen_k, BLOCK_N)))
    heads = max(1, min(scores, CHUNK_KEYS // max(1, p.seqlen_k * max(p.widths))))
    batch_step, head_step = max(1, heads // p.heads_k), min(heads, p.heads_k)
    for b in range(0, p.batch, batch_step):
        for h in range(0, p.heads_k, head_step):
            yield slice(b, b + batch_step), slice(h, h + head_step)


def group_heads(x: Array, p: Problem) -> Array:
    """View of a bshd array of queries as (batch, heads_k, group, seqlen_q, its head_dim)."""
    return x.reshape(*x.shape[:2], p.heads_k, p.heads_q // p.heads_k, x.shape[3]).transpose(0, 2, 3, 1, 4)


def group_lse(x: Array, p: Problem) -> Array:
    """View of (batch, heads_q, seqlen_q) as (batch, heads_k, group, seqlen_q)."""
    return x.reshape(p.batch, p.heads_k, p.heads_q // p.heads_k, p.seqlen_q)


def load(x: Array, dtype: np.dtype[Any]) -> Array:
    """Keys (batch, heads_k, seqlen_k, head_dim) as contiguous (batch * heads_k, seqlen_k, head_dim)."""
    return np.ascontiguousarray(x, dtype).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def transposed(X: Array, p: Problem) -> Array:
    """Keys as (batch * heads_k, head_dim, seqlen_k), which BLAS reads faster as a copy."""
    view = X.swapaxes(1, 2)
    return np.ascontiguousarray(view) if p.seqlen_q >= TRANSPOSE_ROWS else view


def load_rows(x: Array, dtype: np.dtype[Any]) -> Array:
    """A tile (batch, heads_k, group, block_m, head_dim) as (batch * heads_k, group * block_m, head_dim)."""
    b, heads_k, group, block_m, head_dim = x.shape
    return np.ascontiguousarray(x, dtype).reshape(b * heads_k, group * block_m, head_dim)


def by_group(x: Array, p: Problem, dtype: np.dtype[Any]) -> Array:
    """What heads of q have, (heads_q,) or (batch, heads_q), as (batch * heads_k, group)."""
    return np.broadcast_to(x, (p.batch, p.heads_q)).astype(dtype).reshape(-1, p.heads_q // p.heads_k)


def scores_of(p: Problem) -> int:
    """How many scores all heads have at most; of a window with two bounds, those between them."""
    left, right = p.window
    seen = p.seqlen_k if left is None or right is None else min(p.seqlen_k, left + right + 1)
    return p.batch * p.heads_q * p.seqlen_q * seen
