"""Peers of `bench` of packages of their own: FlashAttention; and torch's varlen_attn."""

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
    if cell.block_mask:
        return "block masks"
    if cell.sink:
        return "sinks"
    return "ALiBi" if cell.alibi else "softcap" if cell.softcap is not None else ""


def beyond_sdpa(name: str, cell: Cell, slopes: Any | None, lacks: str) -> Callable[[Any, Any, Any], Any]:
    """(q, k, v) -> out in bshd: FlashAttention-2's own package, where a bound of -1 is none.

    Raises:
        NotImplementedError: it is another peer, or the package is not here.
    """
    if (
        name != "flash2"
        or cell.sink
        or cell.bias
        or cell.mask
        or cell.block_mask
        or cell.padded
        or not has("flash_attn.flash_attn_interface")
    ):
        raise NotImplementedError(f"torch's scaled_dot_product_attention has no {lacks}")
    flash_attn = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_func
    options = {"causal": cell.causal, "window_size": (-1 if cell.window is None else cell.window, -1)}
    options |= {"softcap": cell.softcap or 0.0, "alibi_slopes": slopes, "dropout_p": cell.dropout}
    return lambda q, k, v: flash_attn(q, k, v, **options)


def _fa4_options(cell: Cell, sinks: Any | None) -> dict[str, Any]:
    for has, what in (
        (cell.alibi, "ALiBi"),
        (cell.bias, "biases"),
        (cell.mask or cell.block_mask or cell.padded, "masks"),
    ):
        if has:
            raise NotImplementedError(f"FlashAttention-4 has no {what} but by a function of its own language")
    if cell.dropout:
        raise NotImplementedError("FlashAttention-4 has no dropout")
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
        if not has("flash_attn.flash_attn_interface"):
            raise NotImplementedError(f"{e}, and flash-attn is not installed") from None
        attention = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
        left = -1 if cell.window is None else cell.window
        options = {"causal": cell.causal, "window_size": (left, -1), "softcap": cell.softcap or 0.0}
        options |= {"dropout_p": cell.dropout} if cell.dropout else {}
        options |= {} if slopes is None else {"alibi_slopes": slopes}
    longest = max(cell.lengths)
    return lambda q, k, v: attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def _torch_varlen(cell: Cell) -> tuple[Callable[..., Any], dict[str, Any]]:
    """torch's varlen_attn, whose options differ from version to version, and those that the cell needs."""
    if not has("torch.nn.attention.varlen"):
        raise NotImplementedError("this torch has no varlen_attn")
    if cell.softcap is not None:
        raise NotImplementedError("torch's varlen_attn has no softcap")
    if cell.alibi:
        raise NotImplementedError("torch's varlen_attn has no ALiBi")
    if cell.dropout:
        raise NotImplementedError("torch's varlen_attn has no dropout")
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


def has(module: str) -> bool:
    """Whether a submodule can be found; its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
