"""flash_attn_with_kvcache by composition: no decode kernel, but the same results. No gradients, as there.

What the cache holds is attended to where it lies if all sequences are equally long, or if rows of all sequences lie one
behind the other; pages, chosen sequences and head_dims that are padded are copied first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..errors import ArgumentError
from ..varlen import attention_varlen
from .options import Given
from .rotary import apply_rotary_emb
from .tensors import gathered, head_dim_of, may_be_empty, narrowed, readied, to_theirs


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append k and v to the cache, rotated if asked, and attend with q to all that it then holds.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k_cache, v_cache: (batch of the cache, capacity, heads_k, head_dim), or with block_table (blocks, page, heads_k,
            head_dim), of any page size. Written in place where k is given.
        k, v: (batch, seqlen_new, heads_k, head_dim), written behind the first cache_seqlens rows.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate k by its positions in the cache, and q by the
            same, counted from cache_seqlens (without causal or a window, all of q by the position cache_seqlens).
        cache_seqlens: how many rows of the cache are in use, an integer or (batch,), int32; None: all.
        cache_batch_idx: (batch,): which sequence of the cache belongs to each of q.
        cache_leftpad: (batch,): how many rows at the beginning of each sequence do not count.
        block_table: (batch, pages), int32: the blocks of each sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`, by the lengths in use.
        rotary_interleaved: as in `apply_rotary_emb`.
        num_splits: accepted; results do not depend on it.
        return_softmax_lse: return (out, softmax_lse), lse (batch, heads_q, seqlen_q).
    """
    given = Given(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    keywords = given.ours(head_dim_of(q))
    _check(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    used: Any = capacity if cache_seqlens is None else cache_seqlens
    new = 0 if k is None else k.shape[1]
    _check_capacity(used, new, capacity)
    with torch.no_grad():
        if k is not None:
            if rotary_cos is not None:
                q = _rotated_queries(q, rotary_cos, rotary_sin, rotary_interleaved, used, keywords)
                k = apply_rotary_emb(k, rotary_cos, rotary_sin, rotary_interleaved, False, used)
            rows = _rows(len(q), used, new, q.device)
            for cache, x in ((k_cache, k), (v_cache, v)):
                cache[_places(rows, k_cache.shape[1], cache_batch_idx, block_table)] = x
        used = used + new
        if block_table is not None:
            k_cache, v_cache = gathered(k_cache, block_table), gathered(v_cache, block_table)
        elif cache_batch_idx is not None:
            k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
        if isinstance(used, int):  # what is behind the rows in use need not be looked at, or copied
            k_cache, v_cache = k_cache[:, :used], v_cache[:, :used]
        ready = readied(q, k_cache, v_cache)
        out, lse = _attended(ready, used, cache_leftpad, keywords)
        return (narrowed(out, q.shape[-1]), lse) if return_softmax_lse else narrowed(out, q.shape[-1])


def _attended(
    ready: tuple[Tensor, Tensor, Tensor], used: int | Tensor, leftpad: Tensor | None, keywords: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention over the rows of each sequence from leftpad to used, with flash-attn's lse."""
    q, k, v = ready
    if isinstance(used, int) and leftpad is None:
        out, lse = attention(q, k, v, **keywords, return_lse=True)
        return out, to_theirs(lse) if may_be_empty(q, k, keywords) else lse
    batch, seqlen, heads, head_dim = q.shape
    lengths = _packed_lengths(batch, seqlen, k.shape[1], used, leftpad, q.device)
    slopes = keywords.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2 and leftpad is not None:
        keywords = keywords | {"alibi_slopes": slopes.repeat_interleave(2, dim=0)}
    q, k, v = (x.flatten(0, 1) for x in ready)
    out, lse = attention_varlen(q, k, v, **lengths, **keywords, return_lse=True)
    lse = to_theirs(lse).view(heads, batch, seqlen).transpose(0, 1).contiguous()
    return out.view(batch, seqlen, heads, head_dim), lse


def _packed_lengths(
    batch: int, seqlen: int, capacity: int, used: int | Tensor, leftpad: Tensor | None, device: Any
) -> dict[str, Tensor]:
    """A cache whose sequences lie one behind the other, as packed sequences of which some rows are in use.

    Padding at the left becomes a sequence of its own, in front of each, that no query belongs to.
    """
    numbers = torch.arange(batch + 1, device=device, dtype=torch.int32)
    if isinstance(used, Tensor):
        used = used.to(torch.int32)
    else:
        used = torch.full((batch,), used, device=device, dtype=torch.int32)  # a copy from the host would be waited for
    starts_q, starts_k = numbers * seqlen, numbers * capacity
    if leftpad is None:
        return {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "seqused_k": used.contiguous()}
    pads = leftpad.to(torch.int32)
    starts_k = torch.cat((torch.stack((starts_k[:-1], starts_k[:-1] + pads), 1).flatten(), starts_k[-1:]))
    starts_q = torch.cat((starts_q[:-1].repeat_interleave(2), starts_q[-1:]))
    used = torch.stack((torch.zeros_like(pads), (used - pads).clamp(min=0)), 1).flatten()
    return {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "seqused_k": used}


def _rotated_queries(
    q: Tensor, cos: Tensor, sin: Any, interleaved: bool, offsets: Any, keywords: dict[str, Any]
) -> Tensor:
    """q, each row at its own position where queries are told apart by a mask, else all at the first one."""
    if keywords["causal"] or keywords["window"] is not None:
        return apply_rotary_emb(q, cos, sin, interleaved, False, offsets)
    together = q.flatten(1, 2).unsqueeze(1)  # one row with heads of all positions
    return apply_rotary_emb(together, cos, sin, interleaved, False, offsets).view(q.shape)


def _rows(batch: int, used: int | Tensor, new: int, device: Any) -> Tensor:
    """Where the new rows of each sequence go, (batch, new)."""
    rows = torch.arange(new, device=device)
    return (rows + used[:, None] if isinstance(used, Tensor) else rows + used).expand(batch, new)


def _places(rows: Tensor, page: int, batch_idx: Tensor | None, block_table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same as indices of the first two dimensions of the cache."""
    if block_table is not None:
        return block_table.long().gather(1, rows // page), rows % page
    sequences = torch.arange(len(rows), device=rows.device) if batch_idx is None else batch_idx.long()
    return sequences[:, None].expand_as(rows), rows


def _check_capacity(used: int | Tensor, new: int, capacity: int) -> None:
    """Refuse lengths beyond the cache. On a GPU a tensor of them is not waited for."""
    if isinstance(used, Tensor):
        if used.device.type != "cpu" or not used.numel():
            return
        least, most = int(used.min()), int(used.max())
    else:
        least = most = used
    if least < 0 or most + new > capacity:
        raise ArgumentError(
            f"cache_seqlens: expected lengths of 0 to {capacity - new} ({capacity} rows in the cache, {new} new), got "
            f"{least if least < 0 else most}"
        )


def _check(
    k: Any, v: Any, cos: Any, sin: Any, cache_seqlens: Any, batch_idx: Any, leftpad: Any, block_table: Any
) -> None:
    """Refuse arguments that contradict each other."""
    if (k is None) != (v is None):
        raise ArgumentError(f"{'k' if k is None else 'v'}: expected a tensor, since {'v' if k is None else 'k'} is one")
    if k is not None and cache_seqlens is None:
        raise ArgumentError("cache_seqlens: expected lengths, since k is given: where does it go in the cache?")
    if (cos is None) != (sin is None):
        raise ArgumentError("rotary_cos, rotary_sin: expected both or neither")
    if cos is not None and k is None:
        raise ArgumentError("rotary_cos: expected None, since there is no new k; rotate q by apply_rotary_emb")
    if block_table is not None and (batch_idx is not None or leftpad is not None):
        raise ArgumentError("block_table: expected None together with cache_batch_idx or cache_leftpad")
