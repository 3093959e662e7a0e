"""What a call makes: its results, the workspaces that its launches share, and copies of arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..arrays.adapters import Native
from .prepared import Call


def launched(
    library: Native, call: Call, given: Collection[Any], pointers: list[int], stream: int,
    into: Sequence[Any] | None = None,
) -> Sequence[Any]:  # fmt: skip
    """What a call makes of these arrays, at these addresses, on a stream; `into`: as of `make`."""
    copies = copied(library, given, call.copied, pointers) if call.copied else ()  # which live until the launch
    if call.forms and into is None:
        made: Sequence[Any] = library.make_like(call.forms, pointers)
        if call.room:
            divide(call, pointers)
    else:
        made = make(library, call, given, pointers, into)
    call(pointers, stream)
    del copies
    return made


def make(
    library: Native, call: Call, given: Collection[Any], pointers: list[int], into: Sequence[Any] | None = None
) -> Sequence[Any]:
    """New arrays for a call on these, whose addresses join the others'. Where nobody is given workspaces they are one.

    A call that is kept gets its `forms`, from which the next one makes them at less cost.

    Args:
        into: results that it writes in place of new ones.
    """
    arrays = dict(zip(call.order, given, strict=False))
    in_one = library.allocates and call.room
    kinds = (*call.shaped, ((call.room,), "fp32")) if in_one else call.made
    made: list[Any]
    if into is None:
        if call.forms is None and not call.passing:
            call.forms = library.forms(call.likes, kinds, arrays)
        made = library.make(call.likes, kinds, arrays)
    else:
        made = [*into, *library.make((), kinds[len(call.shaped) :], arrays)]
    pointers += library.pointers(made)
    if in_one:
        divide(call, pointers)
    return made


def divide(call: Call, addresses: list[int]) -> None:
    """The last address, of one block of memory for all that the launches share, becomes those of its parts."""
    start = addresses.pop()
    addresses += [start + offset for offset in call.offsets]


def copied(library: Native, given: Collection[Any], numbers: Sequence[int], pointers: list[int]) -> list[Any]:
    """Contiguous copies of some of the arrays given, whose addresses take the place of theirs."""
    arrays = [*given]
    copies = [library.contiguous(arrays[i]) for i in numbers]
    for i, x in zip(numbers, copies, strict=True):
        pointers[i] = library.pointer(x)
    return copies
