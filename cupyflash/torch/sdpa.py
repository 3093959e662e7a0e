"""F.scaled_dot_product_attention by cupyflash, where it can; else torch's own, with the reason, once."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..arrays.imported import constant_in_programs
from ..errors import ArgumentError
from ..gpu.device import BF16_CAPABILITY, MIN_CAPABILITY, Device
from ..options import make_options
from ..plan.tiles_fp32 import widest_backward
from ..problem import MAX_HEAD_DIM
from . import autograd, seeds
from .followed import has_rules


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention, computed by cupyflash where it can be.

    Args and result are those of torch's: ``(batch, heads, seqlen, head_dim)``; with `is_causal` query i sees keys up
    to i (aligned at the top left), whatever the lengths.

    attn_mask: of bool, it is True where a key is visible; of a floating dtype, that of query or fp32, it is a bias,
        read where it lies, and learned if it requires grad.

    What cupyflash does not take goes to torch's own: head_dims that are no multiple of 8 or differ, fp64 on a GPU, bf16
    and fp32 on GPUs older than Ampere, fp32 beyond head_dim 224 that needs gradients on GPUs with 99 KiB of shared
    memory a block, GPUs older than Turing, broadcast batches, a dropout_p of 1, a scale that is not finite, meta
    tensors, and tensors in host memory, for which torch is faster (unless CUPYFLASH_BACKEND is "cpu").
    A warning says why, once a reason.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 128, 64)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([1, 8, 128, 64])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name}: expected a torch.Tensor, got {type(x).__name__}; give torch.as_tensor({name})"
            )
    reason = why_not(query, key, value, scale=scale) or why_not_bias(query, key, attn_mask)
    if not 0.0 <= dropout_p < 1.0:
        reason = "expected a dropout_p from 0 on and below 1"
    if attn_mask is not None and is_causal:
        reason = "there is an attn_mask beside is_causal"  # an error of torch's
    if not reason and query.shape[1] != key.shape[1] and not enable_gqa:
        reason = "the heads of query and key differ, and enable_gqa is not set"
    if reason:
        tell("scaled_dot_product_attention: this call is torch's own", reason)
        gqa = {"enable_gqa": True} if enable_gqa else {}  # an argument since torch 2.5
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **gqa
        )
    window = (None, query.shape[2] - key.shape[2]) if is_causal else None
    turn, layout = turned_as(query)
    fixed_order = torch.are_deterministic_algorithms_enabled()
    options = make_options(scale=scale, window=window, layout=layout, deterministic=fixed_order, dropout_p=dropout_p)
    arrays = {"q": turn(query), "k": turn(key), "v": turn(value)}
    if attn_mask is not None:
        arrays["mask" if attn_mask.dtype is torch.bool else "bias"] = attn_mask
    if options.dropout_p:
        arrays["dropout_seed"] = seeds.words(None, query, draw=True)
    return turn(autograd.attention(arrays, options, want_lse=False)[0])


def turned_as(q: Tensor) -> tuple[Callable[[Tensor], Tensor], str]:
    """How to look at tensors (batch, heads, seqlen, head_dim) so that results lie as q does, heads within rows or rows
    within heads; and the layout that they then have."""
    if 0 < q.stride(1) < q.stride(2):
        return (lambda x: x.transpose(1, 2)), "bshd"
    return (lambda x: x), "bhsd"


_HALF = (torch.float16, torch.bfloat16)
_GPU = (*_HALF, torch.float32)
_HOST = (*_GPU, torch.float64)


def why_not(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, mask: Tensor | None = None, scale: float | None = None
) -> str:
    """Why a call in the layout bhsd is torch's; "" if it is ours. No reason depends on lengths."""
    if has_rules(q, k, v):
        return "a tensor has rules of its own"
    if mask is not None:
        return "there is an attn_mask"
    if dropout_p:
        return "there is dropout"
    if scale is not None and not -math.inf < scale < math.inf:
        return "expected a finite scale"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return "expected 4 dimensions"
    return _why_not_device(q) or _why_not_shapes(q, k, v) or _why_not_learned(q, k, v)


def why_not_bias(q: Tensor, k: Tensor, mask: Tensor | None) -> str:
    """Why an attn_mask is torch's; "" if it is a bias of ours, or if there is none."""
    if mask is None:
        return ""
    if has_rules(mask) or mask.layout is not torch.strided or mask.device != q.device:
        return "attn_mask is not a plain tensor on the device of query"
    autocast = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    half = torch.float32 if autocast in _HALF else autocast
    if mask.dtype not in (torch.bool, autocast, half, q.dtype if autocast in _HALF else half):
        return "expected attn_mask of bool, of the dtype of query or of fp32"
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    own = tuple(mask.shape)
    # Of as many, since programs of torch 2.9 take any zip for a strict one.
    if len(own) > 4 or any(n not in (1, m) for n, m in zip(own, shape[4 - len(own) :], strict=True)):
        return "expected an attn_mask that broadcasts to the scores"
    return ""


@constant_in_programs  # in which torch 2.4 cannot read the environment
def _takes_host() -> bool:
    return os.environ.get("CUPYFLASH_BACKEND") == "cpu"


def _why_not_device(q: Tensor) -> str:
    kind = q.device.type
    if q.layout is not torch.strided or kind not in ("cpu", "cuda"):
        return "expected plain tensors on the CPU or an NVIDIA GPU"
    autocast = torch.is_autocast_enabled(kind) and q.dtype is torch.float32  # an error for kinds without autocast
    if kind == "cpu":
        if not _takes_host():
            return "tensors in host memory are faster there; CUPYFLASH_BACKEND=cpu takes them, too"
        return "" if q.dtype in _HOST else "expected a floating-point dtype"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < MIN_CAPABILITY:
        return "the GPU is older than Turing"
    dtype = torch.get_autocast_dtype(kind) if autocast else q.dtype
    if dtype in (torch.bfloat16, torch.float32) and capability < BF16_CAPABILITY:
        return "expected fp16 on a GPU older than Ampere"
    return "" if dtype in _GPU else "expected fp16, bf16 or fp32 on a GPU"


def _why_not_shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]):
        return "expected the same batch, and heads and length of value as of key"
    d = q.shape[3]
    if k.shape[3] != d or any(n % 8 or not 0 < n <= MAX_HEAD_DIM for n in (d, v.shape[3])):
        return f"expected key to have the head_dim of query, and each to be a multiple of 8 and at most {MAX_HEAD_DIM}"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return "expected the heads of key to divide those of query"
    if any(x.stride(3) != 1 and x.shape[3] > 1 for x in (q, k, v)):
        return "expected a stride of 1 along head_dim"
    return ""


def _why_not_learned(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why a call that takes a forward would find no backward."""
    widest = max(q.shape[3], v.shape[3])
    if q.device.type != "cuda" or q.dtype is not torch.float32 or torch.is_autocast_enabled("cuda"):
        return ""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (q, k, v)):
        return ""
    most = _widest_learned(q.device.index)
    return "" if widest <= most else f"expected a head_dim of at most {most} on such a GPU, in fp32 and for gradients"


@constant_in_programs
def _widest_learned(ordinal: int | None) -> int:
    """The widest heads of fp32 that have a backward on a GPU."""
    return widest_backward(Device.of(0 if ordinal is None else ordinal))


_told: set[tuple[str, str]] = set()


@constant_in_programs
def tell(what: str, reason: str) -> None:
    """Warn of `what`, once a reason."""
    if (what, reason) not in _told:
        _told.add((what, reason))
        warnings.warn(f"{what}: {reason}", UserWarning, stacklevel=3)
