"""NVRTC, NVIDIA's run-time compiler, called directly: CUDA C++ text to a cubin for one architecture.

Why not through CuPy's binding: CuPy loads whichever NVRTC it finds first, and beside other packages that can be one of
a newer CUDA major than the driver, whose cubins the driver refuses. This module looks at all of them and picks the
newest that makes what the driver can load, and that compiles at all. It needs neither GPU nor driver nor CUDA headers;
the calls release the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnsupportedError
from ..gpu.driver import driver_version as driver_version

_INSTALL = "install one with: pip install 'cupyflash[cu12]' (or [cu13], for a driver of CUDA 13)"
_NAMES = re.compile(r"libnvrtc\.so\.(\d+)|nvrtc64_(\d+)0_0\.dll")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.\d+\.\d+|nvrtc-builtins64_\d+\.dll")
_PROBE = 'extern "C" __global__ void probe(int* x) {\n    x[threadIdx.x] = 1;\n}\n'


@dataclass(frozen=True)
class Candidate:
    """One NVRTC library on this machine."""

    path: str
    major: int
    usable: bool  # the driver, if there is one, loads what it makes

    @property
    def identity(self) -> str:
        """Tells one build of NVRTC from another without loading it (90 MB): file name and size."""
        path = Path(self.path)
        return f"{path.name}:{path.stat().st_size if path.exists() else 0}"


class NvrtcError(RuntimeError):
    """A program that NVRTC refused; `log` says why."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.log = log


class Nvrtc:
    """One loaded NVRTC library."""

    def __init__(self, path: str) -> None:
        self.path = path
        _load_builtins(path)
        self._lib = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value
        self.name = f"{major.value}.{minor.value}"
        self.archs = self._supported_archs()

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise NvrtcError(f"{name}: {self._lib.nvrtcGetErrorString(status).decode()}")

    def _supported_archs(self) -> tuple[str, ...]:
        n = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(n))
        numbers = (ctypes.c_int * n.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(f"sm_{number}" for number in numbers)

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str], made: str = "CUBIN"
    ) -> tuple[bytes, str]:
        """Compile `source` (called `name` in messages) with in-memory `headers`; return the cubin and the log. Or the
        PTX, if that is what should be `made`.

        NVRTC's own cache (since 12.9) is not asked: it answers without a log, so without registers and spills.

        Raises:
            NvrtcError: with the whole log, if the program has an error.
        """
        options = (*options, *(("--no-cache",) if self.version >= (12, 9) else ()))
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*[text.encode() for text in headers.values()])
        names = (ctypes.c_char_p * len(headers))(*[header.encode() for header in headers])
        flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
        )
        try:
            status = self._lib.nvrtcCompileProgram(program, len(options), flags)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise NvrtcError(log)
            return self._fetch(program, made), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def prove(self) -> None:
        """Compile three lines. Raises NvrtcError if that fails: the library is there, and something it needs is not."""
        if not self.archs:
            raise NvrtcError("it knows no architecture")
        self.compile(_PROBE, "probe.cu", {}, (f"-arch={self.archs[-1]}", "-std=c++17"))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw


def _load_builtins(path: str) -> None:
    """Load the builtins that lie beside a library.

    NVRTC opens them by name, when it first compiles. The wheels of CUDA 13.0 do not tell the loader in which folder; it
    takes those that are loaded already. (On Windows likewise; not run there.)
    """
    folder = Path(path).resolve().parent
    for file in sorted(folder.glob("*nvrtc-builtins*")):
        if _BUILTINS.fullmatch(file.name):
            with contextlib.suppress(OSError):  # NVRTC may find others; `prove` tells
                ctypes.CDLL(str(file))


def _libraries() -> Iterator[tuple[str, int]]:
    """Path and CUDA major of the NVRTC libraries of pip packages, then of the system."""
    for entry in sys.path:
        folder = Path(entry or ".", "nvidia")
        # The wheels for Windows have a folder more since CUDA 13: cu13/bin/x86_64 (not run there).
        for path in sorted([*folder.glob("*/*/*nvrtc*"), *folder.glob("*/bin/*/nvrtc*.dll")]):
            match = _NAMES.fullmatch(path.name)
            if match:
                yield str(path), int(match[1] or match[2])
    for major in (13, 12):
        name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
        if (found := _system_library(name)) is not None:
            yield found, major


def _system_library(name: str) -> str | None:
    """Where a CUDA toolkit or a system package has put `name`."""
    folders = [Path(p) for p in ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")]
    return next((str(folder / name) for folder in folders if (folder / name).exists()), None)


@functools.cache
def candidates() -> tuple[Candidate, ...]:
    """All NVRTC libraries found, the preferred one first."""
    driver = driver_version()
    found = dict(_libraries())
    ranked = [Candidate(path, major, driver is None or major <= driver[0]) for path, major in found.items()]
    return tuple(sorted(ranked, key=lambda c: (not c.usable, -c.major)))


def usable() -> tuple[Candidate, ...]:
    """The libraries whose major is not above the driver's, the preferred one first; whether they work is not known yet.

    Raises:
        UnsupportedError: if there is none, with the way out.
    """
    found = candidates()
    if any(c.usable for c in found):
        return tuple(c for c in found if c.usable)
    if found:
        driver = driver_version()
        assert driver is not None
        raise UnsupportedError(
            f"NVRTC: the driver supports CUDA {driver[0]}.{driver[1]}, but the only NVRTC found is of CUDA "
            f"{found[0].major} ({found[0].path}), whose kernels it cannot load; update the driver, or "
            f"pip install 'nvidia-cuda-nvrtc-cu{driver[0]}'"
        )
    raise UnsupportedError(f"NVRTC: no libnvrtc was found, and a kernel must be compiled; {_INSTALL}")


_choosing = threading.Lock()  # several threads compile at the first call


@functools.cache
def _choose() -> tuple[Candidate, Nvrtc, dict[str, str]]:
    """The first usable library that works, loaded, and why those before it do not, by path."""
    rejected: dict[str, str] = {}
    for candidate in usable():
        try:
            library = Nvrtc(candidate.path)
            library.prove()
        except (OSError, AttributeError, NvrtcError) as e:
            rejected[candidate.path] = " ".join(str(e).split())
        else:
            return candidate, library, rejected
    reasons = ", ".join(f"{path} ({reason})" for path, reason in rejected.items())
    raise UnsupportedError(f"NVRTC: what was found does not work: {reasons}; {_INSTALL}")


def pick() -> Candidate:
    """The library to use: the newest whose major is not above the driver's and that compiles three lines.

    Raises:
        UnsupportedError: if there is none, with the way out.
    """
    with _choosing:
        return _choose()[0]


def find() -> Nvrtc:
    """The picked library, loaded. Raises UnsupportedError as `pick` does."""
    with _choosing:
        return _choose()[1]


def rejected() -> dict[str, str]:
    """Path -> why it does not work, of the libraries that would come before the picked one. Raises as `pick` does."""
    with _choosing:
        return _choose()[2]


def update() -> str:
    """How to get a newer NVRTC that this driver can use."""
    driver = driver_version()
    if driver is None or driver[0] >= 13:
        return "pip install -U 'cupyflash[cu13]'"
    return "pip install -U 'cupyflash[cu12]', or update the driver to CUDA 13 and pip install 'cupyflash[cu13]'"
