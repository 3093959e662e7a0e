"""From the table of arrays to a call: what follows from the names of the arrays that it was given, and its params."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..operand import MASK_TILE, MOD_GRADIENTS, ROWS, TILE_WORDS
from ..operands import BACKWARD, SIZES, Operand, Pass, taker
from ..plan.extents import Extents
from ..plan.spec import LEARNED
from ..problem import KEY_BLOCK
from .template import Lengths, ScoreSteps, Steps

Shape = tuple[int, ...]
WITH_LSE = ("lse",)  # what a forward may be asked for
_kinds: dict[Any, object] = {}  # whose hashes cost less than those of their keys


class Asked(NamedTuple):
    """What the names of a call's arrays say of its spec: features, and what is made only if asked for."""

    packed: bool
    dalibi: bool
    dsink: bool
    dbias: bool
    clocks: bool
    dmods: tuple[int, ...] = ()

    def made(self) -> dict[str, Any]:
        """What is made only if asked for, which no problem says, by the names of `Spec.of`."""
        return {name: getattr(self, name) for name in (*LEARNED, "clocks", "dmods")}


class Given:
    """What the table says of a pass that is given arrays of these names, in this order; made once for them.

    Attributes:
        wanted: what it makes only if asked to.
        own_v: whether the head_dim of v is another than that of q.
        made: the results that are shaped like arrays given; `likes`: like which of those.
        shaped: the other results.
        order: all these and the arrays given: a call's addresses, before those of its workspace.
        strided: what has strides, given or made, in the table's order.
        qkv: the numbers of q, k and v among the arrays given.
        alike: of those with strides and the dtype of q.
        like_out, others: of those but q, k and v that are shaped like out, and that are not.
        packed: the number of what says where the sequences of a packed call lie; None: there is a batch.
        table: the number of the block table by which keys lie in pages; None: there are no pages.
        has_kv_range, has_sink: whether there are such.
        alibi, dropout: the numbers of ALiBi's slopes and of dropout's seed; None: there are none.
        added: the numbers of a bias and of a mask, as far as they are there; has_mask: there is the latter.
        broadcast: what broadcasts, given or made, in the table's order.
        block_mask: the number of the tiles of a block mask; None: there is none.
        of_mods: the numbers of the arrays that mods read.
        asked: what all of them say of the spec.
        by_tma, by_hand: take the arrays with strides that the sm90 family reads by TMA, and the others of them.
        kind: what of this decides the kernels.
        sources: of all that has strides the array given whose shape it has, and whether it is that one.
        in_series: how many arrays with strides are given, which are the first; 0: where calls form no series, since
            the shape of another array depends on lengths in more ways than that of `rows_of_q`.
        rows_of_q, without_lengths: of those but these that have a number for each query, and the others.
    """

    def __init__(self, which: Pass, names: tuple[str, ...], wanted: tuple[str, ...], own_v: bool) -> None:
        rows, number = which.rows, {name: i for i, name in enumerate(names)}
        results = which.made(names, wanted)
        self.which, self.names, self.wanted, self.own_v = which, names, wanted, own_v
        self.made = tuple(name for name in results if rows[name].like and not (own_v and rows[name].width))
        self.likes = tuple(rows[name].like for name in self.made)
        self.shaped = tuple(name for name in results if name not in self.made and not rows[name].hopper)
        handed = tuple(name for name in results if rows[name].hopper)
        self.order = (*names, *self.made, *self.shaped, *handed)
        self.strided = tuple(name for name in rows if rows[name].strided and name in self.order)
        self.qkv = tuple(number[name] for name in ("q", "k", "v"))
        self.packed, self.table = number.get("cu_seqlens_q"), number.get("block_table")
        self.has_kv_range, self.has_sink = "kv_range" in number, "sink" in number
        self.alibi, self.dropout = number.get("alibi_slopes"), number.get("dropout_seed")
        self.block_mask = number.get("block_tiles")
        self.of_mods = tuple(i for name, i in number.items() if rows[name].free)
        learned = {f"d{BACKWARD.rows[name].feature}": f"d{name}" in wanted for name in BACKWARD.learned}
        self.added, self.has_mask = tuple(number[x] for x in ("bias", "mask") if x in number), "mask" in number
        dmods = tuple(i for i, name in enumerate(MOD_GRADIENTS) if name in wanted)
        self.asked = Asked(self.packed is not None, **learned, clocks="clocks" in wanted, dmods=dmods)
        self.broadcast = tuple(name for name in rows if rows[name].broadcasts and name in self.order)
        self.alike = tuple(number[name] for name in self.strided if name in number and not rows[name].dtype)
        more = [(i, rows[name]) for name, i in number.items() if i not in self.qkv]
        self.like_out = tuple(i for i, row in more if row.like == "q")
        self.others = tuple((i, row) for i, row in more if row.like != "q")
        read = [name for name in self.strided if name in number]
        self.by_tma = taker([number[name] for name in read if which.uses[name].box is not None])
        self.by_hand = taker([number[name] for name in read if which.uses[name].box is None])
        features = tuple(name for name in rows if rows[name].feature and name in number)
        self.kind = _kinds.setdefault((which, own_v, self.strided, features, handed), object())
        at = ((name if name in number else rows[name].like, name in number) for name in self.broadcast)
        self._broadcast = [(number[name], is_given) for name, is_given in at]
        self._axes = {layout: list(self._places(number, layout)) for layout in ("bshd", "bhsd")}
        self.sources = [(i, is_given) for i, _, is_given, _ in self._axes["bshd"]]
        own = [i for i in range(len(names)) if i not in self.alike]
        self.rows_of_q = [i for i in own if rows[names[i]].dims == ROWS]
        self.without_lengths = [i for i in own if i not in self.rows_of_q]
        by_lengths = [names[i] for i in self.without_lengths if rows[names[i]].by_lengths]
        self.in_series = 0 if by_lengths or self.alike != tuple(range(len(self.alike))) else len(self.alike)

    def _places(self, number: Mapping[str, int], layout: str) -> Iterator[tuple[int, int, bool, Callable[[Any], Any]]]:
        """Of all that has strides: where its shape comes from, and its last dimension; whether its strides do too; and
        its three axes."""
        for name in self.strided:
            row = self.which.rows[name]
            source = name if name in number else row.like
            width = row.width if row.width and name not in number else source
            yield number[source], number[width], name in number, itemgetter(*row.axes(layout))

    def shapes(self, extents: Extents, widths: tuple[int, int], dtype: str, layout: str) -> list[tuple[Shape, str]]:
        """(shape, dtype) of `shaped`.

        Args:
            widths: the head_dims, of q and k, and of v.
            dtype: of q.
        """
        if not self.shaped:
            return []
        packed, sizes = self.packed is not None, sizes_of(extents, widths, self.packed is not None)
        rows = [self.which.rows[name] for name in self.shaped]
        return [(in_layout(row, row.shape(sizes, packed), layout), row.dtype or dtype) for row in rows]

    def around_rows(self, shaped: Sequence[tuple[Shape, str]], layout: str) -> list[tuple[Shape, Shape, str]]:
        """What `shapes` gives, without the number of rows: what stands before it, and behind."""
        found = []
        for name, (shape, dtype) in zip(self.shaped, shaped, strict=True):
            row = self.which.rows[name]
            at = next(
                i for i, d in enumerate(row.dims if self.packed is None else row.packed) if d in ("seqlen_q", "total_q")
            )
            at += layout == "bhsd" and row.has_layout
            found.append((shape[:at], shape[at + 1 :], dtype))
        return found

    def measure(self, signatures: Sequence[tuple[Any, ...]], layout: str) -> tuple[list[Lengths], list[Steps]]:
        """Of all that has strides; `signatures`: of the arrays given, strides in elements. From a sequence to the next
        it is 0 where there is one: what its stride says would be new to each call of new lengths."""
        lengths, steps = [], []
        for i, width, is_given, axes_of in self._axes[layout]:
            shape, strides, _, _ = signatures[i]
            own = axes_of(shape)
            if not is_given:
                strides = contiguous_strides((*shape[:-1], signatures[width][0][-1]))
            row, head, sequence = axes_of(strides)
            lengths.append(own)
            steps.append((row, head, sequence if own[2] > 1 else 0))
        return lengths, steps

    def measure_broadcast(self, signatures: Sequence[tuple[Any, ...]]) -> list[ScoreSteps]:
        """Of all that broadcasts, as `measure`."""
        found = []
        for i, is_given in self._broadcast:
            shape, strides, _, _ = signatures[i]
            found.append(score_steps(shape, strides if is_given else contiguous_strides(shape)))
        return found


@functools.lru_cache(maxsize=256)
def given_of(which: Pass, names: tuple[str, ...], wanted: tuple[str, ...] = (), own_v: bool = False) -> Given:
    """The `Given` of these names."""
    return Given(which, names, wanted, own_v)


def has_own_v(names: Sequence[str], keys: Sequence[tuple[Any, ...]]) -> bool:
    """Whether the head_dim of v is another than that of q, of arrays with these signatures."""
    q, v = keys[names.index("q")][0], keys[names.index("v")][0]
    return bool(q and v and q[-1] != v[-1])


def in_layout(row: Operand, shape: Shape, layout: str) -> Shape:
    """The shape of an array in the caller's layout; packed, it has no batch."""
    if layout == "bshd" or not row.has_layout:
        return shape
    *batch, seqlen, heads, head_dim = shape
    return (*batch, heads, seqlen, head_dim)


def sizes_of(extents: Extents, widths: tuple[int, int], packed: bool) -> tuple[int, ...]:
    """What `operands.SIZES` counts up; `widths`: the head_dims, of q and k, and of v."""
    batch, seqlen_q, seqlen_k, _, _, *longest = extents
    q_tiles, k_tiles = (-(-n // MASK_TILE) for n in (longest if packed else (seqlen_q, seqlen_k)))
    return (*extents, *widths, batch + 1, seqlen_q, seqlen_k, 2, q_tiles, k_tiles, TILE_WORDS, -1)


assert SIZES[: len(Extents._fields)] == Extents._fields


def with_batch(signature: tuple[Any, ...]) -> tuple[Any, ...]:
    """The signature of a packed array as that of a batch of one."""
    shape, strides, dtype, device = signature
    return (1, *shape), (0, *strides), dtype, device


def as_batch(given: Given, signatures: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
    """The signatures of a call's arrays; of packed ones, where they have strides, as of a batch of one."""
    if given.packed is None:
        return signatures
    rows = given.which.rows
    return [
        with_batch(s) if rows[name].strided and len(s[0]) == len(rows[name].packed) else s
        for name, s in zip(given.names, signatures, strict=True)
    ]


def pages_of(pool: Sequence[int], table: Sequence[int]) -> tuple[tuple[int, int, bool], tuple[int, ...]]:
    """Of keys in pages, (pages, page_size, heads_k, head_dim), by a block table of that shape: what `make_problem` is
    told of the pages, and the shape of the rows that the table counts."""
    pages, page_size, *of_row = pool
    is_whole = table[1] == 1 or page_size % KEY_BLOCK == 0
    return (page_size, pages, is_whole), (math.prod(table) * page_size, *of_row)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements, of a new array of this shape."""
    if len(shape) == 4:
        _, a, b, c = shape
        return a * b * c, b * c, c, 1
    if len(shape) == 3:
        _, a, b = shape
        return a * b, b, 1
    step, found = 1, []
    for n in reversed(shape):
        found.append(step)
        step *= n
    return tuple(reversed(found))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie one after the other; strides of dimensions of size 1 say nothing."""
    return 0 in shape or all(
        n == 1 or a == b for n, a, b in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def score_steps(shape: Sequence[int], strides: Sequence[int]) -> ScoreSteps:
    """The strides of what broadcasts to scores, along their four dimensions: 0 along those where it has one element."""
    own = [0 if n == 1 else step for n, step in zip(shape, strides, strict=True)]
    batch, head, row, key = [0] * (4 - len(own)) + own
    return batch, head, row, key
