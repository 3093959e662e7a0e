"""Every shipped variant compiles for every architecture, without register spills and within the shared memory.

A spill shows as slow code only, so nothing else would report it. Which tile spills is a matter of a few registers: see
`fresh_thread` in kernels_cu/tile.cuh before changing a tile or a main loop.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import cupyflash
from cupyflash import jit, nvrtc
from cupyflash.cache import Cubin
from cupyflash.device import Device
from cupyflash.shipped import shipped
from cupyflash.variant import Variant

try:
    nvrtc.pick()
except cupyflash.UnsupportedError as reason:
    pytest.skip(str(reason), allow_module_level=True)

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
REGISTERS_PER_SM = 65536


def test_at_most_sixty_variants_are_shipped() -> None:
    for arch in ARCHS:
        symbols = [v.symbol for v in shipped(Device.synthetic(arch))]
        assert len(set(symbols)) == len(symbols) <= 60


@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_variants_fit_the_shared_memory(arch: str) -> None:
    device = Device.synthetic(arch)
    for v in shipped(device):
        assert v.smem_bytes <= device.smem_bytes, v.symbol


@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_variants_compile_without_spills(arch: str) -> None:
    if arch not in nvrtc.find().archs:
        pytest.skip(f"NVRTC {nvrtc.find().version} does not know {arch}; pip install -U 'cupyflash[cu13]'")
    variants = shipped(Device.synthetic(arch))

    def compiled(v: Variant) -> Cubin:
        return jit.compile_kernel(v, arch)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = list(pool.map(compiled, variants))
    spilled = {c.symbol: c.spill_bytes for c in cubins if c.spill_bytes}
    assert not spilled, f"register spills in bytes, {arch}, NVRTC {cubins[0].nvrtc}: {spilled}"
    for v, cubin in zip(variants, cubins, strict=True):
        assert 0 < cubin.registers * v.threads * v.blocks_per_sm <= REGISTERS_PER_SM, v.symbol
