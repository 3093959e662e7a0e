"""Our kernels in the places of torch's: what F.scaled_dot_product_attention and torch.nn.attention.varlen call.

Each is given, before torch's arguments, what calls torch's own kernel with them, and a reason to do so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arrays.adapters import TORCH
from ..launch import run
from ..options import Options
from .sdpa import turned_as, why_not

# ---- The calls of F.scaled_dot_product_attention: (batch, heads, seqlen, head_dim) ----


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), out with the strides that torch expects: those of an empty_like of q."""
    turned, layout = turned_as(q)
    out, lse = run.forward(TORCH, {"q": turned(q), "k": turned(k), "v": turned(v)}, options._replace(layout=layout))
    assert lse is not None
    return _like(turned(out), q), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> list[Tensor]:
    turned, layout = turned_as(q)
    arrays = {"q": turned(q), "k": turned(k), "v": turned(v), "out": turned(out), "dout": turned(dout)}
    if arrays["dout"].stride(3) != 1:
        arrays["dout"] = arrays["dout"].contiguous()
    options = options._replace(layout=layout, deterministic=torch.are_deterministic_algorithms_enabled())
    grads = run.backward(TORCH, {**arrays, "lse": lse.contiguous()}, options)
    return [turned(grads[name]) for name in ("dq", "dk", "dv")]


def _like(x: Tensor, y: Tensor) -> Tensor:
    """x with the strides of an empty_like of y, copied only if it has others."""
    strides = torch.empty_like(y, device="meta").stride()
    return x if x.stride() == strides else torch.empty_like(y).copy_(x)


def _sdpa(
    by_torch: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    reason = why_not(q, k, v, dropout_p, scale=scale) or ("a debug mask is asked for" if return_debug_mask else "")
    if reason:
        return by_torch(reason)
    out, lse = _forward(q, k, v, Options(is_causal, scale))
    return out, lse, None, None, q.shape[2], k.shape[2], *_no_dropout(q)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What torch keeps of dropout: state and offset of its random numbers, and a mask."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _sdpa_backward(
    by_torch: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *state: Tensor,
    scale: float | None = None,
) -> Any:  # fmt: skip
    if reason := why_not(q, k, v, dropout_p, scale=scale):
        return by_torch(reason)
    grads = _backward(dout, q, k, v, out, lse, Options(is_causal, scale))
    return tuple(_like(g, x) for g, x in zip(grads, (q, k, v), strict=True))


def _sdpa_on_host(
    by_torch: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if reason := why_not(q, k, v, dropout_p, attn_mask, scale):
        return by_torch(reason)
    out, lse = _forward(q, k, v, Options(scale=scale, window=_top_left(q, k, is_causal)))
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _sdpa_on_host_backward(
    by_torch: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if reason := why_not(q, k, v, dropout_p, attn_mask, scale):
        return by_torch(reason)
    grads = _backward(dout, q, k, v, out, lse, Options(scale=scale, window=_top_left(q, k, is_causal)))
    return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)


def _top_left(q: Tensor, k: Tensor, is_causal: bool) -> tuple[None, int] | None:
    return (None, q.shape[2] - k.shape[2]) if is_causal else None


# ---- Those of torch.nn.attention.varlen: (batch, seqlen, heads, head_dim), or packed ----


def _flash(
    by_torch: Any, q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    **more: Any,
) -> Any:  # fmt: skip
    rest = any(x is not None and not (name == "num_splits" and x <= 1) for name, x in more.items())
    reason = _why_not_flash(q, k, v, dropout_p, scale) or (
        "it asks for more than we have" if rest or return_debug_mask else ""
    )
    if reason:
        return by_torch(reason)
    arrays = _places({"q": q, "k": k, "v": v}, cum_seq_q, cum_seq_k, seqused_k)
    out, lse = run.forward(TORCH, arrays, _windowed(is_causal, scale, window_size_left, window_size_right))
    return _like(out, q), lse, *_no_dropout(q)


def _flash_backward(
    by_torch: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *state: Tensor,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> Any:  # fmt: skip
    if reason := _why_not_flash(q, k, v, dropout_p, scale):
        return by_torch(reason)
    arrays = _places({"q": q, "k": k, "v": v}, cum_seq_q, cum_seq_k, None)
    arrays |= {"out": out, "dout": dout if dout.stride(-1) == 1 else dout.contiguous(), "lse": lse.contiguous()}
    options = _windowed(is_causal, scale, window_size_left, window_size_right)
    grads = run.backward(TORCH, arrays, options._replace(deterministic=torch.are_deterministic_algorithms_enabled()))
    return tuple(_like(grads[f"d{name}"], arrays[name]) for name in "qkv")


def _why_not_flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None) -> str:
    """`why_not` of arrays with rows before heads, packed or not."""
    q, k, v = ((x[None] if x.dim() == 3 else x).transpose(1, 2) for x in (q, k, v))
    return why_not(q, k, v, dropout_p, scale=scale)


def _places(
    arrays: dict[str, Tensor], cu_q: Tensor | None, cu_k: Tensor | None, used: Tensor | None
) -> dict[str, Tensor]:
    """The arrays, and where their sequences lie."""
    places = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": used}
    return arrays | {name: x for name, x in places.items() if x is not None}


def _windowed(is_causal: bool, scale: float | None, left: int | None, right: int | None) -> Options:
    """The options; to torch as to flash-attn a bound of -1 is none."""
    window = tuple(None if bound is None or bound < 0 else bound for bound in (left, right))
    return Options(is_causal, scale, (window[0], window[1]))


CUDA: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
}
CPU: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa_on_host,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_on_host_backward,
}
