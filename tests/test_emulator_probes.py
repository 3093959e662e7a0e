"""The emulator against the hardware: layout probes, whose outputs on an H200 are kept in emulator/golden."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from emulator import MODES, probe_cpu, probes
from emulator.require import require_compiler

from cupyflash import nvrtc

require_compiler()

NAMES = tuple(probes.all_probes())


@functools.cache
def golden() -> dict[str, probes.Words]:
    with np.load(probes.GOLDEN) as file:
        return {name: file[name] for name in file.files}


def test_golden_file_is_complete() -> None:
    """Every probe has been run on an H200; if not: tests/emulator/probe_gpu.py."""
    assert probes.GOLDEN.exists(), "run tests/emulator/probe_gpu.py on an H200"
    assert set(golden()) == set(NAMES)


@pytest.mark.parametrize("mode", ["race", "any"])
@pytest.mark.parametrize("unit", probes.units())
def test_emulator_agrees_with_h200(unit: str, mode: str) -> None:
    different = []
    for probe in probes.units()[unit]:
        got = probe_cpu.run(probe, MODES[mode], seed=0 if mode == "race" else 3)
        if probe.name not in golden() or not np.array_equal(_canonical(got), _canonical(golden()[probe.name])):
            different.append(probe.name)
    assert not different


def _canonical(words: probes.Words) -> probes.Words:
    """-0 and 0 are the same sum."""
    return np.where(words == 0x80000000, 0, words)


@pytest.mark.parametrize("unit", probes.units())
def test_probes_compile_for_the_gpu(unit: str) -> None:
    source = probes.unit_source(probes.units()[unit])
    options = ("-arch=sm_90a", "-std=c++17", "-default-device")
    nvrtc.find().compile(source, f"{unit}.cu", probes.headers(), options)
