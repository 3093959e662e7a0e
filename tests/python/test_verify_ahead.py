"""`verify` on a GPU compiles the kernels of its cases side by side while they run, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_files import empty_cache

from cupyflash import attention_with_cache
from cupyflash.check import cases
from cupyflash.check.cache_case import CacheCase
from cupyflash.check.cache_cases import CACHE_CASES
from cupyflash.cli.frameworks import make
from cupyflash.cli.verify import ahead, cached
from cupyflash.cli.verify.cases import call
from cupyflash.compile import cache, jit, nvrtc
from cupyflash.gpu.device import Device
from tests import pretended_gpu

GPU = Device.synthetic("sm_90")
NO_QUERIES = CacheCase("cache-no-queries", "full", (70, 3), 0, append=True, new=2)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with empty_cache(monkeypatch) as path:
        yield path


def wait_for(count: int) -> None:
    until = time.monotonic() + 60
    while len(cache.default().entries()) < count:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_all_that_the_cases_load_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three, so that each family of kernels, memory and feature comes; what is missing would be compiled one by
    one by the calls that need it."""
    wanted = [(c, "bf16") for c in cases.select("full") if "bf16" in c.dtypes][::3]
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    arrays = make("numpy", False)
    gpu = pretended_gpu.pretend(monkeypatch)
    for case, dtype in wanted:
        gpu.loaded.clear()
        pretended_gpu.forget(monkeypatch)
        call(case, case.inputs(dtype), arrays)
        assert set(ahead.needed([(case, dtype)], GPU)) == set(gpu.loaded), case.name


@pytest.mark.parametrize("family", ["", "sm80", "sm90"])
@pytest.mark.parametrize("case", [*CACHE_CASES, NO_QUERIES], ids=lambda c: c.name)
def test_all_that_cases_over_a_cache_load(case: CacheCase, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the family that the environment insists on, too."""
    gpu = pretended_gpu.pretend(monkeypatch)
    gpu.place = pretended_gpu.crossed  # maps of five dimensions
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    attention_with_cache(**case.call(case.inputs("bf16")))
    assert set(ahead.needed([(case, "bf16")], GPU)) == set(gpu.loaded)


def test_each_kernel_once() -> None:
    wanted = [(c, "bf16") for c in cases.select("smoke")]
    over_cache = cached.chosen("smoke", ("bf16",), (), None)
    found = list(ahead.needed([*wanted, *over_cache, *wanted], GPU))
    assert any(v.symbol.startswith("decode") for v in found)
    assert len(found) == len(set(found)) > 4


@pytest.mark.skipif(not nvrtc.candidates(), reason="there is no NVRTC")
def test_they_are_in_the_cache_before_they_are_asked_for(folder: Path) -> None:
    wanted = [(cases.case("dense-d8"), "bf16")]
    expected = list(ahead.needed(wanted, GPU))
    with ahead.compiling_ahead(wanted, GPU):
        wait_for(len(expected))
    assert all(jit.compile_kernel(variant, GPU.arch).from_cache for variant in expected)


def test_the_end_does_not_wait_for_what_has_not_begun(folder: Path) -> None:
    wanted = [(c, "bf16") for c in cases.select("full") if "bf16" in c.dtypes]
    begin = time.monotonic()
    with ahead.compiling_ahead(wanted, GPU):
        pass
    assert time.monotonic() - begin < 30  # they would take minutes
    assert len(cache.default().entries()) < 100  # of 900


def test_nothing_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(subprocess, "Popen", None)
    with ahead.compiling_ahead([(cases.case("dense-d8"), "bf16")], GPU):
        pass


def test_it_ends_with_the_process_that_it_works_for(folder: Path) -> None:
    """That one may be killed, as by the watchdog when a kernel hangs."""
    program = (
        "import os, subprocess, time\n"
        "from cupyflash.check import cases\n"
        "from cupyflash.cli.verify import ahead\n"
        "from cupyflash.gpu.device import Device\n"
        "start = subprocess.Popen\n"
        "def noted(*a, **k):\n"
        "    process = start(*a, **k)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "subprocess.Popen = noted\n"
        "wanted = [(c, 'bf16') for c in cases.select('full') if 'bf16' in c.dtypes]\n"
        "with ahead.compiling_ahead(wanted, Device.synthetic('sm_90')):\n"
        "    time.sleep(100)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as killed:
        assert killed.stdout is not None
        helper = Path("/proc", killed.stdout.readline().strip())
        is_there = helper.exists()
        killed.kill()
    if not is_there:
        pytest.skip("no /proc here")
    until = time.monotonic() + 30
    while helper.exists() and helper.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)
