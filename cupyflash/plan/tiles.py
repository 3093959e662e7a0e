"""Tile tables of the kernel families: what shape of work a block takes, for each head_dim and size of shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 1 << 20


@dataclass(frozen=True)
class ForwardTile:
    """A block computes `block_m` queries against key blocks of `block_n`, through a ring of `stages` K and V tiles."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    blocks_per_sm: int  # launch bound: caps the registers
    q_in_regs: bool = False


@dataclass(frozen=True)
class HopperForwardTile:
    """Each of `groups` consumer warpgroups computes 64 queries against key blocks of `block_n`.

    K and V have rings of `stages` tiles each, Q one of `q_slots` tiles of 64 rows. A thread of a consumer may use
    `consumer_registers`, one of the producer `producer_registers`: together they fill the register file.
    """

    groups: int
    block_n: int
    stages: int
    q_slots: int
    consumer_registers: int
    producer_registers: int


@dataclass(frozen=True)
class HopperBackwardTile:
    """A block keeps `block_n` keys and visits query tiles of `block_m` through `stages`.

    A thread of a consumer may use `consumer_registers`, one of the producer `producer_registers`.
    """

    block_m: int
    block_n: int
    stages: int
    consumer_registers: int
    producer_registers: int


@dataclass(frozen=True)
class BackwardTile:
    """A block keeps `block_n` keys and visits query tiles of `block_m`.

    `split_d` warps share the same keys (needed for head_dim > 128); `dq_warps_m` of the warps lie along the rows of dQ,
    whose depth steps are unrolled `dq_unroll` at a time (0: all), to save registers.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    blocks_per_sm: int
    split_d: int = 1
    dq_warps_m: int = 2
    dq_unroll: int = 0


def row_bytes(columns: int) -> int:
    """Bytes of one row of a shared-memory tile of 16-bit elements: an odd number of 16-byte chunks (tile.cuh)."""
    return 16 * (columns // 8 | 1)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def forward_smem_bytes(tile: ForwardTile, head_dim: int) -> int:
    """Dynamic shared memory of fwd_sm80: Q and the ring."""
    return (tile.block_m + tile.stages * tile.block_n) * row_bytes(round_up(head_dim, 16))


def hopper_forward_smem_bytes(tile: HopperForwardTile, head_dim: int) -> int:
    """Dynamic shared memory of fwd_sm90: Q, K and V in chunks of 64 columns, mbarriers, the queue of work."""
    row = 128 * -(-head_dim // 64)
    barriers = 2 * tile.q_slots + 4 * tile.stages + 4
    return (64 * tile.q_slots + 2 * tile.stages * tile.block_n) * row + 8 * barriers + 32


def hopper_backward_smem_bytes(tile: HopperBackwardTile, head_dim: int) -> int:
    """Dynamic shared memory of bwd_sm90: K, V, the stages of Q, dO and row_stats, two dS, two dQ, mbarriers."""
    m, n, row = tile.block_m, tile.block_n, 128 * -(-head_dim // 64)
    queries = tile.stages * (2 * m * row + 8 * m)
    return 2 * n * row + queries + 2 * m * n * 2 + 4 * m * row + 8 * (10 + 3 * tile.stages)


def hopper_dkv_smem_bytes(tile: HopperBackwardTile, head_dim: int) -> int:
    """Dynamic shared memory of bwd_dkv_sm90: K, V, the stages of Q, dO and row_stats, two P, mbarriers, the queue."""
    m, row = tile.block_m, 128 * -(-head_dim // 64)
    return 2 * 64 * row + tile.stages * (2 * m * row + 8 * m) + 2 * m * 128 + 8 * (12 + 4 * tile.stages) + 32


def hopper_dq_smem_bytes(tile: HopperBackwardTile, head_dim: int) -> int:
    """Dynamic shared memory of bwd_dq_sm90: Q, dO, the ring of V and K, mbarriers, the queue."""
    row = 128 * -(-head_dim // 64)
    return 2 * tile.block_m * row + tile.stages * 64 * row + 8 * (2 * tile.stages + tile.block_m // 16 + 4) + 32


def backward_smem_bytes(tile: BackwardTile, head_dim: int) -> int:
    """Dynamic shared memory of bwd_sm80: K, V, the query stages with their row_stats, dS and, if exchanged, P."""
    row = row_bytes(round_up(head_dim, 16 * tile.split_d))
    exchanged = (2 if tile.split_d > 1 else 1) * tile.block_n * row_bytes(tile.block_m)
    return 2 * tile.block_n * row + tile.stages * (2 * tile.block_m * row + 8 * tile.block_m) + exchanged


# (largest head_dim, tile), first match that fits the shared memory. Chosen by time on an H200, 2026-11-20
# (docs/performance.md), among those that compile without spills with NVRTC 12.9, for all architectures. With 13.0 the
# forward at head_dim 128 spills 16 to 52 bytes on sm_90 (causal), 100, 103 and 120. Those are not measured.
_FORWARD: tuple[tuple[int, ForwardTile], ...] = (
    (64, ForwardTile(128, 64, 4, 2, 2, q_in_regs=True)),
    (120, ForwardTile(128, 32, 4, 4, 2)),
    (128, ForwardTile(128, 64, 4, 2, 2)),
    (256, ForwardTile(128, 64, 8, 2, 1)),
    (256, ForwardTile(64, 64, 4, 2, 1)),
)

_BACKWARD: tuple[tuple[int, BackwardTile], ...] = (
    (64, BackwardTile(32, 128, 4, 2, 2, dq_warps_m=1, dq_unroll=4)),
    (128, BackwardTile(64, 128, 8, 2, 1, split_d=2)),
    (128, BackwardTile(64, 128, 8, 1, 1, split_d=2, dq_warps_m=4)),
    (128, BackwardTile(64, 64, 8, 1, 1, split_d=2)),
    (256, BackwardTile(64, 64, 8, 1, 1, split_d=4, dq_warps_m=1)),
    (256, BackwardTile(32, 32, 4, 1, 1, split_d=2)),
)

# The sm90 family's forward, by largest head_dim; needs the 227 KiB of Hopper. Chosen on an H200 by tensor-core cycles,
# at 80 with a mask by time (docs/performance.md).
_HOPPER_FORWARD: tuple[tuple[int, HopperForwardTile], ...] = (
    (64, HopperForwardTile(4, 64, 8, 8, 112, 24)),
    (80, HopperForwardTile(3, 80, 3, 6, 160, 32)),
    (112, HopperForwardTile(3, 80, 3, 6, 160, 32)),
    (128, HopperForwardTile(3, 64, 4, 6, 160, 32)),
    (160, HopperForwardTile(3, 64, 3, 3, 160, 32)),
    (192, HopperForwardTile(2, 64, 2, 4, 232, 40)),
    (256, HopperForwardTile(2, 64, 2, 3, 232, 40)),
)
# With a mask, of whose diagonal a block of 80 keys computes more in vain: 1 to 3 % slower at 80, not from 96 on.
_HOPPER_FORWARD_MASKED: tuple[tuple[int, HopperForwardTile], ...] = tuple(
    (limit, HopperForwardTile(3, 64, 4, 6, 160, 32) if limit == 80 else tile) for limit, tile in _HOPPER_FORWARD
)


_HOPPER_BACKWARD: tuple[tuple[int, HopperBackwardTile], ...] = (
    (64, HopperBackwardTile(64, 192, 4, 160, 32)),
    (128, HopperBackwardTile(64, 128, 2, 240, 24)),
)
# Where two kernels share the work: one for dK and dV, and one for dQ, which keeps `block_m` queries and visits 64 keys
# at a time, in stages that hold either K or V.
_HOPPER_WIDE_BACKWARD: tuple[tuple[int, HopperBackwardTile, HopperBackwardTile], ...] = (
    (192, HopperBackwardTile(64, 64, 3, 232, 40), HopperBackwardTile(128, 64, 5, 232, 40)),
    (256, HopperBackwardTile(64, 64, 2, 232, 40), HopperBackwardTile(128, 64, 3, 232, 40)),
)


def hopper_backward_tile(head_dim: int) -> HopperBackwardTile | None:
    """The tile of the sm90 family's backward; None beyond the head_dims of bwd_sm90."""
    return next((tile for limit, tile in _HOPPER_BACKWARD if head_dim <= limit), None)


def hopper_wide_backward_tiles(head_dim: int) -> tuple[HopperBackwardTile, HopperBackwardTile]:
    """Those of bwd_dkv_sm90 and bwd_dq_sm90."""
    return next((dkv, dq) for limit, dkv, dq in _HOPPER_WIDE_BACKWARD if head_dim <= limit)


def hopper_forward_tile(head_dim: int, *, masked: bool = False) -> HopperForwardTile:
    """The tile of the sm90 family's forward."""
    table = _HOPPER_FORWARD_MASKED if masked else _HOPPER_FORWARD
    return next(tile for limit, tile in table if head_dim <= limit)


def forward_tile(head_dim: int, smem_bytes: int, *, aligned: bool = True) -> ForwardTile:
    """The tile of the sm80 family's forward. Loads of unaligned rows take registers that wide blocks do not leave."""
    tile = next(t for limit, t in _FORWARD if head_dim <= limit and forward_smem_bytes(t, head_dim) <= smem_bytes)
    return tile if aligned or head_dim <= 64 or tile.warps == 8 else replace(tile, block_n=32)


def backward_tile(head_dim: int, smem_bytes: int, *, causal: bool = False) -> BackwardTile:
    """The tile of the sm80 family's backward."""
    tile = next(t for limit, t in _BACKWARD if head_dim <= limit and backward_smem_bytes(t, head_dim) <= smem_bytes)
    columns = round_up(head_dim, 16 * tile.split_d)
    if columns % (8 * tile.warps // tile.dq_warps_m):  # each warp's share of dQ has whole tiles of 8 columns
        tile = replace(tile, dq_warps_m=tile.block_m // 16)
    if causal and tile.split_d == 2 and tile.block_n == 128:  # 5 % slower without a mask, but spills with this one
        tile = replace(tile, dq_unroll=4)
    return tile
