"""Prepared calls: launches that are ready but for the addresses of the arrays.

A GPU call is prepared once for each combination of signatures and options (checked, planned, kernels loaded, parameters
filled in) and kept. A later call writes the addresses into the params struct and hands it to the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import counters, jit, tensormap
from .device import Device
from .params import FWD_SM90_PARAMS, UNBOUNDED
from .plan import Plan
from .problem import Problem

_MAX_PREPARED = 4096  # calls kept; lengths that change at every call would otherwise fill the memory
_thread = threading.local()


class Filled(NamedTuple):
    """A params struct that lacks addresses only.

    Attributes:
        writes: (word of 64 bits in the struct, which of a call's addresses goes there).
        counter: the word of the tile counter's address, if there is one.
    """

    params: np.ndarray
    writes: tuple[tuple[int, int], ...]
    counter: int | None = None


class _Arguments:
    """One kernel argument, the params struct: its bytes, and the pointer array that the driver reads."""

    def __init__(self, template: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(template, len(template))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._bytes))
        self.slots = memoryview(self._bytes).cast("B").cast("Q")
        self.address = ctypes.addressof(self._pointers)


class Prepared:
    """The launches of one call on one device, ready but for the addresses of the arrays."""

    def __init__(self, problem: Problem, plan: Plan, device: Device, filled: Filled, stream: int) -> None:
        import cupy
        from cupy.cuda import runtime

        kernels = [jit.load(launch.variant, device, stream) for launch in plan.launches]
        self._launches = [
            (kernel.function, launch.grid, 1, 1, launch.variant.threads, 1, 1, launch.variant.smem_bytes)
            for kernel, launch in zip(kernels, plan.launches, strict=True)
            if launch.grid > 0
        ]
        self.problem = problem
        self.persistent = any(launch.variant.persistent for launch in plan.launches)
        self.workspace = plan.workspace
        self.device = device.ordinal
        self._template, self._writes = filled.params.tobytes(), filled.writes
        self._counter_slot = filled.counter
        if filled.counter is not None:
            self._counters = counters.of(device.ordinal)
            with cupy.cuda.Device(device.ordinal):
                self._counters.reserve(stream)
        self._free: list[_Arguments] = []  # a block is taken while its launch is written: threads never share one
        self._launch = jit.launcher()
        self._get_device, self._set_device = runtime.getDevice, runtime.setDevice

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on `stream`; `addresses` as `Filled.writes` counts them."""
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = _Arguments(self._template)
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
            for launch in self._launches:
                self._launch(*launch, stream, arguments.address, 0)
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


def fill_problem(params: np.ndarray, problem: Problem, section: int) -> None:
    """The run-time facts of `params.cuh`'s Problem."""
    p = params["problem"]
    for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "scale"):
        p[name] = getattr(problem, name)
    left, right = problem.window
    p["window_left"] = UNBOUNDED if left is None else left
    p["window_right"] = UNBOUNDED if right is None else right
    p["section"] = section


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


def with_tensor_maps(plain: np.ndarray, maps: Sequence[tensormap.TensorMap]) -> Filled | None:
    """The params of the sm90 forward around those of the plain one; `maps` are q's, k's, v's and o's.

    A call's addresses: q, k, v, o, lse, clocks. None if this driver's maps are not understood.
    """
    params = np.zeros((), FWD_SM90_PARAMS)
    params["plain"] = plain
    offsets = {name: field[1] // 8 for name, field in (FWD_SM90_PARAMS.fields or {}).items()}
    writes = [(offsets["plain"] + i, i) for i in range(5)] + [(offsets["clocks"], 5)]
    for i, (name, tensor) in enumerate(zip("qkvo", maps, strict=True)):
        slot, words = tensormap.address_slot(tensor), tensormap.encode(tensor, 1 << 32)
        if slot is None or words is None:
            return None
        params[f"map_{name}"] = words
        writes.append((offsets[f"map_{name}"] + slot, i))
    return Filled(params, tuple(writes), offsets["counter"])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """In elements, of a new array of this shape."""
    _, a, b, c = shape
    return a * b * c, b * c, c, 1
