"""Sequences that are packed into the rows of a batch: cu_seqlens of what tells them apart."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


def of_numbers(numbers: Tensor) -> Tensor:
    """cu_seqlens of (batch, seqlen) numbers, where each sequence has its own in its row. Waits for the GPU."""
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return _cu_seqlens(begins)


def _cu_seqlens(begins: Tensor) -> Tensor:
    """Of which tokens begin a sequence, in all rows one behind the other."""
    starts = begins.flatten().nonzero()[:, 0].to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=begins.numel())


def as_mask(cu_seqlens: Tensor) -> Tensor:
    """What is handed from a mask function to attention."""
    return cu_seqlens[None, None, :, None]


def is_packed_mask(x: Tensor | None) -> bool:
    return x is not None and x.dtype is torch.int32 and x.dim() == 4 and x.shape[3] == 1


def of_mask(x: Tensor) -> Tensor:
    return x[0, 0, :, 0]


_last: tuple[weakref.ref[Tensor], int, Tensor | None] | None = None


def of_position_ids(position_ids: Tensor) -> Tensor | None:
    """cu_seqlens of (1, seqlen) positions that start again with each sequence and rise by 1 in it; None if there is one
    sequence, or positions are others, which say nothing of sequences.

    All layers of a forward ask with the same tensor: the GPU is waited for once. A tensor made in inference mode does
    not tell whether it was changed, and is asked each time.
    """
    global _last
    version = None if position_ids.is_inference() else position_ids._version
    if version is not None and _last is not None and _last[0]() is position_ids and _last[1] == version:
        return _last[2]
    begins = position_ids == position_ids.min()
    begins[:, 0] = True
    rises = (position_ids[:, 1:] == position_ids[:, :-1] + 1) | begins[:, 1:]
    begins[:, 1:] &= rises.all() & ~begins.all()
    starts = _cu_seqlens(begins)
    found = starts if len(starts) > 2 else None
    if version is not None:
        _last = weakref.ref(position_ids), version, found
    return found
