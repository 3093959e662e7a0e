"""From the table of arrays to a call: what follows from the names of the arrays that it was given, and its params."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..gpu import tensormap
from ..gpu.tensormap import TensorMap
from ..operands import SIZES, Number, Operand, Pass, taker
from ..plan.extents import Extents, Kernels
from ..plan.families import Plan
from ..plan.params import UNBOUNDED, params_of
from ..problem import Problem
from .template import SCHEDULE_NUMBERS, Lengths, Steps, Template

Arrays = Mapping[str, tuple[Sequence[int], Sequence[int]]]  # name -> shape, strides in elements


_kinds: dict[Any, object] = {}  # whose hashes cost less than those of their keys


class Asked(NamedTuple):
    """What the names of a call's arrays say of its spec: features, and what is made only if asked for."""

    packed: bool
    kv_range: bool
    sink: bool
    dalibi: bool
    dsink: bool
    clocks: bool


class Given:
    """What the table says of a pass that is given arrays of these names, in this order; made once for them.

    Attributes:
        wanted: what it makes only if asked to.
        made: the results that are shaped like arrays given; `likes`: like which of those.
        shaped: the other results.
        order: all these and the arrays given: a call's addresses, before those of its workspace.
        strided: what has strides, given or made, in the table's order.
        qkv: the numbers of q, k and v among the arrays given.
        alike: of those with strides and the dtype of q.
        like_q, others: of those but q, k and v that are shaped like q, and that are not.
        packed: the number of what says where the sequences of a packed call lie; None: there is a batch.
        alibi: the number of ALiBi's slopes; None: there are none.
        asked: what all of them say of the spec.
        by_tma, by_hand: take the arrays with strides that the sm90 family reads by TMA, and the others of them.
        kind: what of this decides the kernels.
    """

    def __init__(self, which: Pass, names: tuple[str, ...], wanted: tuple[str, ...]) -> None:
        rows, number = which.rows, {name: i for i, name in enumerate(names)}
        results = which.made(names, wanted)
        self.which, self.names, self.wanted = which, names, wanted
        self.made = tuple(name for name in results if rows[name].like)
        self.likes = tuple(rows[name].like for name in self.made)
        self.shaped = tuple(name for name in results if not rows[name].like and not rows[name].hopper)
        handed = tuple(name for name in results if rows[name].hopper)
        self.order = (*names, *self.made, *self.shaped, *handed)
        self.strided = tuple(name for name in rows if rows[name].strided and name in self.order)
        self.qkv = tuple(number[name] for name in ("q", "k", "v"))
        self.packed, self.alibi = number.get("cu_seqlens_q"), number.get("alibi_slopes")
        of_features = (x in number for x in ("cu_seqlens_q", "kv_range", "sink"))
        self.asked = Asked(*of_features, *(x in wanted for x in ("dalibi_slopes", "dsink", "clocks")))
        self.alike = tuple(number[name] for name in self.strided if name in number and not rows[name].dtype)
        more = [(i, rows[name]) for name, i in number.items() if i not in self.qkv]
        self.like_q = tuple(i for i, row in more if row.like == "q")
        self.others = tuple((i, row) for i, row in more if row.like != "q")
        read = [name for name in self.strided if name in number]
        self.by_tma = taker([number[name] for name in read if which.uses[name].box is not None])
        self.by_hand = taker([number[name] for name in read if which.uses[name].box is None])
        features = tuple(name for name in rows if rows[name].feature and name in number)
        self.kind = _kinds.setdefault((which, self.strided, features, handed), object())
        self._axes = {layout: list(self._places(number, layout)) for layout in ("bshd", "bhsd")}

    def _places(self, number: Mapping[str, int], layout: str) -> Iterator[tuple[int, bool, Callable[[Any], Any]]]:
        """Of all that has strides: where its shape comes from, whether its strides do too, and its three axes."""
        for name in self.strided:
            row = self.which.rows[name]
            yield number[name if name in number else row.like], name in number, itemgetter(*row.axes(layout))

    def shapes(self, extents: Extents, head_dim: int) -> list[tuple[tuple[int, ...], str]]:
        """(shape, dtype) of `shaped`."""
        if not self.shaped:
            return []
        found, sizes = (self.which.rows[name] for name in self.shaped), sizes_of(extents, head_dim)
        return [(row.shape(sizes, self.packed is not None), row.dtype) for row in found]

    def measure(self, signatures: Sequence[tuple[Any, ...]], layout: str) -> tuple[list[Lengths], list[Steps]]:
        """Of all that has strides; `signatures`: of the arrays given, strides in elements."""
        lengths, steps = [], []
        for i, is_given, axes_of in self._axes[layout]:
            shape, strides, _, _ = signatures[i]
            lengths.append(axes_of(shape))
            steps.append(axes_of(strides if is_given else contiguous_strides(shape)))
        return lengths, steps


@functools.lru_cache(maxsize=256)
def given_of(which: Pass, names: tuple[str, ...], wanted: tuple[str, ...] = ()) -> Given:
    """The `Given` of these names."""
    return Given(which, names, wanted)


def sizes_of(extents: Extents, head_dim: int) -> tuple[int, ...]:
    """What `operands.SIZES` counts up."""
    batch, seqlen_q, seqlen_k, _, _ = extents
    return (*extents, head_dim, batch + 1, seqlen_q, seqlen_k, 2)


assert SIZES[: len(Extents._fields)] == Extents._fields


def with_batch(signature: tuple[Any, ...]) -> tuple[Any, ...]:
    """The signature of a packed array as that of a batch of one."""
    shape, strides, dtype, device = signature
    return (1, *shape), (0, *strides), dtype, device


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


class Filled(NamedTuple):
    """A params struct that lacks addresses only.

    Attributes:
        words: of 64 bits in the struct, into which an array's address goes, by the array's name.
        defaults: of arrays that may not be given, those that then stand for them.
        plain_bytes: where the struct without tensor maps begins, which some launches of a call take.
    """

    params: np.ndarray
    words: Mapping[str, tuple[int, ...]]
    defaults: Mapping[str, str]
    plain_bytes: int = 0


def fill_problem(params: np.ndarray, which: Pass, problem: Problem, plan: Plan) -> None:
    """The run-time facts of `params.cuh`'s Problem and Schedule, and the numbers of features."""
    p = params["problem"]
    for name in (*Extents._fields, "scale"):
        p[name] = getattr(problem, name)
    p["softcap"] = problem.softcap or 0
    left, right = problem.window
    p["window_left"] = UNBOUNDED if left is None else left
    p["window_right"] = UNBOUNDED if right is None else right
    for name, number in zip(SCHEDULE_NUMBERS, (*plan.sections, plan.first_stores), strict=True):
        params["schedule"][name] = number
    for row in which.brought:
        if isinstance(row, Number):
            params[row.name] = getattr(problem, row.name) or 0


def fill_plain(params: np.ndarray, rows: Mapping[str, Operand], arrays: Arrays, layout: str) -> None:
    """The strides of all arrays that have some in the struct."""
    for name, (_, strides) in arrays.items():
        if rows[name].strided:
            row, head, batch = rows[name].axes(layout)
            params[f"{rows[name].member}_stride"] = strides[batch], strides[row], strides[head]


def words_of(which: Pass, dtype: np.dtype[np.void], slots: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Where the address of each array of the pass goes; `slots`: its word in the array's tensor map."""
    fields: Any = dtype.fields
    inner, start = fields["plain"][:2] if "plain" in fields else (dtype, 0)
    plain: Any = inner.fields
    found = {}
    for name, row in which.rows.items():
        words = [(start + plain[row.member][1]) // 8] if row.member in plain else []
        words += [fields[row.member][1] // 8] if row.hopper and row.member in fields else []
        words += [fields[f"map_{row.member}"][1] // 8 + slots[name]] if name in slots else []
        found[name] = tuple(words)
    return found


def arrays_of(given: Given, signatures: Sequence[tuple[Any, ...]]) -> Arrays:
    """Shape and strides of the arrays given and of the results that are shaped like them."""
    found = {name: (s[0], s[1]) for name, s in zip(given.names, signatures, strict=True)}
    for name, like in zip(given.made, given.likes, strict=True):
        found[name] = found[like][0], contiguous_strides(found[like][0])
    return found


def fill(
    given: Given, plan: Plan, problem: Problem, signatures: Sequence[tuple[Any, ...]], layout: str
) -> Filled | None:
    """The params of a plan's launches; None if one needs tensor maps and the driver's are not understood.

    Args:
        signatures: of the arrays given, strides in elements.
    """
    which, arrays = given.which, arrays_of(given, signatures)
    plain, hopper = params_of(which)
    params = np.zeros((), plain)
    fill_plain(params, which.rows, arrays, layout)
    fill_problem(params, which, problem, plan)
    boxes = which.boxes(launch.variant for launch in plan.launches)
    if not boxes:
        return Filled(params, words_of(which, plain, {}), which.defaults)
    whole, slots = np.zeros((), hopper), {}
    whole["plain"] = params
    for name, rows in boxes.items():
        tensor = TensorMap.of(problem.dtype, *arrays[name], layout, rows)
        slot, words = tensormap.address_slot(tensor), tensormap.encode(tensor, tensormap.ANYWHERE)
        if slot is None or words is None:
            return None
        whole[f"map_{which.rows[name].member}"], slots[name] = words, slot
    fields: Any = hopper.fields
    return Filled(whole, words_of(which, hopper, slots), which.defaults, fields["plain"][1])


def template_of(given: Given, kernels: Kernels, filled: Filled) -> Template | None:
    """What the params of other calls of the spec are made from; None if the driver's tensor maps are not understood."""
    boxes, rows = given.which.boxes(kernels.variants), given.which.rows
    dtype, head_dim = kernels.spec.dtype, kernels.spec.head_dim
    forms = {box: tensormap.understand(dtype, head_dim, box) for box in set(boxes.values())}
    maps = {}
    for name, box in boxes.items():
        form = forms[box]
        if form is None:
            return None
        maps[rows[name].member] = form, TensorMap(dtype, (head_dim, 1, 1, 1), (16, 16, 16), box)
    return Template(filled.params, [rows[name].member for name in given.strided], maps)
