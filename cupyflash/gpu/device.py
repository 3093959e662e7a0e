"""What the kernels need to know of a GPU."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import DeviceError
from .driver import driver_version

KIB = 1024
# Architectures that wheels and CI compile for: largest dynamic shared memory a block may ask for (CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability"), and SM count and L2 of a typical card.
_SYNTHETIC: dict[str, tuple[int, int, int]] = {
    "sm_75": (64 * KIB, 40, 4 << 20),
    "sm_80": (163 * KIB, 108, 40 << 20),
    "sm_86": (99 * KIB, 82, 6 << 20),
    "sm_87": (163 * KIB, 16, 4 << 20),
    "sm_89": (99 * KIB, 128, 72 << 20),
    "sm_90": (227 * KIB, 132, 50 << 20),
    "sm_100": (227 * KIB, 148, 126 << 20),
    "sm_103": (227 * KIB, 148, 126 << 20),
    "sm_110": (227 * KIB, 20, 32 << 20),
    "sm_120": (99 * KIB, 170, 96 << 20),
    "sm_121": (99 * KIB, 48, 24 << 20),
}
ARCHS = tuple(_SYNTHETIC)
MIN_CAPABILITY = (7, 5)
BF16_CAPABILITY = (8, 0)
_SMALL_BYTES, _TINY_BYTES = 160 * KIB, 80 * KIB


def reserved_smem(capability: tuple[int, int]) -> int:
    """Bytes of an SM's shared memory that the system keeps for each block."""
    return KIB if capability >= (8, 0) else 0


@dataclass(frozen=True)
class Device:
    """One GPU, or a stand-in to compile for."""

    name: str
    ordinal: int
    capability: tuple[int, int]
    sm_count: int
    smem_bytes: int  # dynamic shared memory one block may use
    smem_per_sm_bytes: int
    l2_bytes: int

    @property
    def arch(self) -> str:
        """The plain architecture that the ``sm80`` family is compiled for, such as ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def is_small(self) -> bool:
        """Whether a multiprocessor's shared memory leaves no room for many stages, nor for two large blocks."""
        return self.smem_per_sm_bytes < _SMALL_BYTES

    @property
    def is_tiny(self) -> bool:
        """Whether it leaves hardly room for one (Turing's 64 KiB)."""
        return self.smem_per_sm_bytes < _TINY_BYTES

    @property
    def halves(self) -> tuple[str, ...]:
        """Those of its kernels that have 16 bits: what is compiled where nobody names a dtype."""
        return ("bf16", "fp16") if self.capability >= BF16_CAPABILITY else ("fp16",)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those of its kernels."""
        return (*self.halves, "fp32") if self.capability >= BF16_CAPABILITY else self.halves

    @classmethod
    def synthetic(cls, arch: str) -> Device:
        """A stand-in for a GPU of architecture `arch` (one of `ARCHS`), to plan and compile without one."""
        smem_bytes, sm_count, l2_bytes = _SYNTHETIC[arch]
        digits = arch.removeprefix("sm_")
        capability = int(digits[:-1]), int(digits[-1])
        return cls(
            name=arch,
            ordinal=-1,
            capability=capability,
            sm_count=sm_count,
            smem_bytes=smem_bytes,
            smem_per_sm_bytes=smem_bytes + reserved_smem(capability),
            l2_bytes=l2_bytes,
        )

    @classmethod
    @functools.cache
    def of(cls, ordinal: int) -> Device:
        """The GPU with this CUDA ordinal.

        Raises:
            DeviceError: if there is no such GPU, driver or CuPy.
        """
        found = count()
        if not 0 <= ordinal < found:
            numbers = f"0 to {found - 1} (see CUDA_VISIBLE_DEVICES)" if found else f"there is none: {why_none()}"
            raise DeviceError(f"device: expected the ordinal of a usable GPU, {numbers}; got {ordinal}")
        from cupy.cuda import runtime

        p = runtime.getDeviceProperties(ordinal)
        return cls(
            name=p["name"].decode(),
            ordinal=ordinal,
            capability=(p["major"], p["minor"]),
            sm_count=p["multiProcessorCount"],
            smem_bytes=p["sharedMemPerBlockOptin"],
            smem_per_sm_bytes=p["sharedMemPerMultiprocessor"],
            l2_bytes=p["l2CacheSize"],
        )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The calling thread's current GPU inside, with its context, which a new thread lacks."""
        from cupy.cuda import runtime

        before = runtime.getDevice()
        runtime.setDevice(self.ordinal)
        try:
            yield
        finally:
            if before != self.ordinal:
                runtime.setDevice(before)


_found: tuple[int, str] | None = None


def _probe() -> tuple[int, str]:
    """How many GPUs are usable, and the reason when there are none."""
    global _found
    if _found is None:
        found, is_final = _ask()
        if not is_final:
            return found
        _found = found
    return _found


def _ask() -> tuple[tuple[int, str], bool]:
    """What `_probe` tells, and whether that will stay so."""
    try:
        import cupy  # noqa: F401 first, since this waits for another thread that imports it
        from cupy.cuda import runtime
    except Exception as e:  # a broken CuPy raises anything from ImportError to RuntimeError
        # A CuPy that cannot be imported leaves no trace. One that is there is half imported, by another thread or the
        # one that asks, or was put there by a test.
        is_final = "cupy" not in sys.modules
        is_absent = isinstance(e, ModuleNotFoundError) and e.name == "cupy" and is_final
        way_out = "install it with: pip install 'cupyflash[cu12]'" if is_absent else "see: cupyflash doctor"
        return (0, f"CuPy cannot be imported ({e}); {way_out}"), is_final
    try:
        return (runtime.getDeviceCount(), "no GPU is visible (see CUDA_VISIBLE_DEVICES)"), True
    except runtime.CUDARuntimeError as e:
        if driver_version() is None:
            reason = "there is no NVIDIA driver; install one from https://www.nvidia.com/drivers"
        else:
            reason = f"the NVIDIA driver reports no usable GPU ({e}); see: cupyflash doctor"
        return (0, reason), True


def count() -> int:
    """Number of usable GPUs; 0 without driver or CuPy."""
    return _probe()[0]


def usual_dtype(*, on_gpu: bool) -> str:
    """What is taken where nobody names a dtype: bf16, or what the first GPU has in its place."""
    return Device.of(0).dtypes[0] if on_gpu and count() else "bf16"


def current() -> Callable[[], int]:
    """What asks for the ordinal of the GPU that is current on this thread; there must be one."""
    from cupy.cuda import runtime

    return runtime.getDevice


def read(address: int, to: np.ndarray, stream: int) -> None:
    """Copy from the memory of the current GPU to the host, once all work on `stream` is done."""
    from cupy.cuda import runtime

    runtime.streamSynchronize(stream)
    runtime.memcpy(to.ctypes.data, address, to.nbytes, runtime.memcpyDeviceToHost)


def why_none() -> str:
    """One sentence on why `count()` is 0, with the way out."""
    return _probe()[1]
