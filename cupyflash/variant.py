"""Kernel variants: every compile-time fact of a kernel, its symbol, and the C++ source of its entry unit.

A variant is all that the compiler must know and nothing that the launch decides. Its source is a translation unit of
some twenty lines: a struct with one named constant a field, and one ``extern "C"`` kernel whose symbol names the
variant, as profilers and errors show it: ``fwd_sm80_bf16_d128_m128n64w4s3_causal``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import ClassVar

import numpy as np

from . import tiles
from .device import Device
from .params import BWD_PARAMS, FWD_PARAMS
from .problem import Problem
from .tiles import BackwardTile, ForwardTile

_ELEMENTS = {"bf16": "Bf16", "fp16": "Fp16"}


@functools.cache
def kernel_sources() -> dict[str, str]:
    """The CUDA headers by file name."""
    folder = files("cupyflash.kernels_cu")
    return {f.name: f.read_text() for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".cuh")}


@functools.cache
def digest() -> str:
    """Digest of all CUDA headers: the first line of every entry unit, so that an edited header is a new kernel."""
    h = hashlib.sha256()
    for name, text in kernel_sources().items():
        h.update(f"{name}\0{text}\0".encode())
    return h.hexdigest()[:16]


@dataclass(frozen=True)
class Variant:
    """Base of the kernels' variants. Fields become ``kCamelCase`` constants; flags that are set end the symbol."""

    header: ClassVar[str]  # kernels_cu/<header>.cuh
    function: ClassVar[str]  # the template it defines
    params_name: ClassVar[str]
    params: ClassVar[np.dtype[np.void]]

    dtype: str
    head_dim: int
    block_m: int
    warps: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        raise NotImplementedError

    @property
    def tile_name(self) -> str:
        """The tile's part of the symbol."""
        return f"m{self.block_m}w{self.warps}"

    @functools.cached_property
    def symbol(self) -> str:
        flags = [f.name for f in fields(self) if getattr(self, f.name) is True]
        return "_".join([self.header, self.dtype, f"d{self.head_dim}", self.tile_name, *flags])

    def source(self) -> str:
        """The entry unit, as handed to NVRTC together with `kernel_sources()`."""
        constants = "".join(
            f"    static constexpr {_cuda_type(value)} k{_camel(name)} = {str(value).lower()};\n"
            for name, value in ((f.name, getattr(self, f.name)) for f in fields(self))
            if name not in ("dtype", "blocks_per_sm")
        )
        return (
            f"// kernels_cu {digest()}\n"
            f'#include "{self.header}.cuh"\n\n'
            f"struct Variant {{\n    using Element = {_ELEMENTS[self.dtype]};\n{constants}}};\n\n"
            f"static_assert(sizeof({self.params_name}) == {self.params.itemsize});\n\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.blocks_per_sm})\n'
            f"{self.symbol}(const __grid_constant__ {self.params_name} p) {{ {self.function}<Variant>(p); }}\n"
        )


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _cuda_type(value: object) -> str:
    return "bool" if isinstance(value, bool) else "int"


@dataclass(frozen=True)
class Forward(Variant):
    """fwd_sm80.cuh."""

    header, function, params_name, params = "fwd_sm80", "fwd", "FwdParams", FWD_PARAMS

    block_n: int
    stages: int
    q_in_regs: bool = False
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    unaligned: bool = False

    @property
    def tile_name(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}"

    @property
    def smem_bytes(self) -> int:
        tile = ForwardTile(self.block_m, self.block_n, self.warps, self.stages, self.blocks_per_sm)
        return tiles.forward_smem_bytes(tile, self.head_dim)


@dataclass(frozen=True)
class Backward(Variant):
    """bwd_sm80.cuh: dK, dV, and the sum of dQ."""

    header, function, params_name, params = "bwd_sm80", "bwd", "BwdParams", BWD_PARAMS

    block_n: int
    stages: int
    split_d: int
    dq_warps_m: int
    dq_unroll: int
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    unaligned: bool = False
    deterministic: bool = False

    @property
    def tile_name(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}"

    @property
    def smem_bytes(self) -> int:
        tile = BackwardTile(self.block_m, self.block_n, self.warps, self.stages, self.blocks_per_sm, self.split_d)
        return tiles.backward_smem_bytes(tile, self.head_dim)


@dataclass(frozen=True)
class Delta(Variant):
    """bwd_delta.cuh: row_stats, and dQ's accumulator cleared."""

    header, function, params_name, params = "bwd_delta", "bwd_delta", "BwdParams", BWD_PARAMS

    split_d: int
    dq_warps_m: int
    unaligned: bool = False
    deterministic: bool = False

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Convert(Variant):
    """bwd_convert.cuh: dQ from its accumulator."""

    header, function, params_name, params = "bwd_convert", "bwd_convert", "BwdParams", BWD_PARAMS

    split_d: int
    dq_warps_m: int

    @property
    def smem_bytes(self) -> int:
        return self.block_m * tiles.row_bytes(tiles.round_up(self.head_dim, 16 * self.split_d))


def mask_flags(problem: Problem) -> dict[str, bool]:
    """Which of the mask and score hooks a problem needs."""
    causal = problem.causal
    return {"causal": causal, "window": problem.masked and not causal, "scale_first": problem.scale <= 0}


def forward_variant(problem: Problem, device: Device, *, aligned: bool = True) -> Forward:
    """The forward kernel for a problem; `aligned`: whether every row of q, k and v starts at a multiple of 16 bytes."""
    t = tiles.forward_tile(problem.head_dim, device.smem_bytes, aligned=aligned)
    return Forward(
        problem.dtype,
        problem.head_dim,
        **asdict(t),
        **mask_flags(problem),
        unaligned=not aligned,
    )


def backward_variants(problem: Problem, device: Device, *, aligned: bool = True) -> tuple[Delta, Backward, Convert]:
    """The three backward kernels, in launch order."""
    t = tiles.backward_tile(problem.head_dim, device.smem_bytes, causal=problem.causal)
    main = Backward(
        problem.dtype,
        problem.head_dim,
        **asdict(t),
        **mask_flags(problem),
        unaligned=not aligned,
        deterministic=problem.deterministic,
    )
    shared = (problem.dtype, problem.head_dim, t.block_m, t.warps, 1, t.split_d, t.dq_warps_m)
    return Delta(*shared, unaligned=main.unaligned, deterministic=main.deterministic), main, Convert(*shared)


def _shipped_problems() -> Iterator[tuple[Problem, bool]]:
    """(problem, aligned) of what is compiled for every architecture in tests and by ``cupyflash compile``."""

    def problem(dtype: str, head_dim: int, **options: object) -> Problem:
        return Problem(dtype, 1, 1, 1, 1, 1, head_dim, **{"scale": 1.0, **options})  # type: ignore[arg-type]

    for dtype in ("bf16", "fp16"):
        for head_dim in (64, 128, 256):
            for window in ((None, None), (None, 0)):
                yield problem(dtype, head_dim, window=window), True
    for head_dim in (8, 72, 96, 200):  # sizes that the padding, the ring and the split treat differently
        yield problem("bf16", head_dim, window=(None, 0)), True
    yield problem("bf16", 128, window=(64, 0), deterministic=True), True
    yield problem("fp16", 64, window=(64, 64), scale=-1.0), False


@functools.cache
def shipped(device: Device) -> tuple[Variant, ...]:
    """The finite list of variants that tests and precompiled layers cover on one architecture; at most 60."""
    variants: dict[Variant, None] = {}
    for problem, aligned in _shipped_problems():
        variants[forward_variant(problem, device, aligned=aligned)] = None
        variants.update(dict.fromkeys(backward_variants(problem, device, aligned=aligned)))
    return tuple(variants)
