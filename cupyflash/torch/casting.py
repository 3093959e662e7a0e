"""Autocast: what it makes of a call's arrays."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..operands import FORWARD


def cast(arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What autocast, where it is on for q's device, makes of the arrays of q's dtype: as of those of torch's own."""
    kind = arrays["q"].device.type
    if not torch.is_autocast_enabled(kind):
        return arrays
    dtype, rows = torch.get_autocast_dtype(kind), FORWARD.rows

    def keeps(name: str, x: Tensor) -> bool:  # its own dtype, as a bias does that is fp32, and what mods read
        own = bool(rows[name].dtype) or rows[name].free
        return x.dtype not in _KINDS or own or (rows[name].broadcasts and x.dtype is torch.float32)

    return {name: x if keeps(name, x) else x.to(dtype) for name, x in arrays.items()}


_KINDS = {torch.float16, torch.bfloat16, torch.float32}
