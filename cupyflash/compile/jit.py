"""From a variant to a kernel that can be launched: compile or find its cubin, load it on one GPU.

Lookup order: this process, the precompiled layer, the user's cache, NVRTC. Everything but `load` works without a GPU.
"""

from __future__ import annotations

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

from ..errors import CompileError, UnsupportedError
from ..gpu.device import Device
from ..plan.variant import Variant, kernel_sources
from . import cache, layer, nvrtc
from .cache import Cubin

log = logging.getLogger("cupyflash")
NOTICE_SECONDS = 0.5  # a compilation that takes longer is announced
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute


def _options(arch: str) -> tuple[str, ...]:
    """NVRTC's flags: kernels are C++17, need no annotations, and report registers and spills in the log."""
    debug = ("-lineinfo",) if os.environ.get("CUPYFLASH_DEBUG") == "1" else ()
    return (f"-arch={arch}", "-std=c++17", "-default-device", "--ptxas-options=-v", *debug)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def target_arch(arch: str, compiler: nvrtc.Nvrtc) -> str:
    """What to compile for: `arch`, or the newest plain one of the same major that NVRTC knows (its cubins run too).

    Raises:
        UnsupportedError: if NVRTC knows none of that major.
    """
    if arch.removesuffix("a") in compiler.archs:
        return arch
    number = int(re.sub(r"\D", "", arch))
    older = [n for n in (int(a.removeprefix("sm_")) for a in compiler.archs) if n // 10 == number // 10 and n < number]
    if older and not arch.endswith("a"):  # kernels for exactly one architecture run on no other
        return f"sm_{max(older)}"
    raise UnsupportedError(
        f"NVRTC {compiler.name} knows no architecture for this GPU ({arch}); it knows {', '.join(compiler.archs)}. "
        f"A newer one may; {nvrtc.update()}"
    )


def compile_kernel(variant: Variant, arch: str) -> Cubin:
    """The variant's cubin for the GPUs of `arch`, from the precompiled layer, the cache, or NVRTC.

    Raises:
        CompileError: if NVRTC refuses the source.
        UnsupportedError: if there is no NVRTC, or none that knows `arch`.
    """
    source, store, symbol, arch = variant.source(), cache.default(), variant.symbol, arch + variant.arch_suffix
    found = store.precompiled(_layer_key(source, arch), symbol, arch, nvrtc.driver_version())
    if found is not None:
        return found
    for candidate in nvrtc.usable():  # any of them may have compiled it; to know which works, one must be loaded
        found = store.read(_key(source, arch, candidate), symbol, arch)
        if found is not None:
            return found
    compiler = nvrtc.find()
    key = _key(source, arch, nvrtc.pick())
    with store.lock(key, symbol):
        found = store.read(key, symbol, arch)  # another process may have been first
        return found if found is not None else store.write(key, _compile(variant, arch, compiler))


def _key(source: str, arch: str, candidate: nvrtc.Candidate) -> str:
    """Of a kernel in the user's cache."""
    return _digest(source, *_options(arch), candidate.identity)


def _layer_key(source: str, arch: str) -> str:
    """Of a kernel in the precompiled layer, which knows no compiler."""
    return _digest(source, arch)


def _compile(variant: Variant, arch: str, compiler: nvrtc.Nvrtc) -> Cubin:
    """Run NVRTC."""
    target = target_arch(arch, compiler)
    notice = threading.Timer(NOTICE_SECONDS, log.warning, ("cupyflash: compiling %s for %s ...", variant.symbol, arch))
    notice.daemon = True
    notice.start()
    start = time.perf_counter()
    try:
        data, text = compiler.compile(variant.source(), f"{variant.symbol}.cu", kernel_sources(), _options(target))
    except nvrtc.NvrtcError as e:
        raise CompileError(variant.symbol, target, e.log, variant.mods) from e
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
        compiler.name,
        "\n".join(re.findall(r"\(C75\d\d\).*", text)),
    )


def precompile(variant: Variant, arch: str, folder: Path) -> Cubin:
    """Compile a variant into the precompiled layer of the cache folder `folder`.

    Raises:
        CompileError, UnsupportedError: as `compile_kernel`.
        OSError: if the folder cannot be written.
    """
    kernel = compile_kernel(variant, arch)
    layer.make(folder, kernel.arch)
    return layer.write(folder, _layer_key(variant.source(), kernel.arch), kernel)


@dataclass(frozen=True)
class Kernel:
    """A kernel loaded on one GPU."""

    variant: Variant
    function: int  # CUfunction
    owner: Any  # CuPy's function, which keeps the module loaded


def _load(variant: Variant, device: Device) -> Kernel:
    """Compile and load; the device must be current."""
    import cupy
    from cupy.cuda import driver

    module = cupy.cuda.Module()
    module.load(compile_kernel(variant, device.arch).data)  # the bytes that were checked, not the file again
    function = module.get_function(variant.symbol)
    if variant.smem_bytes > 0:
        driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, variant.smem_bytes)
    return Kernel(variant, function.ptr, function)


# All stay loaded: a CUDA graph may have captured any of them, and nobody can ask it.
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
