"""Series: calls that differ in their lengths alone, and in what follows from these.

Two calls are of one series if their arrays agree in all but how many rows they have and the strides of what lies around
these: of sequences, if there are several, and, where all rows of a head lie together, of heads. What the first of them
was checked for holds for the others, its kernels are theirs, and so are its params but for some words. Hence new
lengths cost little arithmetic. A call of which a series does not say all is prepared by itself (prepare.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..options import Options
from ..plan.numbers import SCHEDULE_NUMBERS, Extents
from ..problem import MAX_SEQLEN
from . import prepared as launch
from .kept import make_room
from .passes import Given, contiguous_strides
from .prepared import Call, Prepared
from .template import Lengths, Steps, Words
from .variables import wish

_NAMES = (*SCHEDULE_NUMBERS, "seqlen_q", "seqlen_k", "seqlen_q less 1", "seqlen_k less 1")
_LESS_1 = 2  # so far behind a length is what is less
_MAX_SEEN = 4096  # lengths that a series remembers to have met: a call is kept once it comes again
_BEFORE_ROWS = -1  # in place of a stride that lengths decide
_UNIT = 8  # elements of 16 bits: rows of an array that TMA reads start at multiples of 16 bytes
# What signatures say: all that calls of a series have in common; how many rows each array given with strides has; the
# strides around rows of each, as its library counts them.
Read = tuple[tuple[Any, ...], list[int], list[int]]


def read(given: Given, keys: Sequence[tuple[Any, ...]], options: Options) -> Read | None:
    """None where no series is looked for."""
    count = given.in_series
    if not count:
        return None
    common: list[Any] = [given, options, wish()]
    lengths: list[int] = []
    steps: list[int] = []
    try:
        if given.packed is not None:
            for (n, heads, head_dim), strides, dtype, device in keys[:count]:
                lengths.append(n)
                common += heads, head_dim, strides, dtype, device
        else:
            is_bshd = options.layout == "bshd"
            for shape, strides, dtype, device in keys[:count]:
                if is_bshd:
                    batch, n, heads, head_dim = shape
                    step, row, head, one = strides
                else:
                    batch, heads, n, head_dim = shape
                    step, head, row, one = strides
                lengths.append(n)
                if batch > 1:
                    steps.append(step)
                if head > row:
                    steps.append(head)
                    head = _BEFORE_ROWS
                common += batch, heads, head_dim, row, head, one, dtype, device
    except ValueError:  # other dimensions
        return None
    seqlen_q, seqlen_k, other, *like_out = lengths
    if other != seqlen_k or not 0 < seqlen_q <= MAX_SEQLEN or not 0 < seqlen_k <= MAX_SEQLEN:
        return None
    if count < len(keys):
        others = _read_others(given, keys, seqlen_q)
        if others is None or like_out.count(seqlen_q) != len(like_out):
            return None
        common += others
    # The stride of a dimension of size 1 says nothing, so one row is another series.
    common += seqlen_q == 1, seqlen_k == 1
    return tuple(common), lengths, steps


def _read_others(given: Given, keys: Sequence[tuple[Any, ...]], seqlen_q: int) -> list[Any] | None:
    """What the other arrays have in common: all but lengths. None where one with a number for each query is not of
    these queries, or has gaps."""
    common: list[Any] = [keys[i] for i in given.without_lengths]
    for i in given.rows_of_q:
        shape, strides, dtype, device = keys[i]
        unit = strides[-1]  # which libraries count in elements or in bytes
        dense = contiguous_strides(shape)
        if shape[-1] != seqlen_q or strides != (dense if unit == 1 else tuple([unit * step for step in dense])):
            return None
        common += shape[:-1], unit, dtype, device
    return common


class Series:
    """What calls of one series have in common. Each has the params of the first but for some words.

    These come from a list of numbers that `call` makes: `_NAMES`, of each array given with strides those around its
    rows, then those of results, and last what is the same in all calls. Below, a place is a word of 32 bits and which
    of the numbers goes there.
    """

    recent = False

    def __init__(
        self, given: Given, options: Options, prepared: Prepared, extents: Extents, call: Call, unit: int,
        lengths: Sequence[Lengths], steps: Sequence[Steps],
    ) -> None:  # fmt: skip
        """
        Args:
            call: the first of the series.
            unit: what its library counts for an element's stride.
            lengths, steps: as `Prepared.call` gets them.
        """
        template, at = prepared.template, _Numbers(given, lengths, steps)
        self._given, self._prepared, self._copied = given, prepared, call.copied
        self._shaped = given.around_rows(call.shaped, options.layout)
        self._numbers = prepared.kernels.by_lengths(extents)
        self._seen: dict[int, None] = {}
        self._unit, self._odd_steps, self._made, self._fixed = unit, unit * _UNIT - 1, at.made, at.fixed
        self._plain = [(template.numbers[name], i) for i, name in enumerate(_NAMES) if name in template.numbers]
        self._words, self._eighths, self._sized = call.params[:], [], []
        for slots, own, axes in zip(template.strides, at.steps, at.axes, strict=True):
            for axis in axes:
                self._plain.append((2 * slots[axis], own[axis]))
                self._words[2 * slots[axis] + 1] = 0  # the first call's stride may take more than a word
        for j, start, slots, form, _ in template.maps:
            _, heads, batch = lengths[j]
            self._plain.append((slots[0], at.rows[j] + _LESS_1))
            self._eighths += [(slots[3 + axis], at.steps[j][axis]) for axis in at.axes[j] if lengths[j][axis] > 1]
            if form.least_bytes:
                self._sized.append((start, form, at.rows[j], heads, batch, at.steps[j]))
            for slot, _ in form.marked or ():
                self._words[start + slot] = int.from_bytes(form.words[4 * slot : 4 * slot + 4], "little")

    def call(self, seqlen_q: int, seqlen_k: int, steps: Sequence[int], stream: int) -> Call | None:
        """The call of these lengths and strides, as `read` gives them; None where more must be asked."""
        bits = 0
        for step in steps:
            bits |= step
        if bits & self._odd_steps or 0 in steps:
            return None
        if self._unit != 1:
            steps = [step // self._unit for step in steps]
        numbers = self._numbers(seqlen_q, seqlen_k)
        found = [*numbers[2:], seqlen_q, seqlen_k, seqlen_q - 1, seqlen_k - 1, *steps]
        for i, width in self._made:
            found.append(found[i] * width)
        words = self._words[:]
        try:
            for place, i in self._plain:
                words[place] = found[i]
            for place, i in self._eighths:
                words[place] = found[i] >> 3
        except OverflowError:  # longer strides, which take more than a word, and negative ones
            return None
        if self._sized and not self._mark(words, [*found, *self._fixed]):
            return None
        shaped = [((*a, seqlen_q, *b), dtype) for a, b, dtype in self._shaped] if self._shaped else ()
        return self._prepared.call_of(self._given, shaped, numbers, words, self._copied, stream)

    def meets(self, seqlen_q: int, seqlen_k: int) -> bool:
        """Whether these lengths came before, so that their call is worth keeping; from now on they did."""
        both = seqlen_q << 32 | seqlen_k
        if both in self._seen:
            return True
        make_room(self._seen, _MAX_SEEN)
        self._seen[both] = None
        return False

    def _mark(self, words: Words, numbers: Sequence[int]) -> bool:
        """Write what maps of small arrays have otherwise; False if the driver must say it."""
        for start, form, rows, heads, batch, (row, head, sequence) in self._sized:
            marks = form.marks((numbers[rows], heads, batch), (numbers[row], numbers[head], numbers[sequence]))
            if marks is None:
                return False
            for slot, word in marks:
                words[start + slot] = word
        return True


class _Numbers:
    """Where the numbers of a call lie in `Series.call`.

    Attributes:
        axes: of each array with strides, given or made, which of `Steps` lie around its rows.
        rows, steps: likewise, where its length, that of q or of k, and its strides are.
        made: of such strides of results, like the rows of which array, and how many elements lie in one.
        fixed: the strides that are the same in all calls.
    """

    def __init__(self, given: Given, lengths: Sequence[Lengths], steps: Sequence[Steps]) -> None:
        is_of_k = [i in given.qkv[1:] for i, _ in given.sources]
        self.rows = [len(SCHEDULE_NUMBERS) + of_k for of_k in is_of_k]
        self.axes = [_axes(given, own, batch) for own, (_, _, batch) in zip(steps, lengths, strict=True)]
        self.made: list[tuple[int, int]] = []
        self.fixed: list[int] = []
        self.steps = [[0, 0, 0] for _ in steps]
        n = len(_NAMES)
        order = sorted(range(len(steps)), key=lambda j: (not given.sources[j][1], given.sources[j][0]))
        for j in order:  # those given in the order of their names, then results
            for axis in self.axes[j]:
                self.steps[j][axis] = n
                n += 1
                if not given.sources[j][1]:
                    self.made.append((self.rows[j], steps[j][axis] // lengths[j][0]))
        for j in order:
            for axis in (axis for axis in range(3) if axis not in self.axes[j]):
                self.steps[j][axis] = n
                n += 1
                self.fixed.append(steps[j][axis])


def _axes(given: Given, steps: Steps, batch: int) -> tuple[int, ...]:
    """Which strides lie around rows: that of several sequences and, where all rows of a head lie together, that of
    heads; of packed arrays none."""
    row, head, _ = steps
    if given.packed is not None:
        return ()
    return (*((2,) if batch > 1 else ()), *((1,) if head > row else ()))


def again(given: Given, keys: Sequence[tuple[Any, ...]], options: Options, stream: int) -> tuple[Series, Call] | None:
    """The series of arrays of these signatures, at addresses that are multiples of 16, and their call, if the series is
    there and says all that it takes."""
    found = read(given, keys, options)
    series: Series | None = None if found is None else launch.series.find(found[0])
    if found is None or series is None:
        return None
    (seqlen_q, seqlen_k, *_), steps = found[1:]
    call = series.call(seqlen_q, seqlen_k, steps, stream)
    if call is None:
        return None
    call.passing = not series.meets(seqlen_q, seqlen_k)
    return series, call


def begin(
    given: Given, keys: Sequence[tuple[Any, ...]], options: Options, prepared: Prepared, extents: Extents, call: Call,
    lengths: Sequence[Lengths], steps: Sequence[Steps],
) -> None:  # fmt: skip
    """Begin the series of a call whose arrays TMA can read, if what must be known of its maps is.

    Args:
        lengths, steps: as `Prepared.call` gets them.
    """
    found = read(given, keys, options)
    if found and found[0] in launch.series:
        return  # whose calls do not say all
    if found and all(x.form.marks(lengths[x.number], steps[x.number]) is not None for x in prepared.template.maps):
        unit = keys[0][1][-1]
        launch.series.keep(found[0], Series(given, options, prepared, extents, call, unit, lengths, steps))
