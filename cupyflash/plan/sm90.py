"""The sm90 family: wgmma, TMA, mbarrier and setmaxnreg, on Hopper alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..operand import MASK_TILE
from .family import Family
from .kernels import Convert, ConvertTile, Delta, DeltaTile, Main, Slopes, SlopesTile, learned
from .lists import lists_before
from .params import BWD_SM90_PARAMS, FWD_SM90_PARAMS
from .spec import Spec
from .variant import Variant


def _row_bytes(head_dim: int) -> int:
    """Of a tile in chunks of 64 columns."""
    return 128 * -(-head_dim // 64)


@dataclass(frozen=True)
class HopperForwardTile:
    """Each of `groups` consumer warpgroups computes 64 of `block_m` queries against key blocks of `block_n`.

    K and V have rings of `stages` tiles each, Q one of `q_slots` tiles of 64 rows. A thread of a consumer may use
    `consumer_registers`, one of the producer `producer_registers`: together they fill the register file.
    """

    block_m: int
    block_n: int
    stages: int
    q_slots: int
    consumer_registers: int
    producer_registers: int
    blocks_per_sm = 1

    @property
    def groups(self) -> int:
        return self.block_m // 64

    @property
    def warps(self) -> int:
        """The consumers' and the producer's."""
        return 4 * (self.groups + 1)

    @property
    def name(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}q{self.q_slots}"

    def smem_bytes(self, head_dim: int) -> int:
        """Q, K and V, mbarriers, the queue of work."""
        barriers = 2 * self.q_slots + 4 * self.stages + 4
        return (64 * self.q_slots + 2 * self.stages * self.block_n) * _row_bytes(head_dim) + 8 * barriers + 32


@dataclass(frozen=True)
class HopperBackwardTile:
    """A block keeps `block_n` keys and visits query tiles of `block_m` through `stages`.

    A thread of a consumer may use `consumer_registers`, one of the producer `producer_registers`. Consumers hold the
    first `held_columns` of V in registers, so that shared memory is read less.
    """

    block_m: int
    block_n: int
    stages: int
    consumer_registers: int
    producer_registers: int
    held_columns: int = 0
    blocks_per_sm = 1

    @property
    def warps(self) -> int:
        """The consumers', 16 keys each, and the producer's."""
        return self.block_n // 16 + 4

    @property
    def name(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}"

    def smem_bytes(self, head_dim: int) -> int:
        """K, V, the stages of Q, dO and row_stats, two dS, two dQ, mbarriers."""
        m, n, row = self.block_m, self.block_n, _row_bytes(head_dim)
        queries = self.stages * (2 * m * row + 8 * m)
        return 2 * n * row + queries + 2 * m * n * 2 + 4 * m * row + 8 * (10 + 3 * self.stages)


class HopperDkvTile(HopperBackwardTile):
    """dK and dV of 64 keys, of whose columns each of two consumer warpgroups has half."""

    warps = 12

    def smem_bytes(self, head_dim: int) -> int:
        """K, V, the stages of Q, dO and row_stats, two P, mbarriers, the queue."""
        m, row = self.block_m, _row_bytes(head_dim)
        return 2 * 64 * row + self.stages * (2 * m * row + 8 * m) + 2 * m * 128 + 8 * (12 + 4 * self.stages) + 32


class HopperDqTile(HopperBackwardTile):
    """dQ: a block keeps `block_m` queries and visits 64 keys at a time, in stages that hold either K or V."""

    warps = 12

    def smem_bytes(self, head_dim: int) -> int:
        """Q, dO, the ring of V and K, mbarriers, the queue."""
        m, row = self.block_m, _row_bytes(head_dim)
        return 2 * m * row + self.stages * 64 * row + 8 * (2 * self.stages + m // 16 + 4) + 32


# (largest head_dim, tile); they need the 227 KiB of Hopper. Chosen on an H200 by tensor-core cycles, at 80 with a mask
# by time (docs/performance.md).
_FORWARD: tuple[tuple[int, HopperForwardTile], ...] = (
    (64, HopperForwardTile(256, 64, 8, 8, 112, 32)),
    (80, HopperForwardTile(192, 80, 3, 6, 160, 32)),
    (112, HopperForwardTile(192, 80, 3, 6, 160, 32)),
    (128, HopperForwardTile(192, 64, 4, 6, 160, 32)),
    (160, HopperForwardTile(192, 64, 3, 3, 160, 32)),
    (192, HopperForwardTile(128, 64, 2, 4, 232, 40)),
    (256, HopperForwardTile(128, 64, 2, 3, 232, 40)),
)
# With a mask, of whose diagonal a block of 80 keys computes more in vain: 1 to 3 % slower at 80, not from 96 on.
_FORWARD_MASKED: tuple[tuple[int, HopperForwardTile], ...] = tuple(
    (limit, HopperForwardTile(192, 64, 4, 6, 160, 32) if limit == 80 else tile) for limit, tile in _FORWARD
)
# With a block mask, in place of 192 queries: a block of keys lies within one tile of the mask, and two warpgroups have
# the registers that the place in a list takes. Not timed yet.
_FORWARD_LISTED = HopperForwardTile(128, MASK_TILE, 4, 4, 232, 40)
_FORWARD_LISTED_WIDE = HopperForwardTile(128, MASK_TILE, 2, 4, 232, 40)

_BACKWARD: tuple[tuple[int, HopperBackwardTile], ...] = (
    (64, HopperBackwardTile(64, 192, 4, 160, 32)),
    (128, HopperBackwardTile(64, 128, 2, 240, 24, 64)),
)
# With dropout, whose random numbers take registers: what compiles without spills. Not measured.
_FORWARD_DROPOUT = ((64, HopperForwardTile(192, 64, 8, 6, 160, 32)), *_FORWARD_MASKED[1:])
_BACKWARD_DROPOUT = (
    (64, HopperBackwardTile(64, 128, 4, 240, 24)),
    (128, HopperBackwardTile(64, 128, 2, 240, 24, 64)),
)
_WIDE_BACKWARD: tuple[tuple[int, HopperDkvTile, HopperDqTile], ...] = (
    (192, HopperDkvTile(64, 64, 3, 232, 40), HopperDqTile(128, 64, 5, 232, 40)),
    (256, HopperDkvTile(64, 64, 2, 232, 40), HopperDqTile(128, 64, 3, 232, 40)),
)

# With a bias: fewer rows, or columns of V held, so that it fits the registers, too. Not measured.
_FORWARD_BIAS: tuple[tuple[int, HopperForwardTile], ...] = (
    (64, HopperForwardTile(192, 64, 8, 6, 160, 32)),
    *((limit, tile) for limit, tile in _FORWARD_MASKED if limit > 64),
)
_BACKWARD_BIAS: tuple[tuple[int, HopperBackwardTile], ...] = (
    (64, HopperBackwardTile(64, 128, 4, 240, 24)),
    (128, HopperBackwardTile(64, 128, 2, 240, 24)),
)

# K and V that share the L2, where tiles are alike and where mixing more heads evens out the tail; up to how many
# keys, with a mask, it pays that dQ's accumulator need not be cleared (docs/performance.md).
_SECTION_BYTES = 4 << 20, 16 << 20
_FIRST_STORES_LIMIT = 4096


@dataclass(frozen=True)
class ForwardSm90(Main):
    """fwd_sm90.cuh."""

    folder, header, function, params_name, params = "sm90", "fwd_sm90", "fwd", "FwdSm90Params", FWD_SM90_PARAMS
    arch_suffix, persistent = "a", True

    clocks: bool = False
    sink: bool = False


@dataclass(frozen=True)
class BackwardSm90(Main):
    """bwd_sm90.cuh: dK, dV, and the sum of dQ."""

    folder, header, function, params_name, params = "sm90", "bwd_sm90", "bwd", "BwdSm90Params", BWD_SM90_PARAMS
    arch_suffix, over = "a", "k"

    deterministic: bool = False
    dalibi: bool = False


class BackwardDkvSm90(BackwardSm90):
    """bwd_dkv_sm90.cuh: dK and dV."""

    header, function, persistent = "bwd_dkv_sm90", "bwd_dkv", True


class BackwardDqSm90(BackwardSm90):
    """bwd_dq_sm90.cuh: dQ."""

    header, function, persistent, over = "bwd_dq_sm90", "bwd_dq", True, "q"


class Sm90(Family):
    """For wide heads, dQ has a kernel of its own."""

    name = "sm90"

    def why_not(self, spec: Spec, device: Device) -> str | None:
        if device.capability != (9, 0):
            has = f"{device.capability[0]}.{device.capability[1]}"
            return f"it needs compute capability 9.0 exactly, {device.name} has {has}"
        if spec.is_empty:
            return "nothing is to be computed"
        if not spec.tma:
            return "TMA reads rows at multiples of 16 bytes, and no dimension with a stride of 0"
        return None

    def forward_tile(self, spec: Spec, device: Device) -> HopperForwardTile:
        if spec.dropout:
            return next(tile for limit, tile in _FORWARD_DROPOUT if spec.head_dim <= limit)
        table = _FORWARD_BIAS if spec.bias else _FORWARD_MASKED if spec.masked else _FORWARD
        tile = next(tile for limit, tile in table if spec.head_dim <= limit)
        if spec.block_mask and tile.block_m == 192:
            tile = _FORWARD_LISTED if spec.head_dim <= 128 else _FORWARD_LISTED_WIDE
        return tile

    def variants(self, spec: Spec, device: Device) -> tuple[Variant, ...]:
        if not spec.backward:
            ahead = self.forward_tile(spec, device)
            return *lists_before(spec, (ahead.block_m, ahead.block_n)), ForwardSm90.of(spec, ahead)
        # dQ lies as a warpgroup leaves it, 64 columns at a time.
        rows = 64, 4 * -(-spec.head_dim // 64), 4, 4
        delta, others = Delta.of(spec, DeltaTile(*rows)), learned(spec, 64, device.smem_bytes)
        for limit, tile in _BACKWARD_BIAS if spec.bias else _BACKWARD_DROPOUT if spec.dropout else _BACKWARD:
            if spec.head_dim <= limit:
                sums = Slopes.after(spec, SlopesTile(64, 4, over_keys=True))
                lists = lists_before(spec, *[(tile.block_m, tile.block_n)] * 2, ranks=True)
                main = delta, BackwardSm90.of(spec, tile), Convert.of(spec, ConvertTile(*rows))
                return *lists, *main, *sums, *others
        dkv, dq = next((dkv, dq) for limit, dkv, dq in _WIDE_BACKWARD if spec.head_dim <= limit)
        wide = spec._replace(deterministic=False)  # these are by nature
        sums = Slopes.after(spec, SlopesTile(64, 4, over_keys=False))
        lists = lists_before(spec, (dq.block_m, dq.block_n), (dkv.block_m, dkv.block_n))
        dkv_dq = BackwardDkvSm90.of(wide._replace(dalibi=False), dkv), BackwardDqSm90.of(wide, dq)
        return *lists, delta, *dkv_dq, *sums, *others

    def mixed_bytes(self, spec: Spec, device: Device) -> int:
        return super().mixed_bytes(spec, device) if spec.backward else _SECTION_BYTES[spec.uneven]

    def first_stores_limit(self, spec: Spec) -> int:
        return _FIRST_STORES_LIMIT if spec.masked else super().first_stores_limit(spec)


SM90 = Sm90()
