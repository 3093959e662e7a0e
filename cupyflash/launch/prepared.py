"""Prepared calls: launches that are ready but for the addresses of the arrays.

The kernels of a spec (all that decides which ones run) are loaded once on each GPU, as `Prepared`. From it a call gets
what is its own: grids, workspace and a params struct with its numbers. Both are kept. A call seen before writes the
addresses into the params struct and hands it to the driver; one with new lengths costs some arithmetic more.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..compile import jit
from ..gpu import tensormap
from ..plan.extents import MAX_GRID, Extents, Kernels, Workspace
from ..plan.families import Plan
from ..plan.params import UNBOUNDED
from ..problem import Problem
from . import counters
from .kept import Kept
from .template import Lengths, Steps, Template, ask_driver

_MAX_CALLS = 1024  # kept, at about 3 KB each; lengths that change at every call would otherwise fill the memory
_MAX_SPECS = 512
_thread = threading.local()


class Filled(NamedTuple):
    """A params struct that lacks addresses only.

    Attributes:
        writes: (word of 64 bits in the struct, which of a call's addresses goes there).
        counter: the word of the tile counter's address, if there is one.
        plain_bytes: where the struct without tensor maps begins, which some launches of a call take.
    """

    params: np.ndarray
    writes: tuple[tuple[int, int], ...]
    counter: int | None = None
    plain_bytes: int = 0


class _Arguments:
    """One kernel argument, the params struct: its bytes, and the pointer arrays that the driver reads."""

    def __init__(self, size: int, plain_bytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self._bytes)
        self._pointers = (ctypes.c_void_p * 2)(start, start + plain_bytes)
        self.bytes = memoryview(self._bytes).cast("B")
        self.slots = self.bytes.cast("Q")
        self.holds = b""  # the params struct that was copied here last
        self.whole = ctypes.addressof(self._pointers)
        self.plain = self.whole + ctypes.sizeof(ctypes.c_void_p)


class Prepared:
    """The kernels of a spec on one device, loaded, and all that their calls have in common."""

    recent = False

    def __init__(self, kernels: Kernels, filled: Filled, template: Template, stream: int) -> None:
        from cupy.cuda import runtime

        self.kernels, self._template, self._device = kernels, template, kernels.device
        self.functions = [
            (
                jit.load(variant, self._device, stream).function,
                kernels.grid(variant, MAX_GRID),
                (variant.threads, 1, 1, variant.smem_bytes),
                variant.params == filled.params.dtype,
            )
            for variant in kernels.variants
        ]
        self.persistent = any(variant.persistent for variant in kernels.variants)
        self.ordinal = self._device.ordinal
        self.size, self.plain_bytes = filled.params.nbytes, filled.plain_bytes
        self.writes = filled.writes
        self.counter_slot = filled.counter if self.persistent else None
        self.counters = counters.of(self.ordinal)
        self.free: list[_Arguments] = []  # a block is taken while its launch is written: threads never share one
        self.launch = jit.launcher()
        self.get_device, self.set_device = runtime.getDevice, runtime.setDevice

    def call(
        self, extents: Extents, options: Sequence[int], lengths: Sequence[Lengths], steps: Sequence[Steps], stream: int
    ) -> Call | None:
        """A call of these extents; None if the driver refuses a tensor map of one of its arrays.

        Args:
            options: as `template.numbers_of` gives them.
            lengths, steps: of the arrays that the template has strides of.
        """
        tiles, workspace, sections, first_stores = self.kernels.numbers(extents)
        numbers = (*options, *extents, *sections, int(first_stores))
        params = self._template.write(numbers, lengths, steps, self._ask)
        if params is None:
            return None
        if self.counter_slot is not None and self.counters.is_low():
            with self._device.current():
                self.counters.reserve(stream)
        launches = [
            ((function, min(n, most), 1, 1, *block), takes_whole)
            for (function, most, block, takes_whole), n in zip(self.functions, tiles, strict=True)
            if n > 0
        ]
        return Call(self, params, launches, workspace, extents)

    def _ask(self, tensor: tensormap.TensorMap) -> bytes | None:
        if hasattr(_thread, "has_context") and self.get_device() == self.ordinal:
            return ask_driver(tensor)
        with self._device.current():  # drivers encode tensor maps for a thread with a context alone
            return ask_driver(tensor)


class Call:
    """The launches of one call on one device, ready but for the addresses of the arrays.

    Attributes:
        rows: the shape of lse.
        workspace: the arrays that the launches share: name -> (shape, dtype).
    """

    __slots__ = ("_launches", "_params", "prepared", "recent", "rows", "workspace")

    def __init__(
        self, prepared: Prepared, params: bytes, launches: list[Any], workspace: Workspace, extents: Extents
    ) -> None:
        self.prepared, self._params, self._launches, self.workspace = prepared, params, launches, workspace
        self.rows = extents.batch, extents.heads_q, extents.seqlen_q
        self.recent = False

    @property
    def persistent(self) -> bool:
        """Whether a kernel of it is."""
        return self.prepared.persistent

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on `stream`; `addresses` as `Filled.writes` counts them."""
        prepared = self.prepared
        try:
            arguments = prepared.free.pop()
        except IndexError:
            arguments = _Arguments(prepared.size, prepared.plain_bytes)
        if arguments.holds is not self._params:
            arguments.bytes[:] = arguments.holds = self._params
        slots = arguments.slots
        for slot, i in prepared.writes:
            slots[slot] = addresses[i]
        current = prepared.get_device()
        if current != prepared.ordinal or not hasattr(_thread, "has_context"):
            prepared.set_device(prepared.ordinal)  # also gives a new thread its CUDA context
            _thread.has_context = True
        try:
            if prepared.counter_slot is not None:
                slots[prepared.counter_slot] = prepared.counters.address(stream)
            for launch, takes_whole in self._launches:
                prepared.launch(*launch, stream, arguments.whole if takes_whole else arguments.plain, 0)
        finally:
            if current != prepared.ordinal:
                prepared.set_device(current)
            prepared.free.append(arguments)


_calls: Kept[Call] = Kept(_MAX_CALLS)
specs: Kept[Prepared] = Kept(_MAX_SPECS)


def find(key: tuple[Any, ...]) -> Call | None:
    """The call prepared under `key`; None for a new one, and for keys that cannot be hashed (the checks decide)."""
    return _calls.find(key)


def keep(key: tuple[Any, ...], call: Call) -> Call:
    """Keep a call for the next time, if its key can be hashed; returns it."""
    return _calls.keep(key, call)


def forget() -> None:
    """Drop what is kept: calls are planned again. For tests and tools that change what a plan rests on."""
    _calls.clear()
    specs.clear()


def fill_problem(params: np.ndarray, problem: Problem, plan: Plan) -> None:
    """The run-time facts of `params.cuh`'s Problem."""
    p = params["problem"]
    for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "scale"):
        p[name] = getattr(problem, name)
    p["softcap"] = problem.softcap or 0
    left, right = problem.window
    p["window_left"] = UNBOUNDED if left is None else left
    p["window_right"] = UNBOUNDED if right is None else right
    p["section"], p["last_section"] = plan.sections
    p["first_stores"] = plan.first_stores


def fill_strides(params: np.ndarray, name: str, strides: Sequence[int], layout: str) -> None:
    """The strides of one array, given in the caller's layout."""
    row, head = (1, 2) if layout == "bshd" else (2, 1)
    params[f"{name}_stride"] = strides[0], strides[row], strides[head]


def pointers_first(params: np.ndarray) -> Filled:
    """For a struct that begins with its pointers, in the order of a call's addresses."""
    names = params.dtype.names or ()
    return Filled(params, tuple((i, i) for i, _ in enumerate(itertools.takewhile(_is_pointer, names))))


def _is_pointer(name: str) -> bool:
    return not name.endswith("_stride")


def with_tensor_maps(
    dtype: np.dtype[np.void], plain: np.ndarray, maps: Mapping[str, tuple[tensormap.TensorMap, int]]
) -> Filled | None:
    """The params of an sm90 kernel around the plain ones.

    Args:
        dtype: of the struct: tensor maps, `plain`, then single words.
        maps: name -> the map, and which of a call's addresses is its array's. The addresses are those of the plain
            struct's pointers and, if the struct has them, of the clocks.

    None if this driver's maps are not understood.
    """
    params = np.zeros((), dtype)
    params["plain"] = plain
    offsets = {name: field[1] // 8 for name, field in (dtype.fields or {}).items()}
    pointers = pointers_first(plain).writes
    writes = [(offsets["plain"] + word, i) for word, i in pointers]
    if "clocks" in offsets:
        writes.append((offsets["clocks"], len(pointers)))
    for name, (tensor, i) in maps.items():
        slot, words = tensormap.address_slot(tensor), tensormap.encode(tensor, 1 << 32)
        if slot is None or words is None:
            return None
        params[f"map_{name}"] = words
        writes.append((offsets[f"map_{name}"] + slot, i))
    return Filled(params, tuple(writes), offsets.get("counter"), 8 * offsets["plain"])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """In elements, of a new array of this shape."""
    _, a, b, c = shape
    return a * b * c, b * c, c, 1
