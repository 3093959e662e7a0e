"""The mask function of transformers: what models hand to their attention, as ranges of keys where that says all.

A single query needs no alignment: all that it sees is one range, made on the device, where a static cache keeps its
length. `packed` masks hold cu_seqlens, as ``(1, 1, sequences + 1, 1)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from . import holes, launched, models, packing
from .patterns import pattern_of
from .ranges import Counting, as_bias, as_range_mask


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    config: Any = None,
    dtype: torch.dtype = torch.float32,
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """A mask function of transformers: None where causal or not says all, a range mask, packed sequences, or for what
    is none of these a bias, ``(batch, 1, q_length, kv_length)``, the least number of `dtype` where a key is hidden.

    Args:
        cache_position: what transformers before 5.6 gives instead of q_length and q_offset; see `mask_of_positions`.
    """

    def in_full() -> Tensor:
        queries: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
        seen = masking_utils.sdpa_mask(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
            **(queries if cache_position is None else {"cache_position": cache_position}),
        )  # fmt: skip
        return as_bias(seen, dtype)

    is_plain = not use_vmap and (allow_is_causal_skip or allow_is_bidirectional_skip)
    pattern = pattern_of(mask_function, local_size, config, is_plain)
    first = _place(q_offset, kv_offset, q_length)
    if pattern is None or first is None or isinstance(kv_offset, Tensor):
        return in_full()
    if models.wants_all(config, is_window=pattern.left is not None):
        return in_full()
    if pattern.sequences is not None and attention_mask is None:
        return packing.as_mask(packing.of_numbers(pattern.sequences))
    all_count = pattern.right != 0 or isinstance(first, Tensor)  # all keys that are no padding, of an encoder, say
    used = kv_length if all_count else first + q_length
    is_aligned = not pattern.right or isinstance(first, Tensor) or first + q_length == kv_length  # as kernels align it
    if pattern.sequences is not None or used > kv_length or (q_length > 1 and not is_aligned):
        return in_full()
    if attention_mask is None and used == kv_length and is_aligned and not isinstance(first, Tensor):
        return None
    padding = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
    window = (pattern.left, pattern.right) if q_length == 1 else (None, None)  # of several the kernels know it
    asked = Counting(batch_size, first, used, window, padding)
    ranges = launched.ranges(asked, device)
    if ranges is None:
        if padding is not None and holes.found_in(padding):
            return in_full()
        ranges = _ranges(asked, device)
    return as_range_mask(ranges, q_length > 1 and pattern.right == 0, used if q_length > 1 else 1)


def mask_of_positions(
    batch_size: int, cache_position: Tensor, kv_length: int, kv_offset: int | Tensor = 0, **others: Any
) -> Tensor | None:
    """`mask`, as transformers before 5.6 calls it, with the positions of all queries on the device."""
    queries = cache_position.shape[0]
    first = kv_offset if queries == kv_length else cache_position[0]
    device = cache_position.device
    return mask(
        batch_size, queries, kv_length, first, kv_offset, cache_position=cache_position, **{**others, "device": device}
    )


def _place(q_offset: int | Tensor, kv_offset: int | Tensor, q_length: int) -> int | Tensor | None:
    """The place of the first query among the keys; None where the host needs it and cannot have it.

    A static cache counts on the device. That is where one query's range is made; of several the host must know how
    they are aligned, and waits: where a static cache that is not empty is given more than one token.
    """
    first = q_offset - kv_offset
    if isinstance(first, Tensor) and q_length > 1:
        return None if torch.compiler.is_compiling() else int(first)
    return first


def _ranges(asked: Counting, device: Any) -> Tensor:
    """(batch, 2), by torch's operations."""
    batch, first, used, (left, right), padding = asked
    if padding is None:
        start = torch.zeros(batch, dtype=torch.int32, device=device)
        end = start + used
    else:
        start = padding.to(torch.uint8).argmax(1)
        end = start + padding.sum(1)
        if used < padding.shape[1]:
            end = end.clamp(max=used)
            start = torch.minimum(start, end)
    if left is not None:
        start = start.clamp(min=_number(first - left))
    if right is not None and not (isinstance(first, int) and first + right + 1 >= used):
        end = end.clamp(max=_number(first + right + 1))
    if left is not None or right is not None:
        start = torch.minimum(start, end)
    return torch.stack([start, end], 1)


def _number(x: int | Tensor) -> int | Tensor:
    """One that others can be compared with; nothing is copied from the host."""
    return x.reshape(()) if isinstance(x, Tensor) else x
