"""The last call of each kind, and the last series, for tensors like those it had: torch compares them all at once.

To look at each array, and to find a call under all that they say, costs the host three times as much, and more where a
core has slept, as that of the thread of torch's autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..arrays.adapters import TORCH
from ..arrays.imported import is_tensor
from ..arrays.tensors import Making
from ..options import Options
from ..problem import MAX_SEQLEN
from . import prepared as launch
from .kept import make_room
from .made import launched
from .passes import Given, contiguous_strides
from .prepared import Call
from .series import Series

_MOST = 256  # kinds
# How far an array reaches in memory: of which length its rows are; elements, those of each row, and what strides around
# rows add to them (`_reach`); their bytes.
_Reach = tuple[int, int, int, list[tuple[int, int]], int]
_Form = TypeVar("_Form")
IsAlike = Callable[..., bool]
_NOTHING: Making = (lambda: None, {}, 0)


@dataclass(frozen=True, slots=True)
class _Last:
    """A call that is kept, and what compares others with it.

    Attributes:
        device: the GPU of its arrays.
        is_alike: says whether tensors are like its own; None: nothing does yet.
        is_plain: these are known to be plain tensors, which need no gradient.
        series: of no series.
    """

    call: Call
    device: int
    is_alike: IsAlike | None = None
    is_plain: bool = False
    series: None = None


@dataclass(frozen=True, slots=True)
class _LastSeries:
    """Likewise of a series.

    Attributes:
        row: the dimension of rows.
        reaches: how far each array reaches in memory, as `_reach` has it.
        before, after: what stands around seqlen_q in the shape of q, and of out.
        making: as `Torch.making` has it.
    """

    series: Series
    device: int
    is_alike: IsAlike | None = None
    is_plain: bool = False
    row: int = 0
    reaches: Sequence[_Reach] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    making: Making = _NOTHING

    def call_of(self, tensors: Collection[Any], pointers: list[int], stream: int) -> Call | None:
        """Their call of lengths that are new to the series, as `series.read` and `Series.call` have it; adds their
        addresses to the others."""
        q, k, v, *_ = tensors
        row, series = self.row, self.series
        lengths = seqlen_q, seqlen_k = q.shape[row], k.shape[row]
        if v.shape[row] != seqlen_k or not 1 < seqlen_q <= MAX_SEQLEN or not 1 < seqlen_k <= MAX_SEQLEN:
            return None
        steps: list[int] = []
        bits = 0
        for x, (of, elements, row_step, around, itemsize) in zip(tensors, self.reaches):  # noqa: B905
            elements += lengths[of] * row_step
            if around:
                strides = x.stride()
                for axis, count in around:
                    step = strides[axis]
                    elements += count * step
                    steps.append(step)
            if (x.storage_offset() + elements) * itemsize > x.untyped_storage().nbytes():
                return None  # which whoever looks for the call will say
            pointer = x.data_ptr()
            bits |= pointer
            pointers.append(pointer)
        if bits & 15 or 0 in pointers or series.meets(seqlen_q, seqlen_k):
            return None
        call = series.call(seqlen_q, seqlen_k, steps, stream)
        if call is not None:
            series.recent = True
            make, dtypes, device = self.making
            shape = (*self.before, seqlen_q, *self.after)
            made = [(shape, contiguous_strides(shape), dtypes[""])]
            for shape, dtype in call.shaped:
                made.append((shape, contiguous_strides(shape), dtypes[dtype]))
            if call.room:
                made.append(((call.room,), (1,), dtypes["fp32"]))
            call.forms = make, made, device
        return call


def again(
    kind: Hashable, tensors: Collection[Any], are_plain: bool = False, into: Sequence[Any] | None = None
) -> tuple[Call, Sequence[Any]] | None:
    """The last call of its kind, or one of its last series, and what it makes of these tensors, if they are as its own
    were, and lie at multiples of 16; None: it must be looked for.

    Args:
        kind: all that decides a call but its arrays.
        are_plain: only if these are plain tensors, which need no gradient.
        into: as of `made.make`.
    """
    for last in launch.calls.last.get(kind, ()):
        if last.is_alike is not None and (last.is_plain or not are_plain) and last.is_alike(*tensors):
            pointers, bits, stream = [], 0, TORCH.stream(last.device)
            if last.series is None:
                call = last.call
                for x in tensors:
                    pointer = x.data_ptr()
                    bits |= pointer
                    pointers.append(pointer)
                if bits & 15 or 0 in pointers:
                    return None
                call.recent = True
            else:
                call = last.call_of(tensors, pointers, stream)
                if call is None:
                    return None
            # As `launched` does, a third of whose time are hops.
            if call.forms and not call.copied and not call.room and into is None:
                made = []
                make, arguments, device = call.forms
                for one in arguments:
                    x = make(*one)
                    made.append(x)
                    pointers.append(x.data_ptr())
                if x.get_device() == device:  # else another GPU is current
                    call(pointers, stream)
                    return call, made
                del pointers[-len(made) :]
            return call, launched(TORCH, call, tensors, pointers, stream, into)
    return None


def remember(kind: Hashable, call: Call, device: int, arrays: Mapping[str, Any]) -> None:
    """This call was found for these tensors. Where calls of a kind take turns, none is worth a comparison."""
    before = _known(kind, _Last)
    found = _Last(call, device)
    if before is not None and before.call is call:
        found = _Last(call, device, TORCH.comparison(arrays.values()), are_plain(arrays))
    keep(launch.calls.last, kind, [found])


def remember_series(
    kind: Hashable, series: Series, device: int, arrays: Mapping[str, Any], given: Given, options: Options
) -> None:
    """A call of lengths that are new was found in this series, for these tensors. A comparison takes series in which no
    more than lengths of q, k and v, and strides, follow from lengths."""
    if given.own_v or given.in_series > len(given.qkv) or given.rows_of_q:
        return
    call, before = _known(kind, _Last), _known(kind, _LastSeries)
    found = _LastSeries(series, device)
    if before is not None and before.series is series:
        found = _compared(found, arrays, given, options)
    keep(launch.calls.last, kind, [found] if call is None else [call, found])  # a call says no at less cost


def _known(kind: Hashable, form: type[_Form]) -> _Form | None:
    return next((last for last in launch.calls.last.get(kind, ()) if type(last) is form), None)


def are_plain(arrays: Mapping[str, Any]) -> bool:
    """Whether these are tensors that need no gradient, and none is the negative of what its memory holds."""
    return not any(not is_tensor(type(x)) or x.requires_grad or x.is_neg() for x in arrays.values())


def _reach(x: Any, of: int, row: int | None, around: list[tuple[int, int]]) -> _Reach:
    """Of an array with so many rows as which of both lengths says.

    Args:
        row: where these are; None: it has none.
        around: of each stride around them: which it is, how often it counts.
    """
    row_step, free = 0 if row is None else x.stride(row), {row, *[axis for axis, _ in around]}
    own = enumerate(zip(x.shape, x.stride(), strict=True))
    inside = sum([(n - 1) * step for axis, (n, step) in own if axis not in free])
    return of, 1 + inside - row_step, row_step, around, x.element_size()


def _compared(last: _LastSeries, arrays: Mapping[str, Any], given: Given, options: Options) -> _LastSeries:
    """With what compares other tensors with these."""
    q, k, *_ = arrays.values()
    row, head = (0, 0) if given.packed is not None else (1, 2) if options.layout == "bshd" else (2, 1)
    making = TORCH.making(q)
    if making is None or 1 in (q.shape[row], k.shape[row]):  # one row is another series, of which no other lengths are
        return last
    sizes: list[list[int | None]] = [[*x.shape] for x in arrays.values()]
    strides: list[list[int | None]] = [[*x.stride()] for x in arrays.values()]
    reaches = [_reach(x, 0, None, []) for x in arrays.values()]
    for i, x in enumerate([*arrays.values()][: given.in_series]):
        around = []
        if head:
            strides[i][0] = None  # also that of one sequence, which says nothing
            if x.shape[0] > 1:
                around.append((0, x.shape[0] - 1))
            if x.stride(head) > x.stride(row):
                strides[i][head] = None
                around.append((head, x.shape[head] - 1))
        sizes[i][row] = None
        reaches[i] = _reach(x, min(i, 1), row, around)
    return replace(
        last, is_alike=TORCH.comparison(arrays.values(), sizes, strides), is_plain=are_plain(arrays),
        row=row, reaches=reaches, before=tuple(q.shape[:row]), after=tuple(q.shape[row + 1 :]), making=making,
    )  # fmt: skip


def keep(last: dict[Hashable, Any], kind: Hashable, value: Any) -> None:
    """The value is the last of its kind; where there are too many kinds, the older half is forgotten."""
    if kind not in last:
        make_room(last, _MOST)
    last[kind] = value
