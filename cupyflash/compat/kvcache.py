"""flash_attn_with_kvcache by `attention_with_cache`. No gradients, as there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache.writes import Lies, check_caches_apart
from ..errors import ArgumentError
from ..kvcache import attention_with_cache
from ..options import flag, whole
from ..torch.followed import is_followed
from .options import Given
from .rotary import apply_rotary_emb
from .tensors import head_dim_of, integers, narrowed, readied, to_theirs


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
            head_dim), of any page size; v_cache, and v, may have another head_dim. Written in place where k is given.
        k, v: (batch, seqlen_new, heads_k, head_dim), written behind the first cache_seqlens rows.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate k by its positions in the cache, and q by the
            same, counted from cache_seqlens (without causal or a window, all of q by the position cache_seqlens).
        cache_seqlens: how many rows of the cache are in use, an integer or (batch,), int32; None: all.
        cache_batch_idx: (batch,): which sequence of the cache belongs to each of q.
        cache_leftpad: (batch,): how many rows at the beginning of each sequence do not count.
        block_table: (batch, pages), int32: the blocks of each sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`, by the lengths in use.
        rotary_interleaved: as in `apply_rotary_emb`.
        num_splits: as in `attention_with_cache`; 0: as is best.
        return_softmax_lse: return (out, softmax_lse), lse (batch, heads_q, seqlen_q).
    """
    given = Given(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    head_dim_v, keywords = head_dim_of(v_cache), given.ours(head_dim_of(q))
    del keywords["deterministic"]
    _check_tensors(q, k_cache, v_cache, rotary_cos, rotary_sin)
    _check(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    _check_shapes(q, k_cache, k, v, cache_seqlens)
    rotary_interleaved = flag("rotary_interleaved", rotary_interleaved)
    places = {
        "cache_batch_idx": None if cache_batch_idx is None else integers("cache_batch_idx", cache_batch_idx),
        "block_table": None if block_table is None else integers("block_table", block_table, 2),
    }
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    used = capacity if cache_seqlens is None else cache_seqlens
    if isinstance(used, Tensor):
        used = integers("cache_seqlens", used, 1 if used.dim() else 0)
    if num_splits is not None:
        num_splits = whole("num_splits", num_splits)
    with torch.no_grad():
        if cache_leftpad is not None:
            places["kv_range"] = _range_behind(cache_leftpad, len(q), capacity)
        keywords |= {"cache_seqlens": used, **places}
        if cache_batch_idx is None and block_table is None:
            k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
        q, k, tables = _turned(q, k, rotary_cos, rotary_sin, rotary_interleaved, used, keywords)
        ready = readied(q, k_cache, v_cache, "_cache")
        if k is not None and ready[1] is not k_cache and not is_followed():  # padded copies, which are always apart
            check_caches_apart(_lies(k_cache), _lies(v_cache))
        if k is not None and v is not None:
            _, keywords["k"], keywords["v"] = readied(q, k, v)
            if head_dim_of(v) != head_dim_v:
                raise ArgumentError(f"v: expected the head_dim of v_cache, {head_dim_v}, got {head_dim_of(v)}")
        keywords |= {"num_splits": num_splits if num_splits and num_splits > 0 else None, "return_lse": True}
        out, lse = attention_with_cache(ready[0], ready[1], ready[2], **keywords, **tables)
        for cache, x in zip((k_cache, v_cache), ready[1:], strict=True):
            if k is not None and x is not cache:  # a padded copy
                cache.copy_(x[..., : cache.shape[-1]])
        out = narrowed(out, head_dim_v)
        return (out, to_theirs(lse)) if return_softmax_lse else out


def packed_over_pages(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lengths: dict[str, Any], keywords: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of packed queries over pages, where nobody asks for gradients: pages are read where they lie.

    Args:
        lengths: as `tensors.lengths_of` gives them.
        keywords: the other options of `attention_varlen`.
    """
    used = lengths["seqused_k"]
    used = integers("cu_seqlens_k", lengths["cu_seqlens_k"]).diff() if used is None else integers("seqused_k", used)
    where = {"cache_seqlens": used, "block_table": integers("block_table", block_table, 2)}
    where["cu_seqlens_q"] = lengths["cu_seqlens_q"]
    options = {name: x for name, x in keywords.items() if name not in ("deterministic", "dropout_p")}
    with torch.no_grad():
        out, lse = attention_with_cache(q, k, v, **where, **options, return_lse=True)
    return out, lse


def _turned(
    q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool, used: Any, keywords: Any
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """q and k, and the tables by which the kernels rotate them on their way.

    flash-attn tells queries apart by a mask only: without one all are at the position of the first. Those are rotated
    here, and where there are other new keys than queries.
    """
    if cos is None or sin is None or k is None:
        return q, k, {}
    has_mask = keywords["causal"] or keywords["window"] is not None
    if q.shape[1] == k.shape[1] and (has_mask or q.shape[1] == 1):
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (x if x.dtype in (q.dtype, wide) else x.to(wide) for x in (cos.contiguous(), sin.contiguous()))
        return q, k, {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    if not isinstance(used, Tensor):
        used = torch.full((1,), whole("cache_seqlens", used, "a torch.Tensor or an integer"), device=q.device)
    used = used.expand(len(q))  # an integer too: as in the kernels, positions that the tables lack are not turned
    k = apply_rotary_emb(k, cos, sin, interleaved, False, used)
    if has_mask:
        return apply_rotary_emb(q, cos, sin, interleaved, False, used), k, {}
    together = q.flatten(1, 2).unsqueeze(1)  # one row with heads of all positions
    return apply_rotary_emb(together, cos, sin, interleaved, False, used).view(q.shape), k, {}


def _check_tensors(q: Any, k_cache: Any, v_cache: Any, cos: Any, sin: Any) -> None:
    """Refuse by flash-attn's names what ours would refuse by others."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor) and not (x is None and "rotary" in name):
            raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ArgumentError(f"{name}: expected 4 dimensions, got shape {tuple(x.shape)}")
    if k_cache.dtype != q.dtype:
        raise ArgumentError(
            f"k_cache: expected the dtype of q, {q.dtype}, got {k_cache.dtype}; cupyflash.attention_with_cache takes "
            "caches of 8 bits, with scales"
        )


def _range_behind(leftpad: Any, batch: int, capacity: int) -> Tensor:
    """`kv_range` of the rows behind those that do not count."""
    pad = integers("cache_leftpad", leftpad)
    if pad.shape != (batch,):
        raise ArgumentError(f"cache_leftpad: expected integers of shape ({batch},), got {tuple(pad.shape)}")
    if pad.device.type == "cpu" and not is_followed() and bool(((pad < 0) | (pad > capacity)).any()):
        raise ArgumentError(f"cache_leftpad: expected 0 to {capacity}, the rows of the cache, got {pad.tolist()}")
    return torch.stack((pad, torch.full_like(pad, capacity)), dim=1)


def _lies(x: Tensor) -> Lies:
    size = x.element_size()
    return Lies(x.data_ptr(), tuple(x.shape), tuple(size * step for step in x.stride()), size)


def _check_shapes(q: Tensor, k_cache: Tensor, k: Any, v: Any, lengths: Any) -> None:
    """Refuse new rows and lengths of another batch before anything is rotated."""
    for name, x in (("k", k), ("v", v)):
        if isinstance(x, Tensor) and (x.dim() != 4 or len(x) != len(q) or x.shape[2] != k_cache.shape[2]):
            expected = f"({len(q)}, seqlen_new, {k_cache.shape[2]}, head_dim)"
            raise ArgumentError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
    if isinstance(lengths, Tensor) and lengths.dim() and lengths.shape != q.shape[:1]:
        raise ArgumentError(
            f"cache_seqlens: expected an integer, or integers of shape ({len(q)},), got shape {tuple(lengths.shape)}"
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
