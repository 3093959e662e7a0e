"""Prepared calls: launches that are ready but for the addresses of the arrays.

A GPU call is prepared once for each combination of signatures and options (checked, planned, kernels loaded, parameters
filled in) and kept. A later call writes the addresses into the params struct and hands it to the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import jit
from .device import Device
from .params import UNBOUNDED
from .plan import Plan
from .problem import Problem

_MAX_PREPARED = 4096  # calls kept; lengths that change at every call would otherwise fill the memory
_thread = threading.local()


class _Arguments:
    """One kernel argument, the params struct: its bytes, and the pointer array that the driver reads."""

    def __init__(self, template: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(template, len(template))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._bytes))
        self.slots = memoryview(self._bytes).cast("B").cast("Q")  # the struct begins with its pointers
        self.address = ctypes.addressof(self._pointers)


class Prepared:
    """The launches of one call on one device, ready but for the addresses of the arrays."""

    def __init__(self, problem: Problem, plan: Plan, device: Device, params: np.ndarray, stream: int) -> None:
        from cupy.cuda import runtime

        kernels = [jit.load(launch.variant, device, stream) for launch in plan.launches]
        self._launches = [
            (kernel.function, launch.grid, 1, 1, launch.variant.threads, 1, 1, launch.variant.smem_bytes)
            for kernel, launch in zip(kernels, plan.launches, strict=True)
            if launch.grid > 0
        ]
        self.problem = problem
        self.workspace = plan.workspace
        self.device = device.ordinal
        self._template = params.tobytes()
        self._free: list[_Arguments] = []  # a block is taken while its launch is written: threads never share one
        self._launch = jit.launcher()
        self._get_device, self._set_device = runtime.getDevice, runtime.setDevice

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on `stream`; `addresses` in the order of the struct's pointers."""
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = _Arguments(self._template)
        slots = arguments.slots
        for i, address in enumerate(addresses):
            slots[i] = address
        current = self._get_device()
        if current != self.device or not hasattr(_thread, "has_context"):
            self._set_device(self.device)  # also gives a new thread its CUDA context
            _thread.has_context = True
        try:
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


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """In elements, of a new array of this shape."""
    _, a, b, c = shape
    return a * b * c, b * c, c, 1
