"""Numbers in equal steps, as an array of a library."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .adapters import CUPY, TORCH, Native


def steps(library: Native, count: int, step: int, like: Any) -> Any:
    """0, step, 2 step, ... in int32, on the device of `like`; queued on the current stream."""
    end = count * step
    if library is TORCH:
        torch = sys.modules["torch"]
        return torch.arange(0, end, step, dtype=torch.int32, device=like.device)
    if library is CUPY:
        with like.device:
            return sys.modules["cupy"].arange(0, end, step, dtype=np.int32)
    return np.arange(0, end, step, dtype=np.int32)
