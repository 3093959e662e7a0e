"""Forms of tensor maps: where the numbers of an array lie in its map, so that calls of new lengths write them there.

Nothing of it is documented. `understand` finds it by encoding maps that differ in little, and tries what it found on
others; where something does not fit, the driver is asked for each map.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .tensormap import ANYWHERE, ROW_BYTES, TensorMap, address_slot, encode


@dataclass(frozen=True)
class Form:
    """Maps of one dtype, head_dim and box, as far as they are understood: where their numbers lie.

    Attributes:
        words: of a map, as 128 bytes, into which the others' numbers can be written.
        address: the word of 64 bits that is the array's address.
        slots: the words of 32 bits that hold seqlen - 1, heads - 1, batch - 1, and the strides of row, head and
            sequence in units of 16 bytes; None: unknown, the driver must make each map.
        marked: the words of 32 bits that small arrays have otherwise, and what they hold there; None: unknown.
        least_bytes: arrays whose last row is this far from the first are not small; 0: none is.
    """

    words: bytes
    address: int
    slots: tuple[int, ...] | None = None
    marked: tuple[tuple[int, int], ...] | None = None
    least_bytes: int = 0

    def marks(self, lengths: tuple[int, int, int], steps: tuple[int, int, int]) -> tuple[tuple[int, int], ...] | None:
        """What is written into `words`, beside an array's numbers, to make its map; None: the driver must make it.

        Args:
            lengths: seqlen, heads, batch.
            steps: from one row, head and sequence to the next, in elements.
        """
        (seqlen, heads, batch), (row, head, sequence) = lengths, steps
        if self.slots is None or (row | head | sequence) >= _WORD_STEP:
            return None
        if not self.least_bytes:
            return ()
        apart = (seqlen - 1) * row + (heads - 1) * head + (batch - 1) * sequence
        if 2 * apart >= self.least_bytes:
            return ()
        # Small, however the driver counts bytes; the stride of a dimension of size 1 says nothing.
        reach = apart + row * (seqlen > 1) + head * (heads > 1) + sequence * (batch > 1)
        return self.marked if 2 * reach <= _SMALL_BYTES else None


_Probe = tuple[tuple[int, int, int], tuple[int, int, int]]  # seqlen, heads and batch, and their strides in bytes
_WORD_STEP = 8 << 32  # elements; longer strides take more than one word
_SMALL_BYTES, _MIDDLE_BYTES, _LARGE_BYTES = 120 << 10, 136 << 10, 1 << 20
# No two numbers of a probe are the same, neither as they are nor as they are stored: each is found in one place.
_FIRST: _Probe = (70001, 3003, 509), (16 * 8101, 16 * 90007, 16 * 12345701)
_SECOND: _Probe = (1234, 47, 23459), (16 * 765433, 16 * 3571, 16 * 80000011)
_LARGE: tuple[_Probe, ...] = (
    ((1 << 29, 1, 1), (512, 16, 16)),
    ((8192, 16, 4), (8192, 512, 8192 * 8192)),
    ((1, 1, 1 << 20), (16, 16, 1 << 21)),
    ((1, 3, 2), (16, 1 << 35, (1 << 36) - 16)),
    ((4096, 8, 3), (512, 512 * 4096, 1 << 30)),
)
# Just beyond _MIDDLE_BYTES, along one dimension and along several.
_MIDDLE: tuple[_Probe, ...] = (
    ((273, 1, 1), (512, 16, 16)),
    ((1, 18, 1), (16, 8192, 16)),
    ((1, 1, 5), (16, 16, 34816)),
    ((69, 4, 2), (1024, 256, 69632)),
)
# Up to _SMALL_BYTES.
_SMALL: tuple[_Probe, ...] = (
    ((1, 1, 1), (16, 16, 16)),
    ((17, 2, 1), (1024, 512, 16)),
    ((1, 8, 5), (16, 512, 4096)),
    ((239, 1, 1), (512, 16, 16)),
    ((1, 7, 1), (16, 16384, 16)),
    ((58, 4, 2), (1024, 256, 30720)),
)


def understand(dtype: str, head_dim: int, rows: int, interleaved: bool = False) -> Form | None:
    """The `Form` of maps with boxes of `rows`, found by comparing some; None if not even the address is understood. Of
    `interleaved` ones it knows no more than that."""

    def map_of(probe: _Probe) -> TensorMap:
        return TensorMap(dtype, (head_dim, *probe[0]), probe[1], rows, interleaved)

    def words(probe: _Probe) -> NDArray[np.uint32] | None:
        found = encode(map_of(probe), ANYWHERE)
        return None if found is None else found.view(np.uint32)

    address = address_slot(map_of(_FIRST))
    first, second = words(_FIRST), words(_SECOND)
    if address is None or first is None:
        return None
    form = Form(first.tobytes(), address)
    slots = () if second is None else _slots(first, second)
    if interleaved or len(slots) < 6:
        return form
    known = replace(form, slots=slots)
    if not all(_is_told(known, words(probe), probe) for probe in (_SECOND, *_LARGE)):
        return form
    small = [_differences(known, words(probe), probe) for probe in _SMALL]
    if all(found == () for found in small):
        return known
    is_middle_large = all(_is_told(known, words(probe), probe) for probe in _MIDDLE)
    known = replace(known, least_bytes=_MIDDLE_BYTES if is_middle_large else _LARGE_BYTES)
    is_same = small[0] is not None and all(found == small[0] for found in small)
    return replace(known, marked=small[0]) if is_same else known


def _slots(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> tuple[int, ...]:
    """The words where the maps of both probes hold their numbers; fewer than six if not all are found in one place."""
    pairs = zip(_stored(_FIRST), _stored(_SECOND), strict=True)
    found = [np.flatnonzero((first == a) & (second == b)) for a, b in pairs]
    return tuple(int(places[0]) for places in found if len(places) == 1)


def _stored(probe: _Probe) -> tuple[int, ...]:
    """Lengths less 1, and strides in units of 16 bytes."""
    lengths, strides_bytes = probe
    return (*(n - 1 for n in lengths), *(step // ROW_BYTES for step in strides_bytes))


def _differences(form: Form, actual: NDArray[np.uint32] | None, probe: _Probe) -> tuple[tuple[int, int], ...] | None:
    """The words in which a map is not what the form makes of its numbers, and what is there; None if it is refused."""
    if actual is None:
        return None
    expected = np.frombuffer(form.words, np.uint32).copy()
    expected[list(form.slots or ())] = _stored(probe)
    return tuple((int(i), int(actual[i])) for i in np.flatnonzero(actual != expected))


def _is_told(form: Form, actual: NDArray[np.uint32] | None, probe: _Probe) -> bool:
    """Whether a map is what the form makes of its numbers."""
    return _differences(form, actual, probe) == ()
