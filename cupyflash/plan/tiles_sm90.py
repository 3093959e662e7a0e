"""What shapes of work the blocks of the sm90 family take."""

from __future__ import annotations

from dataclasses import dataclass

from .kernels import row_bytes


def _row_bytes(head_dim: int) -> int:
    """Of a tile in chunks of 64 columns."""
    return 128 * -(-head_dim // 64)


def _pair_bytes(head_dim: int, head_dim_v: int) -> int:
    """Of a row of Q or K, and one of dO or V."""
    return _row_bytes(head_dim) + _row_bytes(head_dim_v or head_dim)


@dataclass(frozen=True)
class HopperForwardTile:
    """Each of `groups` consumer warpgroups computes 64 of `block_m` queries against key blocks of `block_n`.

    K and V have rings of `stages` tiles each, Q one of `q_slots` tiles of 64 rows. A thread of a consumer may use
    `consumer_registers`, one of the producer `producer_registers`: together they fill the register file.
    `interleaves_keys`: the keys of a tile lie in an order in which a lane has eight neighbours (key_order.cuh).
    """

    block_m: int
    block_n: int
    stages: int
    q_slots: int
    consumer_registers: int
    producer_registers: int
    interleaves_keys: bool = False
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

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0) -> int:
        """Q, through whose tiles O leaves, K and V, mbarriers, the queue of work."""
        barriers, of_q = 2 * self.q_slots + 4 * self.stages + 4, _row_bytes(max(head_dim, head_dim_v))
        ring = self.stages * self.block_n * _pair_bytes(head_dim, head_dim_v)
        return 64 * self.q_slots * of_q + ring + 8 * barriers + 32


@dataclass(frozen=True)
class HopperBackwardTile:
    """A block keeps `block_n` keys and visits query tiles of `block_m` through `stages`.

    A thread of a consumer may use `consumer_registers`, one of the producer `producer_registers`. Consumers hold the
    first `held_columns` of V in registers, so that shared memory is read less. `copies_bias`: a bias comes through
    shared memory (bias_copies.cuh).
    """

    block_m: int
    block_n: int
    stages: int
    consumer_registers: int
    producer_registers: int
    held_columns: int = 0
    copies_bias: bool = False
    blocks_per_sm = 1

    @property
    def warps(self) -> int:
        """The consumers', 16 keys each, and the producer's."""
        return self.block_n // 16 + 4

    @property
    def name(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0) -> int:
        """K, V, the stages of Q, dO and row_stats, two dS, two dQ or parts of 64 columns of it, a bias, mbarriers."""
        m, n, pair = self.block_m, self.block_n, _pair_bytes(head_dim, head_dim_v)
        queries, bias = self.stages * (m * pair + 8 * m), self.copies_bias * n // 16 * m * row_bytes(16)
        of_dq = 4 * m * _row_bytes(head_dim if head_dim <= 128 else 64)
        return n * pair + queries + 2 * m * n * 2 + of_dq + bias + 8 * (10 + 3 * self.stages)


class HopperDkvTile(HopperBackwardTile):
    """dK and dV of 64 keys, of whose columns each of two consumer warpgroups has half."""

    warps = 12

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0) -> int:
        """K and V, in whose places dV and dK leave, the stages of Q, dO and row_stats, two P, mbarriers, the queue."""
        m, resident = self.block_m, 2 * 64 * _row_bytes(max(head_dim, head_dim_v))
        queries = self.stages * (m * _pair_bytes(head_dim, head_dim_v) + 8 * m)
        return resident + queries + 2 * m * 128 + 8 * (12 + 4 * self.stages) + 32


class HopperDqTile(HopperBackwardTile):
    """dQ: a block keeps `block_m` queries and visits 64 keys at a time, in stages that hold either K or V."""

    warps = 12

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0) -> int:
        """Q, dO, the ring of V and K, mbarriers, the queue."""
        m, ring = self.block_m, self.stages * 64 * _row_bytes(max(head_dim, head_dim_v))
        return m * _pair_bytes(head_dim, head_dim_v) + ring + 8 * (2 * self.stages + m // 16 + 4) + 32


@dataclass(frozen=True)
class HopperBiasTile:
    """The gradient of a bias: a block sums up `block_m` queries and `block_n` keys of it.

    A stage of `stages` holds either Q and K or dO and V. row_stats is padded to `stats_rows`.
    """

    block_m: int
    block_n: int
    stages: int
    stats_rows: int
    consumer_registers: int
    producer_registers: int
    blocks_per_sm = 1

    @property
    def warps(self) -> int:
        """The consumers', 16 rows each, and the producer's."""
        return self.block_m // 16 + 4

    @property
    def name(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0) -> int:
        """The stages, a row of sums a warp, the queue of tiles, mbarriers."""
        pair = (self.block_m + self.block_n) * _row_bytes(max(head_dim, head_dim_v))
        return self.stages * (pair + 16) + 4 * self.block_n * self.block_m // 16 + 64
