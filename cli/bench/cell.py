"""One configuration that `bench` times, and what it counts of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.problem import ITEMSIZE

DIRECTIONS = ("fwd", "bwd", "both")
FLOP_FORMULA = "4 * head_dim for each visible query-key pair and head in the forward, 2.5 times that in the backward"
_FLOPS = {"fwd": 1.0, "bwd": 2.5, "both": 3.5}


@dataclass(frozen=True)
class Cell:
    """One configuration; seqlen_q and seqlen_k are the same, `window` is the left bound, `alibi`: with slopes."""

    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    heads_k: int
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False

    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k, v and dout."""
        q, k = ((self.batch, self.seqlen, heads, self.head_dim) for heads in (self.heads, self.heads_k))
        return q, k, k, q

    def flops(self, direction: str) -> float:
        """`FLOP_FORMULA`, counted."""
        pairs = self.seqlen * (self.seqlen + 1) / 2 if self.causal else self.seqlen**2
        beyond = 0 if self.window is None else max(0, self.seqlen - 1 - self.window)  # queries with keys left of it
        pairs -= beyond * (beyond + 1) / 2
        return _FLOPS[direction] * 4 * self.head_dim * pairs * self.heads * self.batch

    def ideal_bytes(self, direction: str) -> int:
        """What must be allocated: out and lse; with a backward also dq, dk, dv, delta and one fp32 sum of dq."""
        item, rows = ITEMSIZE[self.dtype], self.batch * self.heads * self.seqlen
        tensor = rows * self.head_dim
        forward = tensor * item + 4 * rows
        gradients = tensor * (self.heads + 2 * self.heads_k) // self.heads * item
        return forward if direction == "fwd" else forward + gradients + 4 * rows + 4 * tensor

    @property
    def options(self) -> dict[str, Any]:
        """Those of `attention`."""
        window = None if self.window is None else (self.window, None)
        return {"causal": self.causal, "window": window, "softcap": self.softcap}

    def slopes(self) -> np.ndarray | None:
        """Those of Press et al. 2022, for any number of heads: 2^(-8 i / heads), i from 1 on."""
        return np.exp2(-8 * np.arange(1, self.heads + 1, dtype=np.float32) / self.heads) if self.alibi else None
