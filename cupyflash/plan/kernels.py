"""The kernels that families share, and what their main kernels have in common."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from .params import BWD_PARAMS
from .spec import Spec
from .variant import Variant

LEAST_QUERIES = 33  # of the sequences over a cache that the forward takes
LEAST_QUERIES_OF_8_BITS = 128  # where rows of 16 bits are written before
PAGE_UNIT = 16  # it reads pages of a multiple of so many rows


def row_bytes(columns: int, itemsize: int = 2) -> int:
    """Bytes of one row of a shared-memory tile (tile.cuh)."""
    return 2 * columns if itemsize == 2 else padded_row_bytes(columns, itemsize)


def padded_row_bytes(columns: int, itemsize: int = 2) -> int:
    """The same where rows have gaps: an odd number of eight elements and, of fp32, a quarter of what lies behind four
    rows."""
    return 8 * itemsize * (columns // 8 | 1) + (8 if itemsize == 4 else 0)


def least_queries(of_8_bits: bool) -> int:
    """Of the sequences over a cache that the forward takes, over one of 8 bits or another."""
    return LEAST_QUERIES_OF_8_BITS if of_8_bits else LEAST_QUERIES


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Main(Variant):
    """Base of the kernels that form scores, key block by key block, and so have all mask and score hooks."""

    tile: Any  # that of its family
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    softcap: bool = False
    packed: bool = False
    alibi: bool = False
    kv_range: bool = False
    bias: bool = False
    wide_bias: bool = False
    mask: bool = False
    paired_bias: bool = False
    bias_of_keys: bool = False
    masked_bias: bool = False
    dropout: bool = False
    block_mask: bool = False
    bias_beside_mods: bool = False
    mods: str = ""
    paged: bool = False
    whole_pages: bool = False
    of_whole: bool = False
    of_8_bits: bool = False
    split_keys: bool = False
    queues_sequences: ClassVar[bool] = True  # persistent blocks hand on packed tiles with their sequences

    @property
    def smem_bytes(self) -> int:
        """Packed tiles bring their sequence in the queue of persistent blocks (work_sm90.cuh), and are asked for."""
        return super().smem_bytes + (48 if self.packed and self.persistent and self.queues_sequences else 0)

    @functools.cached_property
    def block_n(self) -> int:
        return int(self.tile.block_n)

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        found = {name: x for name, x in super().constants.items() if name != "of_8_bits" or x}
        return found | ({"least_queries": least_queries(self.of_8_bits)} if self.paged else {})

    @property
    def key_rows(self) -> int:
        """Rows of K and V that a copy brings."""
        return self.block_n

    @functools.cached_property
    def rows(self) -> int:
        return self.block_n if self.over == "k" else self.block_m


@dataclass(frozen=True)
class DeltaTile:
    """A block takes `block_m` queries; `warps`, `split_d` and `dq_warps_m`: as the main kernel's sum of dQ lies.
    `listed_rows`: of packed keys, tiles of so many are listed for it; 0: none. `overlaps`: the kernels of a call start
    while those in front of them end."""

    block_m: int
    warps: int
    split_d: int
    dq_warps_m: int
    listed_rows: int = 0
    overlaps: bool = False
    blocks_per_sm = 1

    @property
    def name(self) -> str:
        share = f"d{self.split_d}q{self.dq_warps_m}" if self.split_d > 1 else ""
        return f"m{self.block_m}w{self.warps}{share}" + (f"k{self.listed_rows}" if self.listed_rows else "")

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        return 0


class ConvertTile(DeltaTile):
    """The same, with the rows of dQ in shared memory."""

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        return self.block_m * row_bytes(round_up(head_dim, 16 * self.split_d), itemsize)


@dataclass(frozen=True)
class Delta(Variant):
    """bwd_delta.cuh: row_stats, and dQ's accumulator and its counts cleared where there are any."""

    folder, header, function, params_name, params = "any", "bwd_delta", "bwd_delta", "BwdParams", BWD_PARAMS

    tile: DeltaTile
    unaligned: bool = False
    softcap: bool = False
    packed: bool = False
    bias: bool = False
    dropout: bool = False


@dataclass(frozen=True)
class Convert(Delta):
    """bwd_convert.cuh: dQ from its accumulator."""

    header, function = "bwd_convert", "bwd_convert"

    alibi: bool = False
    kv_range: bool = False
    wide_bias: bool = False
    block_mask: bool = False
    of_whole: bool = False
    mask: bool = False
    masked_bias: bool = False
    bias_beside_mods: bool = False
    mods: str = ""

    @property
    def dependent(self) -> bool:
        return self.tile.overlaps


@dataclass(frozen=True)
class SlopesTile:
    """`parts` warps left a number each for every tile of `block_m` keys or, unless `over_keys`, queries; a block has
    `warps`."""

    block_m: int
    parts: int
    over_keys: bool
    warps: int = 8
    blocks_per_sm = 1

    @property
    def name(self) -> str:
        return f"{'k' if self.over_keys else 'q'}{self.block_m}p{self.parts}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """A number of each warp."""
        return 4 * self.warps


@dataclass(frozen=True)
class Slopes(Variant):
    """bwd_slopes.cuh: the gradient of ALiBi's slopes from its parts."""

    folder, header, function, params_name, params = "any", "bwd_slopes", "bwd_slopes", "BwdParams", BWD_PARAMS
    over = "slopes"

    tile: SlopesTile
    packed: bool = False

    @classmethod
    def after(cls, spec: Spec, tile: SlopesTile) -> tuple[Slopes, ...]:
        """What comes behind a backward's other kernels: nothing, unless the gradient is wanted."""
        return (cls.of(spec, tile),) if spec.dalibi else ()
