"""`cupyflash verify` without a GPU: the kernels run in the emulator, and a wrong one is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from cupyflash import cli
from cupyflash.check import cases
from cupyflash.cli.verify import cached
from cupyflash.cli.verify import emulator as verify_emulator
from cupyflash.emulator import attention, build, compiler, launch
from cupyflash.gpu.device import Device
from cupyflash.plan.variant import kernel_sources
from cupyflash.problem import DTYPES
from tests.emulator.require import require_compiler
from tests.planted.markers import Edit, change, planted, without

require_compiler()

ONE_CASE = ("--case", "gqa", "--dtype", "bf16", "--timeout", "0", "--json")
Verify = Callable[..., dict[str, Any]]


@pytest.fixture
def verify(without_gpu: None) -> Verify:
    """Run the command on a machine without a GPU; gives its JSON document."""

    def run_command(*arguments: str, code: int = 0) -> dict[str, Any]:
        result = CliRunner().invoke(cli.main, ["verify", *arguments])
        assert result.exit_code == code, result.output
        document: dict[str, Any] = json.loads(result.stdout)
        assert document["exit_code"] == code
        return document

    return run_command


def plant(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    """From now on the kernels have another text."""
    texts = kernel_sources() | planted((edit,))
    monkeypatch.setattr(attention, "kernel_sources", lambda: texts)


def test_the_kernels_run(verify: Verify) -> None:
    document = verify(*ONE_CASE)
    assert document["ran"] == ["emulator", "cpu"]
    assert document["verdict"] == (
        "VERIFIED: 1 case and 0 checks on the CPU path; "
        "2 cases of the sm80 and sm90 kernels in the emulator, on the CPU; nothing ran on a GPU"
    )
    assert [r["family"] for r in document["emulator"]] == ["sm80", "sm90"]
    assert all(set(r["results"]) == {"out", "lse", "dq", "dk", "dv"} for r in document["emulator"])


def test_a_kernel_that_is_wrong_is_found(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """O times 42, in both families."""
    plant(monkeypatch, change("o-divided-by-its-sum", "1.f / l[r]", "42.f / l[r]"))
    document = verify(*ONE_CASE, code=1)
    assert document["verdict"].startswith("FAILED: 2 failed of ")
    assert document["reproduce"] == "cupyflash verify --case gqa --dtype bf16 --framework numpy --backend auto"
    assert [c["passed"] for c in document["cases"]] == [True]
    assert [r["results"]["out"]["passed"] for r in document["emulator"]] == [False, False]


def test_a_race_is_found(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers may be right; the message names the line."""
    plant(monkeypatch, without("rows-staged-by-the-warp"))
    document = verify(*ONE_CASE, code=1)
    assert any("RACE" in (r["error"] or "") and "tile/epilogue.cuh" in r["error"] for r in document["emulator"])


def test_a_kernel_that_does_not_compile_is_found(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, change("o-divided-by-its-sum", "1.f / l[r]", "no_such_name / l[r]"))
    document = verify(*ONE_CASE, code=5)
    assert all("no_such_name" in r["error"] for r in document["emulator"])


def test_without_a_compiler_only_the_cpu_path_is_verified(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    document = verify(*ONE_CASE)
    assert document["ran"] == ["cpu"]
    assert document["emulator"] == []
    assert document["verdict"] == (
        "CPU PATH VERIFIED: 1 case and 0 checks on the CPU path; "
        "no kernel ran (no GPU; the emulator needs clang++ or g++ with C++17: apt-get install clang)"
    )


def test_a_compiler_that_cannot_compile(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise build.BuildError("In file included from api.h:1:\napi.h:5: fatal error: cstdint: No such file")

    monkeypatch.setattr(launch, "runtime", fail)
    verdict = verify(*ONE_CASE)["verdict"]
    assert verdict.startswith("CPU PATH VERIFIED: ")
    assert "fatal error: cstdint" in verdict


@pytest.mark.parametrize("arguments", [("--backend", "cpu"), ("--dtype", "fp64"), ("--case", "two-threads")])
def test_the_verdict_says_where_no_kernel_was_to_run(verify: Verify, arguments: tuple[str, ...]) -> None:
    chosen = arguments if "--case" in arguments else (*arguments, "--case", "gqa")
    document = verify(*chosen, "--timeout", "0", "--json")
    assert document["verdict"].startswith("CPU PATH VERIFIED: ")
    assert document["ran"] == ["cpu"]


def test_levels_grow() -> None:
    """Each level has both families and their dtypes, and all that the one before has."""
    before: set[tuple[str, str]] = set()
    for level in cases.LEVELS:
        work = verify_emulator.choose(level, DTYPES, (), None)
        found = {(w.case.name, w.family) for w in work}
        assert len(found) == len(work)
        assert found > before
        assert {(w.dtype, w.family) for w in work} == {(d, f) for f, own in verify_emulator.DTYPES.items() for d in own}
        before = found
    assert {name for name, _ in before} == {c.name for c in cases.select(tag="emulator") if "empty" not in c.tags}


def test_what_was_asked_for_is_chosen() -> None:
    work = verify_emulator.choose("quick", ("bf16", "fp64"), (128,), None)
    assert {w.case.head_dim for w in work} == {128}
    assert {w.dtype for w in work} == {"bf16"}
    named = verify_emulator.choose("smoke", ("bf16", "fp16"), (), "misaligned")
    assert [(w.dtype, w.family) for w in named] == [("bf16", "sm80"), ("fp16", "sm80")]  # TMA cannot read it


def test_cases_over_a_cache_that_a_gpu_has_kernels_for() -> None:
    """Of fp64 none are chosen, of fp32 none over caches of 8 bits; without a GPU all."""
    everywhere, on_gpu = (cached.chosen("full", DTYPES, (), None, gpu) for gpu in (None, Device.synthetic("sm_80")))
    assert {d for _, d in everywhere} == set(DTYPES)
    assert {d for c, d in on_gpu if c.stored} == {"fp16", "bf16"}
    assert {d for c, d in on_gpu if not c.stored} == {"fp16", "bf16", "fp32"}
