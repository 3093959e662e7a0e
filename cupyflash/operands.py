"""The one table of arrays: one row an array, and what follows from a row for each of the two passes.

The params structs in NumPy and in C++ (plan/params.py, tools/params.py), the checks, tensor maps, allocation and
addresses of a call (launch), the emulator's sessions and the names of gradients follow from `TABLE`. A new array is a
row here, then ``python -m tools.params``, then the kernels' lines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

# What an array is to a pass. The counter is the launch's own (launch/counters.py).
INPUT, RESULT, GRADIENT, WORKSPACE, COUNTER = "input", "result", "gradient", "workspace", "counter"

Q = ("batch", "seqlen_q", "heads_q", "head_dim")
K = ("batch", "seqlen_k", "heads_k", "head_dim")
ROWS = ("batch", "heads_q", "seqlen_q")
# The lengths that a call's inputs and results may have, in the order in which `Operand.shape` takes them.
SIZES = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "batch + 1", "total_q", "total_k", "2")


class Use(NamedTuple):
    """What an array is to one pass.

    Attributes:
        role: one of those above.
        box: the rows of the boxes that TMA moves of it, or the variant's field that has them; None: no tensor map.
        optional: its pointer may be null.
        text: what the kernels must know beside its shape.
    """

    role: str
    box: int | str | None = None
    optional: bool = False
    text: str = ""


@dataclass(frozen=True)
class Operand:
    """One row of the table.

    Attributes:
        dims: its dimensions, in the layout bshd.
        dtype: "" is that of q.
        like: the array whose shape and dtype it has.
        forward, backward: what it is to that pass; None: nothing.
        strided: it may have any strides but along its last dimension, and has `Strides` in the structs; others are
            contiguous.
        feature: the option that brings it. What features bring is optional, and lies behind all else in the structs in
            the order of the table, so that kernels without it keep their machine code: new rows go below the others.
        hopper: it lies in the struct of the sm90 family alone.
        default: the array that stands for it where it is not given.
        field: its name in the structs, where that is another.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = ""
    like: str = ""
    forward: Use | None = None
    backward: Use | None = None
    strided: bool = False
    feature: str = ""
    hopper: bool = False
    field: str = ""
    default: str = ""

    @property
    def member(self) -> str:
        """Its pointer in the structs; its strides are `{member}_stride`, its tensor map `map_{member}`."""
        return self.field or self.name

    @property
    def has_layout(self) -> bool:
        """Whether its dimensions are in the order of the caller's layout."""
        return len(self.dims) == 4 and self.dims[3] == "head_dim"

    @property
    def packed(self) -> tuple[str, ...]:
        """Its dimensions where sequences of different lengths lie one after the other: no batch, whose stride is 0."""
        if not any(d.startswith("seqlen") for d in self.dims):
            return self.dims
        return tuple(d.replace("seqlen", "total") for d in self.dims if d != "batch")

    def axes(self, layout: str = "bshd") -> tuple[int, int, int]:
        """Where an array in the caller's layout has its rows, heads and sequences: what its three strides are of."""
        batch, a, b = (next(i for i, d in enumerate(self.dims) if d.startswith(x)) for x in ("batch", "seq", "heads"))
        return (b, a, batch) if layout == "bhsd" and self.has_layout else (a, b, batch)

    def shape(self, sizes: Sequence[int], packed: bool = False) -> tuple[int, ...]:
        """What it must be, or is made, given all of `SIZES`."""
        return self._take_packed(sizes) if packed else self._take(sizes)

    @functools.cached_property
    def _take(self) -> Callable[[Sequence[int]], tuple[int, ...]]:
        return taker([SIZES.index(d) for d in self.dims])

    @functools.cached_property
    def _take_packed(self) -> Callable[[Sequence[int]], tuple[int, ...]]:
        return taker([SIZES.index(d) for d in self.packed])


@dataclass(frozen=True)
class Number:
    """A number that a feature brings: a field of `Problem`, and of both passes' structs; None there is 0 here.

    Attributes:
        type: in C++, "int" or "float".
    """

    name: str
    type: str
    feature: str
    text: str = ""


_IN, _OPTIONAL = Use(INPUT), Use(INPUT, optional=True)
TABLE: tuple[Operand | Number, ...] = (
    Operand("q", Q, forward=Use(INPUT, 64), backward=Use(INPUT, "block_m"), strided=True),
    Operand("k", K, forward=Use(INPUT, "block_n"), backward=Use(INPUT, "block_n"), strided=True),
    Operand("v", K, like="k", forward=Use(INPUT, "block_n"), backward=Use(INPUT, "block_n"), strided=True),
    Operand("out", Q, like="q", forward=Use(RESULT, 64), backward=_IN, strided=True, field="o"),
    Operand("dout", Q, like="q", backward=Use(INPUT, "block_m"), strided=True),
    Operand(
        "lse", ROWS, "fp32",
        forward=Use(RESULT, optional=True, text="natural log; null: not wanted"),
        backward=Use(INPUT, text="natural log"),
    ),
    Operand("dlse", ROWS, "fp32", backward=Use(INPUT, optional=True, text="null: zero")),
    Operand("dq", Q, like="q", backward=Use(GRADIENT, 64), strided=True),
    Operand("dk", K, like="k", backward=Use(GRADIENT, 64), strided=True),
    Operand("dv", K, like="v", backward=Use(GRADIENT, 64), strided=True),
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
        "counter", ("2",), "int32", hopper=True,
        forward=Use(COUNTER, optional=True, text="zeros, left as zeros: tiles drawn, blocks that are done; null: tiles "
                                                 "in a fixed stride"),
        backward=Use(COUNTER, optional=True, text="as in the forward; of bwd_dkv and bwd_dq"),
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
    Operand("kv_range", ("batch", "2"), "int32", forward=_OPTIONAL, backward=_OPTIONAL, feature="kv_range"),
)  # fmt: skip


def taker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items of these numbers from a sequence, fast."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda items: tuple(items[i] for i in numbers)


def shape_of(dims: Iterable[str], sizes: Sequence[int]) -> tuple[int, ...]:
    """The lengths of these dimensions, given all of `SIZES`."""
    return tuple(sizes[SIZES.index(d)] for d in dims)


class HasParams(Protocol):
    """A kernel variant, as far as the table is concerned."""

    @property
    def params(self) -> np.dtype[np.void]: ...


class Pass:
    """The forward or the backward, by a table.

    Attributes:
        rows: name -> its row, of all arrays that the pass has, in the table's order.
        uses: name -> what it is to the pass.
        optional: those that a call may lack.
        defaults: what stands for some of them.
        brought: arrays and numbers of features, in the table's order.
    """

    def __init__(self, name: str, table: Iterable[Operand | Number] = TABLE) -> None:
        table = list(table)
        arrays = [row for row in table if isinstance(row, Operand)]
        found = [(row, row.forward if name == "forward" else row.backward) for row in arrays]
        self.name = name
        self.rows = {row.name: row for row, use in found if use}
        self.uses = {row.name: use for row, use in found if use}
        self.brought = [row for row in table if row.feature and (isinstance(row, Number) or row.name in self.rows)]
        self.optional = {row.name for row, use in found if use and (use.optional or row.feature)}
        self.defaults = {row.name: row.default for row, use in found if use and row.default}
        for row, use in found:
            if row.feature and use and (use.box is not None or row.hopper):
                raise ValueError(f"{row.name}: what lies before a struct's end is of no feature")

    def names(self, *roles: str, where: Callable[[Operand], object] = lambda row: True) -> tuple[str, ...]:
        """The arrays of these roles."""
        return tuple(name for name, use in self.uses.items() if use.role in roles and where(self.rows[name]))

    def made(self, given: Iterable[str], wanted: Iterable[str] = ()) -> tuple[str, ...]:
        """The results or gradients of a call: those that it always has, those like an optional array that it was given,
        and those that were asked for."""
        asked = {*given, *wanted}

        def is_due(row: Operand) -> bool:
            return row.name in asked or row.name not in self.optional or bool(row.feature and row.like in asked)

        return self.names(RESULT, GRADIENT, where=is_due)

    def boxes(self, variants: Iterable[HasParams]) -> dict[str, int]:
        """The rows of the boxes that TMA moves of each array; none in the sm80 family. The launches of a call share one
        struct, so the first of its variants that has tensor maps decides."""
        for variant in variants:
            if "plain" in (variant.params.names or ()):
                found = ((name, use.box) for name, use in self.uses.items() if use.box is not None)
                return {name: box if isinstance(box, int) else getattr(variant, box) for name, box in found}
        return {}


FORWARD, BACKWARD = Pass("forward"), Pass("backward")
