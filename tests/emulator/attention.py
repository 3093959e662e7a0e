"""Runs a case of the table by its plan on the emulator: all launches in order, results as NumPy arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.arrays.adapters import NUMPY
from cupyflash.check.cases import Case, Inputs, case
from cupyflash.gpu.device import Device
from cupyflash.launch.alignment import known_of
from cupyflash.launch.passes import given_of, has_own_v
from cupyflash.operands import BACKWARD, FORWARD, Pass
from cupyflash.plan.extents import Extents
from cupyflash.plan.families import Plan, plan_call
from cupyflash.plan.variant import Variant, kernel_sources
from cupyflash.problem import Problem

from . import build
from .buffers import DTYPES, Buffers
from .launch import MODES, EmulatedKernel, EmulatorError, Memory, Mode

Array = NDArray[Any]


@functools.lru_cache(maxsize=256)
def _kernels(
    variants: tuple[Variant, ...],
    arch: int,
    headers: tuple[tuple[str, str], ...],
    touched: frozenset[str],
    planted: int,
) -> list[EmulatedKernel]:
    units = _units(variants, arch, dict(headers), touched)
    build.build(units)
    return [EmulatedKernel(unit.source, unit.headers, *unit.symbols, arch, planted=planted) for unit in units]


def _units(
    variants: Sequence[Variant], arch: int, headers: Mapping[str, str], touched: frozenset[str]
) -> list[build.Unit]:
    """As shipped, if they include nothing that was touched."""
    shipped = [build.Unit(v.source(), kernel_sources(), (v.symbol,), arch) for v in variants]
    return [u if touched.isdisjoint(u.included) else dataclasses.replace(u, headers=headers) for u in shipped]


def _asked(
    variants: Sequence[Variant], device: Device, headers: Mapping[str, str] | None
) -> tuple[tuple[Variant, ...], int, dict[str, str], frozenset[str]]:
    major, minor = device.capability
    touched = getattr(headers, "touched", frozenset(headers or ()))
    return tuple(variants), 100 * major + 10 * minor, {**kernel_sources(), **(headers or {})}, touched


def units_of(variants: Sequence[Variant], device: Device, headers: Mapping[str, str] | None = None) -> list[build.Unit]:
    """What `kernels_of` compiles."""
    return _units(*_asked(variants, device, headers))


def kernels_of(
    variants: Sequence[Variant], device: Device, headers: Mapping[str, str] | None = None
) -> list[EmulatedKernel]:
    """The variants on the CPU, from the text that NVRTC gets. `headers` replaces some of the kernel sources; it may say
    which it has `touched`, and the `number` of the bug that is alive (`shared.Planted`)."""
    some, arch, texts, touched = _asked(variants, device, headers)
    return _kernels(some, arch, tuple(sorted(texts.items())), touched, getattr(headers, "number", 0))


def kernel_of(variant: Variant, device: Device, headers: Mapping[str, str] | None = None) -> EmulatedKernel:
    """One of them."""
    return kernels_of((variant,), device, headers)[0]


def small_device(arch: str, sm_count: int = 3) -> Device:
    """A stand-in for a GPU with so few multiprocessors that persistent blocks compute several tiles each."""
    return dataclasses.replace(Device.synthetic(arch), sm_count=sm_count)


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
        collectives: shuffles, votes and the like of all launches so far; matrix_ops: products of tensor cores.
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
    matrix_ops: int = 0

    @classmethod
    def of_family(cls, family: str, mode: str = "race", **more: Any) -> Session:
        """With all passes by this family of kernels, on a small GPU that has it."""
        device = small_device("sm_80" if family == "sm80" else "sm_90")
        return cls(device, MODES[mode], family=family, backward_family=family, **more)

    def forward(self, inputs: Inputs, problem: Problem, **more: Array) -> tuple[Array, Array]:
        """out, lse; `more`: what features bring, by name."""
        made = self._run(FORWARD, {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.arrays(), **more}, problem)
        return made["out"], made["lse"]

    def backward(self, inputs: Inputs, out: Array, lse: Array, problem: Problem, **more: Array) -> tuple[Array, ...]:
        """dq, dk, dv, and those of what features bring."""
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "dout": inputs.dout, "lse": lse}
        arrays |= inputs.arrays() | more
        arrays |= {} if inputs.dlse is None else {"dlse": inputs.dlse}
        wanted = inputs.wanted if self.learns else ()
        made = self._run(BACKWARD, arrays, problem, wanted)
        return tuple(made[name] for name in ("dq", "dk", "dv", *wanted))

    def _run(
        self, which: Pass, arrays: dict[str, Array], problem: Problem, wanted: tuple[str, ...] = ("lse",)
    ) -> dict[str, Array]:
        """All that a pass makes of arrays, by name."""
        names = tuple(arrays)
        own_v = has_own_v(names, [(x.shape,) for x in arrays.values()])
        given = given_of(which, names, wanted, own_v)
        family = self.family if which is FORWARD else self.backward_family
        with Memory() as memory:
            buffers = Buffers(memory, which)
            for name, x in arrays.items():
                buffers.add(name, x)
            known = known_of(given, NUMPY, arrays.values())  # whose copies lie as they do
            plan = plan_call(problem, self.device, **known, family=family)
            likes = [arrays[name] for name in given.likes]
            made = {name: buffers.make(name, x.shape, x.dtype) for name, x in zip(given.made, likes, strict=True)}
            shapes = given.shapes(Extents.of(problem), problem.widths, problem.dtype, "bshd")
            for name, (shape, dtype) in zip(given.shaped, shapes, strict=True):
                made[name] = buffers.make(name, shape, DTYPES.get(dtype) or arrays["q"].dtype)
            if not self.wants_lse and which is FORWARD:
                del buffers.address["lse"]
            for name, (shape, dtype) in plan.workspace.items():
                workspace = buffers.make(name, shape, DTYPES[dtype])
                if self.left_over is not None and dtype == "fp32":
                    workspace[:] = self.left_over
            self._launch(plan, problem, buffers)
            return {name: x.copy() for name, x in made.items()}

    def _launch(self, plan: Plan, problem: Problem, buffers: Buffers) -> None:
        mode = dataclasses.replace(self.mode, ordered_red=problem.deterministic and self.mode.race)
        plain, hopper = buffers.params(plan, problem)
        launches = [launch for launch in plan.launches if launch.grid]
        kernels = kernels_of([launch.variant for launch in launches], self.device, self.headers)
        for launch, kernel in zip(launches, kernels, strict=True):
            variant = launch.variant
            struct = (plain if variant.params == plain.dtype else hopper).copy()
            counter = np.zeros(4, np.int32)
            if variant.persistent and self.counter:
                struct["counter"], counter = buffers.memory.output("counter", (4,), np.int32)
                counter[:] = 0
            facts = launch.grid, variant.threads, variant.smem_bytes
            kernel(*facts, [struct], mode, self.seed, dependent=variant.dependent)
            self.collectives += kernel.stats.collectives
            self.matrix_ops += kernel.stats.matrix_ops
            if counter.any():
                raise EmulatorError(f"{variant.symbol}, seed {self.seed}: the counter is left as {counter}")


# What the case table lacks and some barriers of the kernels are for: NaN and inf in q, k and dout, in part of a tile,
# with rows that tiles of 64 and of 128 pad differently; many short tiles a block.
NONFINITE_QUERIES = {
    name: Case(name, "full", 149, 203, head_dim, causal=True, heads_q=heads_q, heads_k=heads_k)
    for name, head_dim, heads_q, heads_k in (
        ("nan-in-queries-d64", 64, 2, 2),
        ("nan-in-queries-d96", 96, 2, 2),
        ("nan-in-queries-d128", 128, 2, 2),
        ("nan-in-queries-d160", 160, 2, 1),
        ("nan-in-queries-d256", 256, 2, 1),
        ("nan-in-queries-of-shares", 64, 8, 1),
        ("nan-in-late-key-d256", 256, 2, 1),
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
        Case("shares-d96", "full", 131, 190, 96, heads_q=16, heads_k=1, causal=True),
        Case("shares-d144", "full", 67, 131, 144, heads_q=8, heads_k=1),
        Case("shares-d200", "full", 131, 190, 200, heads_q=16, heads_k=1, causal=True),
        Case("short-tiles-d256", "full", 70, 40, 256, batch=3, heads_q=4, heads_k=2),
        Case("outliers-d256", "full", 75, 777, 256, heads_q=2, heads_k=2, values="outliers"),
    )
}


def find_case(name: str) -> Case:
    """The case of that name, of the table or of `EXTRA`."""
    return EXTRA.get(name) or case(name)


def _hide_in_one_head(x: Array) -> None:
    """Other heads get numbers in place of NaN: whatever meets NaN is computed again, at length."""
    rng = np.random.default_rng(0)
    for b, rows in enumerate(x):
        hidden = np.flatnonzero(np.isnan(rows).all(axis=(1, 2)))
        others = np.arange(x.shape[2]) != b % x.shape[2]
        rows[np.ix_(hidden, others)] = 2 * rng.standard_normal((hidden.size, others.sum(), x.shape[3]))


def _spoil(c: Case, inputs: Inputs) -> None:
    """What the names of `EXTRA` say; where ranges hide NaN, in one head a sequence."""
    if c.values == "nan_outside" and c.ranges and not c.packed:
        for x in (inputs.k, inputs.v):
            _hide_in_one_head(x)
    if c.name in NONFINITE_QUERIES and "late-key" in c.name:
        inputs.k[:, 190, 0, 7] = np.nan
    elif c.name in NONFINITE_QUERIES:
        inputs.q[:, 70, 0, 3] = np.nan
        inputs.dout[:, 90, 0, 5] = np.nan
        inputs.dout[:, 20, 1, 9] = np.inf


@functools.lru_cache(maxsize=32)  # a test draws them for its oracle and its kernels, and ahead, to compile these
def inputs_of(c: Case, dtype: str, seed: int = 0) -> tuple[Inputs, Problem]:
    """The case's arrays, which nobody may write."""
    inputs = c.inputs(dtype, seed)
    _spoil(c, inputs)
    for x in inputs[:4]:
        x.flags.writeable = False
    return inputs, c.problem(dtype)
