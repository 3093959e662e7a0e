"""Prepared calls: launches that are ready but for the addresses of the arrays.

The kernels of a spec (all that decides which ones run) are loaded once on each GPU, as `Prepared`. From it a call gets
what is its own: grids, workspace and a params struct with its numbers. Both are kept. A call seen before writes the
addresses into the params struct and hands it to the driver; one with new lengths costs some arithmetic more.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..compile import jit
from ..gpu import tensormap
from ..gpu.dependent import DependentLaunch
from ..plan.extents import MAX_GRID, Extents, Kernels
from . import counters
from .filled import Filled
from .kept import Kept, make_room
from .passes import Given
from .template import Lengths, ScoreSteps, Steps, Template, Words, ask_driver

_MAX_CALLS = 1024  # kept, at about 3 KB each; lengths that change at every call would otherwise fill the memory
_MAX_SPECS = 512
_MAX_LAUNCHES = 1024  # of a spec
_thread = threading.local()
_UNIT = 64  # elements: a workspace begins at a multiple of 256 bytes, as what the driver allocates does
Made = tuple[tuple[int, ...], str]
Launches = list[tuple[Callable[..., Any], bool]]  # of a stream and its params; whether these are the whole struct
Writes = tuple[tuple[int, int], ...]  # (word of 64 bits in the params struct, which of a call's addresses goes there)


class _Arguments:
    """One kernel argument, the params struct: its bytes, and the pointer arrays that the driver reads."""

    def __init__(self, size: int, plain_bytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self._bytes)
        self._pointers = (ctypes.c_void_p * 2)(start, start + plain_bytes)
        whole = memoryview(self._bytes).cast("B")
        self.words, self.slots = whole.cast("I"), whole.cast("Q")
        self.holds: Words | None = None  # the params struct that was copied here last
        self.whole = ctypes.addressof(self._pointers)
        self.plain = self.whole + ctypes.sizeof(ctypes.c_void_p)


class Prepared:
    """The kernels of a spec on one device, loaded, and all that their calls have in common."""

    recent = False

    def __init__(self, kernels: Kernels, filled: Filled, template: Template, stream: int) -> None:
        from cupy.cuda import runtime

        self.kernels, self.template, self._device = kernels, template, kernels.device
        self.functions = [
            (
                jit.load(variant, self._device, stream).function,
                kernels.grid(variant, MAX_GRID),
                (1, 1, variant.threads, 1, 1, variant.smem_bytes),
                variant.params == filled.params.dtype,
                variant.dependent,
            )
            for variant in kernels.variants
        ]
        self.persistent = any(variant.persistent for variant in kernels.variants)
        spec = kernels.spec
        self.ordinal = self._device.ordinal
        self.made_of = (spec.head_dim, spec.head_dim_v or spec.head_dim), spec.dtype
        self.size, self.plain_bytes = filled.params.nbytes, filled.plain_bytes
        self._words, self._writes = filled.words, dict[tuple[str, ...], Writes]()
        self._launches: dict[tuple[int, ...], Launches] = {}
        self._defaults = filled.defaults
        self.counter_slot = next(iter(filled.words["counter"]), None) if self.persistent else None
        self.counters = counters.of(self.ordinal)
        self.free: list[_Arguments] = []  # a block is taken while its launch is written: threads never share one
        self.launch = jit.launcher()
        self.get_device, self.set_device = runtime.getDevice, runtime.setDevice

    def call(
        self,
        given: Given,
        extents: Extents,
        options: Sequence[int],
        lengths: Sequence[Lengths],
        steps: Sequence[Steps],
        broadcast: Sequence[ScoreSteps],
        copied: tuple[int, ...],
        layout: str,
        stream: int,
    ) -> Call | None:
        """A call of these extents; None if the driver refuses a tensor map of one of its arrays.

        Args:
            options: as `template.numbers_of` gives them.
            lengths, steps, broadcast: as `given.measure` and `given.measure_broadcast` give them.
            copied: the numbers of arrays that it takes contiguous copies of.
            layout: the caller's.
        """
        numbers = self.kernels.numbers(extents)
        words = (*options, *extents, *numbers[2:])  # `template.NUMBERS`
        params = self.template.write(words, lengths, steps, broadcast, self._ask)
        if params is None:
            return None
        shaped = given.shapes(extents, *self.made_of, layout) if given.shaped else ()
        return self.call_of(given, shaped, numbers, params, copied, stream)

    def call_of(
        self, given: Given, shaped: Sequence[Made], numbers: Sequence[Any], params: Words,
        copied: tuple[int, ...], stream: int,
    ) -> Call:  # fmt: skip
        """A call with the `Numbers` that the plan chose for it, its params, and what `shaped` says of its results."""
        tiles, workspace = numbers[0], numbers[1]
        if self.counter_slot is not None and self.counters.is_low():
            with self._device.current():
                self.counters.reserve(stream)
        launches = self._launches.get(tiles) or self._launch(tiles)
        order = given.order
        if workspace:
            order = (*order, *workspace)
        writes = self._writes.get(order) or self._find(order)
        return Call(self, params, launches, order, writes, given, shaped, tuple(workspace.values()), copied)

    def _launch(self, tiles: tuple[int, ...]) -> Launches:
        """The launches for so many tiles of work of each, kept for other calls."""
        found: Launches = []
        for (function, most, block, takes_whole, dependent), n in zip(self.functions, tiles, strict=True):
            if n > 0:
                facts = function, min(n, most), *block
                # Fewer take less time than the host does, whom launches that overlap cost 1 us more each.
                overlaps = dependent and n > self._device.sm_count
                found.append((DependentLaunch(*facts) if overlaps else partial(self.launch, *facts), takes_whole))
        make_room(self._launches, _MAX_LAUNCHES)
        self._launches[tiles] = found
        return found

    def _find(self, order: tuple[str, ...]) -> Writes:
        """Where the addresses of a call go that has them in this order; kept for all such calls."""
        found = [(word, i) for i, name in enumerate(order) for word in self._words[name]]
        for name, default in self._defaults.items():
            if name not in order and default in order:
                found += [(word, order.index(default)) for word in self._words[name]]
        return self._writes.setdefault(order, tuple(found))

    def _ask(self, tensor: tensormap.TensorMap) -> bytes | None:
        if hasattr(_thread, "has_context") and self.get_device() == self.ordinal:
            return ask_driver(tensor)
        with self._device.current():  # drivers encode tensor maps for a thread with a context alone
            return ask_driver(tensor)


class Call:
    """The launches of one call on one device, ready but for the addresses of the arrays.

    Attributes:
        order: the names of the arrays whose addresses it takes.
        names: of the first results; likes: the arrays given that these are shaped like.
        shaped: (shape, dtype) of the other results; made: of these, and then of what the launches share.
        offsets: where the latter lies, in bytes from the start of one block of memory; room: the block's, in fp32.
        forms: what a library makes all of this like, as its `forms` says; None: nothing yet.
        params: the struct of its launches, without addresses.
        copied: the numbers of the arrays given that it takes contiguous copies of.
        passing: it may be the only one of its lengths, and need not be kept.
    """

    __slots__ = (
        "_launches", "_writes", "copied", "forms", "likes", "made", "names", "offsets", "order", "params", "passing",
        "prepared", "recent", "room", "shaped",
    )  # fmt: skip

    def __init__(
        self,
        prepared: Prepared,
        params: Words,
        launches: Launches,
        order: tuple[str, ...],
        writes: Writes,
        given: Given,
        shaped: Sequence[Made],
        workspace: Sequence[Made],
        copied: tuple[int, ...],
    ) -> None:
        self.prepared, self.params, self._launches, self._writes = prepared, params, launches, writes
        self.order, self.names, self.likes, self.copied = order, given.made, given.likes, copied
        self.shaped, self.made = shaped, (*shaped, *workspace) if workspace else shaped
        self.offsets, self.room = _packed(workspace) if workspace else ((), 0)
        self.forms: Any = None
        self.recent = self.passing = False

    @property
    def persistent(self) -> bool:
        """Whether a kernel of it is."""
        return self.prepared.persistent

    def __call__(self, addresses: Sequence[int], stream: int, current: int | None = None) -> None:
        """Launch on `stream`.

        Args:
            addresses: of the arrays that `order` names.
            current: the GPU that is current on this thread, from whoever knows it.
        """
        prepared = self.prepared
        try:
            arguments = prepared.free.pop()
        except IndexError:
            arguments = _Arguments(prepared.size, prepared.plain_bytes)
        if arguments.holds is not self.params:
            arguments.words[:] = arguments.holds = self.params
        slots = arguments.slots
        for slot, i in self._writes:
            slots[slot] = addresses[i]
        if current is None:
            current = prepared.get_device()
        if current != prepared.ordinal or not hasattr(_thread, "has_context"):
            prepared.set_device(prepared.ordinal)  # also gives a new thread its CUDA context
            _thread.has_context = True
        try:
            if prepared.counter_slot is not None:
                slots[prepared.counter_slot] = prepared.counters.address(stream)
            for launch, takes_whole in self._launches:
                launch(stream, arguments.whole if takes_whole else arguments.plain, 0)
        finally:
            if current != prepared.ordinal:
                prepared.set_device(current)
            prepared.free.append(arguments)


def _packed(workspace: Sequence[Made]) -> tuple[tuple[int, ...], int]:
    """`Call.offsets` and `Call.room`: one allocation costs the host less than several. All elements have 4 bytes."""
    offsets, end = [], 0
    for shape, _ in workspace:
        offsets.append(4 * end)
        end += -(-math.prod(shape) // _UNIT) * _UNIT
    return tuple(offsets), end


calls: Kept[Call] = Kept(_MAX_CALLS)
specs: Kept[Prepared] = Kept(_MAX_SPECS)
series: Kept[Any] = Kept(_MAX_SPECS)  # launch/series.py


def forget() -> None:
    """Drop what is kept: calls are planned again. For tests and tools that change what a plan rests on."""
    calls.clear()
    specs.clear()
    series.clear()
