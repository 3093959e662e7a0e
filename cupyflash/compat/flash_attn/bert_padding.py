"""Padded batches to packed rows and back; differentiable.

The rows that count are found by their indices in the flattened batch, which waits for the GPU, as in flash-attn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..einops_names import rearrange, repeat

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "repeat",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of input (rows, ...) that indices (n,) name."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """values (n, ...) at the rows that indices (n,) name, of (first_axis_dim, ...); the others are 0."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_put((indices.long(),), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and input again: gradients of both add up."""
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that masks name, one behind the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or 0 and 1: tokens that are used.
        unused_mask: (batch, seqlen), likewise: tokens that get a row and are not used.

    Returns:
        rows (total, ...), their indices in the flattened batch (total,), cu_seqlens (batch + 1,) in int32, the longest
        length, and how many of each sequence are used (batch,), in int32.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None:
            _check_mask(name, mask, hidden_states)
    rows_mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = rows_mask.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = rows_mask.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _added_up(lengths), _longest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same where a row of the batch holds several sequences, one behind the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), integers: the lengths of each row's sequences, then zeros.

    Returns:
        As `unpad_input`, without the last; each sequence counts by itself.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    seqlen = attention_mask_in_length.shape[1]
    tokens = torch.arange(seqlen, device=attention_mask_in_length.device)
    indices = (tokens < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)  # row by row
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _added_up(lengths), _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, ...), 0 where no row goes."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _added_up(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    """Else rows of another sequence would be taken."""
    if mask.shape != hidden_states.shape[:2]:
        raise ArgumentError(
            f"{name}: expected shape {tuple(hidden_states.shape[:2])}, the first two of hidden_states, got "
            f"{tuple(mask.shape)}"
        )
