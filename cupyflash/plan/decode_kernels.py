"""The kernels of attention over a cache: their tiles, and what is compiled into them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

from .kernels import LEAST_QUERIES_OF_8_BITS, Main, padded_row_bytes, round_up
from .params_decode import APPEND_PARAMS, DECODE_PARAMS, DECODE_SM90_PARAMS, DEQUANTIZE_PARAMS
from .variant import Variant

SLICE = 16  # keys: kSlice
COMBINE_WARPS, COMBINE_BLOCKS = 8, 3  # of a block; blocks of a multiprocessor


@dataclass(frozen=True)
class DecodeTile:
    """What a block takes: `heads` neighbouring K/V heads, with `warp_rows` packed query rows for each warp of a team.

    Attributes:
        team: warps that share slices of K and V.
        stages: units in flight of each team.
        pair: of the heads, those that a team reads together.
        cluster: blocks that split a tile and combine through distributed shared memory; 0: none.
        box_rows: keys of a TMA box.
        columns: of all rows that the merge of teams adds up at a time.
        kv_bytes: of an element of K and V.
        warp_rows: query rows of a warp.
        scale_bytes: of a scale, where each key of a unit brings its own along.
    """

    team: int
    warps: int
    stages: int
    heads: int
    pair: int
    cluster: int
    box_rows: int
    columns: int = 32
    block_n: int = SLICE
    blocks_per_sm: int = 1
    kv_bytes: int = 2
    warp_rows: int = 16
    scale_bytes: int = 0

    @property
    def block_m(self) -> int:
        return self.warp_rows * self.team

    @property
    def name(self) -> str:
        found = f"m{self.block_m}w{self.warps}s{self.stages}"
        for letter, n, usual in (
            ("h", self.heads, 1), ("p", self.pair, 1), ("c", self.cluster, 0), ("b", self.box_rows, SLICE),
            ("x", self.columns, 32), ("r", self.warp_rows, 16),
        ):  # fmt: skip
            found += f"{letter}{n}" if n != usual else ""
        return found

    def stage_bytes(self, head_dim: int, head_dim_v: int = 0) -> int:
        """A unit of K and V in chunks of 128 bytes a key, or two keys in one, and the scales."""
        rows = self._row_bytes(head_dim) + self._row_bytes(head_dim_v or head_dim)
        return self.pair * SLICE * (rows + 2 * self.scale_bytes)

    def _row_bytes(self, head_dim: int) -> int:
        row = round_up(head_dim, 16) * self.kv_bytes
        return row if (row, self.kv_bytes) == (64, 1) else round_up(row, 128)

    def fixed_bytes(self, head_dim: int, itemsize: int = 2) -> int:
        """Q, of elements of `itemsize`, the scratch and the statistics of the merge; P of a slice, of fp32."""
        teams, rows = self.warps // self.team, self.block_m
        of_q = self.heads * rows * padded_row_bytes(round_up(head_dim, 16), itemsize)
        return of_q + teams * rows * ((self.columns + 8) * 4 + 8 + (4 * SLICE if itemsize == 4 else 0))

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """And the rings."""
        rings = self.warps // self.team * self.stages * self.stage_bytes(head_dim, head_dim_v)
        return rings + self.fixed_bytes(head_dim, itemsize)

    def least_columns(self, row_bytes: int) -> int:
        """Of `columns`: scratch and statistics then have room for a row of O of each warp, to be computed again."""
        return next(n for n in (8, 16, 32, 64) if self.warp_rows * 4 * (n + 10) >= row_bytes)

    def with_stages(self, stages: int) -> DecodeTile:
        return replace(self, stages=stages)

    def with_columns(self, columns: int) -> DecodeTile:
        return replace(self, columns=columns)


@dataclass(frozen=True)
class Decode(Main):
    """decode.cuh."""

    folder, function = "decode", "decode"
    tile: DecodeTile
    sink: bool = False
    paged: bool = False
    unaligned: bool = False
    int8: bool = False
    e4m3: bool = False
    tile_mask: bool = False

    @property
    def qualifiers(self) -> str:
        return f" __cluster_dims__({self.tile.cluster}, 1, 1)" if self.tile.cluster else ""


@dataclass(frozen=True)
class DecodeSm80(Decode):
    """With cp.async."""

    header, params_name, params = "decode_sm80", "DecodeParams", DECODE_PARAMS


@dataclass(frozen=True)
class DecodeSm90(Decode):
    """With TMA."""

    header, params_name, params, arch_suffix = "decode_sm90", "DecodeSm90Params", DECODE_SM90_PARAMS, "a"
    dependent = True

    @property
    def smem_bytes(self) -> int:
        """The mbarriers of the rings and of Q come last."""
        tile = self.tile
        return super().smem_bytes + 8 * (2 * tile.warps // tile.team * tile.stages + 1)


@dataclass(frozen=True)
class CombineTile:
    """As the main kernel's tile, as far as it says what its partial results are."""

    team: int
    heads: int
    pair: int
    warp_rows: int = 16
    warps: int = COMBINE_WARPS
    cluster: int = 0
    block_n: int = SLICE
    blocks_per_sm: int = COMBINE_BLOCKS

    @classmethod
    def behind(cls, main: Decode) -> CombineTile:
        """Fewer blocks a multiprocessor where the repair of what is not finite needs more registers."""
        tile, blocks = main.tile, 2 if main.bias else COMBINE_BLOCKS
        return cls(tile.team, tile.heads, tile.pair, tile.warp_rows, blocks_per_sm=blocks)

    @property
    def block_m(self) -> int:
        return self.warp_rows * self.team

    @property
    def name(self) -> str:
        return f"m{self.block_m}h{self.heads}p{self.pair}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        """Where threads share an element: four columns, maximum and sum of each; or rows that are computed again."""
        return max(24 * 32 * self.warps, itemsize * self.warps * (head_dim_v or head_dim))


@dataclass(frozen=True)
class Combine(Main):
    """decode_combine.cuh."""

    folder, header, function, params_name, params = (
        "decode", "decode_combine", "decode_combine", "DecodeParams", DECODE_PARAMS,
    )  # fmt: skip
    tile: CombineTile
    sink: bool = False
    paged: bool = False
    unaligned: bool = False
    int8: bool = False
    e4m3: bool = False
    tile_mask: bool = False
    dependent: bool = False

    @classmethod
    def behind(cls, main: Decode) -> Combine:
        """What comes behind a main kernel, with its flags; it starts early where that one does."""
        flags = {f.name: getattr(main, f.name) for f in fields(main) if f.name not in ("dtype", "head_dim", "tile")}
        return cls(main.dtype, main.head_dim, CombineTile.behind(main), dependent=main.dependent, **flags)


@dataclass(frozen=True)
class AppendTile:
    """A warp takes a row of one head. `overlaps`: the kernel behind starts while it runs."""

    overlaps: bool = False
    warps: int = 8
    blocks_per_sm: int = 1

    @property
    def block_m(self) -> int:
        return self.warps

    @property
    def name(self) -> str:
        return f"w{self.warps}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        return 0


@dataclass(frozen=True)
class Append(Variant):
    """append.cuh."""

    folder, header, function, params_name, params = "decode", "append", "append", "AppendParams", APPEND_PARAMS
    tile: AppendTile
    packed: bool = False
    paged: bool = False
    int8: bool = False
    e4m3: bool = False


@dataclass(frozen=True)
class DequantizeTile:
    """A block takes so many rows of a sequence, of all heads."""

    block_m: int = 16
    warps: int = 8
    blocks_per_sm: int = 1

    @property
    def name(self) -> str:
        return f"m{self.block_m}w{self.warps}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        return 0


@dataclass(frozen=True)
class Dequantize(Variant):
    """dequantize.cuh."""

    folder, header, function, params_name, params = (
        "decode", "dequantize", "dequantize", "DequantizeParams", DEQUANTIZE_PARAMS,
    )  # fmt: skip
    tile: DequantizeTile
    packed: bool = False
    paged: bool = False
    int8: bool = False
    e4m3: bool = False

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        return super().constants | {"least_queries": LEAST_QUERIES_OF_8_BITS}
