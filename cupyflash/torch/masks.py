"""torch's BlockMask, of flex_attention, as ours: its mask_mod is asked once, in its partial blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..errors import ArgumentError
from ..mask_tiles import FIRST, FULL, TILE, bits_of, no_bits
from .followed import numbers_as_indices

Array = NDArray[Any]
ELEMENTS_AT_ONCE = 1 << 24


def convert(mask: Any) -> BlockMask:
    """The same mask. Waits for the device that it is on.

    Raises:
        ArgumentError: its lists are not those of all its queries.
    """
    rows, keys = mask.BLOCK_SIZE
    lengths = getattr(mask, "seq_lengths", None)  # torch before 2.7 rounds them up to blocks
    if lengths is None:
        lengths = mask.shape[-2:]
    seqlen_q, seqlen_k = (int(n) for n in lengths)
    batch, heads, q_blocks, k_blocks = _shape_of(mask, -(-seqlen_q // rows), -(-seqlen_k // keys))
    if rows % TILE or keys % TILE:
        return _of_stripes(mask, (batch, heads, seqlen_q, seqlen_k), (q_blocks, k_blocks))
    m, n = rows // TILE, keys // TILE
    tiles = np.zeros((batch, heads, q_blocks, m, k_blocks, n), np.int32)
    bits, count = [], 0
    if mask.full_kv_num_blocks is not None:
        b, h, i, j = _listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        tiles[b, h, i, :, j, :] = FULL
    b, h, i, j = _listed(mask.kv_num_blocks, mask.kv_indices)
    at_once = max(1, ELEMENTS_AT_ONCE // (rows * keys))
    for start in range(0, len(b), at_once):
        part = slice(start, start + at_once)
        seen = _elements(mask, (b[part], h[part], i[part], j[part]), (seqlen_q, seqlen_k))
        seen = seen.reshape(-1, m, TILE, n, TILE).swapaxes(2, 3)
        some, every = seen.any(axis=(3, 4)), seen.all(axis=(3, 4))
        kinds = np.where(every, FULL, 0).astype(np.int32)
        partial = some & ~every
        kinds[partial] = FIRST + count + np.arange(partial.sum())
        count += int(partial.sum())
        bits.append(bits_of(seen[partial]))
        tiles[b[part], h[part], i[part], :, j[part], :] = kinds
    tiles = tiles.reshape(batch, heads, q_blocks * m, k_blocks * n)
    cut = np.ascontiguousarray(tiles[:, :, : -(-seqlen_q // TILE), : -(-seqlen_k // TILE)])
    return BlockMask(cut, np.concatenate(bits) if bits else no_bits(), seqlen_q, seqlen_k).compact()


def _of_stripes(mask: Any, shape: tuple[int, int, int, int], blocks: tuple[int, int]) -> BlockMask:
    """That of blocks of any size: mask_mod is asked for 64 queries and all keys at a time."""
    device, (batch, heads, _, seqlen_k) = mask.kv_indices.device, shape
    full, partial = np.zeros((2, batch, heads, *blocks), bool)
    partial[_listed(mask.kv_num_blocks, mask.kv_indices)] = True
    if mask.full_kv_num_blocks is not None:
        full[_listed(mask.full_kv_num_blocks, mask.full_kv_indices)] = True
    of_key = np.arange(seqlen_k) // mask.BLOCK_SIZE[1]
    ask = mask.mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        ask = torch.vmap(ask, in_dims=dims)
    b, h, k = (torch.arange(n, device=device) for n in (batch, heads, seqlen_k))

    def stripe(rows: slice) -> Array:
        of_query = np.arange(rows.start, rows.stop) // mask.BLOCK_SIZE[0]
        in_full, in_partial = (x[:, :, of_query][..., of_key] for x in (full, partial))
        with numbers_as_indices():
            found = ask(b, h, torch.arange(rows.start, rows.stop, device=device), k)
        shown: Array = found.cpu().numpy().astype(bool)
        return in_full | (in_partial & shown)

    return BlockMask.from_stripes(shape, stripe)


def _shape_of(mask: Any, q_blocks: int, k_blocks: int) -> tuple[int, ...]:
    """Batch, heads, query blocks and key blocks: as torch's own kernels read them, which know no other lists."""
    counts, of = tuple(mask.kv_num_blocks.shape), tuple(mask.kv_indices.shape)
    if len(of) != 4 or counts != of[:3] or of[2] < q_blocks:
        way = "give both all dimensions; to a slice give its lengths, mask.seq_lengths = (seqlen_q, seqlen_k)"
        raise ArgumentError(
            f"block_mask: expected kv_num_blocks (batch, heads, {q_blocks}) and kv_indices (batch, heads, {q_blocks}, "
            f"...), as flex_attention's kernels read them, got {counts} and {of}; {way}"
        )
    return *of[:3], k_blocks


def _listed(num_blocks: Any, indices: Any) -> tuple[Array, Array, Array, Array]:
    """Batch, head, query block and key block of all that such lists have."""
    counts, of = (x.cpu().numpy() for x in (num_blocks, indices))
    b, h, i, at = np.nonzero(np.arange(of.shape[-1]) < counts[..., None])
    return b, h, i, of[b, h, i, at]


def _elements(mask: Any, blocks: tuple[Array, ...], lengths: tuple[int, int]) -> Array:
    """What mask_mod says of some blocks: (blocks, rows, keys). Behind the last query or key, what it says of that."""
    device = mask.kv_indices.device
    b, h, i, j = (torch.from_numpy(x).to(device) for x in blocks)
    rows, keys = (torch.arange(n, device=device) for n in mask.BLOCK_SIZE)
    q = (i[:, None] * mask.BLOCK_SIZE[0] + rows).clamp(max=lengths[0] - 1)
    k = (j[:, None] * mask.BLOCK_SIZE[1] + keys).clamp(max=lengths[1] - 1)
    ask = torch.vmap(mask.mask_mod, in_dims=(None, None, None, 0))
    ask = torch.vmap(torch.vmap(ask, in_dims=(None, None, 0, None)), in_dims=(0, 0, 0, 0))
    with numbers_as_indices():
        found = ask(b, h, q, k)
    shown: Array = found.cpu().numpy().astype(bool)
    return shown
