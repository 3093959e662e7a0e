"""A layer of a step of generation like one before it: what it is asked for means the same, and is not asked again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.checks import CacheOptions, make_cache_options
from ..launch.kept import make_room
from ..torch import cached
from ..torch.followed import is_autocast_on
from . import ranges
from .call import BEYOND, Call

# What a model or a user may hand on, and that the last layer was not given.
_MORE = ("cache", "output_attentions", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", *BEYOND)
_MOST = 64


class Asked(NamedTuple):
    """What a layer is asked for, but for tensors."""

    scaling: float | None
    softcap: float | None
    dropout: float
    is_causal: bool | None
    sliding_window: int | None


_known: dict[tuple[Asked, bool], CacheOptions] = {}  # by what was asked, and whether there was a mask: what that means
_of_mask: tuple[Tensor, Tensor] | None = None  # the last one, and its ranges


def again(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, asked: Asked, sink: Tensor | None, others: dict[str, Any]
) -> Tensor | None:
    """(batch, 1, heads_q, head_dim) of a layer that is asked what one before it was; None where none was, or its
    tensors are not like that one's."""
    if torch.compiler.is_compiling():
        return None
    options = _known.get((asked, mask is None))
    if options is None or q.shape[2] != 1 or is_autocast_on():
        return None
    if [x for x in map(others.get, _MORE) if x is not None and x is not False]:
        return None
    arrays = {"q": q.transpose(1, 2), "k_cache": k.transpose(1, 2), "v_cache": v.transpose(1, 2)}
    if mask is not None:
        if not ranges.is_range_mask(mask):
            return None
        arrays["kv_range"] = _range_of(mask)
    if sink is not None:
        arrays["sink"] = sink_of(sink, q)
    found = cached.again(arrays, options, k.shape[2], want_lse=False)
    return None if found is None else found[0]


def remember(mask: Tensor | None, asked: Asked, call: Call) -> None:
    """A step was taken. With a mask it is the ranges that say all; without one a window would depend on how many keys
    there are by now."""
    if torch.compiler.is_compiling() or call.q.shape[2] != 1 or (mask is None and asked.sliding_window is not None):
        return
    if any(isinstance(x, Tensor) for x in asked):  # which may change
        return
    key = asked, mask is None
    if key not in _known:
        make_room(_known, _MOST)
        _known[key] = make_cache_options(call.causal, call.scale, None, call.softcap, False, None, False)


def _range_of(mask: Tensor) -> Tensor:
    """Its ranges, which all layers of a step have in common."""
    global _of_mask
    last = _of_mask
    if last is None or last[0] is not mask:
        last = _of_mask = mask, ranges.kv_range_of(mask)
    return last[1]


def sink_of(sink: Tensor, q: Tensor) -> Tensor:
    """(heads_q,), as kernels read it."""
    return sink.flatten().to(torch.float64 if q.dtype is torch.float64 else torch.float32)
