"""Runs a call of attention over a cache by its plan on the emulator: append, dequantize, decode and combine, on NumPy
arrays."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.arrays.adapters import NUMPY
from cupyflash.cache.arrays import BY_NAME
from cupyflash.cache.problem import CacheProblem
from cupyflash.check.accuracy import Comparison
from cupyflash.check.cache_case import CacheCase
from cupyflash.check.cache_reference import CacheOracle
from cupyflash.gpu.device import Device
from cupyflash.launch.alignment import known_of_cache
from cupyflash.launch.cached_params import (
    APPEND_MEMBERS,
    DECODE_MEMBERS,
    DEQUANTIZE_MEMBERS,
    box_map,
    dequantized_rows,
    fill,
    fill_append,
    fill_dequantize,
    strides_of,
    workspace,
)
from cupyflash.plan.decode import plan_append, plan_decode, plan_dequantize
from cupyflash.plan.decode_shares import DecodePlan
from cupyflash.plan.params_decode import DECODE_SM90_PARAMS

from .attention import kernel_of, kernels_of
from .buffers import barely_aligned
from .launch import Memory, Mode, tensor_map

Array = NDArray[Any]
_CACHES = ("k_cache", "v_cache")


def _writable(memory: Memory, name: str, x: Array) -> tuple[int, Array]:
    """A copy of x with its strides that kernels may write, and a view of it."""
    address = memory.input(name, x, writable=True)
    low, high = np.lib.array_utils.byte_bounds(x)
    start = address - (x.__array_interface__["data"][0] - low)
    data = np.ctypeslib.as_array((ctypes.c_ubyte * (high - low)).from_address(start))
    return address, np.ndarray(x.shape, x.dtype, data, address - start, x.strides)


def _given(name: str, x: Array) -> Array:
    """An array where a caller may have it: one with a dtype of its own at any address that its elements allow."""
    return barely_aligned(x) if BY_NAME[name].dtype and BY_NAME[name].contiguous else x


@dataclasses.dataclass
class CacheSession:
    """One run of one call.

    Attributes:
        plan: instead of the device's own for the problem.
        headers: patched kernel sources by file name; the others are as shipped.
        attends: else it only appends, and out and lse are as they were.
        dequantizes: a cache of 8 bits, for the forward.
        shared: of the last run, what launches before the forward make: q by its positions, where it has rotary tables,
            and the rows that stand for the cache.
    """

    device: Device
    mode: Mode
    seed: int = 0
    plan: DecodePlan | None = None
    headers: Mapping[str, str] | None = None
    attends: bool = True
    dequantizes: bool = False
    shared: list[Array] = dataclasses.field(default_factory=list, init=False)
    _one_length: int = dataclasses.field(default=0, init=False)

    def run(self, arrays: Mapping[str, Array], p: CacheProblem) -> tuple[Array, Array, Array, Array]:
        """out, lse, and the caches after the append; `arrays`: the inputs by name, which stay as they are."""
        with Memory() as memory:
            others = [name for name in arrays if name not in _CACHES and not (p.one_length and name == "cache_seqlens")]
            address = {name: memory.input(name, _given(name, arrays[name])) for name in others}
            caches = {name: _writable(memory, name, arrays[name]) for name in _CACHES}
            address |= {name: where for name, (where, _) in caches.items()}
            steps = {name: tuple(s // x.itemsize for s in x.strides) for name, x in arrays.items()}
            strides = strides_of({name: x.shape for name, x in arrays.items()}, steps)
            q = arrays["q"]
            address["out"], out = memory.output("out", (*p.rows_q, p.head_dim_v), q.dtype)
            address["lse"], lse = memory.output("lse", p.rows, np.float32)
            strides["out"] = tuple(s // out.itemsize for s in out.strides)
            self.shared = []
            self._one_length = int(arrays["cache_seqlens"][0]) if p.one_length else 0
            self._append(p, q, address, strides, memory)
            if self.dequantizes:
                self._dequantize(p, q.dtype, address, strides, memory)
            if q.size and self.attends:
                plan = self.plan or plan_decode(p, self.device, **known_of_cache(NUMPY, arrays, p.itemsize))
                for name, (shape, _) in workspace(p, plan).items():
                    address[name], _ = memory.output(name, shape, np.float32)
                self._launch(p, plan, address, strides)
            return out.copy(), lse.copy(), *(view.copy() for _, view in caches.values())  # type: ignore[return-value]

    def judge(self, case: CacheCase, dtype: str, seed: int = 0) -> list[Comparison]:
        """A case's results against float64."""
        arrays = case.inputs(dtype, seed)
        p = case.problem_with(arrays)
        return CacheOracle(p, arrays).judge(*self.run(arrays, p))

    def run_case(self, case: CacheCase, dtype: str, seed: int = 0) -> tuple[Array, Array, Array, Array]:
        """A case's results, for whom it is enough that it runs."""
        arrays = case.inputs(dtype, seed)
        return self.run(arrays, case.problem_with(arrays))

    def _with_length(self, params: np.ndarray) -> np.ndarray:
        params["one_length"] = self._one_length
        return params

    def _append(
        self, p: CacheProblem, q: Array, address: dict[str, int], strides: dict[str, tuple[int, ...]], memory: Memory
    ) -> None:
        """The launch before, after which q is what it has turned."""
        found = plan_append(p, self.device)
        if found is None:
            return
        variant, grid = found
        params = self._with_length(fill_append(p, strides))
        if p.rotary_dim:
            address["rotated_q"], turned = memory.output("rotated_q", q.shape, q.dtype)
        for name, member in APPEND_MEMBERS.items():
            if name in address:
                params[member] = address[name]
        kernel = kernel_of(variant, self.device, self.headers)
        kernel(grid, variant.threads, variant.smem_bytes, [params], self.mode, self.seed)
        if p.rotary_dim:
            address["q"], strides["q"] = address["rotated_q"], tuple(s // turned.itemsize for s in turned.strides)
            self.shared.append(turned.copy())

    def _dequantize(
        self, p: CacheProblem, dtype: Any, address: dict[str, int], strides: dict[str, tuple[int, ...]], memory: Memory
    ) -> None:
        variant, grid = plan_dequantize(p)
        params, made = self._with_length(fill_dequantize(p, strides)), []
        for name, (shape, kind) in dequantized_rows(p).items():
            address[name], rows = memory.output(name, shape, np.int32 if kind == "int32" else dtype)
            made.append(rows)
        for name, member in DEQUANTIZE_MEMBERS.items():
            if name in address:
                params[member] = address[name]
        kernel = kernel_of(variant, self.device, self.headers)
        kernel(grid, variant.threads, variant.smem_bytes, [params], self.mode, self.seed)
        self.shared += [rows.copy() for rows in made]

    def _launch(
        self, p: CacheProblem, plan: DecodePlan, address: Mapping[str, int], strides: Mapping[str, tuple[int, ...]]
    ) -> None:
        plain = self._with_length(fill(p, plan, strides))
        for name, where in address.items():
            if name in DECODE_MEMBERS:
                plain[DECODE_MEMBERS[name]] = where
        struct, variant = plain, plan.variant
        if variant.params is DECODE_SM90_PARAMS:
            struct = np.zeros((), DECODE_SM90_PARAMS)
            struct["plain"] = plain
            for name, head_dim in zip(_CACHES, p.widths, strict=True):
                m = box_map(p, variant.tile, head_dim, strides[name])
                words = tensor_map(address[name], m.sizes, m.strides_bytes, m.box, m.swizzle)
                struct[f"map_{DECODE_MEMBERS[name]}"] = words
        variants = [variant] if plan.combine is None or not plan.combine_grid else [variant, plan.combine]
        first, *second = kernels_of(variants, self.device, self.headers)
        cluster = max(1, variant.tile.cluster)
        how = self.mode, self.seed
        facts = plan.grid, variant.threads, variant.smem_bytes
        first(*facts, [struct], *how, cluster, variant.dependent)
        for kernel, combine in zip(second, variants[1:], strict=True):
            facts = plan.combine_grid, combine.threads, combine.smem_bytes
            kernel(*facts, [plain], *how, dependent=combine.dependent)
