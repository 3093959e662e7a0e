"""The kernels that come before others where there is a block mask (blocks.cuh): they make it of a mask of booleans, or
of a mask_mod, and list what each tile visits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..operand import MASK_TILE, TILE_WORDS
from . import mod_tiles
from .numbers import Extents, Workspace
from .params import BWD_PARAMS, FWD_PARAMS
from .spec import Spec
from .variant import Variant


@dataclass(frozen=True)
class ListTile:
    """Lists for tiles of `block_m` queries and blocks of `block_n` keys; `ranks`: with the ranks of visits."""

    block_m: int
    block_n: int
    ranks: bool = False
    warps: int = 1
    blocks_per_sm = 1

    @property
    def name(self) -> str:
        return f"m{self.block_m}n{self.block_n}"

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        return 0


@dataclass(frozen=True)
class MaskTile:
    """A block takes a tile of a mask: two warps, a lane a query. Many fit, for each waits once for what it reads."""

    block_m: int = MASK_TILE
    warps: int = 2
    blocks_per_sm = 16
    name = ""

    def smem_bytes(self, head_dim: int, head_dim_v: int = 0, itemsize: int = 2) -> int:
        return 0


class Ahead(Variant):
    """Base of these kernels."""

    folder, params_name, params = "any", "FwdParams", FWD_PARAMS


@dataclass(frozen=True)
class MaskTiles(Ahead):
    """mask_tiles.cuh: the block mask of a mask of booleans; or of `mods`, a mask_mod, by which of both it asks for."""

    header, function, over = "mask_tiles", "mask_tiles", "mask_tiles"

    tile: MaskTile
    backward: bool = False
    mods: str = ""
    by_query: bool = False
    by_key: bool = False
    packed: bool = False

    @classmethod
    def of_mask(cls, spec: Spec) -> MaskTiles:
        """That of a spec with a mask."""
        assert spec.mask_tiles is not None
        *_, by_query, by_key = spec.mask_tiles if spec.mask_mod else (False, False)
        return cls(
            spec.dtype, spec.head_dim, MaskTile(), spec.backward, spec.mask_mod, by_query, by_key,
            spec.packed, head_dim_v=spec.head_dim_v,
        )  # fmt: skip


class BackwardMaskTiles(MaskTiles):
    """The same for a backward."""

    params_name, params = "BwdParams", BWD_PARAMS


@dataclass(frozen=True)
class KeyLists(Ahead):
    """key_lists.cuh: which key blocks each tile of queries visits, by a block mask."""

    header, function, over = "key_lists", "key_lists", "key_lists"

    tile: ListTile
    backward: bool = False
    causal: bool = False
    window: bool = False
    packed: bool = False
    kv_range: bool = False
    block_mask: bool = False
    paged: bool = False
    of_whole: bool = False


class BackwardKeyLists(KeyLists):
    """The same for a backward."""

    params_name, params = "BwdParams", BWD_PARAMS


class QueryLists(BackwardKeyLists):
    """query_lists.cuh: which tiles of queries visit each key block."""

    header, function, over = "query_lists", "query_lists", "query_lists"

    @functools.cached_property
    def rows(self) -> int:
        return self.tile.block_n


def lists_before(spec: Spec, *tiles: tuple[int, int], ranks: bool = False) -> tuple[Ahead, ...]:
    """What comes before a call's other kernels: nothing, unless there is a block mask.

    Args:
        tiles: (block_m, block_n) of the kernel that walks over keys, and of a backward's that walks over queries.
        ranks: whether the latter asks for the ranks of its visits.
    """
    if not spec.block_mask:
        return ()
    keys, *queries = tiles
    tiles_of, of_keys = (BackwardMaskTiles, BackwardKeyLists) if spec.backward else (MaskTiles, KeyLists)
    made = (tiles_of.of_mask(spec),) if spec.mask_tiles else ()
    first = of_keys.of(spec, ListTile(*keys))
    return *made, first, *(QueryLists.of(spec, ListTile(*tile, ranks)) for tile in queries)


def own_tiles(spec: Spec, extents: Extents) -> tuple[int, ...]:
    """`mod_tiles.own_tiles` of a call with a mask; where there are no scores none, whose mask may have no elements."""
    assert spec.mask_tiles is not None
    batch, seqlen_q, seqlen_k = extents.batch, *extents.longest(spec.packed)
    found = mod_tiles.own_tiles(spec.mask_tiles, batch, extents.heads_q, seqlen_q, seqlen_k)
    return found if extents.seqlen_q and extents.seqlen_k and batch else (0, *found[1:])


def block_mask_of(spec: Spec, extents: Extents) -> Workspace:
    """What a mask becomes, by name: bits have room for each tile that it does not share, a quarter of its bytes."""
    own, rows = own_tiles(spec, extents), (-(-n // MASK_TILE) for n in extents.longest(spec.packed))
    return {"block_tiles": ((*own[:2], *rows), "int32"), "block_bits": ((math.prod(own), TILE_WORDS), "int32")}
