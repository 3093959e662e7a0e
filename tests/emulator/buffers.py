"""The arrays of a call in emulated memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.gpu.tensormap import TensorMap
from cupyflash.launch.filled import fill_plain, fill_problem
from cupyflash.launch.passes import contiguous_strides, with_batch
from cupyflash.operand import Box
from cupyflash.operands import Pass
from cupyflash.plan.families import Plan
from cupyflash.plan.params import params_of
from cupyflash.problem import Problem

from .launch import Memory, tensor_map

Array = NDArray[Any]
DTYPES = {"fp32": np.float32, "int32": np.int32}
_SWIZZLE_128B = 3


def barely_aligned(x: Array) -> Array:
    """A copy at an address that is a multiple of an element's size, and of no more: what a caller may give."""
    memory = np.empty(x.nbytes + 16, np.uint8)
    start = (x.itemsize - memory.ctypes.data) % 16
    copy: Array = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


class Buffers:
    """The arrays of one call of a pass in emulated memory: their addresses, and what params structs say of them."""

    def __init__(self, memory: Memory, which: Pass) -> None:
        self.memory, self.which = memory, which
        self.address: dict[str, int] = {}
        self.shape: dict[str, tuple[int, ...]] = {}
        self.strides: dict[str, tuple[int, ...]] = {}  # in elements, of those that have some in the structs
        self.broadcast: dict[str, tuple[int, ...]] = {}  # the same of those that broadcast

    def add(self, name: str, x: Array) -> None:
        """An input."""
        row = self.which.rows[name]
        if not (row.strided or row.broadcasts):
            x = barely_aligned(np.ascontiguousarray(x, None if row.free else DTYPES[row.dtype]))
        self.address[name] = self.memory.input(name, x)
        self._keep(name, x.shape, tuple(s // x.itemsize for s in x.strides))

    def make(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A contiguous output."""
        self.address[name], out = self.memory.output(name, shape, dtype)
        self._keep(name, shape, contiguous_strides(shape))
        return out

    def _keep(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """What is said of an array; a packed one is a batch of one."""
        if self.which.rows[name].broadcasts:
            self.broadcast[name] = strides
        if self.which.rows[name].strided:
            if len(shape) == 3:
                shape, strides, *_ = with_batch((shape, strides, None, None))
            self.strides[name] = strides
        self.shape[name] = shape

    def map(self, name: str, dtype: str, box: Box) -> NDArray[np.uint64]:
        """The array's tensor map."""
        m = TensorMap.of(dtype, self.shape[name], self.strides[name], "bshd", *box).whole
        return tensor_map(self.address[name], m.sizes, m.strides_bytes, m.box, _SWIZZLE_128B)

    def _defaults(self) -> dict[str, int]:
        """The addresses of what stands for arrays that may not be given."""
        defaults = self.which.defaults
        return {name: self.address[default] for name, default in defaults.items() if default in self.address}

    def params(self, plan: Plan, problem: Problem) -> tuple[Array, Array]:
        """Both structs of the pass, the counter apart: the plain one, and that of the sm90 family."""
        rows, (plain, hopper) = self.which.rows, (np.zeros((), kind) for kind in params_of(self.which))
        for name, address in (self._defaults() | self.address).items():
            plain[rows[name].member] = address
        strides = self.strides | self.broadcast | {name: () for name in self.shape if rows[name].free}
        fill_plain(plain, rows, {name: (self.shape[name], own) for name, own in strides.items()}, "bshd")
        fill_problem(plain, self.which, problem, plan)
        hopper["plain"] = plain
        for name, box in self.which.boxes(launch.variant for launch in plan.launches).items():
            hopper[f"map_{rows[name].member}"] = self.map(name, problem.dtype, box)
        return plain, hopper
