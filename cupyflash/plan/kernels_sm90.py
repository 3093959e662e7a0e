"""The kernels of the sm90 family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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


def mask_copies_bytes(tiles: int) -> int:
    """Of the bits of so many tiles of a block mask, and their kinds (mask_copies.cuh)."""
    return 8 * MASK_TILE * tiles + 16 if tiles else 0


@dataclass(frozen=True)
class ForwardSm90(Main):
    """fwd_sm90.cuh."""

    folder, header, function, params_name, params = "sm90", "fwd_sm90", "fwd", "FwdSm90Params", FWD_SM90_PARAMS
    arch_suffix, persistent = "a", True

    clocks: bool = False
    sink: bool = False

    @property
    def smem_bytes(self) -> int:
        """With a block mask, its bits come along with K (mask_copies.cuh), but over a cache."""
        comes = self.block_mask and not self.paged
        tiles = self.block_m // MASK_TILE * (self.block_n // MASK_TILE) if comes else 0
        return super().smem_bytes + self.tile.stages * mask_copies_bytes(tiles)

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

    copies_bits: ClassVar[bool] = True  # of a block mask
    dependent = True

    deterministic: bool = False
    dalibi: bool = False
    sink: bool = False
    grouped: bool = False

    @property
    def smem_bytes(self) -> int:
        """With a block mask, the bits of a visit have a place for each group of keys (bwd_load_sm90.cuh)."""
        groups = self.block_n // MASK_TILE if self.block_mask and self.copies_bits else 0
        return super().smem_bytes + mask_copies_bytes(groups) + 2 * 8 * groups


class BackwardDkvSm90(BackwardSm90):
    """bwd_dkv_sm90.cuh: dK and dV."""

    header, function, persistent, copies_bits = "bwd_dkv_sm90", "bwd_dkv", True, False


class BackwardDqSm90(BackwardSm90):
    """bwd_dq_sm90.cuh: dQ."""

    header, function, persistent, copies_bits, over = "bwd_dq_sm90", "bwd_dq", True, False, "q"


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
        return cls.of(spec, next(tile for limit, tile in _BIAS_GRADIENT if spec.widest <= limit))
