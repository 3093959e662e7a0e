"""How the CPU path cuts attention into tiles of queries and keys.

The first axis of a tile runs over pairs of batch and head of k; the heads of q that share such a head are rows of one
tile, so K and V are never repeated and dK and dV sum over the group by themselves. Tiles that no query sees are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..problem import Problem

Array = NDArray[Any]

# On one core of an AMD EPYC (2026-11-20, fp32, causal, forward + backward): tiles of 128 to 512 rows and keys
# differ by less than 10 %; short sequences take 20 % longer with 2^20 scores at a time than with 2^18.
TILE_ROWS = 256  # queries of a tile, times heads of q that share a head of k
BLOCK_M_MIN = 16  # queries of a tile at least, however large the group
BLOCK_N = 256  # keys of a tile
CHUNK_SCORES = 2**18  # scores that exist at a time: tiles of as many heads as fit share one NumPy call
CHUNK_KEYS = 2**24  # elements of K converted to the accumulator's dtype at a time: 64 MiB in fp32


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
    for start in range(max(0, int(first_key[0, 0])), min(p.seqlen_k, int(end_key[-1, 0])), BLOCK_N):
        stop = min(start + BLOCK_N, p.seqlen_k, int(end_key[-1, 0]))
        visible = None
        if start < first_key[-1, 0] or end_key[0, 0] < stop:
            key = np.arange(start, stop)
            visible = np.tile((first_key <= key) & (key < end_key), (group, 1))
        keys = slice(start, stop)
        if mask is not None:
            if mask.is_empty(rows, keys):
                continue
            seen = np.broadcast_to(mask.sees(rows, keys)[0], (group, rows.stop - rows.start, stop - start))
            seen = seen.reshape(-1, stop - start)
            visible = seen if visible is None else visible & seen
        yield keys, visible


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
    heads = max(1, min(scores, CHUNK_KEYS // max(1, p.seqlen_k * p.head_dim)))
    batch_step, head_step = max(1, heads // p.heads_k), min(heads, p.heads_k)
    for b in range(0, p.batch, batch_step):
        for h in range(0, p.heads_k, head_step):
            yield slice(b, b + batch_step), slice(h, h + head_step)


def group_heads(x: Array, p: Problem) -> Array:
    """View of a bshd array of queries as (batch, heads_k, group, seqlen_q, head_dim)."""
    return x.reshape(p.batch, p.seqlen_q, p.heads_k, p.heads_q // p.heads_k, p.head_dim).transpose(0, 2, 3, 1, 4)


def group_lse(x: Array, p: Problem) -> Array:
    """View of (batch, heads_q, seqlen_q) as (batch, heads_k, group, seqlen_q)."""
    return x.reshape(p.batch, p.heads_k, p.heads_q // p.heads_k, p.seqlen_q)


def load(x: Array, dtype: np.dtype[Any]) -> Array:
    """Keys (batch, heads_k, seqlen_k, head_dim) as contiguous (batch * heads_k, seqlen_k, head_dim)."""
    return np.ascontiguousarray(x, dtype).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def load_rows(x: Array, dtype: np.dtype[Any]) -> Array:
    """A tile (batch, heads_k, group, block_m, head_dim) as (batch * heads_k, group * block_m, head_dim)."""
    b, heads_k, group, block_m, head_dim = x.shape
    return np.ascontiguousarray(x, dtype).reshape(b * heads_k, group * block_m, head_dim)


def by_group(x: Array, p: Problem, dtype: np.dtype[Any]) -> Array:
    """What heads of q have, (heads_q,) or (batch, heads_q), as (batch * heads_k, group)."""
    return np.broadcast_to(x, (p.batch, p.heads_q)).astype(dtype).reshape(-1, p.heads_q // p.heads_k)
