"""Block masks: which keys each query sees, as `attention(..., block_mask=)` and `attention_varlen` take it.

Each function here makes a `BlockMask`: tiles of 64 queries by 64 keys that are empty, full, or seen in part. Empty ones
cost nothing. Masks of the same lengths combine, ``a & b`` and ``a | b``; ``causal`` and ``window`` of the call hide
further keys. Query i stands at key ``i + seqlen_k - seqlen_q`` (aligned at the bottom right, as there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays.vetting import vet_type
from .block_mask import BlockMask as BlockMask
from .errors import ArgumentError
from .mask_arrays import from_torch as from_torch
from .mask_tiles import EMPTY as _EMPTY
from .mask_tiles import FULL as _FULL
from .mask_tiles import TILE as _TILE
from .mask_tiles import no_bits
from .options import whole
from .problem import MAX_SEQLEN

__all__ = [
    "BlockMask", "bigbird", "butterfly", "causal_document", "from_blocks", "from_dense", "from_torch", "global_local",
    "local", "prefix", "strided",
]  # fmt: skip
Array = NDArray[Any]


def from_dense(mask: Any) -> BlockMask:
    """The mask of an array of booleans that has all of them.

    Args:
        mask: ``(..., seqlen_q, seqlen_k)``, True where a query sees a key, in host memory; of 4 dimensions the first
            two are batch and heads of q, of 3 the first is the heads; lengths of 1 hold for all.
    """
    x = _array("mask", mask)
    if x.dtype != bool or not 2 <= x.ndim <= 4:
        raise ArgumentError(f"mask: expected booleans of 2 to 4 dimensions, got {x.dtype} of shape {x.shape}")
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    shape: tuple[int, ...] = x.shape
    batch, heads, seqlen_q, seqlen_k = shape
    _lengths(seqlen_q, seqlen_k)
    return BlockMask.from_stripes((batch, heads, seqlen_q, seqlen_k), lambda rows: x[:, :, rows])


def from_blocks(
    blocks: Any, block_size: int | tuple[int, int], seqlen_q: int, seqlen_k: int | None = None
) -> BlockMask:
    """The mask of blocks that are seen whole or not at all.

    Args:
        blocks: booleans, ``(..., q_blocks, k_blocks)`` with the first dimensions as in `from_dense`.
        block_size: rows and keys of a block, any two numbers; the last blocks may be cut off by the lengths.
        seqlen_q, seqlen_k: how many queries and keys there are; as many keys as queries by default.
    """
    seqlen_q, seqlen_k = _lengths(seqlen_q, seqlen_k)
    sizes = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2:
        raise ArgumentError(f"block_size: expected an integer, or one for rows and one for keys, got {sizes!r:.60}")
    room = (max(_TILE, -(-n // _TILE) * _TILE) for n in (seqlen_q, seqlen_k))  # of one block that has all
    rows, keys = (min(_whole("block_size", n, 1), most) for n, most in zip(sizes, room, strict=True))
    x = _array("blocks", blocks)
    wanted = -(-seqlen_q // rows), -(-seqlen_k // keys)
    if x.dtype != bool or not 2 <= x.ndim <= 4 or x.shape[-2:] != wanted:
        raise ArgumentError(
            f"blocks: expected booleans (..., {wanted[0]}, {wanted[1]}) for {seqlen_q} queries and {seqlen_k} keys in "
            f"blocks of {rows} x {keys}, got {x.dtype} of shape {x.shape}"
        )
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if rows % _TILE or keys % _TILE:
        of_key = np.arange(seqlen_k) // keys
        batch, heads, *_ = tuple[int, ...](x.shape)
        shape = batch, heads, seqlen_q, seqlen_k
        return BlockMask.from_stripes(shape, lambda r: x[:, :, np.arange(r.start, r.stop) // rows][..., of_key])
    tiles = np.repeat(np.repeat(np.where(x, _FULL, _EMPTY), rows // _TILE, 2), keys // _TILE, 3).astype(np.int32)
    cut = tiles[:, :, : -(-seqlen_q // _TILE), : -(-seqlen_k // _TILE)]
    return BlockMask(np.ascontiguousarray(cut), no_bits(), seqlen_q, seqlen_k).compact()


def local(seqlen_q: int, seqlen_k: int | None = None, *, left: int | None, right: int | None = 0) -> BlockMask:
    """Sliding window: query i sees the keys up to `left` before and `right` behind its own position, all for None."""
    before, behind = (
        MAX_SEQLEN if n is None else _within(_whole(name, n, None)) for name, n in (("left", left), ("right", right))
    )
    if before + behind < 0:
        raise ArgumentError(
            f"left: expected left + right >= 0, got ({left}, {right}), which hides every key; write None, not -1, for "
            "an unbounded side"
        )
    return _of_pairs(seqlen_q, seqlen_k, lambda i, j: (j >= i - before) & (j <= i + behind))


def global_local(
    seqlen_q: int, seqlen_k: int | None = None, *, window: int, global_tokens: int | Sequence[int]
) -> BlockMask:
    """Longformer (Beltagy et al. 2020): `window` keys to each side, and tokens that see all and that all see.

    Args:
        global_tokens: their positions, or how many they are, from the first on.
    """
    (seqlen_q, seqlen_k), window = _lengths(seqlen_q, seqlen_k), _within(_whole("window", window, 0))
    is_global, tokens = np.zeros(max(1, seqlen_k), bool), _array("global_tokens", global_tokens)
    if tokens.ndim == 0:
        is_global[: _whole("global_tokens", global_tokens, 0)] = True
    elif tokens.size:
        if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= seqlen_k:
            raise ArgumentError(
                f"global_tokens: expected how many, or positions from 0 to {seqlen_k - 1}, got {global_tokens!r:.60}"
            )
        is_global[tokens] = True

    def sees(i: Array, j: Array) -> Array:
        position = np.clip(i, 0, max(0, seqlen_k - 1))
        return (abs(i - j) <= window) | is_global[j] | (is_global[position] & (i >= 0))

    return _of_pairs(seqlen_q, seqlen_k, sees)


def bigbird(
    seqlen: int, *, block: int = 64, window_blocks: int = 3, global_blocks: int = 2, random_blocks: int = 3,
    heads: int = 1, seed: int = 0,
) -> BlockMask:  # fmt: skip
    """BigBird (Zaheer et al. 2020), by blocks: global ones, a window, and some drawn at random for each head.

    Query block i sees the first `global_blocks`, the `window_blocks` around itself, and `random_blocks` of the others,
    drawn without replacement (all, where there are fewer). The first `global_blocks` see everything.
    """
    seqlen, heads, rng = _length(seqlen), _whole("heads", heads, 1), np.random.default_rng(_whole("seed", seed, 0))
    n = -(-seqlen // _whole("block", block, 1))
    global_blocks, random_blocks = _whole("global_blocks", global_blocks, 0), _whole("random_blocks", random_blocks, 0)
    if heads > MAX_SEQLEN:
        raise ArgumentError(f"heads: expected at most {MAX_SEQLEN}, got {heads}")
    if (window_blocks := _whole("window_blocks", window_blocks, 1)) % 2 == 0:
        raise ArgumentError(f"window_blocks: expected an odd number, with the block itself, got {window_blocks}")
    i = np.arange(n)
    fixed = (abs(i[:, None] - i) <= window_blocks // 2) | (i < global_blocks) | (i[:, None] < global_blocks)
    seen = np.repeat(fixed[None], heads, 0)
    for h in range(heads):
        for row in range(n):
            others = np.flatnonzero(~fixed[row])
            seen[h, row, rng.choice(others, min(random_blocks, len(others)), replace=False)] = True
    return from_blocks(seen, block, seqlen)


def strided(seqlen: int, *, stride: int, window: int | None = None) -> BlockMask:
    """Sparse Transformer (Child et al. 2019), causal: the last `window` keys, by default `stride` of them, and each key
    a multiple of `stride` before."""
    stride = _within(_whole("stride", stride, 1))
    reach = stride if window is None else _within(_whole("window", window, 0))
    return _of_pairs(_length(seqlen), None, lambda i, j: (j <= i) & ((i - j < reach) | ((i - j) % stride == 0)))


def butterfly(seqlen: int, *, block: int = 128) -> BlockMask:
    """The block-sparse pattern of FlashAttention (Dao et al. 2022): a flat butterfly (Pixelated Butterfly, 2021).

    Block i sees itself and the blocks whose number differs from i in one bit: log2 of them in each row.
    """
    seqlen = _length(seqlen)
    i = np.arange(-(-seqlen // _within(_whole("block", block, 1))))
    differ = i[:, None] ^ i
    return from_blocks((differ & (differ - 1)) == 0, block, seqlen)


def causal_document(document_ids: Any) -> BlockMask:
    """Documents one behind the other: a query sees the keys of its own document, up to itself.

    Args:
        document_ids: ``(seqlen,)`` or ``(batch, seqlen)`` integers in host memory, which document each position is of.
    """
    ids = np.atleast_2d(_array("document_ids", document_ids))
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"document_ids: expected integers of 1 or 2 dimensions, got {ids.dtype} of shape {ids.shape}"
        )
    j = np.arange(_length(ids.shape[1]))

    def stripe(rows: slice) -> Array:
        of_own: Array = ids[:, None, rows, None] == ids[:, None, None, :]
        return of_own & (j <= np.arange(rows.start, rows.stop)[:, None])

    return BlockMask.from_stripes((len(ids), 1, len(j), len(j)), stripe)


def prefix(seqlen_q: int, seqlen_k: int | None = None, *, length: int | Sequence[int]) -> BlockMask:
    """Prefix LM: everybody sees the first `length` keys, of each sequence if there are several, and behind these the
    mask is causal."""
    lengths = np.atleast_1d(_array("length", length))
    if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise ArgumentError(f"length: expected a number of keys from 0 on, or one a sequence, got {length!r:.60}")
    of_each = np.minimum(lengths.astype(np.uint64), MAX_SEQLEN).astype(np.int64)[:, None, None, None]
    return _of_pairs(seqlen_q, seqlen_k, lambda i, j: (j < of_each) | (j <= i), batch=len(lengths))


def _lengths(seqlen_q: Any, seqlen_k: Any) -> tuple[int, int]:
    """Both as integers of Python's; None: as many keys as queries."""
    queries = _length(seqlen_q, "seqlen_q")
    return queries, queries if seqlen_k is None else _length(seqlen_k, "seqlen_k")


def _length(x: Any, name: str = "seqlen") -> int:
    n = _whole(name, x, None)
    if not 0 <= n <= MAX_SEQLEN:
        raise ArgumentError(f"{name}: expected a length from 0 to {MAX_SEQLEN}, got {n}")
    return n


def _array(name: str, x: Any) -> Array:
    """What an array or a list in host memory holds; rows of a list must be equally long."""
    vet_type(name, type(x), np.ndarray, ())
    try:
        return np.asarray(x)
    except ValueError:
        raise ArgumentError(f"{name}: expected as many elements of each sequence, got {x!r:.60}") from None
    except (TypeError, RuntimeError) as e:  # of tensors elsewhere, or of another form
        raise ArgumentError(f"{name}: expected a plain array in host memory; {e}") from e


def _within(n: int) -> int:
    """A number of keys as far as sequences can have them."""
    return max(-MAX_SEQLEN, min(n, MAX_SEQLEN))


def _whole(name: str, x: Any, least: int | None) -> int:
    """An integer, of at least so much."""
    wanted = "an integer" if least is None else f"an integer from {least} on"
    n = whole(name, x, wanted)
    if least is not None and n < least:
        raise ArgumentError(f"{name}: expected {wanted}, got {n}")
    return n


def _of_pairs(seqlen_q: int, seqlen_k: int | None, sees: Callable[[Array, Array], Array], batch: int = 1) -> BlockMask:
    """That of a function of the queries' positions (a column) and the keys'."""
    queries, keys = _lengths(seqlen_q, seqlen_k)
    j = np.arange(keys)
    return BlockMask.from_stripes(
        (batch, 1, queries, keys), lambda rows: sees(np.arange(rows.start, rows.stop)[:, None] + (keys - queries), j)
    )
