"""Runs the layout probes on a GPU of compute capability 9.0 and writes their outputs to golden/h200.npz.

    PYTHONPATH=. python tests/probing/probe_gpu.py [--out FILE]

Needs CuPy and NVRTC, like the library. Each unit of probes runs in a process of its own with a time limit. A probe
that hangs or fails ruins the CUDA context, so a new process then takes up the unit behind it. The whole takes under a
minute. Exit status 0 if every probe has a result.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.probing import probes  # noqa: E402
from tests.probing.probes import Map, Probe, Words  # noqa: E402

_OPTIONS = ("-arch=sm_90a", "-std=c++17", "-default-device")
_UNIT_SECONDS = 40
_PARALLEL = 6  # each process compiles on the CPU for most of its time
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_UINT16, _FLOAT32 = 1, 7  # CUtensorMapDataType


class Driver:
    """The few calls of the CUDA driver that a probe needs, in CuPy's context."""

    def __init__(self) -> None:
        import cupy

        cupy.zeros(1)  # makes the context
        self._lib = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with CUresult {status}")

    def encode(self, m: Map, address: int) -> Any:
        """A CUtensorMap: 128 bytes at a multiple of 64."""
        n = len(m.sizes)
        storage = np.zeros(24, np.uint64)
        out = storage[(-storage.ctypes.data % 64) // 8 :][:16]
        self.call(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(out.ctypes.data), _FLOAT32 if m.is_float else _UINT16, n,
            ctypes.c_void_p(address), (ctypes.c_uint64 * n)(*m.sizes),
            (ctypes.c_uint64 * max(1, n - 1))(*m.strides_bytes),
            (ctypes.c_uint32 * n)(*m.box), (ctypes.c_uint32 * n)(*[1] * n), 0, m.swizzle, 0, 0,
        )  # fmt: skip
        return out


def run_probe(driver: Driver, module: ctypes.c_void_p, probe: Probe) -> Words:
    import cupy

    function = ctypes.c_void_p()
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, probe.symbol.encode())
    driver.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, probe.smem_bytes)
    source, out = cupy.asarray(probe.words_in), cupy.asarray(probe.out)
    tensor = np.zeros(16, np.uint64)
    if probe.map:
        tensor = driver.encode(probe.map, (source if probe.map.on == "in" else out).data.ptr)
    values = [tensor, np.array(source.data.ptr, np.uint64), np.array(out.data.ptr, np.uint64), probe.structured_args]
    pointers = (ctypes.c_void_p * 4)(*[v.ctypes.data for v in values])
    cupy.cuda.Device().synchronize()
    driver.call(
        "cuLaunchKernel", function, probe.blocks, 1, 1, probe.threads, 1, 1, probe.smem_bytes, None, pointers, None
    )
    driver.call("cuCtxSynchronize")
    return cupy.asnumpy(out)


def launched(name: str, folder: Path) -> list[str]:
    """The probes of the unit that have been launched, successfully or not."""
    file = folder / f"{name}.launched"
    return file.read_text().split() if file.exists() else []


def run_unit(name: str, folder: Path) -> int:
    """One process: compile the unit, run its probes that no process has launched before, keep each result at once."""
    unit, file = probes.units()[name], folder / f"{name}.cubin"
    if not file.exists():
        from cupyflash.compile import nvrtc

        cubin, _ = nvrtc.find().compile(probes.unit_source(unit), f"{name}.cu", probes.headers(), _OPTIONS)
        file.write_bytes(cubin)
    driver = Driver()
    module = ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), file.read_bytes())
    before = launched(name, folder)
    for probe in unit:
        if probe.name in before:
            continue
        with (folder / f"{name}.launched").open("a") as names:
            print(probe.name, file=names)
        result = run_probe(driver, module, probe)
        temporary = folder / f"{probe.name}.tmp.npy"
        np.save(temporary, result)
        os.replace(temporary, folder / f"{probe.name}.npy")
    return 0


def run_all(out: Path) -> int:
    start = time.monotonic()
    waiting, failures = list(probes.units()), list[str]()
    running: dict[str, tuple[subprocess.Popen[bytes], float, int, TextIO]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        while waiting or running:
            while waiting and len(running) < _PARALLEL:
                name = waiting.pop(0)
                command = [sys.executable, __file__, "--unit", name, "--out", str(folder)]
                log: TextIO = (folder / f"{name}.log").open("w+")
                process = subprocess.Popen(command, stdout=log, stderr=log)
                running[name] = process, time.monotonic(), len(launched(name, folder)), log
            time.sleep(0.1)
            for name, (process, began, n_before, log) in list(running.items()):
                if process.poll() is None and time.monotonic() - began < _UNIT_SECONDS:
                    continue
                if process.poll() is None:
                    process.kill()
                    what = f"still running after {_UNIT_SECONDS} s"
                else:
                    what = f"exit status {process.returncode}"
                process.wait()
                if process.returncode:
                    log.seek(0)
                    names = launched(name, folder)
                    failures.append(f"{name}, {names[-1] if names else 'no probe yet'}: {what}\n{log.read()[-2000:]}")
                    if n_before < len(names) < len(probes.units()[name]):
                        waiting.append(name)
                log.close()
                del running[name]
        results = {f.stem: np.load(f) for f in sorted(folder.glob("*.npy")) if ".tmp" not in f.name}
    missing = sorted(set(probes.all_probes()) - set(results))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **results)
    print(f"{len(results)} probes written to {out} in {time.monotonic() - start:.0f} s")
    for failure in failures:
        print(f"FAILED {failure}")
    if missing:
        print(f"no result: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=probes.GOLDEN)
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.exit(run_unit(options.unit, options.out) if options.unit else run_all(options.out))
