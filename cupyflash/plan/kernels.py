"""The kernels: the compile-time facts that each has, and which of them a problem takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from ..gpu.device import Device
from ..problem import Problem
from . import tiles
from .params import BWD_PARAMS, BWD_SM90_PARAMS, FWD_PARAMS, FWD_SM90_PARAMS
from .tiles import BackwardTile, ForwardTile, HopperBackwardTile, HopperForwardTile
from .variant import Variant


@dataclass(frozen=True)
class Forward(Variant):
    """fwd_sm80.cuh."""

    folder, header, function, params_name, params = "sm80", "fwd_sm80", "fwd", "FwdParams", FWD_PARAMS

    block_n: int
    stages: int
    q_in_regs: bool = False
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    softcap: bool = False
    unaligned: bool = False

    @property
    def tile_name(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}"

    @property
    def smem_bytes(self) -> int:
        tile = ForwardTile(self.block_m, self.block_n, self.warps, self.stages, self.blocks_per_sm)
        return tiles.forward_smem_bytes(tile, self.head_dim)


@dataclass(frozen=True)
class ForwardSm90(Variant):
    """fwd_sm90.cuh. `block_m` is 64 a consumer warpgroup, `warps` counts the producer's four too."""

    folder, header, function, params_name, params = "sm90", "fwd_sm90", "fwd", "FwdSm90Params", FWD_SM90_PARAMS
    arch_suffix, persistent = "a", True

    block_n: int
    stages: int
    q_slots: int
    consumer_registers: int
    producer_registers: int
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    softcap: bool = False
    clocks: bool = False

    @property
    def tile_name(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}q{self.q_slots}"

    @property
    def smem_bytes(self) -> int:
        groups, registers = self.block_m // 64, (self.consumer_registers, self.producer_registers)
        tile = HopperForwardTile(groups, self.block_n, self.stages, self.q_slots, *registers)
        return tiles.hopper_forward_smem_bytes(tile, self.head_dim)


@dataclass(frozen=True)
class Backward(Variant):
    """bwd_sm80.cuh: dK, dV, and the sum of dQ."""

    folder, header, function, params_name, params = "sm80", "bwd_sm80", "bwd", "BwdParams", BWD_PARAMS

    block_n: int
    stages: int
    split_d: int
    dq_warps_m: int
    dq_unroll: int
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    softcap: bool = False
    unaligned: bool = False
    deterministic: bool = False

    @property
    def tile_name(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}"

    @property
    def smem_bytes(self) -> int:
        tile = BackwardTile(self.block_m, self.block_n, self.warps, self.stages, self.blocks_per_sm, self.split_d)
        return tiles.backward_smem_bytes(tile, self.head_dim)


@dataclass(frozen=True)
class BackwardSm90(Variant):
    """bwd_sm90.cuh: dK, dV, and the sum of dQ. `warps` counts the producer's four too."""

    folder, header, function, params_name, params = "sm90", "bwd_sm90", "bwd", "BwdSm90Params", BWD_SM90_PARAMS
    arch_suffix, tile_bytes = "a", staticmethod(tiles.hopper_backward_smem_bytes)

    block_n: int
    stages: int
    consumer_registers: int
    producer_registers: int
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    softcap: bool = False
    deterministic: bool = False

    @property
    def tile_name(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}"

    @property
    def smem_bytes(self) -> int:
        tile = HopperBackwardTile(
            self.block_m, self.block_n, self.stages, self.consumer_registers, self.producer_registers
        )
        return self.tile_bytes(tile, self.head_dim)

    @property
    def box_rows(self) -> dict[str, int]:
        """Of the tensor maps."""
        m, n = self.block_m, self.block_n
        return {"q": m, "k": n, "v": n, "dout": m, "dq": 64, "dk": 64, "dv": 64}


@dataclass(frozen=True)
class BackwardDkvSm90(BackwardSm90):
    """bwd_dkv_sm90.cuh: dK and dV."""

    folder, header, function = "sm90", "bwd_dkv_sm90", "bwd_dkv"
    tile_bytes, persistent = staticmethod(tiles.hopper_dkv_smem_bytes), True


@dataclass(frozen=True)
class BackwardDqSm90(BackwardSm90):
    """bwd_dq_sm90.cuh: dQ."""

    folder, header, function = "sm90", "bwd_dq_sm90", "bwd_dq"
    tile_bytes, persistent = staticmethod(tiles.hopper_dq_smem_bytes), True

    @property
    def box_rows(self) -> dict[str, int]:
        return super().box_rows | {"q": 64, "dout": 64}  # a warpgroup's


_Hopper = TypeVar("_Hopper", bound=BackwardSm90)


@dataclass(frozen=True)
class Delta(Variant):
    """bwd_delta.cuh: row_stats, and dQ's accumulator and its counts cleared where there are any."""

    folder, header, function, params_name, params = "any", "bwd_delta", "bwd_delta", "BwdParams", BWD_PARAMS

    split_d: int
    dq_warps_m: int
    unaligned: bool = False
    softcap: bool = False

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Convert(Variant):
    """bwd_convert.cuh: dQ from its accumulator."""

    folder, header, function, params_name, params = "any", "bwd_convert", "bwd_convert", "BwdParams", BWD_PARAMS

    split_d: int
    dq_warps_m: int
    unaligned: bool = False
    softcap: bool = False

    @property
    def smem_bytes(self) -> int:
        return self.block_m * tiles.row_bytes(tiles.round_up(self.head_dim, 16 * self.split_d))


def hook_flags(problem: Problem) -> dict[str, Any]:
    """Which of the mask and score hooks a problem needs."""
    causal, softcap = problem.causal, problem.softcap is not None
    return {
        "causal": causal,
        "window": problem.masked and not causal,
        "scale_first": problem.scale <= 0 and not softcap,
        "softcap": softcap,
    }


def forward_variant(problem: Problem, device: Device, *, aligned: bool = True) -> Forward:
    """The forward kernel for a problem; `aligned`: whether every row of q, k and v starts at a multiple of 16 bytes."""
    t = tiles.forward_tile(problem.head_dim, device.smem_bytes, aligned=aligned)
    return Forward(problem.dtype, problem.head_dim, **asdict(t), **hook_flags(problem), unaligned=not aligned)


def forward_sm90_variant(problem: Problem, *, clocks: bool = False) -> ForwardSm90:
    """The sm90 family's forward kernel; `clocks`: the form that records how long each block took."""
    t = tiles.hopper_forward_tile(problem.head_dim, masked=problem.masked)
    shape = (problem.dtype, problem.head_dim, 64 * t.groups, 4 * (t.groups + 1), 1, t.block_n, t.stages, t.q_slots)
    variant = ForwardSm90(*shape, t.consumer_registers, t.producer_registers, clocks=clocks)
    return replace(variant, **hook_flags(problem))


def backward_variants(problem: Problem, device: Device, *, aligned: bool = True) -> tuple[Delta, Backward, Convert]:
    """The three backward kernels, in launch order."""
    t = tiles.backward_tile(problem.head_dim, device.smem_bytes, causal=problem.causal)
    main = Backward(
        problem.dtype,
        problem.head_dim,
        **asdict(t),
        **hook_flags(problem),
        unaligned=not aligned,
        deterministic=problem.deterministic,
    )
    shared = (problem.dtype, problem.head_dim, t.block_m, t.warps, 1, t.split_d, t.dq_warps_m)
    delta, convert = Delta(*shared), Convert(*shared)
    flags: dict[str, Any] = {"unaligned": main.unaligned, "softcap": main.softcap}
    return replace(delta, **flags), main, replace(convert, **flags)


def _hopper_backward(kind: type[_Hopper], t: HopperBackwardTile, warps: int, problem: Problem) -> _Hopper:
    shape = (problem.dtype, problem.head_dim, t.block_m, warps, 1, t.block_n, t.stages)
    variant = kind(*shape, t.consumer_registers, t.producer_registers)
    deterministic = problem.deterministic and kind is BackwardSm90  # the others are by nature
    return replace(variant, **hook_flags(problem), deterministic=deterministic)


def backward_sm90_variants(problem: Problem) -> tuple[Delta, BackwardSm90, Convert | BackwardDqSm90]:
    """The same of the sm90 family, whose arrays are aligned; for wide heads dQ has a kernel of its own."""
    tile = tiles.hopper_backward_tile(problem.head_dim)
    # dQ lies as a warpgroup leaves it, 64 columns at a time.
    shared = (problem.dtype, problem.head_dim, 64, 4 * -(-problem.head_dim // 64), 1, 4, 4)
    if tile:
        main = _hopper_backward(BackwardSm90, tile, tile.block_n // 16 + 4, problem)
        return Delta(*shared, softcap=main.softcap), main, Convert(*shared, softcap=main.softcap)
    dkv, dq = tiles.hopper_wide_backward_tiles(problem.head_dim)
    main, last = _hopper_backward(BackwardDkvSm90, dkv, 12, problem), _hopper_backward(BackwardDqSm90, dq, 12, problem)
    return Delta(*shared, softcap=main.softcap), main, last
