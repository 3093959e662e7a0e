"""Seeds of dropout as tensors of the table's form: words of 32 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import options
from ..dropout import missing_seed, vet_seed
from ..errors import ArgumentError, UnsupportedError
from .followed import are_transforms_active, is_compiling


def words(seed: Any, like: Tensor, draw: bool) -> Tensor:
    """The words of a seed, on the device of `like`. None: one from torch's generator of that device, if `draw`: on a
    GPU nothing waits for it, and a CUDA graph that holds the call draws another one at each replay.

    Raises:
        ArgumentError: it is no seed, or none where one is needed.
        UnsupportedError: of DTensors, whose parts would all drop alike.
    """
    if type(like).__name__ == "DTensor":
        raise UnsupportedError("dropout_p: expected 0 for DTensors, since each part would drop the same elements")
    if seed is None:
        if not draw:
            raise missing_seed()
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=like.device)
    elif not isinstance(seed, Tensor):
        number = (options.whole("dropout_seed", seed) + 2**63) % 2**64 - 2**63
        seed = torch.full((1,), number, dtype=torch.int64, device=like.device)
    if seed.device != like.device:
        raise ArgumentError(f"dropout_seed: expected the device of q, {like.device}, got {seed.device}")
    vet_seed(tuple(seed.shape), str(seed.dtype).removeprefix("torch."))
    found = seed.detach().reshape(-1).contiguous()
    if found.dtype is torch.int64 and not is_compiling() and are_transforms_active():
        # Before 2.13 vmap knows no view of another dtype. The cast keeps the lower 32 bits.
        found = torch.stack((found, found >> 32), -1).reshape(-1).to(torch.int32)
    elif found.dtype is not torch.int32:
        found = found.view(torch.int32)
    return found if found.shape[0] == 2 else found.reshape(2, 2)
