"""`bench --framework cupy`: our calls on CuPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import CupyClock
from .work import Bench

MOST_DRAWN = 1 << 27  # random numbers that come from the host


class CupyBench(Bench):
    """CuPy arrays; random numbers come from NumPy, since a lean CuPy has no cuRAND."""

    name = "cupy"
    on_gpu = True

    def __init__(self) -> None:
        import cupy

        super().__init__()
        self.cupy, self.clock = cupy, CupyClock()
        self.pool: dict[tuple[str, float], Any] = {}

    def random(self, dtype: str, shape: tuple[int, ...], std: float = 1.0) -> Any:
        size = int(np.prod(shape))
        drawn = min(4 * size, MOST_DRAWN)
        if (dtype, std) not in self.pool or self.pool[dtype, std].size < drawn:
            self.pool[dtype, std] = self.cupy.asarray(super().random(dtype, (drawn,), std))
        pool = self.pool[dtype, std]
        if size > pool.size // 4:  # as often as it takes
            bits = self.cupy.tile(pool.view(f"u{pool.itemsize}"), -(-size // pool.size))
            return bits[:size].view(pool.dtype).reshape(shape)
        start = int(self.rng.integers(0, pool.size - size)) // 8 * 8  # rows stay aligned
        return pool[start : start + size].copy().reshape(shape)

    def array(self, x: np.ndarray) -> Any:
        return self.cupy.asarray(x)

    def version(self) -> str:
        return str(self.cupy.__version__)

    def matmul(self) -> None:
        """A lean CuPy has no cuBLAS."""
