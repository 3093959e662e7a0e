"""Without a GPU, what can be known of the kernels: that they compile, for every architecture of the support table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from cupyflash.compile import jit
from cupyflash.compile.cache import Cubin
from cupyflash.errors import CompileError
from cupyflash.gpu.device import Device
from cupyflash.plan.shipped import shipped
from cupyflash.plan.shipped_cache import shipped_over_cache
from cupyflash.plan.variant import Variant

SUPPORTED = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
SMOKE_ARCH = "sm_90"


@dataclass
class KernelResult:
    """One kernel for one architecture."""

    symbol: str
    arch: str
    cubin: Cubin | None
    error: CompileError | None = None

    @property
    def passed(self) -> bool:
        return self.error is None

    def document(self) -> dict[str, Any]:
        facts = {} if self.cubin is None else {
            "registers": self.cubin.registers, "spill_bytes": self.cubin.spill_bytes,
            "seconds": round(self.cubin.seconds, 3), "from_cache": self.cubin.from_cache,
        }  # fmt: skip
        error = None if self.error is None else self.error.log
        return {"symbol": self.symbol, "arch": self.arch, "passed": self.passed, "error": error, **facts}


def selection(level: str) -> list[tuple[Variant, str]]:
    """smoke: one variant of each kernel, one architecture; quick: for all of them; full: all shipped variants."""
    archs = (SMOKE_ARCH,) if level == "smoke" else SUPPORTED
    work = []
    for arch in archs:
        device = Device.synthetic(arch)
        variants = *shipped(device), *shipped_over_cache(device)
        if level != "full":
            variants = tuple({type(v): v for v in reversed(variants)}.values())
        work += [(v, arch) for v in variants]
    return work


def compile_all(work: list[tuple[Variant, str]]) -> Iterator[KernelResult]:
    """Compile side by side; results as they come.

    Raises:
        UnsupportedError: if there is no usable NVRTC.
    """
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        futures = {pool.submit(jit.compile_kernel, v, arch): (v, arch) for v, arch in work}
        try:
            for future in as_completed(futures):
                variant, arch = futures[future]
                try:
                    yield KernelResult(variant.symbol, arch, future.result())
                except CompileError as e:
                    yield KernelResult(variant.symbol, arch, None, e)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
