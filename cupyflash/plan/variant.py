"""Kernel variants: every compile-time fact of a kernel, its symbol, and the C++ source of its entry unit.

A variant is all that the compiler must know and nothing that the launch decides. Its source is a translation unit of
some twenty lines: a struct with one named constant a field, and one ``extern "C"`` kernel whose symbol names the
variant, as profilers and errors show it: ``fwd_sm80_bf16_d128_m128n64w4s3_causal``.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, fields
from importlib.resources import files
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from ..mods.description import Mods, read
from ..problem import ITEMSIZE
from .spec import Spec

_ELEMENTS = {"bf16": "Bf16", "fp16": "Fp16", "fp32": "Fp32"}


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


class Tile(Protocol):
    """What shape of work a block takes. A dataclass: its fields are constants of the kernel."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def block_m(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...  # launch bound: caps the registers
    @property
    def name(self) -> str: ...  # the tile's part of the symbol
    def smem_bytes(self, head_dim: int, /) -> int: ...  # dynamic shared memory of one block


_Kind = TypeVar("_Kind", bound="Variant")


@dataclass(frozen=True)
class Variant:
    """Base of the kernels' variants, whose further fields are flags.

    The head_dims, the tile's fields and the flags become ``kCamelCase`` constants; what is set of them ends the symbol.
    """

    folder: ClassVar[str]  # kernels_cu/<folder>/<header>.cuh
    header: ClassVar[str]
    function: ClassVar[str]  # the template it defines
    params_name: ClassVar[str]
    params: ClassVar[np.dtype[np.void]]
    # A tile of work is some rows of a head of q, or of k ("k"), a slope ("slopes"), a sink ("sinks"), some of a bias,
    # or some elements of arrays of mods ("elements").
    over: ClassVar[str] = "q"
    arch_suffix: ClassVar[str] = ""  # "a": uses instructions of one architecture alone
    persistent: ClassVar[bool] = False  # a block computes tile after tile
    mods = ""  # the text of a user's expressions, in kernels that have some
    dmods = tuple[int, ...]()  # the numbers of the arrays that they read whose gradients a kernel makes

    dtype: str
    head_dim: int
    tile: Tile
    head_dim_v: int = field(default=0, kw_only=True)  # where it differs

    @classmethod
    def of(cls: type[_Kind], spec: Spec, tile: Tile) -> _Kind:
        """The variant that a spec takes: its flags are the spec's fields of these names."""
        flags: dict[str, Any] = {f.name: getattr(spec, f.name) for f in fields(cls) if f.name not in _NO_FLAGS}
        flags = {name: x if name in ("mods", "dmods") else bool(x) for name, x in flags.items()}
        return cls(spec.dtype, spec.head_dim, tile, head_dim_v=spec.head_dim_v, **flags)

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        """What the kernel knows when it is compiled, by name."""
        found = {"head_dim": self.head_dim, "head_dim_v": self.head_dims[-1]}
        found |= {"block_m": self.tile.block_m, "warps": self.tile.warps}
        found |= {f.name: getattr(self.tile, f.name) for f in fields(self.tile) if f.name != "blocks_per_sm"}
        found |= {f.name: bool(getattr(self, f.name)) for f in fields(self) if f.name not in _NO_FLAGS}
        mods = self._mods
        return found | {"score_mod": mods.score is not None, "mask_mod": mods.mask is not None} if mods else found

    @property
    def head_dims(self) -> tuple[int, ...]:
        """That of q and k, and that of v where it differs."""
        return (self.head_dim, self.head_dim_v) if self.head_dim_v else (self.head_dim,)

    @property
    def _mods(self) -> Mods | None:
        """A user's expressions, if the kernel has some."""
        return read(self.mods) if self.mods else None

    @functools.cached_property
    def block_m(self) -> int:
        return self.tile.block_m

    @functools.cached_property
    def rows(self) -> int:
        """Of `over`, in a tile of work."""
        return self.tile.block_m

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps

    @property
    def interleaved(self) -> tuple[str, ...]:
        """The arrays whose rows TMA brings in another order (key_order.cuh)."""
        return ()

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        itemsize = ITEMSIZE[self.dtype]
        widths = self.head_dims if itemsize == 2 else (self.head_dim, self.head_dim_v, itemsize)  # of few kernels
        return self.tile.smem_bytes(*widths)

    @property
    def dependent(self) -> bool:
        """Whether it may start before the kernel in front of it on the stream has ended, for which it waits itself."""
        return False

    @property
    def qualifiers(self) -> str:
        """What else is said of the kernel."""
        return ""

    @functools.cached_property
    def symbol(self) -> str:
        flags = [name for name, value in self.constants.items() if value is True]
        learned = "".join(f" {i}" for i in self.dmods)
        flags += [hashlib.sha256((self.mods + learned).encode()).hexdigest()[:12]] if self.mods else []
        width = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")
        return "_".join(filter(None, [self.header, self.dtype, width, self.tile.name, *flags]))

    def source(self) -> str:
        """The entry unit, as handed to NVRTC together with `kernel_sources()`."""
        constants = "".join(
            f"    static constexpr {_cuda_type(value)} k{_camel(name)} = {str(value).lower()};\n"
            for name, value in self.constants.items()
        )
        return (
            f"// kernels_cu {digest()}\n"
            f'#include "{self.folder}/{self.header}.cuh"\n\n'
            f"{self._mods.source(self.dmods) if self._mods else ''}"
            f"struct Variant {{\n    using Element = {_ELEMENTS[self.dtype]};\n{constants}"
            f"{'    using Mods = mods::Mods;' + chr(10) if self._mods else ''}"
            f"    static constexpr int kSmemBytes = {self.smem_bytes};  // what is launched with\n}};\n\n"
            f"static_assert(sizeof({self.params_name}) == {self.params.itemsize});\n\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.tile.blocks_per_sm})'
            f"{self.qualifiers}\n"
            f"{self.symbol}(const __grid_constant__ {self.params_name} p) {{ {self.function}<Variant>(p); }}\n"
        )


_NO_FLAGS = {f.name for f in fields(Variant)}


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _cuda_type(value: object) -> str:
    return "bool" if isinstance(value, bool) else "int"
