"""The one table of arrays: one row an array, and what follows from a row for each of the two passes.

The params structs in NumPy and in C++ (plan/params.py, tools/params.py), the checks, tensor maps, allocation and
addresses of a call (launch), the emulator's sessions and the names of gradients follow from `TABLE`. A new array is a
row here, then ``python -m tools.params``, then the kernels' lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from .operand import COUNTER as COUNTER
from .operand import GRADIENT as GRADIENT
from .operand import INPUT as INPUT
from .operand import MOD_ARRAYS, MOD_LIMIT, OUT, ROWS, SCORES, Box, K, Q, Use, V
from .operand import RESULT as RESULT
from .operand import SIZES as SIZES
from .operand import WORKSPACE as WORKSPACE
from .operand import Number as Number
from .operand import Operand as Operand
from .operand import taker as taker

_TILES = "of 64 x 64: 0 empty, 1 full, 2 + its number among block_bits; null: not given"
_LISTS = "of 1 for batch and heads_q that share theirs (blocks.cuh); null: no block mask"
_UNWANTED = "null: not wanted"
_IN, _OPTIONAL = Use(INPUT), Use(INPUT, optional=True)
_PARTS = Use(WORKSPACE, optional=True, text="null: there is one part")
TABLE: tuple[Operand | Number, ...] = (
    Operand("q", Q, forward=Use(INPUT, 64), backward=Use(INPUT, "block_m"), strided=True),
    Operand("k", K, forward=Use(INPUT, "key_rows"), backward=Use(INPUT, "block_n"), strided=True),
    Operand("v", V, like="k", width="v", forward=Use(INPUT, "key_rows"), backward=Use(INPUT, "block_n"), strided=True),
    Operand("out", OUT, like="q", width="v", forward=Use(RESULT, 64), backward=_IN, strided=True, field="o"),
    Operand("dout", OUT, like="q", width="v", backward=Use(INPUT, "block_m"), strided=True),
    Operand(
        "lse", ROWS, "fp32",
        forward=Use(RESULT, optional=True, text="natural log; null: not wanted"),
        backward=Use(INPUT, text="natural log"),
    ),
    Operand("dlse", ROWS, "fp32", backward=Use(INPUT, optional=True, text="null: zero")),
    Operand("dq", Q, like="q", backward=Use(GRADIENT, 64), strided=True),
    Operand("dk", K, like="k", backward=Use(GRADIENT, 64), strided=True),
    Operand("dv", V, like="v", backward=Use(GRADIENT, 64), strided=True),
    Operand(
        "row_stats", ("batch", "heads_q", "m_blocks * block_m", "2"), "fp32",
        backward=Use(WORKSPACE, text="LSE * log2(e), delta = rowsum(dO * O) - dLSE; beyond seqlen_q inf and 0, which "
                                     "make P and dS zero"),
    ),
    Operand(
        "dq_accum", ("batch", "heads_q", "m_blocks", "block_m * head_dim_padded"), "fp32",
        backward=Use(WORKSPACE, optional=True, text="in fragment order (dq_accum.cuh); null: bwd_dq computes dQ as a "
                                                    "whole"),
    ),
    Operand(
        "dq_turn", ("batch", "heads_q", "m_blocks"), "int32",
        backward=Use(WORKSPACE, optional=True, text="which key block may add next (dq_accum.cuh); null: nobody asks"),
    ),
    Operand(
        "counter", ("4",), "int32", hopper=True,
        forward=Use(COUNTER, optional=True, text="zeros, left as zeros: twice tiles drawn, blocks that are done; "
                                                 "null: tiles in a fixed stride"),
        backward=Use(COUNTER, optional=True, text="as in the forward: for bwd_dkv and bwd_dbias, and for bwd_dq"),
    ),
    Operand(
        "clocks", ("blocks", "2"), "int64", hopper=True,
        forward=Use(RESULT, optional=True, text="cycles and nanoseconds that each block took; kClocks only"),
    ),
    Operand(
        "cu_seqlens_q", ("batch + 1",), "int32", forward=_OPTIONAL, backward=_OPTIONAL, feature="packed",
    ),
    Operand(
        "cu_seqlens_k", ("batch + 1",), "int32", forward=_OPTIONAL, backward=_OPTIONAL, feature="packed",
        default="cu_seqlens_q",
    ),
    Operand("seqused_k", ("batch",), "int32", forward=_OPTIONAL, backward=_OPTIONAL, feature="packed"),
    Operand(
        "lengths_contradict", ("1",), "int32", feature="packed",
        backward=Use(WORKSPACE, optional=True, text="not 0 if lengths decrease (bwd_delta.cuh); null: nobody asks"),
    ),
    Operand(
        "alibi_slopes", ("batch", "heads_q"), "fp32", lacks=("batch",),
        forward=_OPTIONAL, backward=_OPTIONAL, feature="alibi",
    ),
    Number("alibi", "int", "alibi", "how many dimensions the slopes have; with 1 all sequences share them"),
    Operand(
        "dalibi_slopes", ("batch", "heads_q"), "fp32", like="alibi_slopes",
        backward=Use(GRADIENT, optional=True, text=_UNWANTED), feature="alibi",
    ),
    Operand(
        "dalibi_parts", ("batch", "heads_q", "tiles", "warps"), "fp32",
        backward=Use(WORKSPACE, optional=True, text="what each warp's tile adds to dalibi_slopes (slopes.cuh); null: "
                                                    "not wanted"),
        feature="alibi",
    ),
    Operand("kv_range", ("batch", "2"), "int32", forward=_OPTIONAL, backward=_OPTIONAL, feature="kv_range"),
    Operand("sink", ("heads_q",), "fp32", forward=_OPTIONAL, backward=_OPTIONAL, feature="sink"),
    Operand(
        "dsink", ("heads_q",), "fp32", like="sink", backward=Use(GRADIENT, optional=True, text=_UNWANTED),
        feature="sink",
    ),
    Operand("bias", SCORES, broadcasts=True, forward=_OPTIONAL, backward=_OPTIONAL, feature="bias"),
    Operand(
        "dbias", SCORES, like="bias", broadcasts=True, backward=Use(GRADIENT, optional=True, text=_UNWANTED),
        feature="bias",
    ),
    Operand(
        "dropout_seed", ("2", "2"), "int32", lacks=("2",), forward=_OPTIONAL, backward=_OPTIONAL, feature="dropout",
    ),
    Number("dropout", "int", "dropout", "how many dimensions the seed has; with 2 an offset is its second row"),
    Number("dropout_added", "int", "dropout", "(1 - p) * 2^15, rounded, in each half (dropout.cuh)"),
    Number("dropout_inverse", "float", "dropout", "1 / (1 - p) of that p"),
    Operand(
        "block_tiles", ("batch", "heads_q", "q_tiles", "k_tiles"), "int32", single=("batch", "heads_q"),
        forward=Use(INPUT, optional=True, text=_TILES), backward=Use(INPUT, optional=True, text=_TILES),
        feature="block_mask",
    ),
    Operand(
        "block_bits", ("any", "tile_words"), "int32", forward=_OPTIONAL, backward=_OPTIONAL, feature="block_mask",
    ),
    Number("block_mask", "int", "block_mask", "1; 1 more: each sequence has its own, 2 more: each head", planned=True),
    Operand(
        "key_lists", ("batch", "heads_q", "m_blocks", "1 + n_blocks"), "int32", feature="block_mask",
        forward=Use(WORKSPACE, optional=True, text=_LISTS), backward=Use(WORKSPACE, optional=True, text=_LISTS),
    ),
    Operand(
        "query_lists", ("batch", "heads_q", "n_blocks", "1 + 2 * m_blocks"), "int32", feature="block_mask",
        backward=Use(WORKSPACE, optional=True, text=_LISTS),
    ),
    Operand("mask", SCORES, "bool", broadcasts=True, forward=_OPTIONAL, backward=_OPTIONAL, feature="mask"),
    *(
        Operand(name, (), free=True, forward=_OPTIONAL, backward=_OPTIONAL, feature="mods")
        for name in MOD_ARRAYS
    ),
    *(
        Operand(
            f"d{name}", (), like=name, backward=Use(GRADIENT, optional=True, text=_UNWANTED), feature="mods",
        )
        for name in MOD_ARRAYS
    ),
    *(
        Operand(
            f"dmod_sums_{i}", ("elements",), "fp32", feature="mods",
            backward=Use(WORKSPACE, optional=True, text=f"dmod_array_{i}, while it is summed up; {_UNWANTED}"),
        )
        for i in range(MOD_LIMIT)
    ),
    Number("max_seqlen_q", "int", "packed", "queries and keys of each sequence that biases and masks have; 2^29: any"),
    Number("max_seqlen_k", "int", "packed"),
    Number(
        "shares", "int", "grouped", "into how many a group's query heads are divided for dK and dV (shares.cuh)",
        planned=True, only="backward",
    ),
    *(
        Operand(
            f"{name}_shares", ("batch", "heads_k * shares", "seqlen_k", width), "fp32", feature="grouped",
            backward=Use(WORKSPACE, optional=True, text="null: there is one share"),
        )
        for name, width in (("dk", "head_dim"), ("dv", "head_dim_v"))
    ),
    Operand("block_table", ("batch", "any"), "int32", forward=_OPTIONAL, feature="pages"),
    Number("page_size", "int", "pages", "k, v: [pages, page_size, heads_k, head_dim] (pages.cuh)", only="forward"),
    Number("pages", "int", "pages", only="forward"),
    Number("key_splits", "int", "pages", "parts of a sequence's keys (key_parts.cuh)", planned=True, only="forward"),
    Operand("o_parts", ("heads_q", "key_splits", "seqlen_q", "head_dim_v"), "fp32", forward=_PARTS, feature="pages"),
    Operand("lse_parts", ("heads_q", "key_splits", "seqlen_q"), "fp32", forward=_PARTS, feature="pages"),
    Operand(
        "key_tiles", ("n_blocks", "8"), "int32", feature="packed",
        backward=Use(WORKSPACE, optional=True, text="tiles of keys, with their sequences (tile_list.cuh); null: nobody "
                                                    "asks"),
    ),
)  # fmt: skip


def shape_of(dims: Iterable[str], sizes: Sequence[int]) -> tuple[int, ...]:
    """The lengths of these dimensions, given all of `SIZES`."""
    return tuple(sizes[SIZES.index(d)] for d in dims)


class HasParams(Protocol):
    """A kernel variant, as far as the table is concerned."""

    @property
    def params(self) -> np.dtype[np.void]: ...
    @property
    def interleaved(self) -> tuple[str, ...]: ...


class Pass:
    """The forward or the backward, by a table.

    Attributes:
        rows: name -> its row, of all arrays that the pass has, in the table's order.
        uses: name -> what it is to the pass.
        optional: those that a call may lack.
        defaults: what stands for some of them.
        brought: arrays and numbers of features, in the table's order.
        gradient_of: name of an input -> that of its gradient.
        learned: those inputs that features bring, but for what mods read.
    """

    def __init__(self, name: str, table: Iterable[Operand | Number] = TABLE) -> None:
        table = list(table)
        arrays = [row for row in table if isinstance(row, Operand)]
        found = [(row, row.forward if name == "forward" else row.backward) for row in arrays]
        self.name = name
        self.rows = {row.name: row for row, use in found if use}
        self.uses = {row.name: use for row, use in found if use}
        self.brought = [row for row in table if row.feature and self._has(row)]
        self.optional = {row.name for row, use in found if use and (use.optional or row.feature)}
        self.defaults = {row.name: row.default for row, use in found if use and row.default}
        self.gradient_of = {self.rows[made].like: made for made in self.names(GRADIENT)}
        self.learned = tuple(x for x in self.gradient_of if self.rows[x].feature and not self.rows[x].free)
        for row, use in found:
            if row.feature and use and (use.box is not None or row.hopper):
                raise ValueError(f"{row.name}: what lies before a struct's end is of no feature")

    def _has(self, row: Operand | Number) -> bool:
        return row.name in self.rows if isinstance(row, Operand) else row.only in ("", self.name)

    def names(self, *roles: str, where: Callable[[Operand], object] = lambda row: True) -> tuple[str, ...]:
        """The arrays of these roles."""
        return tuple(name for name, use in self.uses.items() if use.role in roles and where(self.rows[name]))

    def made(self, given: Iterable[str], wanted: Iterable[str] = ()) -> tuple[str, ...]:
        """The results or gradients of a call: those that it always has, those like an array of a feature that it was
        given unless they are optional, and those that were asked for."""
        asked = {*given, *wanted}

        def is_due(row: Operand) -> bool:
            comes_along = bool(row.feature and row.like in asked) and not self.uses[row.name].optional
            return row.name in asked or row.name not in self.optional or comes_along

        return self.names(RESULT, GRADIENT, where=is_due)

    def boxes(self, variants: Iterable[HasParams]) -> dict[str, Box]:
        """The boxes that TMA moves of each array; none in the sm80 family. The launches of a call share one struct, so
        the first of its variants that has tensor maps decides."""
        for variant in variants:
            if "plain" in (variant.params.names or ()):
                found = ((name, use.box) for name, use in self.uses.items() if use.box is not None)
                return {
                    name: Box(box if isinstance(box, int) else getattr(variant, box), name in variant.interleaved)
                    for name, box in found
                }
        return {}


FORWARD, BACKWARD = Pass("forward"), Pass("backward")
