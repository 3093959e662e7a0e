"""Tiles that `tools.tune` may measure: which fit, and which of those compile to something worth running."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from cupyflash.compile import jit
from cupyflash.compile.cache import Cubin
from cupyflash.errors import CompileError
from cupyflash.gpu.device import KIB, Device
from cupyflash.launch import prepared as launch
from cupyflash.plan.families import FAMILIES, kernels_of
from cupyflash.plan.kernels import round_up
from cupyflash.plan.spec import Spec
from cupyflash.plan.tiles_sm80 import ForwardTile
from cupyflash.plan.tiles_sm90 import HopperForwardTile
from cupyflash.plan.variant import Variant

Tile = ForwardTile | HopperForwardTile
TILES: dict[str, type[Tile]] = {"sm90": HopperForwardTile, "sm80": ForwardTile}
MAX_REGISTERS, REGISTERS_PER_SM = 255, 65536
SPARE_REGISTERS = 16  # what a thread needs at least besides S, P and O
# Of a consumer's and of the producer's threads, by the number of consumer warpgroups.
REGISTERS = {1: ((240, 24),), 2: ((240, 24), (232, 40)), 3: ((160, 32),), 4: ((112, 32),)}


class Speed(NamedTuple):
    """What was measured in one cell; `percent` is the share of the tensor cores' cycles, where they are counted."""

    causal: bool
    seqlen: int
    tflops: float
    percent: float | None


@dataclass
class Candidate:
    """A tile for one head_dim: why it is left out ("" if it is not), and how fast it is."""

    head_dim: int
    tile: Tile
    reason: str = ""
    registers: int = 0
    speeds: list[Speed] = field(default_factory=list)

    def line(self) -> str:
        """As in the family's file in cupyflash/plan."""
        return f"    ({self.head_dim}, {type(self.tile).__name__}{astuple(self.tile)}),"


def hopper_tiles(head_dim: int, smem_bytes: int) -> Iterator[HopperForwardTile]:
    """Those whose accumulators fit a thread's registers and whose tiles fit the shared memory."""
    sizes = itertools.product(REGISTERS, range(32, 257, 16), (2, 3, 4, 5, 6, 8), (2, 3, 4))
    for groups, block_n, stages, halves in sizes:
        q_slots = groups * halves // 2  # each group's own, half of the groups' next, or all of them
        passed = -(-64 * (groups - 1) // block_n) + (block_n < 64)  # fwd_load_sm90.cuh: kPassed
        if (q_slots % groups and groups != 2) or stages <= passed:
            continue
        for registers in REGISTERS[groups]:
            tile = HopperForwardTile(64 * groups, block_n, stages, q_slots, *registers)
            needed = (round_up(head_dim, 16) + block_n) // 2 + block_n // 4 + SPARE_REGISTERS
            fits = tile.smem_bytes(head_dim) <= smem_bytes
            if fits and needed <= registers[0] and fits_pool(tile, registers_at_launch(groups)):
                yield tile


def registers_at_launch(groups: int) -> int:
    """A thread's, before the warpgroups trade: all of an SM's, in units of 8."""
    return min(MAX_REGISTERS, REGISTERS_PER_SM // (128 * (groups + 1))) // 8 * 8


def fits_pool(tile: HopperForwardTile, at_launch: int) -> bool:
    """Whether what the warpgroups ask for (setmaxnreg) comes free: a block has what it was launched with, no more."""
    asked = tile.groups * tile.consumer_registers + tile.producer_registers
    return asked <= (tile.groups + 1) * round_up(at_launch, 8)


def ampere_tiles(head_dim: int, smem_bytes: int) -> Iterator[ForwardTile]:
    """Those whose accumulators fit a thread's registers and whose tiles fit the shared memory, for each of the blocks
    that an SM is to hold."""
    sizes = itertools.product((64, 128), (32, 48, 64, 80, 96, 128), (4, 8), (2, 3, 4), (1, 2), (False, True), (1, 2))
    for block_m, block_n, warps, stages, blocks, q_in_regs, split_d in sizes:
        tile = ForwardTile(block_m, block_n, warps, stages, blocks, q_in_regs, split_d)
        rows, depth = block_m // (warps // split_d), round_up(head_dim, 16)
        # Up to 128, 32 rows fit one warp; each part of the keys has whole tiles of 16.
        if split_d > 1 and (rows != 32 or head_dim <= 128 or block_n % 32):
            continue
        # P takes the place of S as it is made: half of it counts.
        needed = rows * (depth + block_n) // split_d // 32 + rows * block_n // split_d // 128 + SPARE_REGISTERS
        needed += rows * depth // 64 if q_in_regs else 0
        registers = min(MAX_REGISTERS, REGISTERS_PER_SM // (32 * warps * blocks))
        if rows in (16, 32) and needed <= registers and blocks * (tile.smem_bytes(head_dim) + KIB) <= smem_bytes + KIB:
            yield tile


@contextlib.contextmanager
def in_use(tile: Tile) -> Iterator[None]:
    """The library plans with this tile, whatever its table says. For the whole process: one thread at a time."""
    family = next(FAMILIES[name] for name, kind in TILES.items() if isinstance(tile, kind))
    with mock.patch.object(family, "forward_tile", return_value=tile):
        launch.forget()
        try:
            yield
        finally:
            launch.forget()


def candidates(family: str, head_dim: int, gpu: Device, only: dict[str, tuple[int, ...]]) -> list[Candidate]:
    """The tile in use now, then all others with the values asked for."""
    now: Any = FAMILIES[family].forward_tile(Spec("bf16", head_dim), gpu)
    found = {"sm90": hopper_tiles, "sm80": ampere_tiles}[family](head_dim, gpu.smem_bytes)
    chosen = (t for t in found if all(getattr(t, name) in values for name, values in only.items()))
    return [Candidate(head_dim, tile) for tile in dict.fromkeys((now, *chosen))]


def variants(c: Candidate, family: str, gpu: Device, dtype: str, masks: Sequence[bool]) -> list[Variant]:
    """A candidate's kernels: one for each mask, on sm90 also the form that counts cycles."""
    specs = [
        Spec(dtype, c.head_dim, causal, family=family, clocks=clocks) for causal in masks for clocks in (False, True)
    ]
    with in_use(c.tile):
        return list(dict.fromkeys(v for spec in specs for v in kernels_of(spec, gpu).variants))


def judge(c: Candidate, cubins: Sequence[Cubin]) -> str:
    """Why compiled kernels are not worth running; "" if they are."""
    if any(cubin.spill_bytes for cubin in cubins):
        return "registers spill"
    for cubin in cubins:
        if cubin.advice:
            return f"ptxas: {cubin.advice.splitlines()[0]}"
    if isinstance(c.tile, HopperForwardTile) and not all(fits_pool(c.tile, cubin.registers) for cubin in cubins):
        return "too few registers at launch for the trade"
    return ""


def compile_all(
    found: list[Candidate], gpu: Device, family: str, dtype: str, masks: Sequence[bool], jobs: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Side by side; gives each candidate its registers and, if it is not to run, the reason. `done`: after each."""
    work = [variants(c, family, gpu, dtype, masks) for c in found]

    def one(chosen: list[Variant]) -> list[Cubin] | CompileError:
        try:
            return [jit.compile_kernel(v, gpu.arch) for v in chosen]
        except CompileError as e:
            return e

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        for c, chosen, result in zip(found, work, pool.map(one, work), strict=True):
            if isinstance(result, CompileError):
                c.reason = str(result).splitlines()[0]
            else:
                c.registers = max(cubin.registers for cubin in result)
                # The form that counts cycles may spill where the one that is used does not.
                c.reason = judge(c, [x for v, x in zip(chosen, result, strict=True) if not getattr(v, "clocks", False)])
            done()
