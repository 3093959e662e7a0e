"""Kernel variants: every compile-time fact of a kernel, its symbol, and the C++ source of its entry unit.

A variant is all that the compiler must know and nothing that the launch decides. Its source is a translation unit of
some twenty lines: a struct with one named constant a field, and one ``extern "C"`` kernel whose symbol names the
variant, as profilers and errors show it: ``fwd_sm80_bf16_d128_m128n64w4s3_causal``.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import ClassVar

import numpy as np

_ELEMENTS = {"bf16": "Bf16", "fp16": "Fp16"}


@functools.cache
def kernel_sources() -> dict[str, str]:
    """The CUDA headers by their path in kernels_cu, as they include each other."""
    folders = [folder for folder in files("cupyflash.kernels_cu").iterdir() if folder.is_dir()]
    found = {f"{folder.name}/{f.name}": f for folder in folders for f in folder.iterdir() if f.name.endswith(".cuh")}
    return {name: found[name].read_text() for name in sorted(found)}


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

    folder: ClassVar[str]  # kernels_cu/<folder>/<header>.cuh
    header: ClassVar[str]
    function: ClassVar[str]  # the template it defines
    params_name: ClassVar[str]
    params: ClassVar[np.dtype[np.void]]
    arch_suffix: ClassVar[str] = ""  # "a": uses instructions of one architecture alone
    persistent: ClassVar[bool] = False  # a block computes tile after tile

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
            f'#include "{self.folder}/{self.header}.cuh"\n\n'
            f"struct Variant {{\n    using Element = {_ELEMENTS[self.dtype]};\n{constants}"
            f"    static constexpr int kSmemBytes = {self.smem_bytes};  // what is launched with\n}};\n\n"
            f"static_assert(sizeof({self.params_name}) == {self.params.itemsize});\n\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.blocks_per_sm})\n'
            f"{self.symbol}(const __grid_constant__ {self.params_name} p) {{ {self.function}<Variant>(p); }}\n"
        )


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _cuda_type(value: object) -> str:
    return "bool" if isinstance(value, bool) else "int"
