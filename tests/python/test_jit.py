"""Compiling and keeping kernels, without a GPU."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kernel_files import SMALL

import cupyflash
from cupyflash.compile import cache, jit, nvrtc, upkeep
from cupyflash.gpu.device import ARCHS, Device
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.kernels import Convert
from cupyflash.plan.shipped import shipped
from cupyflash.plan.variant import kernel_sources
from cupyflash.problem import Problem

try:
    nvrtc.pick()
except cupyflash.UnsupportedError as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test alone."""
    path = tmp_path / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(path))
    return path


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols that NVRTC really compiles."""
    done: list[str] = []
    real = nvrtc.Nvrtc.compile

    def counting(self: nvrtc.Nvrtc, source: str, name: str, *rest: Any) -> Any:
        if name != "probe.cu":  # by which a library proves that it works
            done.append(name)
        return real(self, source, name, *rest)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", counting)
    return done


def test_a_kernel_is_compiled_once_and_read_back_whole(folder: Path, compilations: list[str]) -> None:
    first, second = (jit.compile_kernel(SMALL, "sm_80") for _ in range(2))
    assert len(compilations) == 1
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.data == second.data
    assert first.data[:4] == b"\x7fELF"
    assert first.registers > 0
    assert first.symbol.encode() in first.data


def test_another_architecture_or_source_is_another_kernel(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jit.compile_kernel(SMALL, "sm_80")
    jit.compile_kernel(SMALL, "sm_90")
    edited = kernel_sources() | {"attention/params.cuh": kernel_sources()["attention/params.cuh"] + "\n"}
    for module in ("cupyflash.plan.variant.kernel_sources", "cupyflash.compile.jit.kernel_sources"):
        monkeypatch.setattr(module, lambda: edited)
    cupyflash.plan.variant.digest.cache_clear()
    try:
        jit.compile_kernel(SMALL, "sm_80")
    finally:
        monkeypatch.undo()
        cupyflash.plan.variant.digest.cache_clear()
    assert len(compilations) == 3


@pytest.mark.parametrize("suffix", ["cubin", "json"])
def test_a_damaged_kernel_is_compiled_again(folder: Path, compilations: list[str], suffix: str) -> None:
    good = jit.compile_kernel(SMALL, "sm_80").data
    path = next(folder.glob(f"*.{suffix}"))
    path.write_bytes(path.read_bytes()[:-7])
    assert jit.compile_kernel(SMALL, "sm_80").data == good
    assert len(compilations) == 2
    assert jit.compile_kernel(SMALL, "sm_80").from_cache


def test_an_interrupted_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jit.compile_kernel(SMALL, "sm_80")
    assert [p.name for p in folder.iterdir()] == ["locks"]
    assert not jit.compile_kernel(SMALL, "sm_80").from_cache


def test_the_precompiled_layer_needs_no_nvrtc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = jit.precompile(SMALL, "sm_80", folder).data

    def none() -> tuple[nvrtc.Candidate, ...]:
        raise cupyflash.UnsupportedError("no NVRTC here")

    monkeypatch.setattr(nvrtc, "usable", none)
    cache.default().clear()
    found = jit.compile_kernel(SMALL, "sm_80")
    assert found.data == expected
    assert found.from_cache
    with pytest.raises(cupyflash.UnsupportedError, match="no NVRTC here"):
        jit.compile_kernel(SMALL, "sm_90")


def test_the_cache_is_bounded_by_dropping_what_was_used_longest_ago(folder: Path) -> None:
    store = cache.default()
    for i, arch in enumerate(("sm_80", "sm_86", "sm_89")):
        jit.compile_kernel(SMALL, arch)
        newest = max(folder.glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
        os.utime(newest, (i, i))
    jit.compile_kernel(SMALL, "sm_80")  # used again
    sizes = {e.arch: e.bytes for e in store.entries()}
    upkeep.prune(folder, max_bytes=sizes["sm_80"] + sizes["sm_89"])
    assert {e.arch for e in store.entries()} == {"sm_80", "sm_89"}
    assert store.clear() == (2, [])
    assert store.entries() == []


def test_what_must_go_is_looked_for_now_and_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every kernel, the threads of `verify` spent more time on that than on compiling."""
    store, kernel = cache.default(), jit.compile_kernel(SMALL, "sm_80")
    size, looked = len(kernel.data), []
    prune = upkeep.prune
    monkeypatch.setattr(upkeep, "prune", lambda path: (looked.append(path), prune(path, upkeep.MAX_BYTES)))
    monkeypatch.setattr(upkeep, "MAX_BYTES", 20 * size)
    monkeypatch.setattr(upkeep, "SHARE", 4)
    upkeep._left.clear()
    for i in range(60):
        store.write(f"{i:040x}", kernel)
    assert len(looked) == 10  # the first, and then one of six: a fourth of the most, and the one beyond it
    assert len(store.entries()) <= 25


def test_processes_compile_a_kernel_once(folder: Path) -> None:
    program = (
        "from cupyflash.compile import jit; from cupyflash.plan import kernels;"
        "v = kernels.Convert('bf16', 64, kernels.ConvertTile(64, 8, 1, 2));"
        "print(jit.compile_kernel(v, 'sm_80').from_cache)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    assert sorted(p.communicate()[0].strip() for p in running) == ["False", "True", "True"]


def test_a_kernel_that_does_not_compile_names_symbol_and_arch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Convert, "source", lambda self: "this is not C++")
    with pytest.raises(cupyflash.CompileError, match=f"kernel {SMALL.symbol}.*sm_80.*error") as caught:
        jit.compile_kernel(SMALL, "sm_80")
    assert caught.value.symbol == SMALL.symbol
    assert "this is not C++" in caught.value.log


def test_a_long_compilation_is_announced_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, announced = nvrtc.Nvrtc.compile, threading.Event()

    def slow(self: nvrtc.Nvrtc, *arguments: Any) -> Any:
        announced.wait(timeout=60)
        return real(self, *arguments)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            announced.set()

    with caplog.at_level(logging.WARNING, "cupyflash"):
        monkeypatch.setattr(jit, "NOTICE_SECONDS", 3600.0)
        jit.compile_kernel(SMALL, "sm_86")
        assert caplog.messages == []
        monkeypatch.setattr(jit, "NOTICE_SECONDS", 0.0)
        monkeypatch.setattr(nvrtc.Nvrtc, "compile", slow)
        monkeypatch.setattr(jit.log, "handlers", [*jit.log.handlers, Listener()])
        jit.compile_kernel(SMALL, "sm_89")
    assert caplog.messages == [f"cupyflash: compiling {SMALL.symbol} for sm_89 ..."]
    assert threading.active_count() < 20


def test_the_shipped_variants_are_few_and_distinct() -> None:
    for arch in ARCHS:
        device = Device.synthetic(arch)
        variants = shipped(device)
        assert len({v.symbol for v in variants}) == len(variants) <= 200
        assert max(v.smem_bytes for v in variants) <= device.smem_bytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_every_head_dim_has_tiles_that_fit(arch: str) -> None:
    device = Device.synthetic(arch)
    for head_dim in range(8, 257, 8):
        problem = Problem("bf16", 1, 1, 1, 1, 1, head_dim, 1.0)
        for v in variants_of_calls(problem, device, family="sm80"):
            assert v.smem_bytes <= device.smem_bytes, v.symbol


def test_the_facts_beside_a_kernel_are_plain_json(folder: Path) -> None:
    jit.compile_kernel(SMALL, "sm_80")
    facts = json.loads(next(folder.glob("*.json")).read_text())
    assert facts["symbol"] == SMALL.symbol
    names = {"key", "symbol", "arch", "registers", "spill_bytes", "seconds", "nvrtc", "advice", "sha256"}
    assert set(facts) == names
