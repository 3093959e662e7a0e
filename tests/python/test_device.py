"""Looking for GPUs: ordinals that there are not, and a CuPy that is missing, broken, hidden or half imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import cupyflash
from cupyflash.gpu import device
from cupyflash.gpu.device import Device


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test looks for itself."""
    monkeypatch.setattr(device, "_found", None)


@pytest.mark.parametrize("ordinal", [-1, -3, 2, 99])
def test_ordinals_that_there_are_not(ordinal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_probe", lambda: (2, "no GPU is visible"))
    with pytest.raises(cupyflash.DeviceError, match=rf"a usable GPU, 0 to 1 .*; got {ordinal}$"):
        Device.of(ordinal)


def test_no_gpu_at_all_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_probe", lambda: (0, "no GPU is visible (see CUDA_VISIBLE_DEVICES)"))
    with pytest.raises(cupyflash.DeviceError, match=r"there is none: no GPU is visible .*; got -1$"):
        Device.of(-1)


def a_cupy(monkeypatch: pytest.MonkeyPatch, count: Callable[[], int]) -> type[Exception]:
    """A CuPy that counts GPUs like this; its CUDA error."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.runtime")
    cupy, cuda, runtime = modules = [ModuleType(name) for name in names]
    error: type[Exception] = type("CUDARuntimeError", (RuntimeError,), {})
    cupy.cuda, cuda.runtime = cuda, runtime  # type: ignore[attr-defined]
    runtime.CUDARuntimeError, runtime.getDeviceCount = error, count  # type: ignore[attr-defined]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    return error


def test_without_a_driver_no_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise error("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    error = a_cupy(monkeypatch, fail)
    monkeypatch.setattr(device, "driver_version", lambda: None)
    assert device.count() == 0
    assert device.why_none() == "there is no NVIDIA driver; install one from https://www.nvidia.com/drivers"
    monkeypatch.setattr(device, "_found", None)
    monkeypatch.setattr(device, "driver_version", lambda: (12, 4))
    assert device.why_none().startswith("the NVIDIA driver reports no usable GPU (cudaErrorInsufficientDriver")


def test_a_cupy_that_is_hidden_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "cupy", None)
        assert device.count() == 0
        assert device.why_none().startswith("CuPy cannot be imported (")
    a_cupy(monkeypatch, lambda: 3)
    assert device.count() == 3


def run(program: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write_cupy(folder: Path, top: str) -> None:
    """A package called cupy that begins with `top` and sees one GPU."""
    cuda = folder / "cupy" / "cuda"
    cuda.mkdir(parents=True)
    (folder / "cupy" / "__init__.py").write_text(f"{top}\nndarray = object\nfrom cupy import cuda\ncuda.Stream\n")
    (cuda / "__init__.py").write_text("import cupy\ncupy.ndarray\nStream = object\n")  # they use each other
    (cuda / "runtime.py").write_text("class CUDARuntimeError(RuntimeError): pass\ndef getDeviceCount(): return 1\n")


def test_a_cupy_that_another_thread_imports_is_waited_for(tmp_path: Path) -> None:
    """A second thread that begins with a part of CuPy would break the import of the first."""
    write_cupy(tmp_path, "import time; time.sleep(0.3)")
    program = (
        "import threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from cupyflash.gpu import device\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    imported = pool.submit(__import__, 'cupy'); time.sleep(0.1)\n"
        "    print(device.count(), imported.result().__name__)\n"
    )
    assert run(program, tmp_path) == "1 cupy"


def test_a_cupy_that_is_half_imported_is_looked_for_again(tmp_path: Path) -> None:
    """By the thread that asks: what CuPy imports may call cupyflash."""
    write_cupy(tmp_path, "from cupyflash.gpu import device; print(device.count())")
    program = "import cupy; from cupyflash.gpu import device; print(device.count())"
    assert run(program, tmp_path).splitlines() == ["0", "1"]


def test_a_broken_cupy_is_imported_once(tmp_path: Path) -> None:
    write_cupy(tmp_path, "print('imported'); raise ImportError('libcudart.so.12: no such file')")
    program = "from cupyflash.gpu import device; print([device.count() for _ in range(3)], device.why_none())"
    first, second = run(program, tmp_path).splitlines()
    assert first == "imported"
    assert second == "[0, 0, 0] CuPy cannot be imported (libcudart.so.12: no such file); see: cupyflash doctor"
