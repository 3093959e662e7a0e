"""The kernels of the sm90 family."""

from __future__ import annotations

from dataclasses import dataclass

from ..operand import MASK_TILE
from .kernels import PAGE_UNIT, Main
from .params import BWD_SM90_PARAMS, FWD_SM90_PARAMS
from .spec import Spec
from .tiles_sm90 import HopperBackwardTile, HopperBiasTile

# The gradient of a bias, beside backward tiles of 64 queries and 128 keys, whose boxes TMA brings it.
_BIAS_GRADIENT: tuple[tuple[int, HopperBiasTile], ...] = (
    (64, HopperBiasTile(128, 128, 6, 64, 232, 40)),
    (128, HopperBiasTile(128, 128, 3, 64, 232, 40)),
)


@dataclass(frozen=True)
class ForwardSm90(Main):
    """fwd_sm90.cuh."""

    folder, header, function, params_name, params = "sm90", "fwd_sm90", "fwd", "FwdSm90Params", FWD_SM90_PARAMS
    arch_suffix, persistent = "a", True

    clocks: bool = False
    sink: bool = False

    @property
    def smem_bytes(self) -> int:
        """With a block mask, its bits come along with K (mask_copies.cuh)."""
        tiles = self.block_m // MASK_TILE * (self.block_n // MASK_TILE) if self.block_mask else 0
        return super().smem_bytes + (self.tile.stages * (8 * MASK_TILE * tiles + 16) if tiles else 0)

    @property
    def key_rows(self) -> int:
        return PAGE_UNIT if self.paged and not self.whole_pages else self.block_n

    @property
    def interleaved(self) -> tuple[str, ...]:
        return ("k", "v") if self.tile.interleaves_keys else ()


@dataclass(frozen=True)
class BackwardSm90(Main):
    """bwd_sm90.cuh: dK, dV, and the sum of dQ."""

    folder, header, function, params_name, params = "sm90", "bwd_sm90", "bwd", "BwdSm90Params", BWD_SM90_PARAMS
    arch_suffix, over = "a", "k"

    deterministic: bool = False
    dalibi: bool = False
    sink: bool = False
    grouped: bool = False


class BackwardDkvSm90(BackwardSm90):
    """bwd_dkv_sm90.cuh: dK and dV."""

    header, function, persistent = "bwd_dkv_sm90", "bwd_dkv", True


class BackwardDqSm90(BackwardSm90):
    """bwd_dq_sm90.cuh: dQ."""

    header, function, persistent, over = "bwd_dq_sm90", "bwd_dq", True, "q"


@dataclass(frozen=True)
class BiasGradientSm90(Main):
    """bwd_dbias_sm90.cuh: the gradient of a bias."""

    folder, header, function = "sm90", "bwd_dbias_sm90", "bwd_dbias"
    params_name, params = "BwdSm90Params", BWD_SM90_PARAMS
    arch_suffix, persistent, queues_sequences, over = "a", True, False, "bias"

    @classmethod
    def beside(cls, spec: Spec, tile: HopperBackwardTile) -> BiasGradientSm90 | None:
        """That of a spec whose dK and dV have such a tile; None if there is none, or another kernel's."""
        if spec.dbias is None or (tile.block_m, tile.block_n) != (64, 128):
            return None
        return cls.of(spec, next(tile for limit, tile in _BIAS_GRADIENT if spec.head_dim <= limit))
