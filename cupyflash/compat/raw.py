"""The functions behind flash-attn's own: not public there, and imported by other projects all the same.

They see no autograd: gradients are written into tensors of the caller. Nothing decorates them, since callers look at
their arguments by ``inspect.getfullargspec``, which does not see through decorators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import Gradients, attention, attention_backward
from ..errors import UnsupportedError
from ..varlen import attention_varlen, attention_varlen_backward
from .kvcache import packed_over_pages
from .options import Given
from .tensors import (
    lengths_of,
    may_be_empty,
    maybe_contiguous,
    no_probabilities,
    round_multiple,
    sequence_of_rows,
    to_ours,
    to_theirs,
    unpaged,
)

_ROWS = 128  # softmax_d has room for a multiple of it


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state): S_dmask is empty, rng_state dropout's seed and offset, or zeros."""
    window = window_size_left, window_size_right
    keywords = Given(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes).ours(q.shape[-1])
    state = _random_state(q, keywords)
    with torch.no_grad():
        q, k, v = map(maybe_contiguous, (q, k, v))
        out, lse = attention(q, k, v, **keywords, return_lse=True)
        lse = to_theirs(lse) if may_be_empty(q, k, keywords) else lse
    return out, lse, no_probabilities(q), state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of packed sequences. zero_tensors and num_splits change nothing: rows of no sequence are always 0."""
    if leftpad_k is not None:
        raise UnsupportedError(
            "leftpad_k: expected None; let cu_seqlens_k begin behind the padding, or use flash_attn_with_kvcache"
        )
    window = window_size_left, window_size_right
    keywords = Given(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes).ours(q.shape[-1])
    lengths, state = lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_k), _random_state(q, keywords)
    with torch.no_grad():
        if block_table is not None and dropout_p:
            k, v, lengths = unpaged(k, v, cu_seqlens_k, block_table, lengths)
            block_table = None
        q, k, v = map(maybe_contiguous, (q, k, v))
        if block_table is not None:
            out, lse = packed_over_pages(q, k, v, block_table, lengths, keywords)
        else:
            out, lse = attention_varlen(q, k, v, **lengths, **keywords, return_lse=True)
    return out, to_theirs(lse), no_probabilities(q), state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients into dq, dk and dv; return softmax_d, rowsum(dout * out) in fp32.

    Of softmax_d (batch, heads_q, seqlen_q rounded up to 128), what lies behind seqlen_q is 0. out and softmax_lse may
    be those of a softmax over more keys than k has: that is how ring attention calls it.
    """
    window = window_size_left, window_size_right
    given = Given(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    keywords = given.ours(q.shape[-1])
    if dropout_p:
        keywords["dropout_seed"] = rng_state
    with torch.no_grad():
        lse = to_ours(softmax_lse) if may_be_empty(q, k, keywords) else softmax_lse
        dout, q, k, v, out, lse = map(maybe_contiguous, (dout, q, k, v, out, lse))
        grads = attention_backward(dout, q, k, v, out, lse, **keywords)
        _write(grads, dq, dk, dv)
        delta = _delta(dout, out).transpose(1, 2)  # (batch, heads_q, seqlen_q)
        return torch.nn.functional.pad(delta, (0, round_multiple(delta.shape[-1], _ROWS) - delta.shape[-1]))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The same of packed sequences; softmax_d is (heads_q, total_q + 128 * batch), 128 further on for each sequence."""
    window = window_size_left, window_size_right
    given = Given(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    keywords = given.ours(q.shape[-1])
    if dropout_p:
        keywords["dropout_seed"] = rng_state
    with torch.no_grad():
        dout, q, k, v, out, lse = map(maybe_contiguous, (dout, q, k, v, out, to_ours(softmax_lse)))
        grads = attention_varlen_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, **keywords)
        _write(grads, dq, dk, dv)
        delta, batch = _delta(dout, out).t(), len(cu_seqlens_q) - 1  # (heads_q, total_q)
        total = delta.shape[-1]
        softmax_d = delta.new_zeros(delta.shape[0], total + _ROWS * batch)
        places = torch.arange(total, device=q.device) + _ROWS * sequence_of_rows(cu_seqlens_q, total)
        return softmax_d.index_copy_(1, places, delta)


def _delta(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out), in fp32, or fp64 for fp64."""
    wide = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(wide) * out).sum(-1)


def _write(grads: Gradients, *wanted: Tensor | None) -> None:
    for found, place in zip(grads, wanted, strict=True):
        if place is not None:
            place.copy_(found)


def _random_state(q: Tensor, keywords: dict[str, Any]) -> Tensor:
    """A new seed and offset, which `keywords` then have, too; zeros where nothing is dropped."""
    if "dropout_p" not in keywords:
        return torch.zeros(2, dtype=torch.int64, device=q.device)
    keywords["dropout_seed"] = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    found: Tensor = keywords["dropout_seed"]
    return found
