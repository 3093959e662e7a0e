"""Rotary position embeddings (Su et al. 2021), applied by torch: flash-attn's functions for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..options import whole
from .tensors import sequence_of_rows


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` columns of x by the angle of each row's position.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens. Differentiable.
        cos, sin: (positions, rotary_dim / 2), of any floating dtype; they get no gradient.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J); else i and i + rotary_dim / 2 (GPT-NeoX).
        inplace: write into x and return it.
        seqlen_offsets: position of each sequence's first row, an integer or (batch,).
        cu_seqlens: (batch + 1,): where packed sequences begin and end; max_seqlen is then accepted and not needed.

    Returns:
        Of x's shape and dtype; computed in fp32, fp64 for fp64. A position that cos does not have is not rotated.
    """
    _check(x, cos, sin, cu_seqlens)
    _check_offsets(seqlen_offsets, len(x) if cu_seqlens is None else len(cu_seqlens) - 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(wide).unsqueeze(-2) for t in _at_positions(x, cos, sin, seqlen_offsets, cu_seqlens))
    columns = 2 * cos.shape[-1]
    rotated = _rotated(x[..., :columns], cos, sin, interleaved).to(x.dtype)
    if inplace:
        x[..., :columns] = rotated
        return x
    return torch.cat((rotated, x[..., columns:]), dim=-1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k in place, in qkv (batch, seqlen, 3, heads, head_dim).

    Or in qkv (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) given num_heads_q. cos_k and sin_k: those of k,
    where they differ (XPos).
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    else:
        raise ArgumentError(
            "qkv: expected shape (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, "
            f"num_heads_q + 2 * heads_k, head_dim), got {tuple(qkv.shape)} and num_heads_q = {num_heads_q}"
        )
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    k_tables = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, *k_tables, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k in place, in kv (batch, seqlen, 2, heads_k, head_dim)."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ArgumentError(f"kv: expected shape (batch, seqlen, 2, heads_k, head_dim), got {tuple(kv.shape)}")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair of columns (a, b) as (-b, a); pairs as in `apply_rotary_emb`."""
    return _rotated(x, 0, 1, interleaved)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rotary_emb` in the dtype to which torch promotes x, cos and sin, with gradients for all three.

    Args:
        x: (batch, seqlen, heads, head_dim).
        cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2), of as many positions as x has rows.
    """
    columns = 2 * cos.shape[-1]
    if columns > x.shape[-1]:
        raise ArgumentError(f"cos: expected rotary_dim / 2 of at most {x.shape[-1] // 2}, got {cos.shape[-1]}")
    rotated = _rotated(x[..., :columns], cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    return torch.cat((rotated, x[..., columns:]), dim=-1)


def _rotated(x: Tensor, cos: Tensor | int, sin: Tensor | int, interleaved: bool) -> Tensor:
    """Each pair of columns (a, b) as (a cos - b sin, a sin + b cos)."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = a * cos - b * sin, a * sin + b * cos
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def _at_positions(x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Any:
    """cos and sin of each row of x, (seqlen, n), (batch, seqlen, n) or (total, n); no gradient goes to them."""
    cos, sin, count = cos.detach(), sin.detach(), len(cos)
    rows = torch.arange(x.shape[0 if cu_seqlens is not None else 1], device=x.device)
    if cu_seqlens is not None:
        sequence = sequence_of_rows(cu_seqlens, len(rows))
        rows = rows - cu_seqlens[sequence] + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
    elif isinstance(offsets, Tensor):
        rows = rows + offsets[:, None]
    elif 0 <= offsets <= count - len(rows):
        return cos[offsets : offsets + len(rows)], sin[offsets : offsets + len(rows)]
    else:
        raise ArgumentError(
            f"seqlen_offsets: expected rows {offsets} to {offsets + len(rows)} to be among the {count} of cos and sin; "
            "give longer tables"
        )
    known = ((rows >= 0) & (rows < count)).unsqueeze(-1)
    places = rows.clamp(0, max(count - 1, 0))
    return torch.where(known, cos[places], 1), torch.where(known, sin[places], 0)


def _check(x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> None:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"x: expected a torch.Tensor of floating point, got {got}")
    dims = "batch, seqlen, heads, head_dim" if cu_seqlens is None else "total, heads, head_dim"
    if x.dim() != dims.count(",") + 1:
        raise ArgumentError(f"x: expected shape ({dims}), got {tuple(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ArgumentError(
            f"cos, sin: expected the same shape (positions, rotary_dim / 2), rotary_dim at most {x.shape[-1]}, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def _check_offsets(offsets: int | Tensor, batch: int) -> None:
    if not isinstance(offsets, Tensor):
        if type(offsets) is not int and not isinstance(offsets, torch.SymInt):
            whole("seqlen_offsets", offsets, "an integer or a torch.Tensor")
    elif offsets.is_floating_point() or offsets.dtype is torch.bool or tuple(offsets.shape) != (batch,):
        got = f"{offsets.dtype} of shape {tuple(offsets.shape)}"
        raise ArgumentError(f"seqlen_offsets: expected an integer, or integers of shape ({batch},), got {got}")
