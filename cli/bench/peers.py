"""Peers of `bench` outside of scaled_dot_product_attention: flash-attn, torch's varlen_attn, and flex_attention."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from .cell import Cell


def fa4(cell: Cell, sinks: Any | None = None) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out in bshd."""
    options = _fa4_options(cell, sinks)
    flash_attn = importlib.import_module("flash_attn.cute").flash_attn_func
    return lambda q, k, v: flash_attn(q, k, v, **options)[0]  # (out, lse)


def sdpa_lacks(cell: Cell) -> str:
    """What of a configuration torch's scaled_dot_product_attention has not; "" if it has all."""
    if cell.window is not None:
        return "sliding window, but for an explicit mask"
    if cell.sink:
        return "sinks"
    return "ALiBi" if cell.alibi else "softcap" if cell.softcap is not None else ""


def beyond_sdpa(name: str, cell: Cell, slopes: Any | None, lacks: str) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out in bshd: FlashAttention-2's own package, where a bound of -1 is none.

    Raises:
        NotImplementedError: it is another peer, or the package is not here.
    """
    if name != "flash2" or cell.sink or not _has("flash_attn.flash_attn_interface"):
        raise NotImplementedError(f"torch's scaled_dot_product_attention has no {lacks}")
    flash_attn = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_func
    options = {"causal": cell.causal, "window_size": (-1 if cell.window is None else cell.window, -1)}
    options |= {"softcap": cell.softcap or 0.0, "alibi_slopes": slopes}
    return lambda q, k, v: flash_attn(q, k, v, **options)


def _fa4_options(cell: Cell, sinks: Any | None) -> dict[str, Any]:
    if cell.alibi:
        raise NotImplementedError("FlashAttention-4 has no ALiBi but by a function of its own language")
    options: dict[str, Any] = {"causal": cell.causal, "window_size": (cell.window, None)}  # causal: the right one is 0
    options |= {} if cell.softcap is None else {"softcap": cell.softcap}
    return options if sinks is None else options | {"learnable_sink": sinks.bfloat16()}  # the only dtype that it takes


def fa4_varlen(
    cell: Cell, cu_seqlens: Any, slopes: Any | None = None, sinks: Any | None = None
) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out, packed."""
    options = _fa4_options(cell, sinks)
    flash_attn = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    for side in "qk":
        options |= {f"cu_seqlens_{side}": cu_seqlens, f"max_seqlen_{side}": max(cell.lengths)}
    return lambda q, k, v: flash_attn(q, k, v, **options)[0]  # (out, lse)


def flash2_varlen(
    cell: Cell, cu_seqlens: Any, slopes: Any | None = None, sinks: Any | None = None
) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out, packed: torch's varlen_attn, or flash-attn's own function where torch's cannot do the call.

    Raises:
        NotImplementedError: there is neither.
    """
    if cell.sink:
        raise NotImplementedError("FlashAttention-2 has no sinks")
    try:
        attention, options = _torch_varlen(cell)
    except NotImplementedError as e:
        if not _has("flash_attn.flash_attn_interface"):
            raise NotImplementedError(f"{e}, and flash-attn is not installed") from None
        attention = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
        left = -1 if cell.window is None else cell.window
        options = {"causal": cell.causal, "window_size": (left, -1), "softcap": cell.softcap or 0.0}
        options |= {} if slopes is None else {"alibi_slopes": slopes}
    longest = max(cell.lengths)
    return lambda q, k, v: attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def _torch_varlen(cell: Cell) -> tuple[Callable[..., Any], dict[str, Any]]:
    """torch's varlen_attn, whose options differ from version to version, and those that the cell needs."""
    if not _has("torch.nn.attention.varlen"):
        raise NotImplementedError("this torch has no varlen_attn")
    if cell.softcap is not None:
        raise NotImplementedError("torch's varlen_attn has no softcap")
    if cell.alibi:
        raise NotImplementedError("torch's varlen_attn has no ALiBi")
    attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(attention).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1 if cell.window is None else cell.window, 0 if cell.causal else -1)
    elif cell.window is not None:
        raise NotImplementedError("this torch's varlen_attn has no windows")
    elif cell.causal:
        options["is_causal"] = True
    if cell.heads_k != cell.heads:
        if "enable_gqa" not in known:
            raise NotImplementedError("this torch's varlen_attn needs as many key heads as query heads")
        options["enable_gqa"] = True
    return attention, options


VARLEN = {"flash2": flash2_varlen, "fa4": fa4_varlen}


def _has(module: str) -> bool:
    """Whether a submodule can be found; its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def flex_is_missing() -> bool:
    """Whether this torch has no flex_attention."""
    return not _has("torch.nn.attention.flex_attention")


def flex(
    cell: Cell, device: str, slopes: Any | None = None, sinks: Any | None = None
) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out in bshd. The block mask is made here; the first call compiles. Sinks scale out, by lse."""
    import torch
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # What a compiled backward saved is kept, so that one graph can be run back many times.
    config.donated_buffer = False
    torch.compiler.reset()  # each cell has functions of its own, and torch compiles one for eight of them at most
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask, score = visible(cell), with_slopes(tanh_cap(cell.softcap), slopes)
    options = {"score_mod": score, "enable_gqa": cell.heads_k != cell.heads}
    if mask is not None:
        options["block_mask"] = create_block_mask(mask, None, None, cell.seqlen, cell.seqlen, device=device)

    def peer(q: Any, k: Any, v: Any) -> Any:
        return compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)

    def with_sinks(q: Any, k: Any, v: Any) -> Any:
        out, lse = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options, **_with_lse())
        lse = getattr(lse, "lse", lse)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)).transpose(1, 2)  # type: ignore[index]

    return peer if sinks is None else with_sinks


def _with_lse() -> dict[str, Any]:
    """What asks flex_attention for lse, too: before torch 2.9 another argument."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    return {"return_aux": module.AuxRequest(lse=True)} if hasattr(module, "AuxRequest") else {"return_lse": True}


def visible(cell: Cell) -> Callable[[Any, Any, Any, Any], Any] | None:
    """(batch, head, query, key) -> whether the query sees the key, of numbers or tensors; None where all do."""
    window = cell.window
    if window is None:
        return (lambda b, h, q, k: k <= q) if cell.causal else None
    if cell.causal:
        return lambda b, h, q, k: (k <= q) & (k >= q - window)
    return lambda b, h, q, k: k >= q - window


ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


def with_slopes(capped: ScoreMod | None, slopes: Any | None) -> ScoreMod | None:
    """(score, batch, head, query, key) -> the capped score less ALiBi's; as it was without slopes."""
    if slopes is None:
        return capped
    cap = capped or (lambda score, b, h, q, k: score)
    return lambda score, b, h, q, k: cap(score, b, h, q, k) - slopes[h] * (q - k).abs()


def tanh_cap(softcap: float | None) -> ScoreMod | None:
    """(score, batch, head, query, key) -> softcap * tanh(score / softcap); None without a softcap."""
    if softcap is None:
        return None
    return lambda score, b, h, q, k: softcap * (score / softcap).tanh()
