"""The precompiled layer: it holds what calls take, everybody can read it, and who cannot is told."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernel_files import SMALL, another_user, elf, empty_cache, pretend_to_compile

import cupyflash
from cupyflash import cli
from cupyflash.arrays.adapters import Signature
from cupyflash.cli import compile as compile_command
from cupyflash.cli.bench import startup as bench_startup
from cupyflash.cli.doctor import checks as doctor_checks
from cupyflash.compile import cache, jit, layer, nvrtc
from cupyflash.gpu.device import ARCHS, Device
from cupyflash.launch.alignment import Aligned, access_of
from cupyflash.launch.passes import given_of
from cupyflash.operands import BACKWARD
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.variant import Variant
from cupyflash.problem import Problem

try:
    nvrtc.pick()
except cupyflash.UnsupportedError as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    layer._say.cache_clear()
    with empty_cache(monkeypatch) as path:
        yield path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return pretend_to_compile(monkeypatch)


def hide_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this machine has no compiler."""

    def none(*_: object) -> None:
        raise cupyflash.UnsupportedError("NVRTC: no libnvrtc was found")

    for name in ("candidates", "usable", "pick", "find"):
        monkeypatch.setattr(nvrtc, name, none, raising=False)


def run_compile(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.main, ["compile", *arguments])
    assert result.exit_code == code, result.output
    return result.output


# ---- what it holds ----

# How q, k, v and dout may lie; the kernels that a call takes depend on nothing else but the problem.
STRIDES = {
    "contiguous": lambda s, h, d: (s * h * d, h * d, d, 1),
    "bhsd": lambda s, h, d: (s * h * d, d, s * d, 1),
    "the same for the whole batch": lambda s, h, d: (0, h * d, d, 1),
    "the same for all heads": lambda s, h, d: (s * d, d, 0, 1),
    "columns of a wider array": lambda s, h, d: (s * h * (d + 3), h * (d + 3), d + 3, 1),
}


def launched(problem: Problem, device: Device) -> Iterator[Variant]:
    """What calls on arrays that lie in all these ways, at good addresses and odd ones, would launch."""
    given = given_of(BACKWARD, ("q", "k", "v", "dout"))
    s, h, d = problem.seqlen_q, problem.heads_q, problem.head_dim
    for strides in STRIDES.values():
        arrays = [Signature((2, s, h, d), strides(s, h, d), None, 0)] * 4
        for is_good_address in (True, False):
            access = access_of(given, arrays, Aligned(rows=is_good_address))
            yield from variants_of_calls(problem, device, **access._asdict())


def calls(dtype: str, head_dim: int, windows: tuple[object, ...], determinism: tuple[bool, ...]) -> Iterator[Problem]:
    for window in windows:
        for deterministic in determinism:
            for seqlen in (0, 1, 333, 70_000):
                yield Problem(dtype, 2, seqlen, seqlen, 4, 2, head_dim, 0.3, window, deterministic)  # type: ignore[arg-type]


def missing(problems: Iterable[Problem], arch: str, only_usual: bool = False) -> set[str]:
    """The kernels of calls that this machine, which has no NVRTC, cannot launch."""
    device, variants, found = Device.synthetic(arch), set(), set()
    for problem in problems:
        if only_usual:
            variants.update(variants_of_calls(problem, device))
        else:
            variants.update(launched(problem, device))
    for variant in variants:
        try:
            jit.compile_kernel(variant, arch)
        except cupyflash.UnsupportedError:
            found.add(variant.symbol)
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_that_a_call_takes_is_missing(
    arch: str, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc.find(), "archs", ARCHS)
    run_compile("--arch", arch, "--out", str(folder))
    cache.default().clear()
    hide_nvrtc(monkeypatch)
    dense_and_causal, dtypes = ((None, None), (None, 0)), Device.synthetic(arch).halves
    for dtype in dtypes:
        for head_dim in (64, 128):
            assert not missing(calls(dtype, head_dim, dense_and_causal, (False,)), arch)
    assert missing(calls(dtypes[0], 72, dense_and_causal, (False,)), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_preset_all_holds_windows_and_deterministic_calls(
    arch: str, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_compile("--arch", arch, "--preset", "all", "--out", str(folder))
    cache.default().clear()
    hide_nvrtc(monkeypatch)
    windows = ((64, 0), (None, 5), (7, None), (None, 0), (None, None))
    for dtype in ("bf16", "fp16"):
        for head_dim in (64, 96, 128, 256):
            assert not missing(calls(dtype, head_dim, windows[-2:], (False,)), arch)
            problems = (p for p in calls(dtype, head_dim, windows, (False, True)) if p.seqlen_q)
            assert not missing(problems, arch, only_usual=True)


def test_a_layer_of_real_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest one."""
    monkeypatch.setitem(compile_command.PRESETS, "common", (((None, None),), (False,), (8,)))
    monkeypatch.setattr(compile_command, "MEMORY", compile_command.MEMORY[:1])
    run_compile("--arch", "sm_90", "--dtype", "bf16", "--out", str(folder))
    cache.default().clear()
    hide_nvrtc(monkeypatch)
    problem = Problem("bf16", 2, 333, 333, 4, 2, 8, 0.3)
    assert not missing([problem], "sm_90", only_usual=True)
    kernels = {arch: {e.symbol.split("_bf16")[0] for e in found} for arch, found in cache.default().layers().items()}
    assert kernels["sm_90a"] == {"fwd_sm90", "bwd_sm90"}
    assert kernels["sm_90"] == {"bwd_delta", "bwd_convert", "bwd_shares"}


def test_startup_times_what_a_call_takes(folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyflash.gpu.device._probe", lambda: (0, "there is no GPU in this test"))
    symbols = [k["symbol"] for k in bench_startup.child("bf16", 64, "sm_90")["kernels"]]
    assert [s.split("_bf16")[0] for s in symbols] == ["fwd_sm90", "bwd_delta", "bwd_sm90", "bwd_convert"]


# ---- who can read it ----


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002, 0o000], ids=oct)
def test_everybody_reads_it_whatever_the_umask(
    mask: int, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "deep" / "out"
    folder.mkdir(mode=0o755)
    before = os.umask(mask)
    try:
        run_compile("--arch", "sm_80", "--head-dim", "64", "--dtype", "fp16", "--out", str(out))
    finally:
        os.umask(before)
    modes = {p.relative_to(folder).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*")}
    files = {mode for name, mode in modes.items() if name.endswith(("json", "cubin")) and "precompiled" in name}
    assert files == {0o644}
    layer_folders = ("deep", "deep/out", "deep/out/precompiled", "deep/out/precompiled/sm_80")
    assert {modes[name] for name in layer_folders} == {0o755}

    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(out))
    hide_nvrtc(monkeypatch)
    with another_user():
        problem = Problem("fp16", 1, 9, 9, 1, 1, 64, 1.0)
        assert not missing([problem], "sm_80")


def test_a_layer_in_the_private_cache_leaves_it_private(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    output = run_compile("--arch", "sm_80", "--head-dim", "64", "--dtype", "fp16")
    path = folder / "cupyflash"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert "other users" not in output
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.glob("*.json")} == {0o600}


def test_compile_says_what_closes_the_layer(folder: Path, compiled: list[str]) -> None:
    folder.mkdir(mode=0o700)
    text = run_compile("--arch", "sm_80", "--head-dim", "64", "--dtype", "fp16", "--out", str(folder))
    assert f"other users cannot read them: chmod a+x {folder} would let them" in text
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written_is_known_before_the_run(folder: Path, compiled: list[str]) -> None:
    folder.mkdir(mode=0o700)
    arguments = ("--arch", "sm_80", "--head-dim", "64", "--out")
    with another_user(folder):
        folder.chmod(0o500)
        text = run_compile(*arguments, str(folder), code=2)
        folder.chmod(0o700)
    assert f"--out: {folder} cannot be written" in text
    (folder / "file").touch()
    assert "cannot be written" in run_compile(*arguments, str(folder / "file" / "out"), code=2)
    assert compiled == []


def test_tilde_is_expanded(folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves ``--out=~/kernels`` as it is."""
    monkeypatch.setenv("HOME", str(folder))
    run_compile("--arch", "sm_80", "--head-dim", "64", "--dtype", "fp16", "--out=~/kernels")
    assert len(list(folder.glob("kernels/precompiled/sm_80/*.cubin"))) == len(compiled) > 0
    assert "cannot be found" in run_compile("--arch", "sm_80", "--out", "~nobody-is-called-so/kernels", code=2)


def test_a_folder_that_fills_up_is_a_sentence(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit, "precompile", full)
    text = run_compile("--arch", "sm_80", "--out", str(folder), code=4)
    assert f"error: --out: {folder} can no longer be written ([Errno 28] No space left on device); make room" in text


def make_layer(folder: Path) -> Path:
    """One kernel, and the folder of its architecture."""
    folder.mkdir(mode=0o755)
    jit.precompile(SMALL, "sm_80", folder)
    cache.default().clear()
    return folder / "precompiled" / "sm_80"


def read_twice(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said while the kernel is compiled again and again because the layer cannot be used."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cupyflash"):
        for _ in range(2):
            assert jit.compile_kernel(SMALL, "sm_80").data == elf(SMALL.symbol)
    return caplog.messages


@pytest.mark.parametrize("what", ["files", "folder", "layer", "root"])
def test_an_unreadable_layer_is_said_once(
    what: str, folder: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_layer(folder)
    closed = {"files": [*path.iterdir()], "folder": [path], "layer": [path.parent], "root": [folder]}[what]
    if os.geteuid() == 0:  # another user's
        change = [(p, 0o600 if p.is_file() else 0o700) for p in closed]
    else:
        change = [(p, 0) for p in closed]
    for p, mode in change:
        p.chmod(mode)
    with another_user():
        said = read_twice(caplog)
        findings = [f for f in doctor_checks.kernels() if f.name == "precompiled"]
    for p in closed:
        p.chmod(0o755)
    assert len(said) == 1
    blocked = min(closed) if what == "files" else closed[0]
    assert f"{blocked} cannot be read; its owner or root can change that: chmod " in said[0]
    (finding,) = findings
    assert (finding.status, finding.text) == ("WARN", f"kernels are not used: {blocked} cannot be read")
    assert "chmod" in finding.fix


def test_a_home_that_is_not_ours_is_not_taken_for_a_layer(
    folder: Path, compiled: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that runs as another user often keeps HOME=/root."""
    folder.mkdir(mode=0o700 if os.geteuid() == 0 else 0)
    monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with another_user():
        assert read_twice(caplog) == []
        assert [f.name for f in doctor_checks.kernels()] == ["cache"]
    folder.chmod(0o700)


def test_a_layer_that_others_can_write_is_said(
    folder: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_layer(folder)
    path.chmod(0o775)
    (said,) = read_twice(caplog)
    assert said == f"cupyflash: precompiled kernels are not used: {path} can be written by others; chmod go-w {path}"


def test_kernels_for_a_newer_driver_are_said(
    folder: Path, compiled: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cubins of NVRTC 13 do not load with a driver of CUDA 12, whatever the layer's name says."""
    monkeypatch.setattr(nvrtc.find(), "name", "13.0")
    make_layer(folder)
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (13, 0))
    assert jit.compile_kernel(SMALL, "sm_80").from_cache
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (12, 4))
    (said,) = read_twice(caplog)
    assert (
        "were compiled by NVRTC 13.0, and the driver supports CUDA 12.4; update the driver, or compile them with"
        in said
    )


def test_doctor_says_that_the_layer_works_though_nothing_is_kept(folder: Path, compiled: list[str]) -> None:
    make_layer(folder)
    folder.chmod(0o755 if os.geteuid() == 0 else 0o555)  # root's, or our own
    with another_user():
        found = {f.name: f for f in doctor_checks.kernels()}
    folder.chmod(0o755)
    assert found["cache"].status == "WARN"
    assert found["cache"].text.startswith("new kernels are not kept, each process compiles its own: ")
    assert "chmod" not in found["cache"].fix
    assert (found["precompiled"].status, found["precompiled"].text) == ("OK", "kernels: 1 for sm_80")


@pytest.mark.parametrize("has_layer", [True, False])
def test_doctor_without_a_compiler(
    has_layer: bool, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image with a GPU and precompiled kernels is not broken."""
    if has_layer:
        make_layer(folder)
    hide_nvrtc(monkeypatch)
    monkeypatch.setattr("cupyflash.gpu.device._probe", lambda: (1, ""))
    (finding,) = doctor_checks.compiler()
    assert finding.status == ("WARN" if has_layer else "FAIL")
    assert ("precompiled kernels run without it, for sm_80" in finding.text) == has_layer


# ---- on a GPU ----


@pytest.mark.gpu
def test_calls_run_without_nvrtc(tmp_path: Path) -> None:
    """A machine with a GPU, a layer and no compiler: arrays of all kinds of memory, forward and backward."""
    program = """
import cupy, numpy as np, cupyflash
from cupyflash.compile import nvrtc
nvrtc.candidates = lambda: ()
def check(q, k, v, **options):
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    grads = cupyflash.attention_backward(out, q, k, v, out, lse, **options)
    assert all(bool(cupy.isfinite(x).all()) for x in (out, *grads))
base = (cupy.arange(3 * 2 * 200 * 4 * 72, dtype=np.float32) % 7 - 3).astype(np.float16).reshape(3, 2, 200, 4, 72)
q, k, v = cupy.ascontiguousarray(base[..., :64])
for causal in (False, True):
    check(q, k, v, causal=causal)
    check(*base[..., 1:65], causal=causal)
    check(q, *(cupy.broadcast_to(x[:1], x.shape) for x in (k, v)), causal=causal)
    check(q[:, :0], k, v, causal=causal)
print("done")
"""
    arch = Device.of(0).arch
    environment = os.environ | {"CUPYFLASH_CACHE_DIR": str(tmp_path / "out")}
    command = [sys.executable, "-m", "cupyflash", "compile", "--arch", arch, "--dtype", "fp16", "--head-dim", "64"]
    subprocess.run([*command, "--json"], env=environment, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "cupyflash", "cache", "clear", "--yes"], env=environment, check=True)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr


def test_cache_commands_cover_the_layer(folder: Path, compiled: list[str]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli.main, ["cache", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    path = make_layer(folder)
    assert "precompiled" not in json.loads(run("info", "--json"))
    document = json.loads(run("info", "--precompiled", "--json"))
    assert document["entries"] == []
    assert [(e["symbol"], e["arch"]) for e in document["precompiled"]] == [(SMALL.symbol, "sm_80")]
    assert document["precompiled_problems"] == []
    assert "precompiled: 1 kernel," in run("info", "--precompiled")
    assert "0 kernels removed" in run("clear")
    assert len(list(path.iterdir())) == 2
    assert "1 kernel removed" in run("clear", "--precompiled", "--yes")
    assert not path.exists()
