"""What shapes of work the sm80 family's blocks take."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device, reserved_smem
from .kernels import round_up, row_bytes
from .spec import Spec


@dataclass(frozen=True)
class ForwardTile:
    """A block computes `block_m` queries against key blocks of `block_n`, through a ring of `stages` K and V tiles.

    `split_d` warps, 1 or 2, share the same rows: each forms the scores of its part of the keys, and its part of the
    columns of O. `interleaves_keys`: the keys of a tile lie in an order in which a lane has eight neighbours
    (key_order.cuh).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    blocks_per_sm: int  # launch bound: caps the registers
    q_in_regs: bool = False
    split_d: int = 1
    interleaves_keys: bool = False

    @property
    def name(self) -> str:
        split = f"d{self.split_d}" if self.split_d > 1 else ""
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}{split}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """Q, in whose place O leaves, and the ring, whose slots take K or V; P and row maxima, if exchanged."""
        row, exchanged = row_bytes(self.block_n // self.split_d, itemsize), self.split_d > 1
        width = row_bytes(round_up(max(head_dim, head_dim_v), 16), itemsize)
        ring = (self.block_m + self.stages * self.block_n) * width
        return ring + exchanged * (self.split_d * self.block_m * row + 128 * self.warps)


@dataclass(frozen=True)
class BackwardTile:
    """A block keeps `block_n` keys and visits query tiles of `block_m`.

    `split_d` warps share the same keys (needed for head_dim > 128); `dq_warps_m` of the warps lie along the rows of dQ.
    To save registers, its depth steps are unrolled `dq_unroll` at a time (0: all), and a warp forms its columns in
    `dq_parts` steps. `copies_bias`: a bias comes through shared memory (bias_copies.cuh).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    blocks_per_sm: int
    split_d: int = 1
    dq_warps_m: int = 2
    dq_unroll: int = 0
    dq_parts: int = 1
    copies_bias: bool = False

    @property
    def name(self) -> str:
        steps = f"p{self.dq_parts}" if self.dq_parts > 1 else ""
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}{steps}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """K, V, the query stages with their row_stats, dS and, if exchanged, P; and a copied bias of each warp."""
        widths = (round_up(width, 16 * self.split_d) for width in (head_dim, head_dim_v or head_dim))
        rows = sum(row_bytes(width, itemsize) for width in widths)
        exchanged = (2 if self.split_d > 1 else 1) * self.block_n * row_bytes(self.block_m, itemsize)
        keys, queries = self.block_n * self.split_d // self.warps, self.block_m // self.split_d
        bias = self.copies_bias * self.warps * queries * row_bytes(keys)
        return self.block_n * rows + self.stages * (self.block_m * rows + 8 * self.block_m) + exchanged + bias


@dataclass(frozen=True)
class WideTile(BackwardTile):
    """Two groups of four warps, of P and of dS. One group hands the other P, or `weights` beside it."""

    weights: bool = False

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        weights = self.weights * self.block_n * row_bytes(self.block_m, itemsize)
        return super().smem_bytes(head_dim, head_dim_v, itemsize) + weights


def fits(tile: ForwardTile | BackwardTile, spec: Spec, device: Device) -> bool:
    """Whether the shared memory has room for a block."""
    return tile.smem_bytes(*spec.widths) <= device.smem_bytes


def has_room(tile: ForwardTile | BackwardTile, spec: Spec, device: Device) -> bool:
    """Whether a multiprocessor has it for as many blocks as are meant to run there."""
    of_block = tile.smem_bytes(*spec.widths) + reserved_smem(device.capability)
    return tile.blocks_per_sm * of_block <= device.smem_per_sm_bytes


def is_plain(spec: Spec) -> bool:
    """Whether scores bring nothing but a mask of the causal kind or a window."""
    others = spec.bias, spec.block_mask, spec.dropout, spec.softcap, spec.dalibi, spec.kv_range, spec.packed
    return not (any(others) or spec.unaligned or spec.head_dim_v)


def divides_dq(tile: BackwardTile, head_dim: int, dq_warps_m: int = 0) -> bool:
    """Whether each warp's share of dQ has whole tiles of 8 columns; with so many warps along its rows, or with most."""
    columns = round_up(head_dim, 16 * tile.split_d)
    return columns % (8 * tile.warps // (dq_warps_m or tile.block_m // 16)) == 0
