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


def ranges(
    batch: int,
    first: int | Tensor,
    used: int,
    window: tuple[int | None, int | None],
    padding: Tensor | None,
    device: Any,
) -> Tensor | None:
    """(batch, 2), which keys of each sequence count, as `masks` has them; whether they lie side by side is told to
    `holes`. None: it is torch's to make them.

    Args:
        window: of one query, which stands at the place `first`; of several both sides are None.
        padding: (batch, keys) of bool.
    """
    if is_compiling() or torch.device(device).type != "cuda" or is_followed() or holes.are_checked() or not batch:
        return None
    holes.look()
    found = torch.empty((batch, 2), dtype=torch.int32, device=device)
    ordinal = found.get_device()
    place = first if isinstance(first, Tensor) else None
    if place is not None and not (_lies_on(ordinal, place, torch.int64) and place.numel() == 1):
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
    launch(
        stream, batch, 0 if padding is None else padding.data_ptr(), 0 if place is None else place.data_ptr(),
        found.data_ptr(), holes.verdict_of(ordinal), stride=0 if padding is None else padding.stride(0),
        keys=used if padding is None else padding.shape[1], used=used, first=0 if place is not None else int(first),
        window=window,
    )  # fmt: skip
    return found


def _lies_on(ordinal: int, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is a plain tensor on this GPU."""
    return type(x) is Tensor and x.is_cuda and x.get_device() == ordinal and x.dtype is dtype
