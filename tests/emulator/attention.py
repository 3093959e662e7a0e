"""Runs a case of `cupyflash.cases` by its plan on the emulator: all launches in order, results as NumPy arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.cases import Case, Inputs
from cupyflash.device import Device
from cupyflash.launch import fill_problem
from cupyflash.plan import Plan, backward_plan, forward_plan
from cupyflash.problem import Problem
from cupyflash.variant import Variant, kernel_sources

from .launch import EmulatedKernel, Memory, Mode

Array = NDArray[Any]
_DTYPES = {"fp32": np.float32, "int32": np.int32}


@functools.lru_cache(maxsize=256)
def _kernel(source: str, symbol: str, arch: int, headers: tuple[tuple[str, str], ...]) -> EmulatedKernel:
    return EmulatedKernel(source, dict(headers), symbol, arch)


def kernel_of(variant: Variant, device: Device, headers: Mapping[str, str] | None = None) -> EmulatedKernel:
    """The variant on the CPU, from the text that NVRTC gets. `headers` replaces some of the kernel sources."""
    texts = {**kernel_sources(), **(headers or {})}
    major, minor = device.capability
    return _kernel(variant.source(), variant.symbol, 100 * major + 10 * minor, tuple(sorted(texts.items())))


@dataclasses.dataclass
class Session:
    """One run of one problem.

    Attributes:
        headers: patched kernel sources by file name; the others are as shipped.
    """

    device: Device
    mode: Mode
    seed: int = 0
    headers: Mapping[str, str] | None = None

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Array, Array]:
        """out, lse."""
        with Memory() as memory:
            params, aligned = _params_of(memory, {"q": inputs.q, "k": inputs.k, "v": inputs.v})
            plan = forward_plan(problem, self.device, aligned=aligned)
            params["o"], strides = memory.output("o", inputs.q.shape, inputs.q.dtype), _strides(inputs.q.shape)
            params["lse"] = memory.output("lse", (problem.batch, problem.heads_q, problem.seqlen_q), np.float32)
            self._launch(plan, problem, params, {"o": strides})
            return params["o"][1].copy(), params["lse"][1].copy()

    def backward(self, inputs: Inputs, out: Array, lse: Array, problem: Problem) -> tuple[Array, Array, Array]:
        """dq, dk, dv."""
        with Memory() as memory:
            arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": out, "dout": inputs.dout}
            params, aligned = _params_of(memory, arrays)
            params["lse"] = memory.input("lse", np.ascontiguousarray(lse, np.float32)), None
            if inputs.dlse is not None:
                params["dlse"] = memory.input("dlse", np.ascontiguousarray(inputs.dlse, np.float32)), None
            plan = backward_plan(problem, self.device, aligned=aligned)
            strides = {}
            for name, like in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
                params[name] = memory.output(name, like.shape, like.dtype)
                strides[name] = _strides(like.shape)
            for name, (shape, dtype) in plan.workspace.items():
                params[name] = memory.output(name, shape, _DTYPES[dtype])
            self._launch(plan, problem, params, strides)
            return params["dq"][1].copy(), params["dk"][1].copy(), params["dv"][1].copy()

    def _launch(
        self, plan: Plan, problem: Problem, params: dict[str, Any], strides: dict[str, tuple[int, ...]]
    ) -> None:
        mode = dataclasses.replace(self.mode, ordered_red=problem.deterministic and self.mode.race)
        for launch in plan.launches:
            if launch.grid == 0:
                continue
            struct = np.zeros((), launch.variant.params)
            names = struct.dtype.names or ()
            for name, value in params.items():
                if name in names:
                    struct[name] = value if name.endswith("_stride") else value[0]
            for name, value in strides.items():
                struct[f"{name}_stride"] = value
            fill_problem(struct, problem, plan.section)
            kernel = kernel_of(launch.variant, self.device, self.headers)
            kernel(launch.grid, launch.variant.threads, launch.variant.smem_bytes, [struct], mode, self.seed)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(batch, row, head) of a contiguous bshd array, in elements."""
    _, seqlen, heads, head_dim = shape
    return seqlen * heads * head_dim, heads * head_dim, head_dim


def _params_of(memory: Memory, arrays: dict[str, Array]) -> tuple[dict[str, Any], bool]:
    """Addresses and strides of the inputs; whether every row starts at a multiple of 16 bytes."""
    params: dict[str, Any] = {}
    aligned = True
    for name, x in arrays.items():
        address = memory.input(name, x)
        strides = [s // x.itemsize for s in x.strides]
        aligned &= address % 16 == 0 and all(s % 8 == 0 for s, n in zip(strides[:3], x.shape[:3], strict=True) if n > 1)
        params[name] = address, None
        params[f"{name}_stride"] = tuple(strides[:3])
    return params, aligned


# What the case table lacks and some barriers of the kernels are for: NaN and inf in q and dout, in part of a tile.
NONFINITE_QUERIES = {
    name: Case(name, "full", 201, 203, head_dim, causal=True, heads_q=2, heads_k=1)
    for name, head_dim in (("nan-in-queries-d64", 64), ("nan-in-queries-d128", 128), ("nan-in-queries-d256", 256))
}


def inputs_of(case: Case, dtype: str, seed: int = 0) -> tuple[Inputs, Problem]:
    """The case's arrays; those of NONFINITE_QUERIES with NaN and inf planted."""
    inputs = case.inputs(dtype, seed)
    if case.name in NONFINITE_QUERIES:
        inputs.q[:, 70, 0, 3] = np.nan
        inputs.dout[:, 90, 0, 5] = np.nan
        inputs.dout[:, 20, 1, 9] = np.inf
    return inputs, case.problem(dtype)
