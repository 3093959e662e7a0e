"""From a variant to a kernel that can be launched: compile or find its cubin, load it on one GPU.

Lookup order: this process, the precompiled layer, the user's cache, NVRTC. Everything but `load` works without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache, nvrtc
from .cache import Cubin
from .device import Device
from .errors import CompileError, UnsupportedError
from .variant import Variant, kernel_sources

log = logging.getLogger("cupyflash")
NOTICE_SECONDS = 0.5  # a compilation that takes longer is announced
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute


def _options(arch: str) -> tuple[str, ...]:
    """NVRTC's flags: kernels are C++17, need no annotations, and report registers and spills in the log."""
    debug = ("-lineinfo",) if os.environ.get("CUPYFLASH_DEBUG") else ()
    return (f"-arch={arch}", "-std=c++17", "-default-device", "--ptxas-options=-v", *debug)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def target_arch(arch: str, known: Iterable[str]) -> str:
    """What to compile for: `arch`, or the newest plain one of the same major that NVRTC knows (its cubins run too).

    Raises:
        UnsupportedError: if NVRTC knows none of that major.
    """
    if arch.removesuffix("a") in (known := tuple(known)):
        return arch
    same_major = [a for a in known if a[:-1] == arch[:-1] and a < arch]
    if not same_major:
        raise UnsupportedError(
            f"NVRTC {nvrtc.find().version} knows no architecture for this GPU ({arch}); it knows {', '.join(known)}. "
            "Update it: pip install -U 'cupyflash[cu13]'"
        )
    return max(same_major)


def compile_kernel(variant: Variant, arch: str) -> Cubin:
    """The variant's cubin for the GPUs of `arch`, from the precompiled layer, the cache, or NVRTC.

    Raises:
        CompileError: if NVRTC refuses the source.
        UnsupportedError: if there is no NVRTC, or none that knows `arch`.
    """
    source, store, arch = variant.source(), cache.default(), arch + variant.arch_suffix
    found = store.precompiled(_digest(source, arch), arch)
    if found is not None:
        return found
    key = _digest(source, *_options(arch), nvrtc.identity())
    found = store.read(key)
    if found is not None:
        return found
    with store.lock(key):
        found = store.read(key)  # another process may have been first
        return found if found is not None else store.write(key, _compile(variant, arch))


def _compile(variant: Variant, arch: str) -> Cubin:
    """Run NVRTC."""
    compiler = nvrtc.find()
    target = target_arch(arch, compiler.archs)
    notice = threading.Timer(NOTICE_SECONDS, log.warning, ("cupyflash: compiling %s for %s ...", variant.symbol, arch))
    notice.daemon = True
    notice.start()
    start = time.perf_counter()
    try:
        # NVRTC's own cache (since 12.9) would answer without a log, so without registers and spills.
        options = (*_options(target), *(("--no-cache",) if compiler.version >= (12, 9) else ()))
        data, text = compiler.compile(variant.source(), f"{variant.symbol}.cu", kernel_sources(), options)
    except nvrtc.NvrtcError as e:
        raise CompileError(variant.symbol, target, e.log) from e
    finally:
        notice.cancel()
    seconds = time.perf_counter() - start
    log.info("compiled %s for %s in %.2f s\n%s", variant.symbol, target, seconds, text)
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill", text)
    return Cubin(
        data,
        variant.symbol,
        arch,
        int(registers[1]) if registers else 0,
        sum(map(int, spills)),
        seconds,
        "{}.{}".format(*compiler.version),
        "\n".join(re.findall(r"\(C75\d\d\).*", text)),
    )


def precompile(variant: Variant, arch: str, folder: Path) -> Cubin:
    """Compile a variant into the precompiled layer of the cache folder `folder`."""
    cubin = compile_kernel(variant, arch)
    layer = folder / "precompiled" / cubin.arch
    layer.mkdir(mode=0o755, parents=True, exist_ok=True)
    return cache.write(layer, _digest(variant.source(), cubin.arch), dataclasses.replace(cubin))


@dataclass(frozen=True)
class Kernel:
    """A kernel loaded on one GPU."""

    variant: Variant
    function: int  # CUfunction
    owner: Any  # keeps the module loaded


def _load(variant: Variant, device: Device) -> Kernel:
    """Compile and load; the device must be current."""
    import cupy
    from cupy.cuda import driver

    cubin = compile_kernel(variant, device.arch)
    if cubin.path is not None:
        owner = cupy.RawModule(path=cubin.path).get_function(cubin.symbol)
        function = owner.kernel.ptr
    else:  # no folder is writable
        owner = cupy.cuda.Module()
        owner.load(cubin.data)
        function = owner.get_function(cubin.symbol).ptr
    if variant.smem_bytes > 0:
        driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, variant.smem_bytes)
    return Kernel(variant, function, owner)


_kernels: dict[tuple[Variant, int], Kernel] = {}
_locks: dict[tuple[Variant, int], threading.Lock] = {}


def load(variant: Variant, device: Device, stream: int = 0) -> Kernel:
    """The kernel on this device, compiled and loaded at the first call.

    Raises:
        UnsupportedError: if `stream` is being captured into a CUDA graph and the kernel is not loaded yet.
        CompileError, UnsupportedError: as `compile_kernel`.
    """
    key = variant, device.ordinal
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    import cupy

    if cupy.cuda.runtime.streamIsCapturing(stream):
        raise UnsupportedError(
            f"kernel {variant.symbol} is not loaded yet and cannot be while a CUDA graph is captured; "
            "call the same function once before the capture, or cupyflash.warmup(...)"
        )
    with _locks.setdefault(key, threading.Lock()), cupy.cuda.Device(device.ordinal):
        if key not in _kernels:
            _kernels[key] = _load(variant, device)
        return _kernels[key]


@functools.cache
def launcher() -> Any:
    """``launchKernel(function, grid x, y, z, block x, y, z, smem, stream, params, extra)`` of the CUDA driver."""
    from cupy.cuda import driver

    return driver.launchKernel


def load_all(variants: Iterable[Variant], device: Device) -> Iterator[Kernel]:
    """Load several kernels, compiled side by side."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        yield from pool.map(lambda v: load(v, device), variants)
