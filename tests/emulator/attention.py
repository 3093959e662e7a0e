"""Runs a case of the table by its plan on the emulator: all launches in order, results as NumPy arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.check.cases import Case, Inputs, case
from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Device
from cupyflash.gpu.tensormap import TensorMap
from cupyflash.launch.prepared import contiguous_strides, fill_problem, fill_strides
from cupyflash.plan.families import Plan, plan_call
from cupyflash.plan.sm90 import BackwardSm90, ForwardSm90
from cupyflash.plan.variant import Variant, kernel_sources
from cupyflash.problem import Problem

from .launch import EmulatedKernel, EmulatorError, Memory, Mode, tensor_map

Array = NDArray[Any]
_DTYPES = {"fp32": np.float32, "int32": np.int32}
_SWIZZLE_128B = 3


@functools.lru_cache(maxsize=256)
def _kernel(source: str, symbol: str, arch: int, headers: tuple[tuple[str, str], ...]) -> EmulatedKernel:
    return EmulatedKernel(source, dict(headers), symbol, arch)


def kernel_of(variant: Variant, device: Device, headers: Mapping[str, str] | None = None) -> EmulatedKernel:
    """The variant on the CPU, from the text that NVRTC gets. `headers` replaces some of the kernel sources."""
    texts = {**kernel_sources(), **(headers or {})}
    major, minor = device.capability
    return _kernel(variant.source(), variant.symbol, 100 * major + 10 * minor, tuple(sorted(texts.items())))


def small_device(arch: str, sm_count: int = 3) -> Device:
    """A stand-in for a GPU with so few multiprocessors that persistent blocks compute several tiles each."""
    return dataclasses.replace(Device.synthetic(arch), sm_count=sm_count)


class Buffers:
    """The arrays of one call in emulated memory: their addresses, and what params structs say of them."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.address: dict[str, int] = {}
        self.shape: dict[str, tuple[int, ...]] = {}
        self.strides: dict[str, tuple[int, ...]] = {}  # in elements

    def add(self, name: str, x: Array) -> None:
        """An input."""
        self.address[name], self.shape[name] = self.memory.input(name, x), x.shape
        self.strides[name] = tuple(s // x.itemsize for s in x.strides)

    def make(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A contiguous output."""
        self.address[name], out = self.memory.output(name, shape, dtype)
        self.shape[name] = shape
        if len(shape) == 4:
            self.strides[name] = contiguous_strides(shape)
        return out

    def aligned(self) -> bool:
        """Whether every row of all inputs starts at a multiple of 16 bytes."""
        return all(
            self.address[name] % 16 == 0
            and all(s % 8 == 0 for s, n in zip(strides[:3], self.shape[name][:3], strict=True) if n > 1)
            for name, strides in self.strides.items()
        )

    def readable(self, name: str) -> bool:
        """Whether TMA can read an array."""
        return self.address[name] % 16 == 0 and tensormap.readable(self.shape[name], self.strides[name])

    def map(self, name: str, dtype: str, rows: int) -> NDArray[np.uint64]:
        """The array's tensor map."""
        m = TensorMap.of(dtype, self.shape[name], self.strides[name], "bshd", rows)
        box = tensormap.BOX_COLUMNS, rows, 1, 1
        return tensor_map(self.address[name], m.sizes, m.strides_bytes, box, _SWIZZLE_128B)

    def fill(self, struct: np.ndarray) -> None:
        """Addresses and strides of all the arrays that the struct names."""
        names = struct.dtype.names or ()
        for name, address in self.address.items():
            if name in names:
                struct[name] = address
        for name, strides in self.strides.items():
            if f"{name}_stride" in names:
                fill_strides(struct, name, strides, "bshd")


@dataclasses.dataclass
class Session:
    """One run of one problem.

    Attributes:
        headers: patched kernel sources by file name; the others are as shipped.
        family, backward_family: of the forward and the backward, of `plan.FAMILIES`; None: as planned.
        counter: whether persistent blocks draw their tiles from a counter; else in a fixed stride.
        wants_lse: else the forward gets no address for lse, and returns NaN.
        left_over: what the backward's floating-point workspace holds before; None: NaN.
        collectives: shuffles, votes and the like of all launches so far.
    """

    device: Device
    mode: Mode
    seed: int = 0
    headers: Mapping[str, str] | None = None
    family: str | None = None
    backward_family: str | None = None
    counter: bool = True
    wants_lse: bool = True
    left_over: float | None = None
    collectives: int = 0

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Array, Array]:
        """out, lse."""
        with Memory() as memory:
            buffers = Buffers(memory)
            for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
                buffers.add(name, x)
            aligned, tma = buffers.aligned(), all(buffers.readable(name) for name in "qkv")
            plan = plan_call(problem, self.device, aligned=aligned, tma=tma, family=self.family)
            out = buffers.make("o", inputs.q.shape, inputs.q.dtype)
            lse = buffers.make("lse", (problem.batch, problem.heads_q, problem.seqlen_q), np.float32)
            if not self.wants_lse:
                del buffers.address["lse"]
            self._launch(plan, problem, buffers)
            return out.copy(), lse.copy()

    def backward(self, inputs: Inputs, out: Array, lse: Array, problem: Problem) -> tuple[Array, Array, Array]:
        """dq, dk, dv."""
        with Memory() as memory:
            buffers = Buffers(memory)
            arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": out, "dout": inputs.dout}
            for name, x in arrays.items():
                buffers.add(name, x)
            readable = all(buffers.readable(name) for name in ("q", "k", "v", "dout"))
            lies = {"aligned": buffers.aligned(), "tma": readable}
            plan = plan_call(problem, self.device, backward=True, family=self.backward_family, **lies)
            for name, vector in (("lse", lse), ("dlse", inputs.dlse)):
                if vector is not None:
                    buffers.address[name] = memory.input(name, np.ascontiguousarray(vector, np.float32))
            like = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
            gradients = [buffers.make(name, x.shape, x.dtype) for name, x in like.items()]
            for name, (shape, dtype) in plan.workspace.items():
                buffers.address[name], workspace = memory.output(name, shape, _DTYPES[dtype])
                if self.left_over is not None and dtype == "fp32":
                    workspace[:] = self.left_over
            self._launch(plan, problem, buffers)
            dq, dk, dv = (x.copy() for x in gradients)
            return dq, dk, dv

    def _launch(self, plan: Plan, problem: Problem, buffers: Buffers) -> None:
        mode = dataclasses.replace(self.mode, ordered_red=problem.deterministic and self.mode.race)
        for launch in plan.launches:
            if launch.grid == 0:
                continue
            struct, variant = np.zeros((), launch.variant.params), launch.variant
            plain = struct["plain"] if isinstance(variant, ForwardSm90 | BackwardSm90) else struct
            buffers.fill(plain)
            fill_problem(plain, problem, plan)
            counter = np.zeros(2, np.int32)
            if isinstance(variant, ForwardSm90):
                for name, rows in (("q", 64), ("k", variant.block_n), ("v", variant.block_n), ("o", 64)):
                    struct[f"map_{name}"] = buffers.map(name, problem.dtype, rows)
            if variant.persistent and self.counter:
                struct["counter"], counter = buffers.memory.output("counter", (2,), np.int32)
                counter[:] = 0
            if isinstance(variant, BackwardSm90):
                for name, rows in variant.box_rows.items():
                    struct[f"map_{name}"] = buffers.map(name, problem.dtype, rows)
            kernel = kernel_of(variant, self.device, self.headers)
            kernel(launch.grid, variant.threads, variant.smem_bytes, [struct], mode, self.seed)
            self.collectives += kernel.stats.collectives
            if counter.any():
                raise EmulatorError(f"{variant.symbol}, seed {self.seed}: the counter is left as {counter}")


# What the case table lacks and some barriers of the kernels are for: NaN and inf in q, k and dout, in part of a tile,
# with rows that tiles of 64 and of 128 pad differently; many short tiles a block.
NONFINITE_QUERIES = {
    name: Case(name, "full", 149, 203, head_dim, causal=True, heads_q=2, heads_k=1)
    for name, head_dim in (
        ("nan-in-queries-d64", 64),
        ("nan-in-queries-d128", 128),
        ("nan-in-queries-d256", 256),
        ("nan-in-late-key-d256", 256),
    )
}
EXTRA = NONFINITE_QUERIES | {
    c.name: c
    for c in (
        Case("many-tiles", "full", 261, 65, 64, batch=3, heads_q=4, heads_k=2),
        Case("many-tiles-causal", "full", 197, 197, 128, batch=2, heads_q=3, heads_k=3, causal=True),
        Case("many-tiles-d160", "full", 197, 197, 160, batch=2, heads_q=3, heads_k=3, causal=True),
        Case("many-tiles-d192", "full", 293, 131, 192, heads_q=4, heads_k=2),
        Case("many-tiles-d256", "full", 293, 131, 256, heads_q=4, heads_k=4, causal=True),
        Case("short-tiles-d256", "full", 70, 40, 256, batch=3, heads_q=4, heads_k=2),
    )
}


def find_case(name: str) -> Case:
    """The case of that name, of the table or of `EXTRA`."""
    return EXTRA.get(name) or case(name)


def inputs_of(c: Case, dtype: str, seed: int = 0) -> tuple[Inputs, Problem]:
    """The case's arrays; those of `EXTRA` with what their names say."""
    inputs = c.inputs(dtype, seed)
    if c.name in NONFINITE_QUERIES:
        if "late-key" in c.name:
            inputs.k[:, 190, 0, 7] = np.nan
            return inputs, c.problem(dtype)
        inputs.q[:, 70, 0, 3] = np.nan
        inputs.dout[:, 90, 0, 5] = np.nan
        inputs.dout[:, 20, 1, 9] = np.inf
    return inputs, c.problem(dtype)
