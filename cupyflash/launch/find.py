"""Find a call on the GPU: one that is kept, or of a series, or else prepare it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from ..arrays.adapters import Native
from ..arrays.readable import check_addresses, vet_all, vet_new
from ..operands import Pass
from ..options import Options
from ..sequences import Sequences
from . import last, series
from . import prepared as launch
from .alignment import ALIGNED, aligned_at
from .checks import check
from .packed import sequences_of, vet_lengths
from .passes import given_of, has_own_v
from .prepare import prepare
from .variables import is_debug, wish


def find(
    which: Pass,
    library: Native,
    arrays: Mapping[str, Any],
    keys: Sequence[tuple[Any, ...]],
    pointers: Sequence[int],
    kind: tuple[tuple[str, ...], Options, tuple[str, ...], Any],
    stream: int,
) -> launch.Call:
    """The call of arrays on a GPU that look like this."""
    names, options, wanted, own_wish = kind
    aligned, bits = ALIGNED, 0
    for pointer in pointers:
        bits |= pointer
    if bits & 15 or 0 in pointers:
        if bits & 7 or 0 in pointers:
            check_addresses(library, pointers, arrays)
        aligned = aligned_at(which, arrays, pointers)
    key = names, *keys, options, aligned, wanted, own_wish  # no two passes have the same names
    call = launch.calls.find(key)
    if call is None:
        vet_new(library, arrays)
        q, v = keys[names.index("q")][0], keys[names.index("v")][0]
        given = given_of(which, names, wanted, q[-1:] != v[-1:])  # `has_own_v`, whose call would cost the host more
        found = series.again(given, keys, options, stream) if aligned.rows else None
        if found is None:
            call = prepare(given, library, keys, options, aligned, stream, vet=partial(vet_all, library, arrays))
        else:
            call = found[1]
            if library.compares:
                last.remember_series(kind, found[0], keys[0][3], arrays, given, options)
        if not call.passing:
            launch.calls.keep(key, call)
    elif library.compares and aligned is ALIGNED:
        last.remember(kind, call, keys[0][3], arrays)
    if is_debug() and "block_table" not in arrays and not arrays.keys().isdisjoint(Sequences._fields):
        vet_lengths(library, sequences_of(arrays), check(which, names, library, keys, options)[0])
    return call


def key_of(
    names: tuple[str, ...], keys: Sequence[tuple[Any, ...]], options: Options, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    """What the key of a call begins with, where addresses are multiples of 16; the rest is what `wish` says."""
    return names, *keys, options, ALIGNED, wanted


def ready(kind: Hashable, key: Callable[[], tuple[Any, ...]], pointers: Sequence[int]) -> launch.Call | None:
    """The call that is kept under a key of `key_of`; None where it is not there yet, or more has to be looked at than
    addresses that are multiples of 16. It takes them and those of what it makes, in the order of `likes` and `made`.

    Args:
        kind: all that decides the call, at less cost than by its key, which is asked for where the kind is new.
    """
    bits = 0
    for pointer in pointers:
        bits |= pointer
    if bits & 15 or 0 in pointers or is_debug():
        return None
    call: launch.Call | None = launch.calls.last.get(kind)
    if call is None:
        call = launch.calls.find((*key(), wish()))
        if call is None or call.copied:
            return None
        last.keep(launch.calls.last, kind, call)
    call.recent = True
    return call


def planned(
    which: Pass,
    library: Native,
    names: tuple[str, ...],
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    wanted: tuple[str, ...],
) -> launch.Call:
    """The call that arrays on a GPU will find, of these signatures, at addresses that are multiples of 16.

    Its kernels are loaded then, and it says what it will allocate.
    """
    key = *key_of(names, keys, options, wanted), wish()
    call = launch.calls.find(key)
    if call is None:
        given = given_of(which, names, wanted, has_own_v(names, keys))
        call = launch.calls.keep(key, prepare(given, library, keys, options, ALIGNED, 0))
    return call
