"""The layout probes: what they run, on which data. `probe_gpu.py` runs them on a GPU, the tests on the emulator.

All data are small integers, so sums are exact and outputs are compared bit for bit.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

HERE = Path(__file__).resolve().parents[1] / "emulator"
KERNELS_CU = HERE.parents[1] / "kernels_cu"
GOLDEN = HERE / "golden" / "h200.npz"
ARGS = np.dtype([("x", "i4", 8)])


@dataclass(frozen=True)
class Map:
    """A tensor map on the input or the output buffer. Sizes, box and strides innermost first."""

    on: str  # "in" or "out"
    element_bytes: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]  # of dimensions 1 and up
    box: tuple[int, ...]
    swizzle: int = 0
    is_float: bool = False


@dataclass(frozen=True)
class Probe:
    name: str
    unit: str  # probes of one unit are compiled together
    call: str  # C++ of the kernel's body
    words_in: Words = field(repr=False)
    out: Words = field(repr=False)  # what the output buffer holds before
    args: tuple[int, ...] = ()
    threads: int = 32
    blocks: int = 1
    map: Map | None = None
    cluster: int = 1

    @property
    def symbol(self) -> str:
        return f"run_{self.name}"

    @property
    def smem_bytes(self) -> int:
        return 65536

    @property
    def definition(self) -> str:
        macro = "CLUSTER_PROBE" if self.cluster > 1 else "PROBE"
        return f"{macro}({self.symbol}, {self.call})"

    @property
    def structured_args(self) -> Any:
        struct = np.zeros((), ARGS)
        struct["x"][: len(self.args)] = self.args
        return struct


def unit_source(probes: list[Probe]) -> str:
    return '#include "probes.cuh"\n' + "\n".join(p.definition for p in probes) + "\n"


def headers() -> dict[str, str]:
    """All that a unit may include, by file name."""
    files = [*KERNELS_CU.glob("hw/*.cuh"), *(HERE / "kernels").glob("*.cuh")]
    return {("hw/" if f.parent.name == "hw" else "") + f.name: f.read_text() for f in sorted(files)}


def instructions(header: str) -> set[str]:
    """The wrappers that the text of a header in kernels_cu/hw defines, itself or by a macro that takes their name."""
    return set(re.findall(r"^(?:__device__ .*?\b| +CUPYFLASH_\w+\()(\w+)[(,]", header, flags=re.MULTILINE))


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _small(name: str, n: int, dtype: str) -> Words:
    """n words of small integers in the dtype: "f16", "bf16", "tf32"."""
    x = _rng(name).integers(-8, 9, size=(n, 2)).astype(np.float32)
    if dtype == "tf32":
        return x[:, 0].copy().view(np.uint32)
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint32).ravel()
    bits = x.view(np.uint32) >> 16
    return (bits[:, 0] | bits[:, 1] << 16).astype(np.uint32)


def _zeros(n: int) -> Words:
    return np.zeros(n, np.uint32)


def _mma() -> Iterator[Probe]:
    kinds = {"kBf16k16": "bf16", "kF16k16": "f16", "kBf16k8": "bf16", "kF16k8": "f16", "kTf32k8": "tf32"}
    for kind, dtype in kinds.items():
        name = f"mma_{kind[1:].lower()}"
        yield Probe(name, "warp", f"probe_mma<{kind}>(in, out)", _small(name, 192, dtype), _zeros(128))
    for count in (1, -2, 4, -4):
        name = f"ldmatrix_x{abs(count)}{'_trans' if count < 0 else ''}"
        words = _rng(name).integers(0, 2**32, 256, dtype=np.uint32)
        yield Probe(name, "warp", f"probe_ldmatrix<{count}>(in, out)", words, _zeros(128))
    for count in (1, 2, 4):
        for trans in (False, True):
            name = f"stmatrix_x{count}{'_trans' if trans else ''}"
            words = _rng(name).integers(0, 2**32, 128, dtype=np.uint32)
            call = f"probe_stmatrix<{count}, {str(trans).lower()}>(in, out)"
            yield Probe(name, "warp", call, words, _zeros(256))
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 6e-8, 3e-8, 5.96e-8, 65504, 65519, 65520, 1e38, 3.4e38, 1 / 3]
    floats = np.array([*special, *_rng("cvt").standard_normal(49)], np.float32)
    yield Probe("cvt", "warp", f"probe_cvt(in, out, {len(floats)})", floats.view(np.uint32), _zeros(2 * len(floats)))
    words = _rng("signs").integers(0, 2**32, 64, np.uint32)
    yield Probe("signs_of_halves", "warp", f"probe_signs(in, out, {len(words)})", words, _zeros(len(words)))
    words = _rng("warp").integers(0, 2**31, 128, dtype=np.uint32)
    yield Probe("warp", "warp", "probe_warp(in, out)", words, _zeros(516), threads=128)


# Name, swizzle mode in the descriptor, bytes of a swizzled row.
_SWIZZLES = (("none", 0, 16), ("b32", 3, 32), ("b64", 2, 64), ("b128", 1, 128))
_IMAGE_WORDS = 12288  # 48 KiB


def _operand(span: int, trans: bool, rows: int) -> tuple[int, int]:
    """Leading and stride bytes of a 16-column operand, unlike each other where both matter; see PTX ISA 9.7.15.5.1."""
    if span == 16:  # no swizzle: core matrices of 128 bytes
        return (rows * 16, 144) if not trans else (160, 272)
    if not trans:
        return 16, 8 * span
    return 16 * span, 8 * span  # chunks of span / 2 rows, 16 columns deep


def _wgmma(
    name: str, unit: str, n: int, dtype: str, registers: bool, trans_a: bool, trans_b: bool, swizzle: str,
    start: tuple[int, int] = (0, 16384),
) -> Probe:  # fmt: skip
    mode, span = next((m, s) for s_name, m, s in _SWIZZLES if s_name == swizzle)
    a, b = _operand(span, trans_a, 64), _operand(span, trans_b, n)
    image = _small(name, _IMAGE_WORDS + 512, dtype)
    flags = f"{n}, {str(dtype == 'bf16').lower()}, {str(registers).lower()}, {int(trans_a)}, {int(trans_b)}"
    args = (_IMAGE_WORDS, *start, *a, *b, mode)
    return Probe(name, unit, f"probe_wgmma<{flags}>(in, out, args)", image, _zeros(64 * n), args, threads=128)


def _wgmmas() -> Iterator[Probe]:
    for swizzle, _, span in _SWIZZLES:
        for trans_a, trans_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            name = f"wgmma_ss_{swizzle}_a{'mn' if trans_a else 'k'}_b{'mn' if trans_b else 'k'}"
            yield _wgmma(name, "wgmma_ss", 64, "bf16", False, bool(trans_a), bool(trans_b), swizzle)
        for trans_b in (0, 1):
            name = f"wgmma_rs_{swizzle}_b{'mn' if trans_b else 'k'}"
            yield _wgmma(name, "wgmma_rs", 128, "f16", True, False, bool(trans_b), swizzle)
        for step in range(1, span // 32):  # the next 16 columns of a K-major tile: 32 bytes further inside the swizzle
            name = f"wgmma_step_{swizzle}_{step}"
            yield _wgmma(name, "wgmma_rs", 64, "f16", False, False, False, swizzle, (32 * step, 16384 + 32 * step))
    for n in range(8, 257, 8):
        unit = f"wgmma_n_{n // 8 % 4}"
        yield _wgmma(f"wgmma_n{n}_ss", unit, n, "f16", False, False, True, "b128", (0, 8192))
        yield _wgmma(f"wgmma_n{n}_rs", unit, n, "bf16", True, False, False, "b128", (0, 8192))


def _tensor(element_bytes: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Strides of a tensor whose rows are padded, and its bytes. Innermost first."""
    strides, step = [], -(-sizes[0] * element_bytes // 16) * 16 + 16
    for size in sizes[1:]:
        strides.append(step)
        step = step * size + 16
    return tuple(strides), step


def _tma_load(name: str, sizes: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...], swizzle: int = 0) -> Probe:
    strides, total = _tensor(2, sizes)
    words = _rng(name).integers(1, 2**32, total // 4 + 64, dtype=np.uint32)
    n_bytes = int(np.prod(box)) * 2
    call = f"probe_tma_load<{len(sizes)}>(map, out, args)"
    return Probe(
        name, "tma", call, words, _zeros(n_bytes // 4), (n_bytes, *at), threads=128,
        map=Map("in", 2, sizes, strides, box, swizzle),
    )  # fmt: skip


def _tma_store(
    name: str, sizes: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...], swizzle: int = 0, add: bool = False
) -> Probe:
    element = 4 if add else 2
    strides, total = _tensor(element, sizes)
    n_bytes = int(np.prod(box)) * element
    words = _small(name, n_bytes // 4, "tf32") if add else _rng(name).integers(1, 2**32, n_bytes // 4, dtype=np.uint32)
    out = _small(name + " before", total // 4 + 64, "tf32")
    call = f"probe_tma_store<{len(sizes)}, {str(add).lower()}>(map, in, args)"
    return Probe(
        name, "tma", call, words, out, (n_bytes, *at), threads=128,
        map=Map("out", element, sizes, strides, box, swizzle, is_float=add),
    )  # fmt: skip


def _tmas() -> Iterator[Probe]:
    for code, (swizzle, _, span) in enumerate(_SWIZZLES):
        box = (span // 2, 24)
        yield _tma_load(f"tma_load_2d_{swizzle}", (span, 40), box, (8, 5), code)
        yield _tma_store(f"tma_store_2d_{swizzle}", (span, 40), box, (8, 5), code)
        inner = 8 if span > 16 else 0  # 16 bytes: TMA takes no finer innermost coordinate
        yield _tma_load(f"tma_load_2d_{swizzle}_cut", (5, 20), box, (-inner, -3), code)
        yield _tma_store(f"tma_store_2d_{swizzle}_cut", (span // 2 - 3, 20), box, (inner, 7), code)
    yield _tma_load("tma_load_1d", (300,), (64,), (248,))
    yield _tma_load("tma_load_3d", (40, 7, 5), (32, 4, 3), (16, 5, -1), 2)
    yield _tma_load("tma_load_4d", (64, 9, 3, 4), (64, 8, 2, 1), (0, 3, 1, 2), 3)
    yield _tma_load("tma_load_5d", (64, 9, 3, 2, 3), (64, 8, 2, 2, 1), (0, 3, 1, 1, 2), 3)
    yield _tma_store("tma_store_1d", (300,), (64,), (248,))
    yield _tma_store("tma_store_3d", (40, 7, 5), (32, 4, 3), (16, 5, 3), 2)
    yield _tma_store("tma_store_4d", (64, 9, 3, 4), (64, 8, 2, 1), (0, 3, 1, 2), 3)
    yield _tma_store("tma_store_5d", (64, 9, 3, 2, 3), (64, 8, 2, 2, 1), (0, 3, 1, 1, 2), 3)
    yield _tma_store("tma_reduce_2d", (30, 20), (32, 16), (4, 9), 3, add=True)
    yield _tma_store("tma_reduce_3d", (32, 6, 3), (16, 4, 2), (8, 3, 1), 0, add=True)
    words = _small("bulk", 256, "tf32")
    yield Probe(
        "bulk", "tma", "probe_bulk(in, out, args)", words, _small("bulk before", 512, "tf32"), (1024,), threads=128
    )
    strides, total = _tensor(2, (64, 20))
    words = _rng("cluster").integers(0, 2**31, total // 4 + 64, dtype=np.uint32)
    yield Probe(
        "cluster", "cluster", "probe_cluster(map, out, args)", words, _zeros(2 * (1024 + 1)), (2048, 0, 3), threads=128,
        blocks=2, map=Map("in", 2, (64, 20), strides, (64, 16), 3), cluster=2,
    )  # fmt: skip


@functools.cache
def all_probes() -> dict[str, Probe]:
    """Every probe by its name."""
    return {p.name: p for p in (*_mma(), *_wgmmas(), *_tmas())}


@functools.cache
def units() -> dict[str, list[Probe]]:
    found: dict[str, list[Probe]] = {}
    for probe in all_probes().values():
        found.setdefault(probe.unit, []).append(probe)
    return found
