"""Attention as transformers asks for it: by cupyflash where it can be, else by transformers itself, with the reason."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from .. import api, varlen
from ..kvcache import attention_with_cache
from ..torch import sdpa
from ..torch.followed import is_autocast_on
from . import fallback, holes, packing, ranges, steps
from .call import BEYOND, Call, Output

# From 4.53 on. Before, models make their masks themselves, whole, and of packed sequences as if they were one.
HAS_MASK_FUNCTIONS = hasattr(transformers, "AttentionMaskInterface")


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> Output:
    """An attention function of transformers.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim), any strides; key, value: (batch, heads_k, seqlen_k, head_dim).
        attention_mask: None, what `masks.mask` made, or one that says all, (batch, 1, seqlen_q, seqlen_k), which is
            added to the scores.
        sliding_window: how many keys a causal query sees at most, with its own.
        s_aux: (heads_q,): a score for each head that takes part in the softmax and has no value.

    Returns:
        (batch, seqlen_q, heads_q, head_dim), and None for the weights, which are not formed; or the model's own eager
        results, where weights are asked for.
    """
    holes.look()
    asked, given_mask = steps.Asked(scaling, softcap, dropout, is_causal, sliding_window), attention_mask
    found = steps.again(query, key, value, attention_mask, asked, s_aux, others)
    if found is not None:
        return found, None
    cache = others.pop("cache", None)
    if cache is not None:  # of continuous batching: it puts the keys of all requests one behind the other
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others)
        attention_mask = None
    is_known = attention_mask is None or ranges.is_range_mask(attention_mask) or packing.is_packed_mask(attention_mask)
    if not is_known:
        attention_mask = _made_by_model(module, query, key, attention_mask, others)
    own_mask = None if is_known else attention_mask
    form = _form(module, query, key, value, attention_mask, is_causal, sliding_window, others)
    deterministic = bool(others.get("deterministic")) or torch.are_deterministic_algorithms_enabled()
    call = Call(**form, scale=scaling, softcap=softcap, sink=s_aux, dropout=dropout, deterministic=deterministic)
    reason = _why_not(call, others)
    if reason:
        out, weights = fallback.by_transformers(module, call, own_mask, reason, is_causal, others)
    else:
        is_step = _is_step(call)
        if is_step and cache is None:
            steps.remember(given_mask, asked, call)
        out, weights = (_step if is_step else _attend)(call), None
    return out.reshape(query.shape[0], query.shape[2], *out.shape[2:]), weights


def _made_by_model(module: Any, q: Tensor, k: Tensor, mask: Tensor, others: dict[str, Any]) -> Tensor | None:
    """A mask that says all, of one that a model made itself: that may be longer than the keys (GPT-2 of 4.53, too), or
    leave to the model what is causal. None of packed sequences."""
    if HAS_MASK_FUNCTIONS:
        return mask[..., : k.shape[2]]
    if others.get("cu_seq_lens_q") is not None:
        return None
    mask = mask[..., : k.shape[2]]
    is_alone = mask.shape[2] == 1 < q.shape[2] and not getattr(module, "is_cross_attention", False)
    if not is_alone or not getattr(module, "is_causal", False):
        return mask
    seen = ranges.in_full(q.shape[2], k.shape[2], k.shape[2], (None, 0), None, q.device)
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _form(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
    others: dict[str, Any],
) -> dict[str, Any]:
    """The arrays of a call, and which keys each query sees."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    kv_range = None
    cu_seqlens = _cu_seqlens(q, k, mask, others)
    if cu_seqlens is not None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
    elif ranges.is_range_mask(mask):
        kv_range, causal = ranges.kv_range_of(mask), ranges.is_causal(mask)
        if q.shape[2] > 1 and mask.shape[2] < k.shape[2]:
            k, v = k[:, :, : mask.shape[2]], v[:, :, : mask.shape[2]]
    elif mask is not None:  # one that says all
        causal, sliding_window = False, None
    is_alone = q.shape[2] == 1 and cu_seqlens is None  # its causal limit hides nothing, or is in the range
    left = None if is_alone and kv_range is not None else _left(module, causal, sliding_window, k.shape[2])
    bias, shown = _of_scores(mask, k.shape[2], others)
    places = {"kv_range": kv_range, "cu_seqlens": cu_seqlens, "bias": bias, "mask": shown}
    return {"q": q, "k": k, "v": v, "causal": causal and not is_alone, "left": left, **places}


def _of_scores(mask: Tensor | None, keys: int, others: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores of so many keys, and the keys that are visible, if a mask of bool says so; of a
    static cache a bias of positions may have more."""
    bias: Tensor | None = others.get("position_bias")
    if bias is not None and bias.shape[-1] > keys:
        bias = others["position_bias"] = bias[..., :keys]
    if mask is None or ranges.is_range_mask(mask) or packing.is_packed_mask(mask):
        return bias, None
    if mask.dtype is torch.bool:
        return bias, mask
    return mask if bias is None else mask + bias, None


def _left(module: Any, causal: bool, sliding_window: int | None, keys: int) -> int | None:
    """How far a window reaches to the left. What transformers calls the size of one counts a query's own key where it
    is causal; where not, models differ in what they hand on, and masks are made of what the config says."""
    if sliding_window is None or keys <= sliding_window:
        return None
    own = None if causal else getattr(getattr(module, "config", None), "sliding_window", None)
    return int(sliding_window) - 1 if own is None else int(own)


def _cu_seqlens(q: Tensor, k: Tensor, mask: Tensor | None, others: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Those of q and k: as a data collator gives them, as the mask function found them, or of positions that start
    again in a batch of one."""
    if mask is not None and not packing.is_packed_mask(mask):
        return None
    given = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    if given[0] is not None and given[1] is not None:
        same = given[0] is given[1]
        cu_q = given[0].to(torch.int32)
        return cu_q, cu_q if same else given[1].to(torch.int32)
    if mask is not None:
        found: Tensor | None = packing.of_mask(mask)
    else:
        found = _of_positions(q, k, others.get("position_ids"))
    return None if found is None else (found, found)


def _of_positions(q: Tensor, k: Tensor, position_ids: Tensor | None) -> Tensor | None:
    n = q.shape[2]
    if position_ids is None or torch.compiler.is_compiling() or n == 1 or n != k.shape[2]:
        return None
    return packing.of_position_ids(position_ids) if position_ids.shape == (1, n) and q.shape[0] == 1 else None


def _why_not(call: Call, others: dict[str, Any]) -> str:
    """Why transformers computes a call; "" if cupyflash does."""
    if others.get("output_attentions"):
        return "there are no attention weights to be returned (output_attentions)"
    for name in BEYOND:
        if others.get(name) is not None:
            return f"there is a {name}"
    if call.sink is not None and call.sink.numel() != call.q.shape[1]:
        return "there are sinks, and not one for each head of the queries"
    if call.softcap is not None and not 0.001 <= call.softcap <= 1000:
        return "the softcap is not between 0.001 and 1000"
    of_scores = [x for x in (call.bias, call.mask) if x is not None]
    if of_scores and call.cu_seqlens is not None:
        return "there is a bias of packed sequences"
    reasons = (sdpa.why_not_bias(call.q, call.k, x) for x in of_scores)
    return sdpa.why_not(call.q, call.k, call.v) or next(filter(None, reasons), "")


def _attend(call: Call) -> Tensor:
    """(batch, seqlen_q, heads_q, head_dim)"""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    options = _options(call) | {"deterministic": call.deterministic, "dropout_p": call.dropout}
    if call.cu_seqlens is None:
        return api.attention(q, k, v, kv_range=call.kv_range, bias=call.bias, mask=call.mask, **options)
    return varlen.attention_varlen(q[0], k[0], v[0], *call.cu_seqlens, **options)[None]


def _step(call: Call) -> Tensor:
    """The same of few queries. Of a cache with more room than is in use the range says which keys count, and no others
    are read."""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    return attention_with_cache(q, k, v, cache_seqlens=k.shape[1], kv_range=call.kv_range, **_options(call))


def _options(call: Call) -> dict[str, Any]:
    window = None if call.left is None else call.window()
    options = {"causal": call.causal, "scale": call.scale, "window": window, "softcap": call.softcap}
    return options if call.sink is None else options | {"sink": steps.sink_of(call.sink, call.q)}


_FEW = 16  # queries of a step: what it costs is reading the keys, which attention over a cache splits among the GPU


def _is_step(call: Call) -> bool:
    """Whether a few new queries look at a cache, as in generation; there is nothing to be differentiated then."""
    brings_more = call.bias is not None or call.mask is not None or call.dropout or call.cu_seqlens is not None
    if call.q.shape[2] > _FEW or brings_more or is_autocast_on():
        return False
    brought = (call.q, call.k, call.v, *(() if call.sink is None else (call.sink,)))
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in brought))
