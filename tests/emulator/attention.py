"""Runs a case of the table by its plan on the emulator: all launches in order, results as NumPy arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.check.accuracy import GRADIENTS
from cupyflash.check.cases import Case, Inputs, case
from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Device
from cupyflash.gpu.tensormap import TensorMap
from cupyflash.launch.passes import contiguous_strides, fill_plain, fill_problem, given_of, with_batch
from cupyflash.operands import BACKWARD, FORWARD, Pass
from cupyflash.plan.extents import Extents
from cupyflash.plan.families import Plan, plan_call
from cupyflash.plan.params import params_of
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
    """The arrays of one call of a pass in emulated memory: their addresses, and what params structs say of them."""

    def __init__(self, memory: Memory, which: Pass) -> None:
        self.memory, self.which = memory, which
        self.address: dict[str, int] = {}
        self.shape: dict[str, tuple[int, ...]] = {}
        self.strides: dict[str, tuple[int, ...]] = {}  # in elements, of those that have some in the structs

    def add(self, name: str, x: Array) -> None:
        """An input."""
        row = self.which.rows[name]
        if not row.strided:
            x = np.ascontiguousarray(x, _DTYPES[row.dtype])
        self.address[name] = self.memory.input(name, x)
        self._keep(name, x.shape, tuple(s // x.itemsize for s in x.strides))

    def make(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A contiguous output."""
        self.address[name], out = self.memory.output(name, shape, dtype)
        self._keep(name, shape, contiguous_strides(shape))
        return out

    def _keep(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """What is said of an array; a packed one is a batch of one."""
        if self.which.rows[name].strided:
            if len(shape) == 3:
                shape, strides, *_ = with_batch((shape, strides, None, None))
            self.strides[name] = strides
        self.shape[name] = shape

    def aligned(self) -> bool:
        """Whether every row of all inputs starts at a multiple of 16 bytes."""
        return all(
            self.address[name] % 16 == 0
            and all(s % 8 == 0 for s, n in zip(strides[:-1], self.shape[name][:-1], strict=True) if n > 1)
            for name, strides in self.strides.items()
        )

    def readable(self) -> bool:
        """Whether TMA can read the inputs that it reads."""
        return all(
            self.address[name] % 16 == 0 and tensormap.readable(self.shape[name], strides)
            for name, strides in self.strides.items()
            if self.which.uses[name].box is not None
        )

    def map(self, name: str, dtype: str, rows: int) -> NDArray[np.uint64]:
        """The array's tensor map."""
        m = TensorMap.of(dtype, self.shape[name], self.strides[name], "bshd", rows)
        box = tensormap.BOX_COLUMNS, rows, 1, 1
        return tensor_map(self.address[name], m.sizes, m.strides_bytes, box, _SWIZZLE_128B)

    def _defaults(self) -> dict[str, int]:
        """The addresses of what stands for arrays that may not be given."""
        defaults = self.which.defaults
        return {name: self.address[default] for name, default in defaults.items() if default in self.address}

    def params(self, plan: Plan, problem: Problem) -> tuple[Array, Array]:
        """Both structs of the pass, the counter apart: the plain one, and that of the sm90 family."""
        rows, (plain, hopper) = self.which.rows, (np.zeros((), kind) for kind in params_of(self.which))
        for name, address in (self._defaults() | self.address).items():
            plain[rows[name].member] = address
        fill_plain(plain, rows, {name: (self.shape[name], strides) for name, strides in self.strides.items()}, "bshd")
        fill_problem(plain, self.which, problem, plan)
        hopper["plain"] = plain
        for name, box in self.which.boxes(launch.variant for launch in plan.launches).items():
            hopper[f"map_{rows[name].member}"] = self.map(name, problem.dtype, box)
        return plain, hopper


@dataclasses.dataclass
class Session:
    """One run of one problem.

    Attributes:
        headers: patched kernel sources by file name; the others are as shipped.
        family, backward_family: of the forward and the backward, of `plan.FAMILIES`; None: as planned.
        counter: whether persistent blocks draw their tiles from a counter; else in a fixed stride.
        learns: whether gradients of what features bring are asked for.
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
    learns: bool = True
    wants_lse: bool = True
    left_over: float | None = None
    collectives: int = 0

    def forward(self, inputs: Inputs, problem: Problem, **more: Array) -> tuple[Array, Array]:
        """out, lse; `more`: what features bring, by name."""
        made = self._run(FORWARD, {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.brought(), **more}, problem)
        return made["out"], made["lse"]

    def backward(self, inputs: Inputs, out: Array, lse: Array, problem: Problem, **more: Array) -> tuple[Array, ...]:
        """dq, dk, dv, and dalibi_slopes and dsink where there are slopes and sinks."""
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "dout": inputs.dout, "lse": lse}
        arrays |= inputs.brought() | more
        arrays |= {} if inputs.dlse is None else {"dlse": inputs.dlse}
        wanted = tuple(f"d{name}" for name in inputs.learned) if self.learns else ()
        made = self._run(BACKWARD, arrays, problem, wanted)
        return tuple(made[name] for name in GRADIENTS if name in made)

    def _run(
        self, which: Pass, arrays: dict[str, Array], problem: Problem, wanted: tuple[str, ...] = ("lse",)
    ) -> dict[str, Array]:
        """All that a pass makes of arrays, by name."""
        given = given_of(which, tuple(arrays), wanted)
        family = self.family if which is FORWARD else self.backward_family
        with Memory() as memory:
            buffers = Buffers(memory, which)
            for name, x in arrays.items():
                buffers.add(name, x)
            known = {"backward": which is BACKWARD, "aligned": buffers.aligned(), "tma": buffers.readable()}
            known |= {"dalibi": "dalibi_slopes" in wanted, "dsink": "dsink" in wanted}
            plan = plan_call(problem, self.device, family=family, **known)
            likes = [arrays[name] for name in given.likes]
            made = {name: buffers.make(name, x.shape, x.dtype) for name, x in zip(given.made, likes, strict=True)}
            shapes = given.shapes(Extents.of(problem), problem.head_dim)
            for name, (shape, dtype) in zip(given.shaped, shapes, strict=True):
                made[name] = buffers.make(name, shape, _DTYPES[dtype])
            if not self.wants_lse and which is FORWARD:
                del buffers.address["lse"]
            for name, (shape, dtype) in plan.workspace.items():
                workspace = buffers.make(name, shape, _DTYPES[dtype])
                if self.left_over is not None and dtype == "fp32":
                    workspace[:] = self.left_over
            self._launch(plan, problem, buffers)
            return {name: x.copy() for name, x in made.items()}

    def _launch(self, plan: Plan, problem: Problem, buffers: Buffers) -> None:
        mode = dataclasses.replace(self.mode, ordered_red=problem.deterministic and self.mode.race)
        plain, hopper = buffers.params(plan, problem)
        for launch in plan.launches:
            if launch.grid == 0:
                continue
            variant = launch.variant
            struct = (plain if variant.params == plain.dtype else hopper).copy()
            counter = np.zeros(2, np.int32)
            if variant.persistent and self.counter:
                struct["counter"], counter = buffers.memory.output("counter", (2,), np.int32)
                counter[:] = 0
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
