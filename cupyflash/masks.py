"""Block masks: which keys each query sees, as `attention(..., block_mask=)` and `attention_varlen` take it.

Each function here makes a `BlockMask`: tiles of 64 queries by 64 keys that are empty, full, or seen in part. Empty ones
cost nothing. Masks of the same lengths combine, ``a & b`` and ``a | b``; ``causal`` and ``window`` of the call hide
further keys. Query i stands at key ``i + seqlen_k - seqlen_q`` (aligned at the bottom right, as there).
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays.placed import placed
from .block_mask import EMPTY as _EMPTY
from .block_mask import FULL as _FULL
from .block_mask import TILE as _TILE
from .block_mask import BlockMask as BlockMask
from .block_mask import no_bits
from .errors import ArgumentError
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
    x = np.asarray(mask)
    if x.dtype != bool or not 2 <= x.ndim <= 4:
        raise ArgumentError(f"mask: expected booleans of 2 to 4 dimensions, got {x.dtype} of shape {x.shape}")
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    shape: tuple[int, ...] = x.shape
    batch, heads, seqlen_q, seqlen_k = shape
    _check_lengths(seqlen_q, seqlen_k)
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
    seqlen_k = _check_lengths(seqlen_q, seqlen_k)
    rows, keys = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    x = np.asarray(blocks)
    wanted = -(-seqlen_q // max(1, rows)), -(-seqlen_k // max(1, keys))
    if x.dtype != bool or not 2 <= x.ndim <= 4 or x.shape[-2:] != wanted or min(rows, keys) < 1:
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
    return BlockMask(np.ascontiguousarray(cut), no_bits(), seqlen_q, seqlen_k)


def local(seqlen_q: int, seqlen_k: int | None = None, *, left: int, right: int = 0) -> BlockMask:
    """Sliding window: query i sees the keys up to `left` before and `right` behind its own position."""
    return _of_pairs(seqlen_q, seqlen_k, lambda i, j: (j >= i - left) & (j <= i + right))


def global_local(
    seqlen_q: int, seqlen_k: int | None = None, *, window: int, global_tokens: int | Sequence[int]
) -> BlockMask:
    """Longformer (Beltagy et al. 2020): `window` keys to each side, and tokens that see all and that all see.

    Args:
        global_tokens: their positions, or how many they are, from the first on.
    """
    seqlen_k = _check_lengths(seqlen_q, seqlen_k)
    is_global = np.zeros(seqlen_k, bool)
    is_global[slice(global_tokens) if isinstance(global_tokens, int) else np.asarray(global_tokens, int)] = True

    def sees(i: Array, j: Array) -> Array:
        position = np.clip(i, 0, seqlen_k - 1)
        return (abs(i - j) <= window) | is_global[j] | (is_global[position] & (i >= 0))

    return _of_pairs(seqlen_q, seqlen_k, sees)


def bigbird(
    seqlen: int, *, block: int = 64, window_blocks: int = 3, global_blocks: int = 2, random_blocks: int = 3,
    heads: int = 1, seed: int = 0,
) -> BlockMask:  # fmt: skip
    """BigBird (Zaheer et al. 2020), by blocks: global ones, a window, and some drawn at random, for each head anew.

    Query block i sees the first `global_blocks`, the `window_blocks` around itself, and `random_blocks` of the others,
    drawn without replacement (all, where there are fewer). The first `global_blocks` see everything.
    """
    n, half, rng = -(-_check_lengths(seqlen, None) // block), window_blocks // 2, np.random.default_rng(seed)
    i = np.arange(n)
    fixed = (abs(i[:, None] - i) <= half) | (i < global_blocks) | (i[:, None] < global_blocks)
    if window_blocks % 2 == 0 or window_blocks < 0:
        raise ArgumentError(f"window_blocks: expected an odd number, with the block itself, got {window_blocks}")
    seen = np.repeat(fixed[None], heads, 0)
    for h in range(heads):
        for row in range(n):
            others = np.flatnonzero(~fixed[row])
            seen[h, row, rng.choice(others, min(random_blocks, len(others)), replace=False)] = True
    return from_blocks(seen, block, seqlen)


def strided(seqlen: int, *, stride: int, window: int | None = None) -> BlockMask:
    """Sparse Transformer (Child et al. 2019), causal: the last `window` keys, by default `stride` of them, and each key
    a multiple of `stride` before."""
    reach = stride if window is None else window
    return _of_pairs(seqlen, None, lambda i, j: (j <= i) & ((i - j < reach) | ((i - j) % stride == 0)))


def butterfly(seqlen: int, *, block: int = 128) -> BlockMask:
    """The block-sparse pattern of FlashAttention (Dao et al. 2022): a flat butterfly (Pixelated Butterfly, 2021).

    Block i sees itself and the blocks whose number differs from i in one bit: log2 of them in each row.
    """
    i = np.arange(-(-_check_lengths(seqlen, None) // block))
    differ = i[:, None] ^ i
    return from_blocks((differ & (differ - 1)) == 0, block, seqlen)


def causal_document(document_ids: Any) -> BlockMask:
    """Documents one behind the other: a query sees the keys of its own document, up to itself.

    Args:
        document_ids: ``(seqlen,)`` or ``(batch, seqlen)`` integers in host memory, which document each position is of.
    """
    ids = np.atleast_2d(np.asarray(document_ids))
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"document_ids: expected integers of 1 or 2 dimensions, got {ids.dtype} of shape {ids.shape}"
        )
    j = np.arange(_check_lengths(ids.shape[1], None))

    def stripe(rows: slice) -> Array:
        of_own: Array = ids[:, None, rows, None] == ids[:, None, None, :]
        return of_own & (j <= np.arange(rows.start, rows.stop)[:, None])

    return BlockMask.from_stripes((len(ids), 1, len(j), len(j)), stripe)


def prefix(seqlen_q: int, seqlen_k: int | None = None, *, length: int | Sequence[int]) -> BlockMask:
    """Prefix LM: everybody sees the first `length` keys, of each sequence if there are several, and behind these the
    mask is causal."""
    lengths = np.atleast_1d(np.asarray(length))[:, None, None, None]
    return _of_pairs(seqlen_q, seqlen_k, lambda i, j: (j < lengths) | (j <= i), batch=len(lengths))


def from_torch(mask: Any) -> BlockMask:
    """That of a `torch.nn.attention.flex_attention.BlockMask`; its mask_mod is asked once, in its partial blocks.

    `attention` takes such masks as they are, and converts each once. Converting waits for the GPU that it is on.
    """
    if mask not in _converted:
        import cupyflash.torch.masks

        _converted[mask] = cupyflash.torch.masks.convert(mask)
    return _converted[mask]


_converted: weakref.WeakKeyDictionary[Any, BlockMask] = weakref.WeakKeyDictionary()


def arrays_of(block_mask: Any, arrays: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """The arrays of a mask beside q and k, in their library and on their device, by the names of the table of arrays.

    Raises:
        ArgumentError: it is no mask, or one of other lengths; or, beside packed sequences, one of none.
    """
    mask = block_mask if isinstance(block_mask, BlockMask) else _other(block_mask)
    q, k, axis, packed = arrays["q"], arrays["k"], 1 if layout == "bshd" else 2, "cu_seqlens_q" in arrays
    batch = math.prod(np.shape(arrays["cu_seqlens_q"])) - 1 if packed else q.shape[0]
    if not packed and len(q.shape) == len(k.shape) == 4:  # else checks say more
        lengths = q.shape[axis], k.shape[axis]
        if lengths != (mask.seqlen_q, mask.seqlen_k):
            raise ArgumentError(
                f"block_mask: expected one of {lengths[0]} queries and {lengths[1]} keys, as q and k have, got one of "
                f"{mask.seqlen_q} and {mask.seqlen_k}"
            )
    for i, (name, n) in enumerate((("batch", batch), ("heads_q", q.shape[3 - axis - packed]))):
        if mask.tiles.shape[i] not in (1, n):
            raise ArgumentError(f"block_mask: expected {name} of 1 or {n}, as q has, got {mask.tiles.shape[i]}")
    if packed and mask.tiles.size == 0:
        raise ArgumentError(
            "block_mask: expected room for the longest sequence, at least 1 query and 1 key, got a mask of "
            f"{mask.seqlen_q} and {mask.seqlen_k}"
        )
    if packed:  # sequences may end anywhere in its last tiles
        mask = mask.kept["padded"] if "padded" in mask.kept else mask.kept.setdefault("padded", mask.padded())
    return {"block_tiles": placed(mask.tiles, q, mask.kept), "block_bits": placed(mask.bits, q, mask.kept)}


def _other(mask: Any) -> BlockMask:
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(mask, flex.BlockMask):
        return from_torch(mask)
    raise ArgumentError(
        f"block_mask: expected a cupyflash.BlockMask, of cupyflash.masks, or one of torch's flex_attention, got a "
        f"{type(mask).__module__}.{type(mask).__qualname__}; masks.from_dense takes booleans"
    )


def _check_lengths(seqlen_q: int, seqlen_k: int | None) -> int:
    """seqlen_k, or seqlen_q in its place."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    for name, n in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if not 0 <= n <= MAX_SEQLEN:
            raise ArgumentError(f"{name}: expected a length from 0 to {MAX_SEQLEN}, got {n}")
    return seqlen_k


def _of_pairs(seqlen_q: int, seqlen_k: int | None, sees: Callable[[Array, Array], Array], batch: int = 1) -> BlockMask:
    """That of a function of the queries' positions (a column) and the keys'."""
    keys = _check_lengths(seqlen_q, seqlen_k)
    j = np.arange(keys)
    return BlockMask.from_stripes(
        (batch, 1, seqlen_q, keys), lambda rows: sees(np.arange(rows.start, rows.stop)[:, None] + (keys - seqlen_q), j)
    )
