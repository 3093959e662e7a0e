"""What the kernels need to know of a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import DeviceError

KIB = 1024
# Architectures that wheels and CI compile for: largest dynamic shared memory a block may ask for (CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability"), and SM count and L2 of a typical card.
_SYNTHETIC: dict[str, tuple[int, int, int]] = {
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
MIN_CAPABILITY = (8, 0)


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

    @classmethod
    def synthetic(cls, arch: str) -> Device:
        """A stand-in for a GPU of architecture `arch` (one of `ARCHS`), to plan and compile without one."""
        smem_bytes, sm_count, l2_bytes = _SYNTHETIC[arch]
        digits = arch.removeprefix("sm_")
        # A block may use all of an SM's shared memory but the 1 KiB that the system keeps per block.
        return cls(
            name=arch,
            ordinal=-1,
            capability=(int(digits[:-1]), int(digits[-1])),
            sm_count=sm_count,
            smem_bytes=smem_bytes,
            smem_per_sm_bytes=smem_bytes + KIB,
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
        if ordinal >= found:
            raise DeviceError(
                f"device: expected the ordinal of one of the {found} usable GPUs, got {ordinal}; {why_none()}"
            )
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


@functools.cache
def _probe() -> tuple[int, str]:
    """How many GPUs are usable, and the reason when there are none."""
    try:
        from cupy.cuda import runtime
    except Exception as e:  # a broken CuPy raises anything from ImportError to RuntimeError
        return 0, f"CuPy cannot be imported ({e}); install it with: pip install 'cupyflash[cu12]'"
    try:
        return runtime.getDeviceCount(), "no GPU is visible (see CUDA_VISIBLE_DEVICES)"
    except runtime.CUDARuntimeError as e:
        return 0, f"the NVIDIA driver reports no usable GPU ({e}); see: cupyflash doctor"


def count() -> int:
    """Number of usable GPUs; 0 without driver or CuPy."""
    return _probe()[0]


def why_none() -> str:
    """One sentence on why `count()` is 0, with the way out."""
    return _probe()[1]
