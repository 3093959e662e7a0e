"""Every shipped kernel compiles, without register spills and within the shared memory.

A spill shows as slow code only, so nothing else would report it. Which tile spills is a matter of a few registers: see
`fresh_thread` in kernels_cu/tile/tile.cuh before changing a tile or a main loop. Architectures share most kernels. One
that has few registers left is compiled for an architecture of each generation that takes it, any other for one of them,
but for each sixth; with --thorough all are compiled for all.

Every kernel's machine code is pinned for one architecture a family: a new feature leaves that of all kernels without it
as it was. A change that means to touch it writes the digests again, with
``PYTHONPATH=. python tests/kernels/test_compile.py``, and shows them in its commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.compile import jit, nvrtc
from cupyflash.compile.cache import Cubin
from cupyflash.gpu.device import Device
from cupyflash.mods import bind
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.shipped import shipped
from cupyflash.plan.shipped_cache import shipped_over_cache
from cupyflash.plan.variant import Variant, kernel_sources
from cupyflash.problem import Problem
from tests.sass import opcodes
from tests.shipped_kernels import ARCHS, PINNED, all_shipped, generations, kernels

try:
    nvrtc.pick()
except cupyflash.UnsupportedError as reason:
    pytest.skip(str(reason), allow_module_level=True)

MARGIN = 32  # registers; on another generation a kernel takes up to 22 more (NVRTC 12.9), which the test watches
PARTS = 12  # tests that share the kernels, for processes side by side
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "machine_code.json"
NVRTC = (12, 9)  # another compiler makes other code
REGISTERS_PER_SM, REGISTERS_PER_THREAD = 65536, 255
# What ptxas says where it waits for each wgmma, because it cannot tell that the next one's registers are free.
SERIALISED = re.compile(r"C75(?:08|1[0-6])\b")


def test_few_variants_are_shipped() -> None:
    """Each costs CI a compilation an architecture, and a run in the emulator."""
    for arch in ARCHS:
        symbols = [v.symbol for v in all_shipped(arch)]
        assert len(set(symbols)) == len(symbols)
        assert len(shipped(Device.synthetic(arch))) <= 176
        assert len(shipped_over_cache(Device.synthetic(arch))) <= 76


@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_variants_fit_the_shared_memory(arch: str) -> None:
    device = Device.synthetic(arch)
    for v in all_shipped(arch):
        assert v.smem_bytes <= device.smem_bytes, v.symbol


def compiled(variants: Iterable[Variant], arch: str) -> list[Cubin]:
    return [cubin for _, _, cubin in compiled_for((v, arch) for v in variants)]


def compiled_for(todo: Iterable[tuple[Variant, str]]) -> list[tuple[Variant, str, Cubin]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda each: (*each, jit.compile_kernel(*each)), todo))


def spills_in_the_producer_alone(cubin: bytes, folder: Path) -> bool:
    """Whether no consumer of a persistent Hopper kernel spills: all local loads and stores, and no product, come behind
    the place where the producer's warps give registers away. There the warp that schedules packed tiles has 32 of them
    a thread, and waits for most of its time.
    """
    found = opcodes(cubin, folder)
    start = next((i for i, op in enumerate(found) if op.startswith("USETMAXREG.DEALLOC")), None)
    is_spill = [op.startswith(("STL", "LDL")) for op in found]
    return start is not None and not any(is_spill[:start]) and not any("GMMA" in op for op in found[start:])


def registers_left(v: Variant, cubin: Cubin) -> int:
    limit = REGISTERS_PER_SM // (v.threads * v.tile.blocks_per_sm) // 8 * 8
    return min(limit, REGISTERS_PER_THREAD) - cubin.registers


def test_all_architectures_have_their_turn() -> None:
    assert generations(ARCHS[1:], 0) == ["sm_86", "sm_90", "sm_100", "sm_120"]
    assert generations(ARCHS[1:], 1) == ["sm_89", "sm_90", "sm_103", "sm_120"]
    assert all(generations(ARCHS, turn)[0] == "sm_80" for turn in range(2))


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_knows(arch: str) -> None:
    if arch not in nvrtc.find().archs:
        pytest.skip(f"NVRTC {nvrtc.find().version} does not know {arch}; pip install -U 'cupyflash[cu13]'")


def compiled_part(part: int, *, thorough: bool) -> list[tuple[Variant, str, Cubin]]:
    """Of `kernels`, each `PARTS`-th."""
    known = nvrtc.find().archs
    mine = [{arch: v for arch, v in on.items() if arch in known} for on in list(kernels().values())[part::PARTS]]
    if thorough:
        return compiled_for((v, arch) for on in mine for arch, v in on.items())
    now, later = [], []
    for turn, on in enumerate(filter(None, mine)):
        first, *others = generations(on, turn)
        pinned = [arch for arch in others if arch in PINNED]
        now += [(on[arch], arch) for arch in (first, *pinned)]
        later.append([(on[arch], arch) for arch in others if arch not in pinned])
    made = compiled_for(now)
    tight = {v.source() for v, _, cubin in made if registers_left(v, cubin) < MARGIN}
    return made + compiled_for(
        each for turn, some in enumerate(later) for each in some if turn % 6 == 0 or each[0].source() in tight
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_shipped_variants_compile_without_spills(part: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """And, where the architecture's machine code is pinned, into that."""
    made = compiled_part(part, thorough=pytestconfig.getoption("--thorough"))
    spilled = {
        (c.symbol, arch): c.spill_bytes
        for v, arch, c in made
        if c.spill_bytes and not (v.persistent and spills_in_the_producer_alone(c.data, tmp_path))
    }
    assert not spilled, f"register spills in bytes, NVRTC {nvrtc.find().version}: {spilled}"
    first: dict[str, int] = {}
    for v, arch, c in made:
        assert 0 < c.registers * v.threads * v.tile.blocks_per_sm <= REGISTERS_PER_SM, (v.symbol, arch)
        more = c.registers - first.setdefault(v.source(), c.registers)
        assert more < MARGIN, f"{v.symbol}, {arch}: {more} registers more than elsewhere; raise MARGIN"
    if nvrtc.find().version != NVRTC:
        pytest.skip(f"the code is that of NVRTC {NVRTC[0]}.{NVRTC[1]}; this is {nvrtc.find().version}")
    golden = json.loads(GOLDEN.read_text())
    for pinned in PINNED:
        for symbol, digest in digests(c for _, arch, c in made if arch == pinned).items():
            assert digest == golden[pinned].get(symbol), (symbol, pinned)


@pytest.mark.parametrize("arch", PINNED)
def test_what_is_shipped_is_pinned(arch: str) -> None:
    """And the tests above compile all of it."""
    assert set(json.loads(GOLDEN.read_text())[arch]) == {v.symbol for v in all_shipped(arch)}
    for turn in range(2):
        assert all(arch in generations(on, turn) for on in kernels().values() if arch in on)


@pytest.mark.parametrize("arch", PINNED)
def test_gradients_of_what_mods_read_compile_without_spills(arch: str) -> None:
    arrays = {"scale": np.zeros(2, np.float32), "table": np.zeros((2, 2, 40), np.float16)}
    text, _ = bind("tanh(score * scale[h]) * 20 + table[b, h, q - k] + scale[0]", "k % 3 != 1", arrays)
    shapes = (2,), (2, 2, 40)
    variants: list[Variant] = []
    more: tuple[dict[str, Any], ...] = ({"window": (None, 0)}, {"packed": True}, {"block_mask": 4, "dropout": 1})
    for head_dim, options in zip((64, 128, 256), more, strict=True):
        problem = Problem("bf16", 1, 1, 1, 1, 1, head_dim, 1.0, mods=text, mod_shapes=shapes, **options)
        of = variants_of_calls(problem, Device.synthetic(arch), dmods=(0, 1))
        variants += [v for v in of if v.header == "bwd_dmods"]
    assert len(variants) == 3
    assert {c.symbol: c.spill_bytes for c in compiled(variants, arch) if c.spill_bytes} == {}


def test_the_products_of_hopper_kernels_overlap() -> None:
    """All masks and both dtypes, and head_dims that are no multiple of 64."""
    windows = ((None, None), (None, 0), (64, 64))
    asked = [(dtype, d, w) for dtype in ("bf16", "fp16") for d in (64, 128, 256) for w in windows]
    asked += [("bf16", d, (None, 0)) for d in (8, 40, 80, 112, 160, 192)]
    variants: list[Variant] = []
    for dtype, head_dim, window in asked:
        problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, 1.0, window)
        variants += [v for v in variants_of_calls(problem, Device.synthetic("sm_90")) if v.arch_suffix]
    cubins = compiled(variants, "sm_90")
    serialised = {c.symbol: c.advice for c in cubins if SERIALISED.search(c.advice)}
    assert not serialised, f"ptxas serialises wgmma, NVRTC {cubins[0].nvrtc}: {serialised}"
    spilled = {c.symbol: c.spill_bytes for c in cubins if c.spill_bytes and "window" not in c.symbol}
    assert not spilled, f"register spills in bytes, NVRTC {cubins[0].nvrtc}: {spilled}"


def one_of_each() -> list[Variant]:
    """A variant of every kernel."""
    found = {v.header: v for arch in PINNED for v in all_shipped(arch)}
    return list(found.values())


@pytest.mark.parametrize("variant", one_of_each(), ids=lambda v: v.header)
def test_shared_memory_is_what_the_kernel_lays_out(variant: Variant) -> None:
    size = f"kSmemBytes = {variant.smem_bytes};"
    source = variant.source()
    assert source.count(size) == 1
    options = ["-arch=sm_90a", "-std=c++17", "-default-device"]
    wrong = source.replace(size, f"kSmemBytes = {variant.smem_bytes + 16};")
    with pytest.raises(nvrtc.NvrtcError) as error:
        nvrtc.find().compile(wrong, f"{variant.symbol}.cu", kernel_sources(), options)
    assert re.search(r"static assertion failed", error.value.log)


def machine_code(cubin: bytes) -> bytes:
    """The instructions of an ELF file: its sections .text.*."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = cubin[sections[names_at][4] :]
    code = [cubin[s[4] : s[4] + s[5]] for s in sections if names[s[0] :].startswith(b".text.")]
    assert code
    return b"".join(code)


def digests(cubins: Iterable[Cubin]) -> dict[str, str]:
    """Of the machine code, by symbol."""
    return {c.symbol: hashlib.sha256(machine_code(c.data)).hexdigest()[:16] for c in cubins}


if __name__ == "__main__":
    found = {arch: digests(compiled(all_shipped(arch), arch)) for arch in PINNED}
    GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
