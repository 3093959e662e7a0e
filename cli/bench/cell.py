"""One configuration that `bench` times, and what it counts of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from cupyflash.problem import ITEMSIZE

DIRECTIONS = ("fwd", "bwd", "both")
FLOP_FORMULA = "4 * head_dim for each visible query-key pair and head in the forward, 2.5 times that in the backward"
_FLOPS = {"fwd": 1.0, "bwd": 2.5, "both": 3.5}


@dataclass(frozen=True)
class Cell:
    """One configuration; seqlen_q and seqlen_k are the same, `window` is the left bound.

    `alibi`: with slopes, `sink`: with sinks.

    Of packed sequences, `packed` names the distribution that `lengths` are drawn from, `seqlen` is the longest that it
    knows, and `batch` says how many there are.
    """

    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    heads_k: int
    window: int | None = None
    softcap: float | None = None
    packed: str | None = None
    lengths: tuple[int, ...] = ()
    alibi: bool = False
    sink: bool = False

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and dout."""
        rows = (self.tokens,) if self.packed else (self.batch, self.seqlen)
        q, k = ((*rows, heads, self.head_dim) for heads in (self.heads, self.heads_k))
        return q, k, k, q

    @property
    def tokens(self) -> int:
        """Rows of q in all."""
        return sum(self.lengths) if self.packed else self.batch * self.seqlen

    @property
    def cu_seqlens(self) -> list[int]:
        """0, and the lengths of the packed sequences added up."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def dense(self) -> Cell:
        """The same rows in one call that is not packed.

        Raises:
            NotImplementedError: the lengths differ.
        """
        if set(self.lengths) != {self.seqlen}:
            raise NotImplementedError("a call that is not packed has one length: --packed equal")
        return replace(self, packed=None, lengths=())

    @property
    def sequences(self) -> str:
        """Their lengths, for a table: 4096, or uniform 1024."""
        return f"{self.packed} {self.seqlen}" if self.packed else str(self.seqlen)

    def record(self) -> dict[str, Any]:
        """Every field but the list of lengths."""
        fields = asdict(self)
        del fields["lengths"]
        return fields

    def visible_pairs(self, seqlen: int) -> float:
        """Query-key pairs that the mask lets through, in one head of a sequence."""
        pairs = seqlen * (seqlen + 1) / 2 if self.causal else seqlen**2
        beyond = 0 if self.window is None else max(0, seqlen - 1 - self.window)  # queries with keys left of it
        return pairs - beyond * (beyond + 1) / 2

    def flops(self, direction: str) -> float:
        """`FLOP_FORMULA`, counted."""
        lengths = Counter(self.lengths) if self.packed else {self.seqlen: self.batch}
        pairs = sum(n * self.visible_pairs(length) for length, n in lengths.items())
        return _FLOPS[direction] * 4 * self.head_dim * pairs * self.heads

    def ideal_bytes(self, direction: str) -> int:
        """What must be allocated: out and lse; with a backward also dq, dk, dv, delta and one fp32 sum of dq."""
        item, rows = ITEMSIZE[self.dtype], self.heads * self.tokens
        tensor = rows * self.head_dim
        forward = tensor * item + 4 * rows
        gradients = tensor * (self.heads + 2 * self.heads_k) // self.heads * item
        return forward if direction == "fwd" else forward + gradients + 4 * rows + 4 * tensor

    @property
    def options(self) -> dict[str, Any]:
        """Those of `attention`."""
        window = None if self.window is None else (self.window, None)
        return {"causal": self.causal, "window": window, "softcap": self.softcap}

    def brought(self) -> dict[str, np.ndarray]:
        """Of those that there are: slopes as Press et al. 2022 have them, for any number of heads, 2^(-8 i / heads), i
        from 1 on; sinks from -2 to 2.
        """
        slopes = np.exp2(-8 * np.arange(1, self.heads + 1, dtype=np.float32) / self.heads)
        sinks = np.linspace(-2, 2, self.heads, dtype=np.float32)
        there = {"alibi_slopes": self.alibi, "sink": self.sink}
        return {name: x for name, x in (("alibi_slopes", slopes), ("sink", sinks)) if there[name]}
