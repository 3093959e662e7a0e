"""What a row of the table of arrays says: an array with its dimensions and roles, or a number that a feature brings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

# What an array is to a pass. The counter is the launch's own (launch/counters.py).
INPUT, RESULT, GRADIENT, WORKSPACE, COUNTER = "input", "result", "gradient", "workspace", "counter"

Q = ("batch", "seqlen_q", "heads_q", "head_dim")
K = ("batch", "seqlen_k", "heads_k", "head_dim")
OUT, V = (*Q[:3], "head_dim_v"), (*K[:3], "head_dim_v")
ROWS = ("batch", "heads_q", "seqlen_q")
SCORES = ("batch", "heads_q", "seqlen_q", "seqlen_k")
MASK_TILE = 64  # queries and keys of a tile of a block mask, "q_tiles" and "k_tiles" of them in all
TILE_WORDS = 4 * MASK_TILE  # of 32 bits: a tile's elements, a row for each query and then one for each key
MOD_LIMIT = 4  # arrays that mods read, and dimensions of each
# Those arrays by number, and their gradients.
MOD_ARRAYS = tuple(f"mod_array_{i}" for i in range(MOD_LIMIT))
MOD_GRADIENTS = tuple(f"d{name}" for name in MOD_ARRAYS)
# The lengths that a call's inputs and results may have, in the order in which `Operand.shape` takes them.
SIZES = (
    "batch",
    "seqlen_q",
    "seqlen_k",
    "heads_q",
    "heads_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "head_dim",
    "head_dim_v",
    "batch + 1",
    "total_q",
    "total_k",
    "2",
    "q_tiles",
    "k_tiles",
    "tile_words",
    "any",
)


def has_lengths(shape: Sequence[int], wanted: Sequence[int], dims: Sequence[str], single: Container[str]) -> bool:
    """Whether an array of this shape has the lengths that are wanted, of which -1 is any, or 1 along dimensions that
    are `single`."""
    return len(shape) == len(wanted) and all(
        n == m or m == -1 or (n == 1 and dim in single) for n, m, dim in zip(shape, wanted, dims, strict=True)
    )


def broadcasts_to(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether an array of this shape broadcasts to another one, as NumPy has it, without making that larger."""
    missing = len(whole) - len(shape)
    return missing >= 0 and all(n in (1, m) for n, m in zip(shape, whole[missing:], strict=True))


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


class Box(NamedTuple):
    """What one copy of TMA moves of an array: so many rows; `interleaved`: of the tile that copies fill, some of it."""

    rows: int
    interleaved: bool = False


@dataclass(frozen=True)
class Operand:
    """One row of the table.

    Attributes:
        dims: its dimensions, in the layout bshd.
        dtype: "" is that of q.
        like: the array whose shape and dtype it has; width: another one, whose last dimension it has.
        forward, backward: what it is to that pass; None: nothing.
        strided: it may have any strides but along its last dimension, and has `Strides` in the structs; others are
            contiguous.
        feature: the option that brings it. What features bring is optional, and lies behind all else in the structs in
            the order of the table, so that kernels without it keep their machine code: new rows go below the others.
        hopper: it lies in the struct of the sm90 family alone.
        default: the array that stands for it where it is not given.
        lacks: first dimensions that it may lack, since it is the same for all.
        broadcasts: it may have any shape that broadcasts to its dimensions, as NumPy has it, and any strides; it has
            `ScoreStrides` in the structs, and may be fp32, too.
        single: dimensions whose length may be 1, since it is the same for all.
        free: it may have any shape and dtype that mods read, and has `Lengths` in the structs.
        field: its name in the structs, where that is another.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = ""
    like: str = ""
    width: str = ""
    forward: Use | None = None
    backward: Use | None = None
    strided: bool = False
    feature: str = ""
    hopper: bool = False
    field: str = ""
    default: str = ""
    lacks: tuple[str, ...] = ()
    broadcasts: bool = False
    single: tuple[str, ...] = ()
    free: bool = False

    @property
    def member(self) -> str:
        """Its pointer in the structs; its strides are `{member}_stride`, its tensor map `map_{member}`."""
        return self.field or self.name

    @property
    def has_layout(self) -> bool:
        """Whether its dimensions are in the order of the caller's layout."""
        return len(self.dims) == 4 and self.dims[3].startswith("head_dim")

    @property
    def packed(self) -> tuple[str, ...]:
        """Its dimensions where sequences of different lengths lie one after the other: no batch, whose stride is 0; or,
        of what broadcasts to scores, room for the longest sequence."""
        if self.broadcasts:
            return tuple(d.replace("seqlen", "max_seqlen") for d in self.dims)
        if not any(d.startswith("seqlen") for d in self.dims):
            return self.dims
        return tuple(d.replace("seqlen", "total") for d in self.dims if d != "batch")

    @property
    def by_lengths(self) -> bool:
        """Whether its dimensions depend on the lengths of sequences."""
        return any("seqlen" in d or d.endswith("_tiles") or d == "any" for d in self.dims)

    def axes(self, layout: str = "bshd") -> tuple[int, int, int]:
        """Where an array in the caller's layout has its rows, heads and sequences: what its three strides are of."""
        batch, a, b = (next(i for i, d in enumerate(self.dims) if d.startswith(x)) for x in ("batch", "seq", "heads"))
        return (b, a, batch) if layout == "bhsd" and self.has_layout else (a, b, batch)

    def shape(self, sizes: Sequence[int], packed: bool = False) -> tuple[int, ...]:
        """What it must be, or is made, given all of `SIZES`."""
        return self._take_packed(sizes) if packed else self._take(sizes)

    def fits(self, shape: Sequence[int], sizes: Sequence[int], packed: bool = False) -> bool:
        """Whether an array of this shape is what it must be."""
        if self.free:
            return 1 <= len(shape) <= MOD_LIMIT
        wanted = self.shape(sizes, packed)
        if self.broadcasts:
            return broadcasts_to(shape, wanted)
        if -1 in wanted or self.single:
            return has_lengths(shape, wanted, self.dims, self.single)
        return shape == wanted or (bool(self.lacks) and shape == wanted[len(self.lacks) :])

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
        planned: the plan chooses it.
        only: the pass that has it alone; "": both have it.
    """

    name: str
    type: str
    feature: str
    text: str = ""
    planned: bool = False
    only: str = ""


def taker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items of these numbers from a sequence, fast."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda items: tuple(items[i] for i in numbers)
