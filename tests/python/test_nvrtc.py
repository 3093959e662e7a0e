"""Which NVRTC is used: the newest whose kernels the driver loads and that compiles; nothing is loaded in vain."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_files import SMALL, empty_cache, pretend_to_compile

import cupyflash
from cupyflash.cli.doctor import checks as doctor_checks
from cupyflash.compile import jit, nvrtc

try:
    LIBRARY = Path(nvrtc.pick().path)
except cupyflash.UnsupportedError as reason:
    pytest.skip(str(reason), allow_module_level=True)

linux = pytest.mark.skipif(sys.platform != "linux", reason="edits an ELF file")
forget = nvrtc._choose.cache_clear


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What a test pretends of this machine ends with it."""
    yield
    nvrtc.candidates.cache_clear()
    forget()


def pretend(monkeypatch: pytest.MonkeyPatch, *paths: object, driver: tuple[int, int] | None = None) -> None:
    """That these are the libraries of this machine; their folders say of which CUDA major."""
    found = [(str(path), 13 if "cu13" in str(path) else 12) for path in paths]
    monkeypatch.setattr(nvrtc, "_libraries", lambda: iter(found))
    monkeypatch.setattr(nvrtc, "driver_version", lambda: driver)
    nvrtc.candidates.cache_clear()
    forget()


def not_a_library(folder: Path, text: str = "") -> Path:
    path = folder / "cu13" / "libnvrtc.so.13"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- wheels that do not say where their builtins lie ----


@pytest.fixture(scope="module")
def without_runpath(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of NVRTC that does not find its builtins, like that of the wheels of CUDA 13.0."""
    data = LIBRARY.read_bytes()
    if b"\0$ORIGIN:\0" in data:
        data = data.replace(b"\0$ORIGIN:\0", b"\0/nowhere\0")
    path = tmp_path_factory.mktemp("wheel") / LIBRARY.name
    path.write_bytes(data)
    return path


def wheel(library: Path, folder: Path, with_builtins: bool) -> Path:
    """A folder of site-packages with this library."""
    lib = folder / "nvidia" / "cuda_nvrtc" / "lib"
    lib.mkdir(parents=True)
    os.link(library, lib / library.name)
    for path in LIBRARY.parent.glob("libnvrtc-builtins.so.*"):
        if with_builtins:
            (lib / path.name).symlink_to(path)
    return folder


def elsewhere(folder: Path, program: str) -> list[str]:
    """The lines that a fresh process prints, which finds the libraries of `folder` first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


COMPILE = """
from cupyflash.compile import jit, nvrtc
from cupyflash.plan import kernels
print(len(jit.compile_kernel(kernels.Convert('bf16', 64, kernels.ConvertTile(64, 8, 1, 2)), 'sm_80').data) > 1000)
"""


@linux
def test_builtins_beside_the_library_are_found(
    without_runpath: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = wheel(without_runpath, tmp_path / "site", with_builtins=True)
    with empty_cache(monkeypatch):
        compiled, path = elsewhere(folder, COMPILE + "print(nvrtc.find().path)")
    assert (compiled, Path(path).is_relative_to(folder)) == ("True", True)


@linux
def test_a_library_that_compiles_nothing_is_not_picked(
    without_runpath: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = wheel(without_runpath, tmp_path / "site", with_builtins=False)
    program = COMPILE + (
        "print(nvrtc.find().path); print(*nvrtc.rejected().values());"
        "from cupyflash.cli.doctor import checks as d; [print(f.status, f.text) for f in d.compiler()]"
    )
    with empty_cache(monkeypatch):
        compiled, path, why, *findings = elsewhere(folder, program)
    assert compiled == "True"
    assert not Path(path).is_relative_to(folder)
    assert "failed to open libnvrtc-builtins" in why
    assert findings[0].startswith("OK ")
    assert findings[0].endswith(path)
    assert any(f.startswith(f"WARN not used, it cannot compile ({why}): {folder}") for f in findings)


# ---- which one ----


@pytest.mark.parametrize("text", ["", "not a library"])
def test_a_file_that_is_no_library_is_not_picked(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = not_a_library(tmp_path, text)
    pretend(monkeypatch, broken, LIBRARY)
    assert nvrtc.usable()[0].path == str(broken)
    assert nvrtc.find().path == nvrtc.pick().path == str(LIBRARY)
    assert list(nvrtc.rejected()) == [str(broken)]


def test_a_library_of_something_else_is_not_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without the functions of NVRTC."""
    other = sys.modules["numpy._core._multiarray_umath"].__file__
    assert other
    path = not_a_library(tmp_path)
    shutil.copyfile(other, path)
    pretend(monkeypatch, path, LIBRARY)
    assert nvrtc.find().path == str(LIBRARY)


def test_none_that_works_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = not_a_library(tmp_path)
    pretend(monkeypatch, broken)
    for ask in (nvrtc.find, nvrtc.pick):
        with pytest.raises(cupyflash.UnsupportedError, match=f"does not work: {broken} .*; install one with: pip"):
            ask()
    (finding,) = doctor_checks.compiler()
    assert finding.text.startswith("NVRTC: what was found does not work")
    assert finding.fix.startswith("install one with")


def test_the_newest_that_the_driver_loads_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, first in ((None, 13), ((13, 0), 13), ((12, 8), 12)):
        pretend(monkeypatch, "/b/libnvrtc.so.12", "/cu13/libnvrtc.so.13", driver=driver)
        assert nvrtc.usable()[0].major == first
        assert len(nvrtc.usable()) == (2 if first == 13 else 1)
    pretend(monkeypatch, "/b/libnvrtc.so.12", driver=(11, 8))
    with pytest.raises(cupyflash.UnsupportedError, match=r"driver supports CUDA 11\.8.*update the driver"):
        nvrtc.pick()
    pretend(monkeypatch)
    with pytest.raises(cupyflash.UnsupportedError, match=r"pip install 'cupyflash\[cu12\]'"):
        nvrtc.pick()


@pytest.mark.parametrize(
    "path",
    ["nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
     "nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll", "nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll"],
)  # fmt: skip
def test_wheels_of_all_systems_are_found(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    builtins = ("libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "nvrtc64_130_0.alt.dll", "nvrtc-builtins64_130.dll")
    for name in (file.name, *builtins):
        (file.parent / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(nvrtc, "_system_library", lambda name: None)
    assert list(nvrtc._libraries()) == [(str(file), 13 if "13" in path else 12)]


def test_builtins_are_loaded_before_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows too, by the names they have there."""
    loaded: list[str] = []

    def load(path: str) -> Any:
        loaded.append(Path(path).name)
        raise OSError("not here")

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", load)
    for name in ("nvrtc64_130_0.dll", "nvrtc64_130_0.alt.dll", "nvrtc-builtins64_130.dll"):
        (tmp_path / name).touch()
    with pytest.raises(OSError, match="not here"):
        nvrtc.Nvrtc(str(tmp_path / "nvrtc64_130_0.dll"))
    assert loaded == ["nvrtc-builtins64_130.dll", "nvrtc64_130_0.dll"]


# ---- what is loaded, and when ----


def test_a_kernel_in_the_cache_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_compile(monkeypatch)
    with empty_cache(monkeypatch):
        jit.compile_kernel(SMALL, "sm_80")

        def never(path: str) -> None:
            raise AssertionError(f"{path} was loaded")

        forget()
        monkeypatch.setattr(nvrtc, "Nvrtc", never)
        assert jit.compile_kernel(SMALL, "sm_80").from_cache
        # One that comes first does not hide what another compiled: whether it works is not known without loading it.
        pretend(monkeypatch, "/cu13/libnvrtc.so.13", LIBRARY)
        assert jit.compile_kernel(SMALL, "sm_80").from_cache


def test_threads_prove_a_library_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs: list[str] = []
    real: Callable[[nvrtc.Nvrtc], None] = nvrtc.Nvrtc.prove

    def prove(self: nvrtc.Nvrtc) -> None:
        proofs.append(self.path)
        real(self)

    monkeypatch.setattr(nvrtc.Nvrtc, "prove", prove)
    forget()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: nvrtc.find(), range(8)))
    assert len(proofs) == 1
    assert all(library is found[0] for library in found)


# ---- architectures ----


def compiler(*archs: str) -> Any:
    return SimpleNamespace(archs=archs, name="12.9")


def test_an_unknown_architecture_falls_back_within_its_major() -> None:
    known = compiler("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "sm_1000")
    for arch, target in (("sm_90", "sm_90"), ("sm_90a", "sm_90a"), ("sm_89", "sm_86"), ("sm_121", "sm_120"),
                         ("sm_103", "sm_100"), ("sm_1003", "sm_1000")):  # fmt: skip
        assert jit.target_arch(arch, known) == target
    for arch in ("sm_110", "sm_70", "sm_130"):
        with pytest.raises(cupyflash.UnsupportedError, match=rf"NVRTC 12\.9 knows no architecture.*\({arch}\).*sm_75"):
            jit.target_arch(arch, known)
    with pytest.raises(cupyflash.UnsupportedError, match="sm_103a"):  # runs on no other
        jit.target_arch("sm_103a", known)


def test_the_way_to_a_newer_nvrtc_fits_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, expected in (((12, 8), r"cu12\]', or update the driver"), ((13, 0), r"-U 'cupyflash\[cu13\]'$")):
        monkeypatch.setattr(nvrtc, "driver_version", lambda driver=driver: driver)
        with pytest.raises(cupyflash.UnsupportedError, match=expected):
            jit.target_arch("sm_110", compiler("sm_80"))
