"""The emulator against the hardware: layout probes, whose outputs on an H200 are kept in emulator/golden."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest

from cupyflash.compile import nvrtc
from tests.emulator import MODES, EmulatorError
from tests.emulator.require import require_compiler
from tests.probing import probe_cpu, probes

require_compiler()

NAMES = tuple(probes.all_probes())
# Those of the kernels' instructions that no probe executes: nothing here compares them with an H200, only the results
# of the kernels do.
WITHOUT_A_PROBE = """
    add_rn atomic_add_acq_rel bar_red_or block_index clock64 cp_async_16 cp_async_4 cp_async_8
    cp_async_commit_group cp_async_wait_group cvt_f32_f16 cvt_rn_f16x2_e4m3x2 dynamic_smem_1024 ex2 fence_gpu
    fence_proxy_async_global float_as_uint fma_rn_bf16x2 fma_rn_f16x2 globaltimer grid_size
    griddepcontrol_launch_dependents griddepcontrol_wait infinity ld_acquire ld_relaxed ld_shared_cluster_v2_f32
    ld_shared_cluster_v4_f32 ld_shared_v2_f32 ld_shared_v4_b32 ld_shared_v4_f32 lg2 mbarrier_arrive
    movmatrix_trans mul_rn nan nanosleep opaque popc prefetch_tensormap prmt rcp red_add rsqrt setmaxnreg_dec
    setmaxnreg_inc sqrt st_release st_shared_v2_f32 st_shared_v4_b32 trap vote_all
"""


@functools.cache
def golden() -> dict[str, probes.Words]:
    if not probes.GOLDEN.exists():
        pytest.fail(f"{probes.GOLDEN} is missing: run tests/probing/probe_gpu.py on an H200", pytrace=False)
    with np.load(probes.GOLDEN) as file:
        return {name: file[name] for name in file.files}


def test_golden_file_is_complete() -> None:
    """Every probe has been run on an H200; if not: tests/probing/probe_gpu.py."""
    assert probes.GOLDEN.exists(), "run tests/probing/probe_gpu.py on an H200"
    assert set(golden()) == set(NAMES)


def test_instructions_without_a_probe_are_listed() -> None:
    """A probe for one of them needs a new run of tests/probing/probe_gpu.py on an H200."""
    headers = probes.headers()
    wrappers = {name for file in headers if file.startswith("hw/") for name in probes.instructions(headers[file])}
    assert wrappers - set(re.findall(r"\b(\w+)[(<]", headers["probes.cuh"])) == set(WITHOUT_A_PROBE.split())


@pytest.mark.parametrize("mode", ["race", "any"])
@pytest.mark.parametrize("unit", probes.units())
def test_emulator_agrees_with_h200(unit: str, mode: str) -> None:
    different = []
    for probe in probes.units()[unit]:
        got = probe_cpu.run(probe, MODES[mode], seed=0 if mode == "race" else 3)
        if probe.name not in golden() or not np.array_equal(_canonical(got), _canonical(golden()[probe.name])):
            different.append(probe.name)
    assert not different


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("tma_load_2d_b128", (4, 5)),
        ("tma_store_2d_b128", (-8, 3)),
        ("tma_store_2d_b128", (8, -3)),
        ("tma_store_3d", (16, 5, -1)),
        ("tma_reduce_2d", (-4, 9)),
        ("tma_reduce_2d", (4, -5)),
    ],
)
def test_emulator_refuses_what_h200_refuses(name: str, at: tuple[int, ...]) -> None:
    """Coordinates on which an H200 stops with an illegal instruction."""
    probe = probes.all_probes()[name]
    with pytest.raises(EmulatorError, match="coordinate"):
        probe_cpu.run(dataclasses.replace(probe, args=(probe.args[0], *at)), MODES["race"])


def _canonical(words: probes.Words) -> probes.Words:
    """-0 and 0 are the same sum."""
    return np.where(words == 0x80000000, 0, words)


@pytest.mark.parametrize("unit", probes.units())
def test_probes_compile_for_the_gpu(unit: str) -> None:
    source = probes.unit_source(probes.units()[unit])
    options = ("-arch=sm_90a", "-std=c++17", "-default-device")
    nvrtc.find().compile(source, f"{unit}.cu", probes.headers(), options)
