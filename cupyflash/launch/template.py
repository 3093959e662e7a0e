"""Templates: a params struct that stands but for the numbers of a call, and where these go."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..gpu.forms import Form
from ..gpu.tensormap import ANYWHERE, TensorMap, encode
from ..plan.numbers import SCHEDULE_NUMBERS, Extents
from ..plan.params import PROBLEM, SCHEDULE, SCORE_STRIDES, STRIDES, UNBOUNDED
from ..problem import Problem

# The numbers of a call, in the order in which `write` gets them; other fields are part of a template.
OPTION_NUMBERS = ("window_left", "window_right", "scale")
NUMBERS = (*OPTION_NUMBERS, *Extents._fields, *SCHEDULE_NUMBERS)
Lengths = tuple[int, int, int]  # seqlen, heads, batch
Steps = tuple[int, int, int]  # from one row, head and sequence to the next, in elements
ScoreSteps = tuple[int, int, int, int]  # from one sequence, head, query and key to the next, likewise; 0: broadcast
Encode = Callable[[TensorMap], "bytes | None"]
Words: TypeAlias = "array[int]"  # a params struct in words of 32 bits: what is copied and written to at the least cost


def numbers_of(problem: Problem) -> tuple[int, int, int]:
    """`OPTION_NUMBERS`, as words of 32 bits."""
    left, right = problem.window
    bounds = np.array([UNBOUNDED if left is None else left, UNBOUNDED if right is None else right], np.int32)
    left_word, right_word = bounds.view(np.uint32).tolist()
    return left_word, right_word, int(np.float32(problem.scale).view(np.uint32))


def _fields(dtype: np.dtype[np.void]) -> Any:
    """Name -> (dtype, offset)."""
    return dtype.fields


class MapPlace(NamedTuple):
    """A tensor map in a params struct.

    Attributes:
        number: of the array that it is of, among those with strides.
        start: its first word of 32 bits.
        slots: the words of its numbers, as in `Form`.
        form: what is known of it; `like`: the map of any array of that form.
    """

    number: int
    start: int
    slots: tuple[int, ...]
    form: Form
    like: TensorMap


class Template:
    """A params struct, filled in for one call; `write` makes it that of another one.

    Attributes:
        numbers: of `NUMBERS` those that the struct has, and their words of 32 bits.
        strides: those of 64 bits of the strides of row, head and batch, of each array that has some.
        maps: where tensor maps lie.
    """

    def __init__(
        self, params: np.ndarray, arrays: Sequence[str], broadcast: Sequence[str],
        maps: Mapping[str, tuple[Form, TensorMap]],
    ) -> None:  # fmt: skip
        """
        Args:
            params: the struct.
            arrays: those with strides, by their names in the struct, in the order in which `write` gets them.
            broadcast: those that broadcast, likewise.
            maps: of those that have one in the struct: its form, and the map of any array of that form.
        """
        fields = _fields(params.dtype)
        plain, start = fields["plain"][:2] if "plain" in fields else (params.dtype, 0)
        inner, order = _fields(plain), _fields(STRIDES)
        words = {
            name: (start + inner[part][1] + field[1]) // 4
            for part, numbers in (("problem", PROBLEM), ("schedule", SCHEDULE))
            for name, field in _fields(numbers).items()
        }
        words |= {name: (start + inner[name][1]) // 4 for name in NUMBERS if name in inner}
        self.numbers = {name: words[name] for name in NUMBERS if name in words}
        self._numbers = tuple((words[name], i) for i, name in enumerate(NUMBERS) if name in words)
        self.strides = tuple(
            tuple((start + inner[f"{name}_stride"][1] + order[part][1]) // 8 for part in ("row", "head", "batch"))
            for name in arrays
        )
        self._broadcast = tuple(
            tuple((start + inner[f"{name}_stride"][1] + offset) // 8 for _, offset in _fields(SCORE_STRIDES).values())
            for name in broadcast
        )
        self.maps: list[MapPlace] = []
        data = bytearray(params.tobytes())
        for name, (form, like) in maps.items():
            byte = fields[f"map_{name}"][1]
            data[byte : byte + 128] = form.words  # those of `params` may say more: that its array is small
            slots = tuple(byte // 4 + slot for slot in form.slots or ())
            self.maps.append(MapPlace(arrays.index(name), byte // 4, slots, form, like))
        self._words = array("I", bytes(data))

    def write(
        self, numbers: Sequence[int], lengths: Sequence[Lengths], steps: Sequence[Steps],
        broadcast: Sequence[ScoreSteps], ask: Encode,
    ) -> Words | None:  # fmt: skip
        """The struct of another call; None if the driver, which `ask` asks for maps, refuses one."""
        words = self._words[:]
        longs = memoryview(words).cast("B").cast("q")
        for slot, i in self._numbers:
            words[slot] = numbers[i]
        for (a, b, c), (row, head, sequence) in zip(self.strides, steps, strict=True):
            longs[a], longs[b], longs[c] = row, head, sequence
        for slots, own in zip(self._broadcast, broadcast, strict=True):
            for slot, step in zip(slots, own, strict=True):
                longs[slot] = step
        for i, start, slots, form, like in self.maps:
            (seqlen, heads, batch), (row, head, sequence) = lengths[i], steps[i]
            marks = form.marks(lengths[i], steps[i])
            if marks is not None:
                for slot, number in marks:
                    words[start + slot] = number
                a, b, c, d, e, f = slots
                words[a], words[b], words[c] = seqlen - 1, heads - 1, batch - 1
                # As TensorMap.of has it: the stride of a dimension of size 1 says nothing.
                words[d] = row >> 3 if seqlen > 1 else 1
                words[e] = head >> 3 if heads > 1 else 1
                words[f] = sequence >> 3 if batch > 1 else 1
                continue
            strides = (2 * row if seqlen > 1 else 16, 2 * head if heads > 1 else 16, 2 * sequence if batch > 1 else 16)
            whole = ask(replace(like, sizes=(like.sizes[0], seqlen, heads, batch), strides_bytes=strides))
            if whole is None:
                return None
            words[start : start + 32] = array("I", whole)
        return words


def ask_driver(tensor: TensorMap) -> bytes | None:
    """The driver's map of an array that lies anywhere; None if it refuses."""
    words = encode(tensor, ANYWHERE)
    return None if words is None else words.tobytes()
