"""What is to be computed, however transformers asked for it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Output = tuple[Tensor, "Tensor | None"]  # of an attention function: out, and the weights where they are formed


CHOSEN = ("indices", "block_indices")  # keys that a model chooses for each query
BEYOND = ("head_mask", *CHOSEN)  # what changes the result in some models, and is only transformers' to know


class Call(NamedTuple):
    """Arrays and options of attention.

    Attributes:
        q, k, v: (batch, heads, seqlen, head_dim), any strides.
        left: how many keys before its own a query sees at most, and as many after it unless causal; None: all.
        kv_range: (batch, 2), int32; None: all keys.
        cu_seqlens: those of q and of k where sequences are packed, and batch is 1.
        bias: what is added to the scores: a bias of positions, a mask of numbers that is no range, or both.
        mask: a mask that is no range, of bool: True where a key is visible.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    left: int | None
    kv_range: Tensor | None
    cu_seqlens: tuple[Tensor, Tensor] | None
    bias: Tensor | None
    mask: Tensor | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    dropout: float
    deterministic: bool

    def window(self) -> tuple[int | None, int | None]:
        """As `attention` takes it. No property: programs of torch 2.9 know none of a NamedTuple."""
        return self.left, 0 if self.causal else self.left
