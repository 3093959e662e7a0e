"""Which kernels are compiled for the emulator, and which of them at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import EmulatedKernel, EmulatorError, Memory, build, compiler, launch
from tests.emulator.require import require_compiler

require_compiler()

HEADERS = {"a.cuh": "constexpr int kA = 1;\n", "b.cuh": '#include "a.cuh"\n', "c.cuh": "constexpr int kC = 1;\n"}


def unit(symbol: str, constant: int, before: str = "", **edited: str) -> build.Unit:
    """As `Variant.source` writes them."""
    source = (
        f'// kernels_cu 1234\n#include "b.cuh"\n\n{before}'
        f"struct Variant {{\n    static constexpr int k = {constant};\n}};\n\n"
        f'extern "C" __global__ void {symbol}(int *x) {{ x[ptx::thread_index()] = Variant::k + kA; }}\n'
    )
    return build.Unit(source, HEADERS | {f"{name}.cuh": text for name, text in edited.items()}, (symbol,))


def written(u: build.Unit) -> int:
    """What its kernel writes."""
    with Memory() as memory:
        address, x = memory.output("x", (32,), np.int32)
        EmulatedKernel(u.source, u.headers, u.symbols[0])(1, 32, 0, [np.uint64(address)])
        return int(x[0])


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that the compiler gets, in an empty folder."""
    sources, run = [], build._compile

    def recorded(command: Sequence[str], out: Path, cwd: Path | None = None) -> None:
        if cwd is not None:
            sources.append((cwd / command[-1]).read_text())
        run(command, out, cwd)

    launch.runtime()  # lies in the folder of before
    monkeypatch.setattr(build, "build_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "_compile", recorded)
    return sources


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in ("clang++", "g++")])
def by_each_compiler(request: pytest.FixtureRequest, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles kernels; the emulator is there already."""
    monkeypatch.setattr(compiler, "program", lambda: request.param)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("x[32] = 1", r"store at .*bytes \[128, 132\) of buffer 'x' are out of bounds"),
        ("x[0] = x[32]", r"load at .*bytes \[128, 132\) of buffer 'x' are out of bounds"),
        ("*(Four *)(x + 30) = *(Four *)x", r"store at .*address \S+ is not aligned to 16 bytes"),
        ("*(Four *)(x + 32) = *(Four *)x", r"store at .*bytes \[128, 144\) of buffer 'x' are out of bounds"),
        ("*(Four *)x = *(Four *)(x + 32)", r"load at .*bytes \[128, 144\) of buffer 'x' are out of bounds"),
        ("*(Four *)(x + 32) = Four{}", r"store at .*bytes \[128, 144\) of buffer 'x' are out of bounds"),
        ("x[0] = ptx::thread_index()", "RACE, write after write: buffer 'x'"),
        ("*(Four *)x = Four{{ptx::thread_index()}}", "RACE, write after write: buffer 'x'"),
    ],
)
@pytest.mark.usefixtures("by_each_compiler")
def test_every_compiler_announces_what_is_read_and_written(statement: str, message: str) -> None:
    source = (
        f'#include "b.cuh"\nstruct alignas(16) Four {{ int x[4]; }};\nstruct Variant {{}};\n'
        f'extern "C" __global__ void one(int *x) {{ {statement}; }}\n'
    )
    with Memory() as memory:
        address, _ = memory.output("x", (32,), np.int32)
        with pytest.raises(EmulatorError, match=message):
            EmulatedKernel(source, HEADERS, "one")(1, 32, 0, [np.uint64(address)])


@pytest.mark.parametrize(("answer", "chosen"), [("exit 0", "clang++"), ("exit 1", "g++"), (None, "g++")])
def test_a_clang_that_cannot_compile_is_not_taken(
    answer: str | None, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too old for the flags, or has no headers; or there is none."""
    if answer:
        (tmp_path / "clang++").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "clang++").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.program.__wrapped__() == chosen


def test_kernels_with_other_headers_are_compiled_alone(compiled: list[str]) -> None:
    some = unit("one", 1), unit("two", 2), unit("one", 3, a="constexpr int kA = 5;\n")
    build.build(some)
    assert [source.count("EMU_ENTRY") for source in compiled] == [2, 1]
    assert [written(u) for u in some] == [2, 3, 8]


def test_kernels_are_compiled_at_once(compiled: list[str]) -> None:
    """Each with constants of its own, and only those that are missing."""
    build.build([unit("one", 10)])
    units = [unit(name, constant) for name, constant in (("one", 10), ("two", 20), ("three", 30))]
    build.build(units)
    assert ["EMU_ENTRY(one)" in source for source in compiled] == [True, False]
    assert [written(u) for u in units] == [11, 21, 31]
    assert len(compiled) == 2


def test_kernels_with_other_expressions_are_compiled_apart(compiled: list[str]) -> None:
    units = [unit("one", 10, "struct Mods {};\n"), unit("two", 20, "struct Mods { int x; };\n")]
    build.build(units)
    assert [written(u) for u in units] == [11, 21]
    assert len(compiled) == 2


def test_of_kernels_with_one_name_each_has_its_library(compiled: list[str]) -> None:
    units = [unit("one", 10), unit("one", 20), unit("two", 30), unit("two", 30)]
    build.build(units)
    assert [written(u) for u in units] == [11, 21, 31, 31]
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("asked", "apart"),
    [("0", []), ("ptx::kHasE4m3", [890]), ("ptx::kRedWidth", [900]), ("ptx::kHasE4m3 + ptx::kRedWidth", [890, 900])],
)
def test_architectures_share_a_library_unless_the_kernel_tells_them_apart(asked: str, apart: list[int]) -> None:
    u = unit("one", 10, c=f"constexpr int kC = {asked};\n", b='#include "a.cuh"\n#include "c.cuh"\n')
    archs = (800, 860, 890, 900, 1200)
    libraries = [dataclasses.replace(u, arch=arch).library for arch in archs]
    assert [arch for arch, a, b in zip(archs[1:], libraries, libraries[1:], strict=False) if a != b] == apart


def test_all_that_differs_between_architectures_is_a_constant_that_build_knows() -> None:
    asking = [line for text in build.twin_texts().values() for line in text.splitlines() if "EMULATED_ARCH" in line]
    assert len(asking) == len(build.from_arch_on()) > 0
    assert all(re.fullmatch(r"#if EMULATED_ARCH >= \d+", line) for line in asking)


def test_a_header_makes_new_what_includes_it(compiled: list[str]) -> None:
    u = unit("one", 10)
    assert unit("one", 10, c="constexpr int kC = 2;\n").library == u.library
    assert written(u) == 11
    assert written(unit("one", 10, a="constexpr int kA = 2;\n")) == 12
    assert len(compiled) == 2


def test_without_links_libraries_are_copied(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(build.os, "link", refuse)
    units = [unit("one", 10), unit("two", 20)]
    build.build(units)
    assert [written(u) for u in units] == [11, 21]
    assert len(compiled) == 1
