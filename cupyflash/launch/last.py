"""The last call of each kind, and the last series, for tensors like those it had: torch compares them all at once.

To look at each array, and to find a call under all that they say, costs the host three times as much, and more where a
core has slept, as that of the thread of torch's autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from ..arrays.adapters import TORCH
from ..arrays.readable import vet_lengths
from ..options import Options
from ..problem import MAX_SEQLEN
from . import prepared as launch
from .passes import Given
from .prepared import Call
from .series import Series

_MOST = 256  # kinds
IsAlike = Callable[..., bool]
Found = tuple[Call, int, list[int]]  # a call, the GPU of its arrays, and their addresses


class _Last(NamedTuple):
    """A call that is kept, the GPU of its arrays, and what compares others with these; None: nothing does yet."""

    call: Call
    device: int
    is_alike: IsAlike | None


class _LastSeries(NamedTuple):
    """Likewise of a series.

    Attributes:
        row: the dimension of rows.
        around: strides of sequences differ with lengths; head: those of heads do, which are this dimension; 0: not.
    """

    series: Series
    device: int
    is_alike: IsAlike | None
    row: int = 0
    around: bool = False
    head: int = 0


def recall(kind: Hashable, arrays: Mapping[str, Any]) -> Found | None:
    """The last call of its kind, or one of its last series, if these tensors are as its own were, and lie at multiples
    of 16; None: it must be looked for.

    Args:
        kind: all that decides a call but its arrays.
    """
    last: _Last | None = launch.calls.last.get(kind)
    if last is not None and last.is_alike is not None and last.is_alike(*arrays.values()):
        pointers = _pointers(arrays)
        if pointers is None:
            return None
        last.call.recent = True
        return last.call, last.device, pointers
    varied: _LastSeries | None = launch.series.last.get(kind)
    if varied is not None and varied.is_alike is not None and varied.is_alike(*arrays.values()):
        return _of_series(varied, arrays)
    return None


def _pointers(arrays: Mapping[str, Any]) -> list[int] | None:
    found, bits = [], 0
    for x in arrays.values():
        pointer = x.data_ptr()
        if not pointer:
            return None
        bits |= pointer
        found.append(pointer)
    return None if bits & 15 else found


def _of_series(last: _LastSeries, arrays: Mapping[str, Any]) -> Found | None:
    """A call of lengths that are new to the series, as `series.read` and `Series.call` have it."""
    q, k, v, *_ = arrays.values()
    row, steps = last.row, []
    seqlen_q, seqlen_k = q.shape[row], k.shape[row]
    if v.shape[row] != seqlen_k or not 1 < seqlen_q <= MAX_SEQLEN or not 1 < seqlen_k <= MAX_SEQLEN:
        return None
    if last.around:
        for x in (q, k, v):
            strides = x.stride()
            steps.append(strides[0])
            if last.head:
                if strides[last.head] <= strides[row]:
                    return None
                steps.append(strides[last.head])
    pointers = _pointers(arrays)
    if pointers is None or last.series.has_met(seqlen_q, seqlen_k):
        return None
    vet_lengths(arrays)
    last.series.recent = True
    call = last.series.call((seqlen_q, seqlen_k, seqlen_k), steps, TORCH.stream(last.device))
    return None if call is None else (call, last.device, pointers)


def remember(kind: Hashable, call: Call, device: int, arrays: Mapping[str, Any]) -> None:
    """This call was found for these tensors. Where calls of a kind take turns, none is worth a comparison."""
    before: _Last | None = launch.calls.last.get(kind)
    is_again = before is not None and before.call is call
    keep(launch.calls.last, kind, _Last(call, device, TORCH.comparison(arrays.values()) if is_again else None))
    launch.series.last.pop(kind, None)


def remember_series(
    kind: Hashable, series: Series, device: int, arrays: Mapping[str, Any], given: Given, options: Options
) -> None:
    """A call of lengths that are new was found in this series, for these tensors."""
    before: _LastSeries | None = launch.series.last.get(kind)
    found = _LastSeries(series, device, None)
    if before is not None and before.series is series:
        found = _compared(found, arrays, given, options)
    keep(launch.series.last, kind, found)


def _compared(last: _LastSeries, arrays: Mapping[str, Any], given: Given, options: Options) -> _LastSeries:
    """With what compares other tensors with these, where no more than lengths of q, k and v, and strides that are alike
    in all three, follow from lengths."""
    of_series = [*arrays.values()][: given.in_series]
    is_dense = given.packed is None
    row, head = (0, 0) if not is_dense else (1, 2) if options.layout == "bshd" else (2, 1)
    around_heads = {x.stride(head) > x.stride(row) for x in of_series}
    if len(of_series) > len(given.qkv) or given.rows_of_q or len(around_heads) > 1:
        return last
    if any(x.shape[row] == 1 for x in of_series):  # one row is another series, of which no other lengths are
        return last
    sizes: list[list[int | None]] = [[*x.shape] for x in arrays.values()]
    strides: list[list[int | None]] = [[*x.stride()] for x in arrays.values()]
    last = last._replace(row=row, around=is_dense, head=head if True in around_heads else 0)
    for own_sizes, own in zip(sizes[: len(of_series)], strides, strict=False):
        own_sizes[last.row] = None
        for axis in (0, last.head) if is_dense else ():
            own[axis] = None
    return last._replace(is_alike=TORCH.comparison(arrays.values(), sizes, strides))


def keep(last: dict[Hashable, Any], kind: Hashable, value: Any) -> None:
    """The value is the last of its kind; where there are too many kinds, those before are forgotten."""
    if len(last) >= _MOST and kind not in last:
        last.clear()
    last[kind] = value
