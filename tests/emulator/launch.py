"""Launches kernels on the emulator: buffers between guard pages, modes, and messages with source lines."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import build

Array = NDArray[Any]

IN_ORDER, RANDOM, PRIORITY, STARVE = range(4)
EARLY, LATE, ANY_TIME = range(3)


class EmulatorError(AssertionError):
    """What the emulator has found: a race, a deadlock, an address out of bounds, ..."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a run chooses among what the programming model allows.

    Attributes:
        scheduler: IN_ORDER, RANDOM warps, PRIORITY (a warp may stand still for long), STARVE (one warp runs only when
            nothing else can).
        completion: when asynchronous work is done: EARLY (at issue), LATE (as late as allowed), ANY_TIME.
        race: the happens-before race detector; does not depend on the schedule.
        resident: how many blocks (clusters) run at the same time.
        lanes_alone: each lane of a warp waits on its own; else a warp's lanes pass waits together, as on the device
            unless the compiler splits a warp.
        votes_order: a vote or a shuffle orders the memory accesses of its warp: on the device the values that it moves
            have been read by then. The PTX memory model does not say so.
        whole_a: every warp of a wgmma reads all 64 rows of A, not only its own 16.
        ordered_red: additions to one address must come in a fixed order: for kernels that promise it.
    """

    scheduler: int = RANDOM
    completion: int = LATE
    race: bool = False
    resident: int = 1
    poison: bool = True
    lanes_alone: bool = False
    votes_order: bool = False
    whole_a: bool = False
    ordered_red: bool = False
    max_reports: int = 6


MODES = {
    "race": Mode(race=True, resident=2),
    "late": Mode(resident=2),
    "early": Mode(IN_ORDER, EARLY),
    "any": Mode(RANDOM, ANY_TIME, resident=3),
    "priority": Mode(PRIORITY, LATE, resident=2),
    "starve": Mode(STARVE, LATE),
    "lanes": Mode(RANDOM, ANY_TIME, lanes_alone=True),
    "race lanes": Mode(race=True, lanes_alone=True),
}

_CONFIG = (
    "poison", "max_reports", "cluster", "resident", "lanes_alone", "votes_order", "whole_a", "ordered_red", "planted",
    "dependent",
)  # fmt: skip


class _Config(ctypes.Structure):
    """runtime/common.h: Config."""

    _fields_ = [
        *[(name, ctypes.c_uint32) for name in ("blocks", "threads", "smem_bytes")],
        *[(name, ctypes.c_int) for name in ("scheduler", "completion", "race", "seed", *_CONFIG)],
    ]


class Stats(ctypes.Structure):
    """runtime/common.h: Stats. What a launch has done."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "switches", "collectives", "matrix_ops", "async_ops", "accesses", "races", "ldmatrix",
            "ldmatrix_wavefronts",
        )
    ]  # fmt: skip


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator, loaded once a process. Kernels find its functions by name, hence RTLD_GLOBAL."""
    library = ctypes.CDLL(str(build.build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.emu_alloc.restype = ctypes.c_void_p
    library.emu_alloc.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.emu_free.argtypes = [ctypes.c_void_p]
    library.emu_protect.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library


def tensor_map(
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    element_bytes: int = 2,
) -> NDArray[np.uint64]:
    """A tensor map as the emulator's kernels get it: 128 bytes. Sizes, box and strides (of dimension 1 and up)
    innermost first."""
    out, n = np.zeros(16, np.uint64), len(sizes)
    failed = runtime().emu_tensor_map_encode(
        ctypes.c_void_p(out.ctypes.data), n, element_bytes, ctypes.c_void_p(address), (ctypes.c_uint64 * n)(*sizes),
        (ctypes.c_uint64 * max(1, n - 1))(*strides_bytes), (ctypes.c_uint32 * n)(*box), swizzle,
    )  # fmt: skip
    if failed:
        raise EmulatorError(f"tensor map refused, rule {failed}: {sizes} {strides_bytes} {box} at {address:#x}")
    return out


class Memory:
    """Global memory of one test: named buffers between guard pages. A context manager that frees them."""

    def __init__(self) -> None:
        self._addresses: list[int] = []

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        for address in self._addresses:
            runtime().emu_free(address)
        self._addresses.clear()

    def raw(
        self, name: str, n_bytes: int, *, at_start: bool = False, granule: int = 2, pad: int = 0
    ) -> tuple[int, Array]:
        """The address and the bytes of a buffer, all 0xff: NaN in every dtype. Copy what you keep. It starts `pad`
        bytes after a multiple of 16. Races are found by pieces of `granule` bytes."""
        address = runtime().emu_alloc(name.encode(), n_bytes, int(at_start), granule, pad)
        self._addresses.append(address)
        return address, np.ctypeslib.as_array((ctypes.c_ubyte * n_bytes).from_address(address))

    def output(self, name: str, shape: Sequence[int], dtype: Any) -> tuple[int, Array]:
        """A buffer that kernels write, poisoned with NaN; the array is a view of it."""
        size = np.dtype(dtype).itemsize
        address, data = self.raw(name, int(np.prod(shape)) * size, granule=min(size, 4))
        return address, data.view(dtype).reshape(shape)

    def input(self, name: str, x: Array, *, writable: bool = False) -> int:
        """The address of a copy of x, with the strides and the alignment of x. Writing to it is an error."""
        low, high = np.lib.array_utils.byte_bounds(x)
        address, data = self.raw(name, high - low, granule=min(x.itemsize, 2), pad=low % 16)
        data[:] = np.ctypeslib.as_array((ctypes.c_ubyte * (high - low)).from_address(low))
        if not writable:
            runtime().emu_protect(address, 0)
        return address + x.__array_interface__["data"][0] - low


class EmulatedKernel:
    """A kernel on the CPU.

    Args:
        source, headers, symbol: as for NVRTC, see `build.Unit`.
        arch: 750, 800, ...: what ``__CUDA_ARCH__`` would be.
        unit: all kernels of the source that are used, if more than one: they are compiled together.
        planted: which bug of the headers is alive.
    """

    def __init__(
        self,
        source: str,
        headers: Mapping[str, str],
        symbol: str,
        arch: int = 800,
        unit: Sequence[str] = (),
        planted: int = 0,
    ) -> None:
        runtime()
        self.planted = planted
        self.symbol = symbol
        made = build.Unit(source, headers, tuple(unit) or (symbol,), arch)
        build.build([made])
        self.path = made.library
        self._entry = getattr(ctypes.CDLL(str(self.path)), f"emu_entry_{symbol}")
        self.stats = Stats()

    def __call__(
        self,
        grid: int,
        threads: int,
        smem_bytes: int,
        args: Sequence[Any],
        mode: Mode = MODES["race"],
        seed: int = 0,
        cluster: int = 1,
        dependent: bool = False,
    ) -> None:
        """Run the grid, which may be `dependent`: start before the launch in front of it has ended. `args`: its
        parameters: NumPy structured scalars, NumPy numbers, or bytes-like tensor maps.

        Raises:
            EmulatorError: with what was found, where in the kernel, by which block, warp and lane.
        """
        values = [np.ascontiguousarray(a).copy() for a in args]
        pointers = (ctypes.c_void_p * len(values))(*[v.ctypes.data for v in values])
        facts = dataclasses.asdict(mode) | {"cluster": cluster, "planted": self.planted, "dependent": dependent}
        config = _Config(grid, threads, smem_bytes, mode.scheduler, mode.completion, mode.race, seed)
        for name in _CONFIG:
            setattr(config, name, int(facts[name]))
        message = ctypes.create_string_buffer(1 << 16)
        failed = runtime().emu_launch(
            self._entry, pointers, ctypes.byref(config), message, len(message), ctypes.byref(self.stats)
        )
        if failed:
            text = resolve(message.value.decode(errors="replace"), self.path)
            raise EmulatorError(f"{self.symbol}, seed {seed}: {text}")


def resolve(message: str, library: Path) -> str:
    """Replace the {pc+0x..} tokens of the runtime by source lines; call stacks by chains, innermost first."""
    tokens = sorted(set(re.findall(r"\{pc\+(0x[0-9a-f]+)\}", message)))
    if not tokens:
        return message
    addresses = [hex(int(t, 16) - 1) for t in tokens]  # the call, not the instruction after it
    done = subprocess.run(["addr2line", "-a", "-i", "-e", str(library), *addresses], capture_output=True, text=True)
    chains: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("0x"):
            chains[hex(int(line, 16) + 1)] = current = []
        elif (place := _place(line)) is not None:
            current.append(place)
    expanded = re.sub(r"\{pc\+(0x[0-9a-f]+)\}", lambda m: " < ".join(chains.get(m[1]) or ["?"]) + " < ", message)
    return re.sub(r" < (?=$|\n|[^<\w?])|(\? < )", "", expanded, flags=re.MULTILINE)


def _place(line: str) -> str | None:
    """kernels_cu/x.cuh:12 of a line of addr2line; None for what is not kernel source."""
    match = re.search(r"(kernels_cu/[\w./]+|[\w.]+-[0-9a-f]{16}\.cpp):(\d+)", line)
    if not match or "/twin/" in line:
        return None
    name = match[1] if match[1].startswith("kernels_cu/") else "entry unit"
    return f"{name}:{match[2]}"
