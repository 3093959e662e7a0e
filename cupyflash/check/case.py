"""What a named case is: a shape, options, values, memory. The table of them is `cases`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask, code_of
from ..problem import DTYPES, Problem, Window, make_problem
from ..sequences import Sequences
from .case_bias import draw_added, form_of, room_of
from .case_inputs import MEMORY, VALUES, alibi_slopes, sink_logits
from .case_masks import draw_mask, hide_keys
from .case_mods import draw_mods, hide_by_mods, with_mods
from .case_packed import PACKED_VALUES, draw_packed
from .features import Features
from .inputs import Inputs as Inputs

Array = NDArray[Any]

NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
EMULATOR_SEQLEN = 330  # the emulator runs some thousand times slower than a GPU
EMULATOR_HEADS = 8
NONFINITE = (
    "nan_in_hidden_key",
    "nan_in_visible_key",
    "inf_in_visible_key",
    "minus_inf_scores",
    "nan_in_other_batch",
    *PACKED_VALUES,
)


@dataclass(frozen=True)
class Case:
    """One named case.

    Attributes:
        values: how the numbers are drawn, a key of `case_inputs.VALUES`, or, packed, of `case_packed.PACKED_VALUES`.
        memory: how the arrays lie in memory, a key of `case_inputs.MEMORY`.
        layout: what to hand to `attention`; `inputs` stays bshd, `in_layout` converts.
        dlse: whether a gradient of lse is part of the backward pass.
        backward: whether the case has a backward pass at all.
        lengths_q, lengths_k, used_k: of a packed case, the lengths of its sequences and how many keys of each count;
            None: as lengths_q, and all. batch is then the number of sequences, seqlen_q and seqlen_k count all rows,
            also those behind the last sequence.
        alibi: how many dimensions ALiBi's slopes have; 0 without.
        ranges: the keys [start, end) of each sequence that its queries may see; None: all.
        sink: whether heads of q have sinks.
        bias: what is added to the scores, in words of `case_bias`; "" without.
        dropout_p: of dropout; 0 without.
        mask: a block mask, a key of `case_masks.MASKS`; "": none.
        mods: a key of `case_mods.MODS`; "": none.
        head_dim_v: of v; None: that of q and k.
    """

    name: str
    level: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    batch: int = 1
    heads_q: int = 2
    heads_k: int = 2
    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    deterministic: bool = False
    layout: str = "bshd"
    values: str = "normal"
    memory: str = "contiguous"
    dlse: bool = False
    backward: bool = True
    dtypes: tuple[str, ...] = DTYPES
    softcap: float | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    alibi: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None
    sink: bool = False
    bias: str = ""
    dropout_p: float = 0.0
    mask: str = ""
    mods: str = ""
    head_dim_v: int | None = None

    @property
    def packed(self) -> bool:
        """Whether several sequences lie one behind the other."""
        return self.lengths_q is not None

    @property
    def tags(self) -> frozenset[str]:
        """`values`, `memory`, and: emulator, nonfinite, strided, gqa, masked, empty, dlse, deterministic, softcap,
        alibi, packed, kv_range, sink, bias, dropout, block_mask, mods,
        own_v.
        """
        heads = self.heads_q if self.packed else self.batch * self.heads_q
        small = max(self.seqlen_q, self.seqlen_k) <= EMULATOR_SEQLEN and heads <= EMULATOR_HEADS
        facts = {
            "emulator": small,
            "nonfinite": self.values in NONFINITE,
            "strided": self.memory != "contiguous",
            "gqa": self.heads_q != self.heads_k,
            "masked": self.causal or self.window is not None or bool(self.mask),
            "empty": 0 in (self.batch, self.seqlen_q, self.seqlen_k),
            "dlse": self.dlse,
            "deterministic": self.deterministic,
            "softcap": self.softcap is not None,
            "alibi": self.alibi > 0,
            "packed": self.packed,
            "kv_range": self.ranges is not None,
            "sink": self.sink,
            "bias": bool(self.bias),
            "dropout": self.dropout_p > 0,
            "block_mask": bool(self.mask),
            "mods": bool(self.mods),
            "own_v": self.head_dim_v is not None,
        }
        return frozenset(name for name, holds in facts.items() if holds) | {self.values, self.memory}

    def problem(self, dtype: str) -> Problem:
        """The checked problem in `dtype`."""
        batch, sequences = ((), self.batch) if self.packed else ((self.batch,), None)
        q = (*batch, self.seqlen_q, self.heads_q, self.head_dim)
        k = (*batch, self.seqlen_k, self.heads_k, self.head_dim)
        v = (*k[:-1], self.head_dim_v or self.head_dim)
        more: dict[str, Any] = self.options(layout="bshd") | {"sequences": sequences, "alibi": self.alibi}
        more |= {"kv_range": self.ranges is not None, "sink": self.sink, "bias": form_of(self.bias, dtype)}
        if self.packed:
            more["max_seqlens"] = room_of(self.bias, self.room, bool(self.mask))
        if self.mask:
            mask = self.block_mask()
            more |= {"block_mask": code_of(mask.tiles.shape), "tall": mask.tall}
        plain = make_problem((q, k, v), (dtype,) * 3, **more, dropout=int(self.dropout_p > 0))
        return with_mods(plain, draw_mods(self.mods, np.random.default_rng(0), plain))

    @property
    def room(self) -> tuple[int, int]:
        """Queries and keys that a bias of packed sequences has: more than the longest one needs, and if that one has an
        odd number of keys, a pair of neighbours of which it has one."""
        keys = self.used_k or self.lengths_k or self.lengths_q
        return max(self.lengths_q or (), default=0) + 1, max(keys or (), default=0) + 3

    def block_mask(self) -> BlockMask:
        """The block mask, the same whatever the seed."""
        lengths = self.room if self.packed else (self.seqlen_q, self.seqlen_k)
        return draw_mask(self.mask, self.name, (self.batch, self.heads_q, *lengths))

    def sequences(self) -> Sequences | None:
        """Where the sequences of a packed case lie, and which of their keys count."""
        if self.lengths_q is None and self.ranges is None:
            return None
        queries, keys = (None if x is None else _cumulative(x) for x in (self.lengths_q, self.lengths_k))
        used, ranges = (None if x is None else np.array(x, np.int32) for x in (self.used_k, self.ranges))
        return Sequences.of(queries, keys, used, ranges)

    def options(self, layout: str | None = None) -> dict[str, Any]:
        """Keyword arguments of `attention` or `attention_varlen`, in the case's layout unless another is given."""
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "layout": layout or self.layout,
            "deterministic": self.deterministic,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
        }

    def inputs(self, dtype: str, seed: int = 0) -> Inputs:
        """Fresh arrays; the same name, dtype and seed give the same numbers on every machine."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        problem, sequences = self.problem(dtype), self.sequences()
        if sequences is None:
            tensors = VALUES[self.values](rng, problem)
        else:
            tensors = draw_packed(self.values, rng, problem, sequences)
        mask = self.block_mask() if self.mask else None
        if mask is not None and self.values == "nan_in_hidden_key":
            hide_keys(mask, tensors)
        tensors = MEMORY[self.memory](*(x.astype(NUMPY_DTYPE[dtype]) for x in tensors))
        q, k, v, dout = (x[0] for x in tensors) if self.packed else tensors
        lse_dtype = np.float64 if dtype == "fp64" else np.float32
        dlse = rng.standard_normal(problem.rows).astype(lse_dtype) if self.dlse else None
        features = Features(
            sequences=sequences,
            alibi_slopes=alibi_slopes(rng, problem).astype(lse_dtype) if self.alibi else None,
            sink=sink_logits(rng, problem).astype(lse_dtype) if self.sink else None,
            block_mask=mask,
        )
        bias, shown = draw_added(self.bias, rng, problem, NUMPY_DTYPE[dtype])
        if self.packed and bias is not None and bias.ndim > 1:  # what no sequence has must not be read
            bias[..., self.room[0] - 1 :, :] = bias[..., self.room[1] - 3 :] = np.nan
        words = rng.integers(-(2**31), 2**31, 2).astype(np.int32) if self.dropout_p else None
        mods = draw_mods(self.mods, rng, problem)
        if self.mods == "adds" and self.values == "nan_in_hidden_key":
            hide_by_mods(mods, k, v)
        return Inputs(q, k, v, dout, dlse, features._replace(bias=bias, mask=shown, dropout_seed=words, mods=mods))

    def in_layout(self, x: Array) -> Array:
        """A view of an array in bshd, or packed, in the layout of the case, and back again."""
        return x.swapaxes(-3, -2) if self.layout == "bhsd" else x


def _cumulative(lengths: tuple[int, ...]) -> Array:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
