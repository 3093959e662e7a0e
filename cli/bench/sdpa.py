"""torch's scaled_dot_product_attention as peers of `bench`, one of its backends each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .cell import Cell

TORCH_CPU = "torch-cpu"  # the fused kernel of torch's CPU, which goes by the name of another algorithm's there
BACKENDS = {"flash2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH",
            TORCH_CPU: "FLASH_ATTENTION"}  # fmt: skip


def sdpa(name: str, cell: Cell, given: Mapping[str, Any]) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out in bshd, by this backend alone; what it does not take, it says when it is called.

    Raises:
        NotImplementedError: no backend takes it.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name == "flash2" and (cell.bias or cell.mask or cell.padded):
        raise NotImplementedError("FlashAttention-2 takes no bias, no mask and no padding")
    backend = getattr(SDPBackend, BACKENDS[name])
    attention = torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {"enable_gqa": cell.heads_k != cell.heads, "dropout_p": cell.dropout}
    if not (cell.bias or cell.mask or cell.padded):
        options["is_causal"] = cell.causal
    added = None if cell.learned else attn_mask(cell, given)

    def peer(q: Any, k: Any, v: Any) -> Any:
        options["attn_mask"] = attn_mask(cell, given) if cell.learned else added  # a graph of each call's own
        with sdpa_kernel(backend):
            out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
        return out.transpose(1, 2)

    return peer


def attn_mask(cell: Cell, given: Mapping[str, Any]) -> Any | None:
    """A bias, a mask and ranges of keys in one; with what the causal mask hides, which torch takes beside none."""
    import torch

    bias, mask, ranges = given.get("bias"), given.get("mask"), given.get("kv_range")
    if ranges is not None:
        keys = torch.arange(cell.seqlen, device=ranges.device)
        counts = ((keys >= ranges[:, :1]) & (keys < ranges[:, 1:]))[:, None, None]
        mask = counts if mask is None else mask & counts
    if bias is None and mask is None:
        return None
    if cell.causal:
        device = (mask if bias is None else bias).device  # type: ignore[union-attr]
        seen = torch.ones(cell.seqlen, cell.seqlen, dtype=torch.bool, device=device).tril()
        mask = seen if mask is None else mask & seen
    if bias is None:
        return mask
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)
