"""Calls that cupyflash does not take, by transformers' own functions, which are told the whole mask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import UnsupportedError
from ..torch.sdpa import tell
from . import ranges
from .call import CHOSEN, Call, Output


def by_transformers(
    module: Any, call: Call, mask: Tensor | None, reason: str, is_causal: bool | None, others: dict[str, Any]
) -> Output:
    """A call by sdpa, or by the model's own eager function where sdpa lacks something: a softcap, sinks, weights.

    Args:
        mask: what the user gave, (batch, 1, seqlen_q, seqlen_k); None for the call's own.
    """
    chosen = next((name for name in CHOSEN if others.get(name) is not None), None)
    if chosen is not None:
        raise UnsupportedError(
            f"{chosen}: expected None, got {type(others[chosen]).__name__}: {type(module).__name__} chooses its keys, "
            'which neither cupyflash nor sdpa can; load it with attn_implementation="eager"'
        )
    tell("cupyflash.transformers: this call is transformers' own", reason)
    is_asked_more = bool(others.get("output_attentions")) or others.get("head_mask") is not None
    by_eager = call.softcap is not None or call.sink is not None or is_asked_more
    if mask is None:
        mask = _mask_of(call, by_eager)
        is_causal = call.causal and mask is None
    options = {"dropout": call.dropout, "scaling": call.scale}
    if not by_eager:
        return sdpa_attention_forward(module, call.q, call.k, call.v, mask, is_causal=is_causal, **options, **others)
    if mask is not None and mask.dtype is torch.bool:
        mask = ranges.as_bias(mask, call.q.dtype)
    brought = {"softcap": call.softcap, "s_aux": call.sink}
    given = {name: x for name, x in brought.items() if x is not None}
    return _eager_of(module)(module, call.q, call.k, call.v, mask, **options, **given, **others)


def _mask_of(call: Call, is_needed: bool) -> Tensor | None:
    """The mask of a call, of bool; None where all is seen, or if it is not needed, since sdpa knows what causal is."""
    queries, keys, device = call.q.shape[2], call.k.shape[2], call.q.device
    if call.cu_seqlens is not None:
        return _mask_of_packed(call)
    sees_all, is_known = not call.causal, queries == keys and not is_needed
    if call.kv_range is None and call.left is None and (sees_all or is_known):
        return None
    return ranges.in_full(queries, keys, keys, call.window(), call.kv_range, device)


def _mask_of_packed(call: Call) -> Tensor:
    """(1, 1, total_q, total_k): within each sequence aligned at its last query and key."""
    assert call.cu_seqlens is not None
    device, places, numbers = call.q.device, [], []
    for cu, total in zip(call.cu_seqlens, (call.q.shape[2], call.k.shape[2]), strict=True):
        rows = torch.arange(total, device=device, dtype=torch.int32)
        number = torch.bucketize(rows, cu[1:], right=True)
        ends = torch.cat([cu[1:], cu[-1:]])[number]  # rows behind the last sequence see each other, and no one else
        places.append(rows - ends)
        numbers.append(number)
    i, j = places[0][:, None], places[1]
    seen = numbers[0][:, None] == numbers[1]
    left, right = call.window()
    if left is not None:
        seen = seen & (j >= i - left)
    if right is not None:
        seen = seen & (j <= i + right)
    return seen[None, None]


def _eager_of(module: Any) -> Callable[..., Output]:
    """The eager attention function of a model, which stands in the file of its attention class."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise UnsupportedError(
        f"{type(module).__name__}: expected a model with a function eager_attention_forward beside it for what neither "
        'cupyflash nor sdpa computes; load it with attn_implementation="eager"'
    )
