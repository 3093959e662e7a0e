"""The checks of `doctor`. Each yields findings; none needs anything but Python and cupyflash's hard dependencies."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from cupyflash import __version__
from cupyflash.compile import cache, nvrtc
from cupyflash.errors import CupyflashError, UnsupportedError
from cupyflash.gpu import device
from cupyflash.launch import run
from cupyflash.launch.prepare import family

from ..output import counted, gib

OK, WARN, FAIL = "OK", "WARN", "FAIL"
MIN_CUPY = 14
FOLDER_ERRORS = ("PermissionError", "FileNotFoundError", "FileExistsError", "NotADirectoryError", "OSError")
VARIABLES = ("CUPYFLASH_BACKEND", "CUPYFLASH_CACHE_DIR", "CUPYFLASH_DEBUG", "CUPYFLASH_FAMILY")
OPTIONAL = ("torch", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "transformers", "flash-attn",
            "flash-attn-4", "flash-attn-3")  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, OK, WARN or FAIL, what was found, and how to fix it."""

    name: str
    status: str
    text: str
    fix: str = ""


@functools.cache
def installed() -> dict[str, str]:
    """Version of every installed distribution, by its normalised name; nothing is imported."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def cupy_packages() -> dict[str, str]:
    """The distributions that install a package called cupy."""
    return {n: v for n, v in installed().items() if re.fullmatch(r"cupy(-cuda\d+x|-cuda\d+|-rocm.*)?", n)}


@functools.cache
def import_cupy() -> tuple[Any, str]:
    """CuPy, or None and why not."""
    try:
        import cupy
    except Exception as e:  # a broken installation raises anything
        return None, f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"
    return cupy, ""


def system() -> Iterator[Finding]:
    yield Finding("cupyflash", OK, f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in VARIABLES:
        if name in os.environ:
            yield _variable(name, os.environ[name])


def _variable(name: str, value: str) -> Finding:
    if name == "CUPYFLASH_DEBUG" and value not in ("", "0", "1"):
        return Finding("variable", WARN, f"{name}={value} has no effect", "set it to 1, or unset it")
    if name == "CUPYFLASH_FAMILY":
        try:
            family()
        except CupyflashError as e:
            return Finding("variable", FAIL, str(e), f"unset {name}")
    return Finding("variable", OK, f"{name}={value}")


def driver() -> Iterator[Finding]:
    version = nvrtc.driver_version()
    if version is None:
        yield Finding("driver", WARN, "no NVIDIA driver: calls run on the CPU path",
                      "for a GPU: install the NVIDIA driver, https://www.nvidia.com/drivers")  # fmt: skip
    elif version < (12, 0):
        yield Finding("driver", FAIL, f"supports CUDA {version[0]}.{version[1]}; 12.0 or newer is needed",
                      "update the NVIDIA driver")  # fmt: skip
    else:
        yield Finding("driver", OK, f"supports CUDA {version[0]}.{version[1]}")


def cupy() -> Iterator[Finding]:
    packages = cupy_packages()
    if not packages:
        major = (nvrtc.driver_version() or (12, 0))[0]
        yield Finding("cupy", WARN, "not installed: calls run on the CPU path, CuPy arrays cannot be made",
                      f"pip install 'cupyflash[cu{13 if major >= 13 else 12}]'")  # fmt: skip
        return
    text = ", ".join(f"{name} {version}" for name, version in packages.items())
    if len(packages) > 1:
        yield Finding("cupy", FAIL, f"{text}: they overwrite each other's files", _one_cupy(packages))
        return
    (name, version), (module, reason) = next(iter(packages.items())), import_cupy()
    if module is None:
        # CuPy makes its own cache folder when it is imported.
        no_folder = reason.split(":")[0] in FOLDER_ERRORS
        fix = "set CUPY_CACHE_DIR to a folder of your own" if no_folder else f"pip install --force-reinstall {name}"
        yield Finding("cupy", FAIL, f"{text} cannot be imported ({reason})", fix)
    elif int(version.split(".")[0]) < MIN_CUPY:
        yield Finding("cupy", WARN, f"{text}; {MIN_CUPY} or newer is tested", f"pip install -U '{name}>={MIN_CUPY}'")
    else:
        yield Finding("cupy", OK, text)
    yield from _cupy_major(name)


def _one_cupy(packages: Iterable[str]) -> str:
    """How to get from several CuPy packages to one."""
    major = (nvrtc.driver_version() or (12, 0))[0]
    return f"pip uninstall -y {' '.join(packages)} && pip install 'cupyflash[cu{13 if major >= 13 else 12}]'"


def _cupy_major(name: str) -> Iterator[Finding]:
    """CuPy's CUDA major against that of the driver, and the headers that CuPy's own kernels include."""
    major = int(digits[1]) if (digits := re.search(r"cuda(\d+)x", name)) else None
    version = nvrtc.driver_version()
    if major is None:
        return
    if version is not None and major > version[0]:
        fix = f"pip uninstall -y {name} && pip install 'cupyflash[cu{version[0]}]', or update the driver"
        yield Finding("cupy", FAIL, f"{name} needs a driver of CUDA {major}, this one supports {version[0]}", fix)
    suffix = "-cu12" if major == 12 else ""
    if found := installed().get(f"nvidia-cuda-runtime{suffix}"):
        agrees = int(found.split(".")[0]) == major
        yield Finding("headers", OK if agrees else WARN, f"nvidia-cuda-runtime{suffix} {found}",
                      "" if agrees else f"pip install 'nvidia-cuda-runtime=={major}.*'")  # fmt: skip
    elif os.environ.get("CUDA_PATH"):
        yield Finding("headers", OK, f"CUDA_PATH={os.environ['CUDA_PATH']}")
    else:
        yield Finding("headers", WARN, "no CUDA headers: CuPy's own kernels may not compile; cupyflash needs none",
                      f"pip install 'cupyflash[cu{major}]'")  # fmt: skip


def gpus() -> Iterator[Finding]:
    count = device.count()
    if not count:
        # Without driver or CuPy there is nothing to fix here: those lines said so.
        has_driver, hidden = nvrtc.driver_version() is not None, os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        broken = has_driver and import_cupy()[0] is not None and not hidden
        text = device.why_none().split(";")[0] if has_driver else "none"
        fix = "check `nvidia-smi` and CUDA_VISIBLE_DEVICES" if broken else ""
        yield Finding("GPU", FAIL if broken else WARN, text, fix)
    for ordinal in range(count):
        gpu = device.Device.of(ordinal)
        text = (
            f"{ordinal}: {gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.sm_count} SMs, "
            f"{gpu.smem_bytes >> 10} KiB shared memory a block, {gib(gpu.l2_bytes)} L2"
        )
        old = gpu.capability < device.MIN_CAPABILITY
        if not old and "bf16" not in gpu.dtypes:
            text += ", kernels of fp16 alone"
        yield Finding(
            "GPU", WARN if old else OK, text, "the kernels need 7.5 or newer; use the CPU path" if old else ""
        )


def compiler() -> Iterator[Finding]:
    """NVRTC: the one that is used, which has compiled three lines by then, and why each of the others is not."""
    try:
        picked = nvrtc.find()
    except UnsupportedError as e:
        (reason, fix), layers = _parts(str(e)), cache.default().layers()
        reason += f"; precompiled kernels run without it, for {', '.join(layers)}" if layers else ""
        yield Finding("NVRTC", FAIL if device.count() and not layers else WARN, reason, fix)
        return
    yield Finding("NVRTC", OK, f"{picked.name} compiles, {picked.path}")
    yield Finding("NVRTC", OK, f"knows {', '.join(picked.archs)}")
    for other in nvrtc.candidates():
        if why := nvrtc.rejected().get(other.path, ""):
            yield Finding("NVRTC", WARN, f"not used, it cannot compile ({why}): {other.path}",
                          "reinstall or remove the package that it belongs to")  # fmt: skip
        elif other.path != picked.path:
            why = "older, or found later" if other.usable else "newer than the driver"
            yield Finding("NVRTC", OK, f"not used ({why}): {other.path}")
    for ordinal in range(device.count()):
        arch = device.Device.of(ordinal).arch
        if arch not in picked.archs:
            yield Finding("NVRTC", WARN, f"does not know {arch}, the architecture of GPU {ordinal}", nvrtc.update())


def _parts(text: str) -> tuple[str, str]:
    """A reason and the way out that follows it."""
    reason, separator, fix = text.rpartition("; ")
    return (reason, fix) if separator else (text, "")


def kernels() -> Iterator[Finding]:
    store = cache.default()
    entries, problem = store.entries(), store.problem
    if problem is None:
        size = gib(sum(e.bytes for e in entries))
        yield Finding("cache", OK, f"{store.path}, {counted(len(entries), 'kernel')}, {size}")
    else:
        reason, fix = _parts(problem)
        yield Finding("cache", WARN, f"new kernels are not kept, each process compiles its own: {reason}", fix)
    problems = store.layer_problems(nvrtc.driver_version())
    for text in problems:
        reason, fix = _parts(text)
        yield Finding("precompiled", WARN, f"kernels are not used: {reason}", fix)
    layers = [f"{len(found)} for {arch}" for arch, found in store.layers().items()]
    if layers and not problems:
        yield Finding("precompiled", OK, f"kernels: {', '.join(layers)}")


def packages() -> Iterator[Finding]:
    found = [f"{name} {installed()[name]}" for name in OPTIONAL if name in installed()]
    absent = [name for name in ("torch", "jax", "flash-attn") if name not in installed()]
    if found:
        yield Finding("optional", OK, ", ".join(found))
    if absent:
        yield Finding("optional", OK, f"not installed (not needed): {', '.join(absent)}")


def backend() -> Iterator[Finding]:
    try:
        chosen = run.backend()
    except CupyflashError as e:
        yield Finding("backend", FAIL, str(e), "unset CUPYFLASH_BACKEND")
        return
    text = "calls on NumPy arrays run on the CPU path"
    if chosen == "cuda":
        is_forced = os.environ.get("CUPYFLASH_BACKEND") == "cuda"
        text = "calls on NumPy arrays run on the GPU" + ("" if is_forced else ", but where the CPU path is faster")
    yield Finding("backend", OK, text)


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("cupyflash", system),
    ("driver", driver),
    ("cupy", cupy),
    ("GPU", gpus),
    ("NVRTC", compiler),
    ("cache", kernels),
    ("optional", packages),
    ("backend", backend),
)
