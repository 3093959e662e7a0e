"""Tensors between flash-attn's conventions and ours: head_dim, lse, packed rows, pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..torch.followed import are_transforms_active

_LEAST, _MOST = -(2**31), 2**31 - 1
_HEAD_DIMS = 8  # head_dim is padded with zeros to a multiple of this


def head_dim_of(x: Tensor) -> int:
    """The head_dim of q or v that the user gave; 0 for what has none, which `attention` refuses."""
    return x.shape[-1] if isinstance(x, Tensor) and x.dim() else 0


def readied(q: Tensor, k: Tensor, v: Tensor, of: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as our calls take them: the last stride 1, head_dim padded with zeros to a multiple of 8.

    Args:
        of: behind the names of k and v.

    Raises:
        ArgumentError: one is not a tensor, or k has another head_dim than q, which may be the same when padded.
    """
    found = _readied("q", q), _readied(f"k{of}", k), _readied(f"v{of}", v)
    if k.dim() >= q.dim() > 0 and (wanted := head_dim_of(q)) != (got := head_dim_of(k)):  # else checks say more
        raise ArgumentError(f"k{of}: expected the head_dim of q, {wanted}, got {got}")
    return found


def _readied(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    missing = -x.shape[-1] % _HEAD_DIMS if x.dim() else 0
    return torch.nn.functional.pad(x, (0, missing)) if missing else maybe_contiguous(x)


def integers(name: str, x: Any, dims: int = 1) -> Tensor:
    """Lengths or numbers of so many dimensions in int32; what is beyond it, as the nearest there is.

    Raises:
        ArgumentError: it is not such a tensor.
    """
    if not isinstance(x, Tensor) or x.dim() != dims or x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        what = ("an integer", "one dimension of integers", "two dimensions of integers")[dims]
        raise ArgumentError(f"{name}: expected a torch.Tensor of {what}, got {got}")
    return (x.clamp(_LEAST, _MOST) if x.dtype == torch.int64 else x).to(torch.int32)


def maybe_contiguous(x: Any) -> Any:
    """`x`, copied if its last stride is not 1; None stays None."""
    return x.contiguous() if x is not None and x.dim() and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """The least multiple of m that is not below x."""
    return -(-x // m) * m


def narrowed(out: Tensor, head_dim: int) -> Tensor:
    """`out` without the columns that were padded."""
    return out if out.shape[-1] == head_dim else out[..., :head_dim]


def may_be_empty(q: Tensor, k: Tensor, keywords: dict[str, Any]) -> bool:
    """Whether a query of dense q (batch, seqlen, heads, head_dim) may see no key."""
    right = (keywords["window"] or (None, None))[1]
    right = 0 if keywords["causal"] else right
    return k.shape[1] == 0 or (right is not None and k.shape[1] - q.shape[1] + right < 0)


def to_theirs(lse: Tensor) -> Tensor:
    """lse with +inf for a query that sees no key, as flash-attn 2 has it; ours is -inf."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def to_ours(lse: Tensor) -> Tensor:
    """The inverse of `to_theirs`."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def no_probabilities(q: Tensor) -> Tensor:
    """What flash-attn returns as S_dmask without dropout: an empty tensor of q's dtype and device."""
    return q.new_empty(0)


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """Which sequence each of `total` packed rows belongs to, int64; rows behind the last count with it."""
    rows = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    ends = cu_seqlens[1:].contiguous()
    return torch.searchsorted(ends, rows, right=True).clamp_(max=max(len(ends) - 1, 0))


def gathered(cache: Tensor, block_table: Tensor) -> Tensor:
    """A paged cache (blocks, page, heads, head_dim) as (batch, pages * page, heads, head_dim), a copy.

    Entries of the table behind the last page in use may hold anything: they are clamped, and what they bring counts
    for nothing.
    """
    if not cache.shape[0]:
        raise ArgumentError("k, v: expected a pool of at least 1 page, got none")
    table = block_table.clamp(0, cache.shape[0] - 1).long()
    return cache[table].flatten(1, 2)


def _check_pages(block_table: Tensor, used: Tensor, pages: int, page_size: int) -> None:
    """Refuse numbers of pages in use that the pool lacks, as attention over the pages themselves does."""
    in_use = torch.arange(block_table.shape[1]) < -(-used // page_size)[:, None]
    wrong = block_table[in_use & ((block_table < 0) | (block_table >= pages))]
    if len(wrong):
        raise ArgumentError(
            f"block_table: expected numbers of the {pages} pages of the pool, from 0, got {int(wrong[0])}"
        )


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd watches one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def lengths_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None = None) -> dict[str, Any]:
    """The arguments of `attention_varlen` that say where sequences lie."""
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}


def unpaged(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, block_table: Tensor, lengths: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """k and v of a paged cache as packed rows, and where the sequences lie in them."""
    block_table, cu_seqlens_k = integers("block_table", block_table, 2), integers("cu_seqlens_k", cu_seqlens_k)
    rows = block_table.shape[1] * k.shape[1]  # of each sequence
    starts = torch.arange(len(block_table) + 1, device=k.device, dtype=torch.int32) * rows
    used = lengths["seqused_k"]
    used = cu_seqlens_k.diff() if used is None else integers("seqused_k", used)
    if not (block_table.is_cuda or torch.compiler.is_compiling() or are_transforms_active()):
        _check_pages(block_table, used, *k.shape[:2])
    k, v = (gathered(x, block_table).flatten(0, 1) for x in (k, v))
    return k, v, lengths | {"cu_seqlens_k": starts, "seqused_k": used}
