"""What a call makes: its results, and the workspaces that its launches share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arrays.adapters import Native
from .prepared import Call


def make(library: Native, call: Call, arrays: Mapping[str, Any], pointers: list[int]) -> list[Any]:
    """New arrays for a call on these, whose addresses join the others'. Where nobody is given workspaces they are one.

    A call that is kept gets its `forms`, from which the next one makes them at less cost.
    """
    in_one = library.allocates and call.room
    made: list[Any] = library.make(call.likes, call.shaped if in_one else call.made, arrays)
    pointers += map(library.pointer, made)
    if in_one:
        made.append(library.empty((call.room,), "fp32", arrays["q"]))
        start = library.pointer(made[-1])
        pointers += [start + offset for offset in call.offsets]
    if call.forms is None and not call.passing:
        call.forms = library.forms(made)
    return made
