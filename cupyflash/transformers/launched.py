"""Ranges of keys by one launch of a kernel of ours, where torch would take twenty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays.adapters import TORCH
from ..errors import CupyflashError
from ..launch import key_ranges
from ..torch.followed import is_compiling, is_followed
from . import holes
from .ranges import Counting


def ranges(asked: Counting, device: Any) -> Tensor | None:
    """(batch, 2), which keys of each sequence count; whether they lie side by side is told to `holes`. None: it is
    torch's to make them."""
    batch, first, used, window, padding = asked
    if is_compiling() or torch.device(device).type != "cuda" or is_followed() or holes.are_checked() or not batch:
        return None
    holes.look()
    found = torch.empty((batch, 2), dtype=torch.int32, device=device)
    ordinal = found.get_device()
    if isinstance(first, Tensor) and not (_lies_on(ordinal, first, torch.int64) and first.numel() == 1):
        return None
    if padding is not None and not (
        _lies_on(ordinal, padding, torch.bool) and padding.stride(1) == 1 and len(padding) == batch
    ):
        return None
    stream = TORCH.stream(ordinal)
    try:
        launch = key_ranges.on(ordinal, stream)
    except CupyflashError:  # attention will say why
        return None
    shown, stride, keys = (0, 0, used) if padding is None else (padding.data_ptr(), padding.stride(0), padding.shape[1])
    first_at, number = (first.data_ptr(), 0) if isinstance(first, Tensor) else (0, first)
    addresses = shown, first_at, found.data_ptr(), holes.verdict_of(ordinal)
    launch(stream, batch, *addresses, stride=stride, keys=keys, used=used, first=number, window=window)
    return found


def _lies_on(ordinal: int, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is a plain tensor on this GPU."""
    return type(x) is Tensor and x.is_cuda and x.get_device() == ordinal and x.dtype is dtype
