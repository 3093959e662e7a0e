"""The kernels of the gradients of sinks, of a bias and of arrays of mods: in any family, behind its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..mods.description import read
from ..mods.learned import walk_of
from .kernels import Main, round_up, row_bytes
from .params import BWD_PARAMS
from .shares import Shares
from .spec import Spec
from .variant import Variant


@dataclass(frozen=True)
class SinksTile:
    """A block has `warps`, each of which takes tiles of `block_m` queries, as row_stats has them."""

    block_m: int
    warps: int = 16
    blocks_per_sm = 1

    @property
    def name(self) -> str:
        return f"q{self.block_m}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """A number of each warp."""
        return 4 * self.warps


@dataclass(frozen=True)
class Sinks(Variant):
    """bwd_sink.cuh: the gradient of the sinks from row_stats."""

    folder, header, function, params_name, params = "any", "bwd_sink", "bwd_sink", "BwdParams", BWD_PARAMS
    over = "sinks"

    tile: SinksTile
    packed: bool = False
    bias: bool = False

    @classmethod
    def after(cls, spec: Spec, block_m: int) -> tuple[Sinks, ...]:
        """What comes behind a backward's other kernels: nothing, unless the gradient is wanted."""
        return (cls.of(spec, SinksTile(block_m)),) if spec.dsink else ()


def _pair_bytes(head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Of a row of Q or K, and one of dO or V."""
    return sum(row_bytes(round_up(width, 16), itemsize) for width in (head_dim, head_dim_v or head_dim))


@dataclass(frozen=True)
class BiasTile:
    """A block makes the gradient of `block_m` queries and `block_n` keys; row_stats is padded to `stats_rows`."""

    block_m: int
    block_n: int
    warps: int
    stats_rows: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """Q, dO, K and V."""
        return (self.block_m + self.block_n) * _pair_bytes(head_dim, head_dim_v, itemsize)

    def fits(self, spec: Spec, smem_bytes: int) -> bool:
        """Whether so many blocks do, where one can have `smem_bytes` of a multiprocessor's, which has 1 KiB more."""
        return self.blocks_per_sm * (self.smem_bytes(*spec.widths) + 1024) <= smem_bytes + 1024


@dataclass(frozen=True)
class BiasGradient(Main):
    """bwd_dbias.cuh: the gradient of a bias, in whatever family the others are."""

    folder, header, function, params_name, params = "any", "bwd_dbias", "bwd_dbias", "BwdParams", BWD_PARAMS
    over = "bias"

    unaligned: bool = False

    @classmethod
    def after(cls, spec: Spec, stats_rows: int, smem_bytes: int) -> tuple[BiasGradient, ...]:
        """What comes behind a backward's other kernels: nothing, unless the gradient is wanted."""
        if spec.dbias is None:
            return ()
        columns, most = 32 if spec.crowded else 64, 3 if spec.widest <= 128 else 1
        tiles = [BiasTile(64, columns, 4, stats_rows, blocks) for blocks in range(most, 0, -1)]
        tiles += [BiasTile(16 * warps, 32, warps, stats_rows, 1) for warps in (2, 1)]
        return (cls.of(spec, next(tile for tile in tiles if tile.fits(spec, smem_bytes))),)


@dataclass(frozen=True)
class ModsTile(BiasTile):
    """The same; scores and their gradients, in rows of one float more, take the place of K and V."""

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        pair = _pair_bytes(head_dim, head_dim_v, itemsize)
        return self.block_m * pair + max(self.block_n * pair, 8 * self.block_m * (self.block_n + 1))


@dataclass(frozen=True)
class ModsGradient(Main):
    """bwd_dmods.cuh: the gradients of what mods read, summed up in fp32."""

    folder, header, function, params_name, params = "any", "bwd_dmods", "bwd_dmods", "BwdParams", BWD_PARAMS

    unaligned: bool = False
    dmods: tuple[int, ...] = ()

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        reads = read(self.mods).reads(self.dmods)
        return super().constants | {"reads": len(reads), "walk": walk_of(reads)}


@dataclass(frozen=True)
class SumsTile:
    """A block takes `block_m` elements of each array."""

    block_m: int = 4096
    warps: int = 8
    blocks_per_sm = 1
    name = ""

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        return 0


@dataclass(frozen=True)
class ModsSums(Variant):
    """bwd_dmods_sums.cuh: sums of 0; or, where it `stores`, the gradients from their sums."""

    folder, header, function, params_name, params = "any", "bwd_dmods_sums", "bwd_dmods_sums", "BwdParams", BWD_PARAMS
    over = "elements"

    mods: str = ""
    dmods: tuple[int, ...] = ()
    stores: bool = False


def _of_mods(spec: Spec, stats_rows: int, smem_bytes: int) -> tuple[Variant, ...]:
    """Sums are cleared, added to and stored; nothing is added where no score depends on the arrays."""
    if not spec.dmods:
        return ()
    columns, blocks = 32 if spec.crowded else 64, 2 if spec.widest <= 128 else 1
    few = [ModsTile(16 * warps, 32, warps, stats_rows, 1) for warps in (2, 1)]
    tiles = ModsTile(64, columns, 4, stats_rows, blocks), *few
    tile = next(tile for tile in tiles if tile.smem_bytes(*spec.widths) <= smem_bytes)
    clears, stores = (
        ModsSums(spec.dtype, spec.head_dim, SumsTile(), spec.mods, spec.dmods, stores) for stores in (False, True)
    )
    adds = (ModsGradient.of(spec, tile),) if read(spec.mods).reads(spec.dmods) else ()
    return clears, *adds, stores


def learned(spec: Spec, stats_rows: int, smem_bytes: int, of_bias: Variant | None = None) -> tuple[Variant, ...]:
    """What makes these gradients, behind a backward's other kernels; `of_bias`: a family's own of a bias."""
    of_heads = *Shares.after(spec, stats_rows), *Sinks.after(spec, stats_rows)
    bias = BiasGradient.after(spec, stats_rows, smem_bytes) if of_bias is None else (of_bias,)
    return *of_heads, *bias, *_of_mods(spec, stats_rows, smem_bytes)
