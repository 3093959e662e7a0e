"""Range masks: which keys of each sequence count, as it is handed from a mask function to attention.

A range mask says of each sequence which keys count, ``[start, end)``, in int32 on the device, and by its shape
``(batch, 1 or 2, keys, 2)`` what the host must know: the second dimension is 2 where masks are causal, the third is the
number of keys in use, of which there may be fewer than a static cache has room for. All but the last dimension, and the
first, are broadcast. It has four dimensions because generate() applies the mask function twice for static caches and
hands on untouched what has four.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor


class Counting(NamedTuple):
    """Which keys of a batch of sequences count: of the first `used` those that are no padding, and of them those in the
    window of one query, left and right of the place `first`; of several queries both sides are None.

    Attributes:
        padding: (batch, keys) of bool, False where a key is padding; None: there is none.
    """

    batch: int
    first: int | Tensor
    used: int
    window: tuple[int | None, int | None]
    padding: Tensor | None


def as_range_mask(ranges: Tensor, causal: bool, used: int) -> Tensor:
    """Of the keys that count in each sequence, (batch, 2), from start to end."""
    return ranges.to(torch.int32)[:, None, None].expand(-1, 2 if causal else 1, used, -1)


def is_range_mask(x: Tensor | None) -> TypeGuard[Tensor]:
    return x is not None and x.dtype is torch.int32 and x.dim() == 4 and x.shape[3] == 2


def is_causal(ranges: Tensor) -> bool:
    return ranges.shape[1] == 2


def kv_range_of(ranges: Tensor) -> Tensor:
    """(batch, 2), contiguous: a view of what `mask` made; a copy where it was moved to another device on the way."""
    return ranges[:, 0, 0].contiguous()


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, the least number where it is not: a query that sees none sees all alike, as if eager."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def in_full(
    queries: int, keys: int, used: int, window: tuple[int | None, int | None], kv_range: Tensor | None, device: Any
) -> Tensor:
    """(batch, 1, queries, keys): which keys each query sees, for those who take no ranges. The last query stands at the
    last of the `used` keys; window is counted from there."""
    i = torch.arange(queries, device=device)[:, None] + (used - queries)
    j = torch.arange(keys, device=device)
    seen = (j < used).expand(queries, keys)
    left, right = window
    if left is not None:
        seen = seen & (j >= i - left)
    if right is not None:
        seen = seen & (j <= i + right)
    if kv_range is None:
        return seen[None, None]
    start, end = kv_range[:, :, None, None, None].unbind(1)
    return seen & (j >= start) & (j < end)
