"""What is to be computed, however transformers asked for it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Output = tuple[Tensor, "Tensor | None"]  # of an attention function: out, and the weights where they are formed


class Call(NamedTuple):
    """What is to be computed: q, k and v are (batch, heads, seqlen, head_dim), the first `used` keys count."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    left: int | None  # how many keys before its own a query sees at most; after it as many, unless causal
    kv_range: Tensor | None
    cu_seqlens: tuple[Tensor, Tensor] | None  # of packed sequences, where batch is 1
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    dropout: float
    deterministic: bool

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.left, 0 if self.causal else self.left
