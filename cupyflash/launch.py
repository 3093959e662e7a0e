"""Prepared calls: launches that are ready but for the addresses of the arrays.

A GPU call is prepared once for each combination of signatures and options (checked, planned, kernels loaded, parameters
filled in) and kept. A later call writes the addresses into the params struct and hands it to the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import counters, jit, tensormap
from .device import Device
from .params import UNBOUNDED
from .plan import Plan
from .problem import Problem

_MAX_PREPARED = 4096  # calls kept; lengths that change at every call would otherwise fill the memory
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

    def __init__(self, template: bytes, plain_bytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(template, len(template))
        start = ctypes.addressof(self._bytes)
        self._pointers = (ctypes.c_void_p * 2)(start, start + plain_bytes)
        self.slots = memoryview(self._bytes).cast("B").cast("Q")
        self.whole = ctypes.addressof(self._pointers)
        self.plain = self.whole + ctypes.sizeof(ctypes.c_void_p)


class Prepared:
    """The launches of one call on one device, ready but for the addresses of the arrays."""

    def __init__(self, problem: Problem, plan: Plan, device: Device, filled: Filled, stream: int) -> None:
        from cupy.cuda import runtime

        kernels = [jit.load(launch.variant, device, stream) for launch in plan.launches]
        self._launches = [
            (
                (kernel.function, launch.grid, 1, 1, launch.variant.threads, 1, 1, launch.variant.smem_bytes),
                launch.variant.params == filled.params.dtype,
            )
            for kernel, launch in zip(kernels, plan.launches, strict=True)
            if launch.grid > 0
        ]
        self.problem = problem
        self.persistent = any(launch.variant.persistent for launch in plan.launches)
        self.workspace = plan.workspace
        self.device = device.ordinal
        self._template, self._plain_bytes = filled.params.tobytes(), filled.plain_bytes
        self._writes = filled.writes
        self._counter_slot = filled.counter if self.persistent else None
        if self._counter_slot is not None:
            self._counters = counters.of(device.ordinal)
            with device.current():
                self._counters.reserve(stream)
        self._free: list[_Arguments] = []  # a block is taken while its launch is written: threads never share one
        self._launch = jit.launcher()
        self._get_device, self._set_device = runtime.getDevice, runtime.setDevice

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on `stream`; `addresses` as `Filled.writes` counts them."""
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = _Arguments(self._template, self._plain_bytes)
        slots = arguments.slots
        for slot, i in self._writes:
            slots[slot] = addresses[i]
        current = self._get_device()
        if current != self.device or not hasattr(_thread, "has_context"):
            self._set_device(self.device)  # also gives a new thread its CUDA context
            _thread.has_context = True
        try:
            if self._counter_slot is not None:
                slots[self._counter_slot] = self._counters.address(stream)
            for launch, takes_whole in self._launches:
                self._launch(*launch, stream, arguments.whole if takes_whole else arguments.plain, 0)
        finally:
            if current != self.device:
                self._set_device(current)
            self._free.append(arguments)


_calls: dict[tuple[Any, ...], Prepared] = {}


def find(key: tuple[Any, ...]) -> Prepared | None:
    """The call prepared under `key`; None for a new one, and for keys that cannot be hashed (the checks decide)."""
    try:
        return _calls.get(key)
    except TypeError:
        return None


def keep(key: tuple[Any, ...], call: Prepared) -> Prepared:
    """Keep a call for the next time, if its key can be hashed; returns it."""
    if len(_calls) >= _MAX_PREPARED:
        _calls.clear()
    with contextlib.suppress(TypeError):
        _calls[key] = call
    return call


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
