"""flash-attn's public functions, dense and packed, on `attention` and `attention_varlen`; differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import attention
from ..errors import ArgumentError
from ..torch.followed import are_transforms_active
from ..varlen import attention_varlen
from .kvcache import packed_over_pages
from .options import Given
from .tensors import (
    head_dim_of,
    lengths_of,
    may_be_empty,
    narrowed,
    needs_gradients,
    no_probabilities,
    readied,
    to_theirs,
    unpaged,
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads_q, head_dim) and k, v (batch, seqlen_k, heads_k, head_dim).

    Args:
        q, k, v: any head_dim up to 256; one that is no multiple of 8 is padded, by copies.
        dropout_p: as in `attention`, by a seed from torch's generator; other elements are dropped than by flash-attn.
        softmax_scale: head_dim ** -0.5 by default.
        causal, window_size: aligned at the bottom right; -1 is unbounded.
        softcap: what no score's magnitude exceeds; 0.0 for no cap.
        alibi_slopes: (heads_q,) or (batch, heads_q), fp32 (fp64 beside fp64); they get no gradient.
        deterministic: bitwise reproducible gradients.
        return_attn_probs: also return lse and S_dmask.

    Returns:
        out, as q; with `return_attn_probs` (out, softmax_lse, S_dmask): softmax_lse (batch, heads_q, seqlen_q) in fp32,
        +inf for a query that sees no key, and an empty S_dmask, also with dropout.
    """
    given = Given(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    head_dim, keywords = head_dim_of(v), given.ours(head_dim_of(q))
    q, k, v = readied(q, k, v)
    if not return_attn_probs:
        return narrowed(attention(q, k, v, **keywords), head_dim)
    out, lse = attention(q, k, v, **keywords, return_lse=True)
    lse = to_theirs(lse) if may_be_empty(q, k, keywords) else lse
    return narrowed(out, head_dim), lse, no_probabilities(q)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _parts("qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q and kv (batch, seqlen_k, 2, heads_k, head_dim)."""
    k, v = _parts("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q (total_q, heads_q, head_dim), k and v (total_k, heads_k, head_dim).

    Args:
        q, k, v, dropout_p to return_attn_probs: as in `flash_attn_func`; masks are aligned sequence by sequence.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32: 0, and the lengths added up.
        max_seqlen_q, max_seqlen_k: not needed and not looked at.
        block_table: (batch, pages), int32: k and v are then (blocks, page, heads_k, head_dim), of any page size. Where
            gradients are wanted, or there is dropout, pages are copied one behind the other first.

    Returns:
        As `flash_attn_func`, with softmax_lse (heads_q, total_q).
    """
    given = Given(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    head_dim, keywords = head_dim_of(v), given.ours(head_dim_of(q))
    q, k, v = readied(q, k, v)
    lengths = lengths_of(cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        if not (dropout_p or are_transforms_active() or needs_gradients(q, k, v, alibi_slopes)):
            out, lse = packed_over_pages(q, k, v, block_table, lengths, keywords)
            out = narrowed(out, head_dim)
            return (out, to_theirs(lse), no_probabilities(q)) if return_attn_probs else out
        k, v, lengths = unpaged(k, v, cu_seqlens_k, block_table, lengths)
    if not return_attn_probs:
        return narrowed(attention_varlen(q, k, v, **lengths, **keywords), head_dim)
    out, lse = attention_varlen(q, k, v, **lengths, **keywords, return_lse=True)
    return narrowed(out, head_dim), to_theirs(lse), no_probabilities(q)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, head_dim)."""
    q, k, v = _parts("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q and kv (total_k, 2, heads_k, head_dim)."""
    k, v = _parts("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _parts(name: str, packed: Tensor, dims: int, count: int) -> tuple[Tensor, ...]:
    """q, k and v, or k and v, of a packed tensor: views."""
    if not isinstance(packed, Tensor) or packed.dim() != dims or packed.shape[-3] != count:
        got = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        shape = ", ".join(["batch, seqlen" if dims == 5 else "total", str(count), "heads, head_dim"])
        raise ArgumentError(f"{name}: expected a torch.Tensor of shape ({shape}), got {got}")
    return packed.unbind(-3)
