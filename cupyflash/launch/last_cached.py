"""The last call over a cache of each kind, for tensors like those it had, as `last` has those of attention: a step of
generation looks like the one before."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..arrays.adapters import TORCH
from ..arrays.tensors import Forms
from ..cache.checks import CacheOptions
from ..cache.problem import CacheProblem
from ..cache.values import check_length
from .attending import Attending
from .decode import CacheCall
from .last import IsAlike, are_plain, keep
from .variables import is_debug, wish

Lasts = dict[Hashable, Any]  # by kind: all that decides a call but its tensors


class _Call(Protocol):
    """One that `cached` keeps."""

    recent: bool
    problem: CacheProblem
    launch: CacheCall
    forms: Forms
    attends: bool
    reach: int
    apart: int | None
    attending: Attending | None


@dataclass(frozen=True, slots=True)
class _Last:
    """A call that is kept, and what compares others with it.

    Attributes:
        is_alike: says whether tensors are like its own; None: nothing does yet.
        grows: whether caches may be of other lengths than its own (growing.py).
    """

    call: _Call
    device: int
    is_alike: IsAlike | None = None
    grows: bool = False


def again(
    lasts: Lasts, arrays: Mapping[str, Any], options: CacheOptions, length: int | None, want_lse: bool = True
) -> tuple[Any, Any] | None:
    """(out, lse) of tensors like those of the last call of its kind; None: somebody must look at them.

    Args:
        arrays, length, want_lse: as those of `cached.forward`.

    Raises:
        ArgumentError: the cache has no room for `length`.
    """
    last = lasts.get((*arrays, options, wish()))
    if last is None or last.is_alike is None or is_debug():
        return None
    tensors = arrays.values()
    if not last.is_alike(*tensors):
        return None
    room, launch = None, last.call.launch
    if last.grows:
        room = launch.growing.fitting(arrays["k_cache"], arrays["v_cache"])
        if room is None or not 0 <= (length or 0) <= room.lies[0]:
            return None
    bits, pointers = 0, []
    for x in tensors:
        pointer = x.data_ptr()
        bits |= pointer
        pointers.append(pointer)
    if bits & 15 or 0 in pointers:
        return None
    apart = pointers[2] - pointers[1]
    if abs(apart) < last.call.reach and apart != last.call.apart:  # caches that may have memory in common
        return None
    if length is not None and room is None:
        check_length(last.call.problem, length)
    call, stream = last.call, TORCH.stream(last.device)
    call.recent = True
    made = TORCH.make_like(call.forms, pointers) if call.forms else []
    launch(pointers, stream, length, room)
    if call.attending is None:
        return made[0], made[1]
    return call.attending(TORCH, arrays, pointers, stream, length, want_lse, made[:2] if call.attends else ())


def remember(lasts: Lasts, arrays: Mapping[str, Any], options: CacheOptions, call: _Call, device: int) -> None:
    """This call was found for these tensors, all of which lie at multiples of 16, and runs by kernels that it knows.
    Where calls of a kind take turns, none is worth a comparison. Nor is one of tensors that ask for a gradient, which
    is refused where they are looked at."""
    kind = *arrays, options, wish()
    before = lasts.get(kind)
    grows = before is not None and _has_grown(before.call, call)
    if before is None or not (grows or before.call is call):
        keep(lasts, kind, _Last(call, device))
    elif (grows or before.is_alike is None) and are_plain(arrays):
        is_alike = TORCH.comparison(arrays.values(), *(_free(arrays) if grows else ()))
        if is_alike is not None:
            keep(lasts, kind, _Last(call, device, is_alike, grows))


def _has_grown(before: _Call, call: _Call) -> bool:
    """Whether two calls are of caches of which no more than the length differs, and by no forward."""
    a, b = before.launch.growing, call.launch.growing
    by_own = before.attending is None and call.attending is None
    return by_own and before is not call and a is not None and b is not None and a.kind == b.kind


def _free(arrays: Mapping[str, Any]) -> list[list[list[int | None]]]:
    """The sizes and strides of tensors, None where those of caches follow from their length."""
    sizes: list[list[int | None]] = [[*x.shape] for x in arrays.values()]
    strides: list[list[int | None]] = [[*x.stride()] for x in arrays.values()]
    for i in (1, 2):  # sequence, row, head and element of K and V
        sizes[i][1] = strides[i][0] = strides[i][2] = None
    return [sizes, strides]
