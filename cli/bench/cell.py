"""One configuration that `bench` times, and what it counts of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from cupyflash.problem import ITEMSIZE, Problem

from .. import block_masks
from ..explain.work import visible_pairs
from .mods import MODS

OURS = "cupyflash"
PLAIN, CPU = "plain", "cpu"  # other ways of our calls on NumPy arrays
SM80 = "sm80"  # our calls by the kernels of this family
ORDERED = "deterministic"  # our calls with `deterministic=True`
DIRECTIONS = ("fwd", "bwd", "both")
FLOP_FORMULA = (
    "2 * (head_dim + head_dim_v) for each visible query-key pair and head in the forward, "
    "6 * head_dim + 4 * head_dim_v in the backward"
)
SHOWN = 0.5  # of the elements of a mask, drawn at random
UNRECORDED = {"lengths", "deterministic"}  # fields that do not tell the rows of a table apart
_FLOPS = {"fwd": (2.0, 2.0), "bwd": (6.0, 4.0), "both": (8.0, 6.0)}  # by head_dim, by that of v


def short(length: int) -> str:
    """For pictures and names: 512, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


@dataclass(frozen=True)
class Cell:
    """One configuration; seqlen_q and seqlen_k are the same, `window` is the left bound.

    `alibi`: with slopes, `sink`: with sinks. `bias`, `mask`: along which dimensions they have elements of their own,
    letters of bhqk, - for none; "": there is none. `learned`: the bias has a gradient. `dropout`: its p. `block_mask`:
    a word of `block_masks`. `mod`: one of `mods.MODS`. `padded`: on which side the keys are that do not
    count, of each sequence any number of them. `head_dim_v`: of v and out; 0: head_dim. `score_std`: the standard
    deviation of scores, and of q's elements; those of k, v and dout have 1.

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
    bias: str = ""
    mask: str = ""
    learned: bool = False
    dropout: float = 0.0
    block_mask: str = ""
    mod: str = ""
    padded: str = ""
    head_dim_v: int = 0
    deterministic: bool = False
    score_std: float = 1.0

    heading, labels, unit = "TFLOP/s (ours / theirs)", ("head_dim", "mask", "seqlen"), "TFLOP/s"

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and dout."""
        rows = (self.tokens,) if self.packed else (self.batch, self.seqlen)
        (q, out), (k, v) = ([(*rows, n, d) for d in (self.head_dim, self.width_v)] for n in (self.heads, self.heads_k))
        return q, k, v, out

    @property
    def width_v(self) -> int:
        """The head_dim of v."""
        return self.head_dim_v or self.head_dim

    @property
    def widths(self) -> str:
        """Of a head, for a table: 128, or 192/128 where that of v is another."""
        return f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else str(self.head_dim)

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
    def brings_arrays(self) -> bool:
        """Whether its features need arguments beside `options`."""
        named = self.alibi, self.sink, self.bias, self.mask, self.dropout, self.block_mask, self.mod, self.padded
        return any(map(bool, named))

    @property
    def sequences(self) -> str:
        """Their lengths, for a table: 4096, or uniform 1024."""
        return f"{self.packed} {self.seqlen}" if self.packed else str(self.seqlen)

    @property
    def mask_name(self) -> str:
        """full or causal, and the features."""
        parts = ["causal" if self.causal else "full"]
        parts += [] if self.window is None else [f"window {self.window}"]
        parts += [f"block mask {self.block_mask}"] if self.block_mask else []
        parts += [f"padded on the {self.padded}"] if self.padded else []
        parts += [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        parts += ["ALiBi"] * self.alibi + ["sinks"] * self.sink
        parts += [f"{'learned ' * self.learned}bias {self.bias}"] if self.bias else []
        parts += [f"mask {self.mask}"] if self.mask else []
        parts += [f"dropout {self.dropout:g}"] if self.dropout else []
        parts += [f"mod {self.mod}"] if self.mod else []
        parts += [f"scores of std {self.score_std:g}"] if self.score_std != 1 else []
        return ", ".join(parts)

    def label(self) -> tuple[str, ...]:
        """What a table says of it, under `labels`."""
        return self.widths, self.mask_name, self.sequences

    @property
    def panel(self) -> tuple[str, str]:
        """Of a picture: the row and the column of the panel that has it."""
        return self.mask_name, f"head_dim {self.widths}"

    @property
    def length(self) -> int:
        """Along a panel."""
        return self.seqlen

    @property
    def length_name(self) -> str:
        """What `length` is."""
        return "lengths, the longest" if self.packed else "sequence length"

    @property
    def where(self) -> str:
        """For a sentence."""
        return f"head_dim {self.widths}, {self.mask_name}, seqlen {self.sequences}"

    def record(self) -> dict[str, Any]:
        """Every field but those of `UNRECORDED`."""
        return {name: value for name, value in asdict(self).items() if name not in UNRECORDED}

    def visible_pairs(self, seqlen: int, first: int = 0, end: int | None = None) -> float:
        """Query-key pairs that the masks let through, in one head of a sequence; with a mask, on average. Of the keys
        from `first` to `end`, but for a block mask.
        """
        keys = (seqlen if end is None else end) - first
        shift = first + keys - seqlen  # of query i's own position: masks of a problem are aligned at its last key
        window = (None if self.window is None else self.window + shift, -shift if self.causal else None)
        problem = Problem("bf16", 1, seqlen, keys, 1, 1, 8, 1.0, window)
        if self.block_mask:
            return block_masks.visible_pairs(self.block_mask, problem)
        if self.mod and (length := MODS[self.mod].length):  # each document by itself
            whole, rest = (visible_pairs(replace(problem, seqlen_q=n, seqlen_k=n)) for n in (length, seqlen % length))
            return seqlen // length * whole + rest
        return visible_pairs(problem) * (SHOWN if self.mask else 1)

    @property
    def ranges(self) -> np.ndarray:
        """``(batch, 2)`` of `padded`: lengths are drawn from 1 to seqlen, the same ones each time."""
        lengths = np.random.default_rng(0).integers(1, self.seqlen + 1, self.batch, np.int32)
        first = self.seqlen - lengths if self.padded == "left" else np.zeros_like(lengths)
        return np.stack((first, first + lengths), axis=1)

    def flops(self, direction: str) -> float:
        """`FLOP_FORMULA`, counted."""
        if self.padded:
            pairs = sum(self.visible_pairs(self.seqlen, first, end) for first, end in self.ranges.tolist())
        else:
            lengths = Counter(self.lengths) if self.packed else {self.seqlen: self.batch}
            pairs = sum(n * self.visible_pairs(length) for length, n in lengths.items())
        of_q, of_v = _FLOPS[direction]
        return (of_q * self.head_dim + of_v * self.width_v) * pairs * self.heads

    def speed(self, direction: str, implementation: str, ms: float) -> float:
        """TFLOP/s."""
        return self.flops(direction) / ms / 1e9

    def facts(self, direction: str, implementation: str, ms: float | None) -> dict[str, Any]:
        """What a row says beside times."""
        speed = None if ms is None else self.speed(direction, implementation, ms)
        return {"tflops": speed, "ideal_bytes": self.ideal_bytes(direction)}

    def ideal_bytes(self, direction: str) -> int:
        """What must be allocated: out and lse; with a backward also dq, dk, dv, delta and one fp32 sum of dq."""
        item, rows = ITEMSIZE[self.dtype], self.heads * self.tokens
        of_q, of_v, group = rows * self.head_dim, rows * self.width_v, self.heads // self.heads_k
        forward = of_v * item + 4 * rows
        gradients = (of_q + (of_q + of_v) // group) * item
        gradients += item * math.prod(self.added_shape(self.bias)) if self.learned else 0
        return forward if direction == "fwd" else forward + gradients + 4 * rows + 4 * of_q

    @property
    def options(self) -> dict[str, Any]:
        """Those of `attention`."""
        window = None if self.window is None else (self.window, None)
        dropout = {"dropout_p": self.dropout} if self.dropout else {}
        ordered = {"deterministic": True} if self.deterministic else {}
        return {"causal": self.causal, "window": window, "softcap": self.softcap} | dropout | ordered

    def added_shape(self, dims: str) -> tuple[int, ...]:
        """Of a bias or a mask with elements of its own along these dimensions."""
        whole = self.batch, self.heads, self.seqlen, self.seqlen
        return tuple(n if d in dims else 1 for d, n in zip("bhqk", whole, strict=True))

    def brought(self) -> dict[str, np.ndarray]:
        """Of those that there are: slopes as Press et al. 2022 have them, for any number of heads, 2^(-8 i / heads), i
        from 1 on; sinks from -2 to 2; a seed of dropout; ranges of keys.
        """
        found: dict[str, np.ndarray] = {}
        if self.alibi:
            found["alibi_slopes"] = np.exp2(-8 * np.arange(1, self.heads + 1, dtype=np.float32) / self.heads)
        if self.sink:
            found["sink"] = np.linspace(-2, 2, self.heads, dtype=np.float32)
        if self.dropout:
            found["dropout_seed"] = np.array([1], np.int64)
        if self.padded:
            found["kv_range"] = self.ranges
        return found
