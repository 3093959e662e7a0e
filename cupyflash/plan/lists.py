"""The kernels that come before others where there is a block mask: they list what each tile visits (blocks.cuh)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

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

    def smem_bytes(self, head_dim: int) -> int:
        return 0


@dataclass(frozen=True)
class KeyLists(Variant):
    """key_lists.cuh: which key blocks each tile of queries visits, by a block mask."""

    folder, header, function, params_name, params = "any", "key_lists", "key_lists", "FwdParams", FWD_PARAMS
    over = "key_lists"

    tile: ListTile
    backward: bool = False
    causal: bool = False
    window: bool = False
    packed: bool = False
    kv_range: bool = False
    block_mask: bool = False


class BackwardKeyLists(KeyLists):
    """The same for a backward."""

    params_name, params = "BwdParams", BWD_PARAMS


class QueryLists(BackwardKeyLists):
    """query_lists.cuh: which tiles of queries visit each key block."""

    header, function, over = "query_lists", "query_lists", "query_lists"

    @functools.cached_property
    def rows(self) -> int:
        return self.tile.block_n


def lists_before(spec: Spec, *tiles: tuple[int, int], ranks: bool = False) -> tuple[KeyLists, ...]:
    """What comes before a call's other kernels: nothing, unless there is a block mask.

    Args:
        tiles: (block_m, block_n) of the kernel that walks over keys, and of a backward's that walks over queries.
        ranks: whether the latter asks for the ranks of its visits.
    """
    if not spec.block_mask:
        return ()
    keys, *queries = tiles
    first = (BackwardKeyLists if spec.backward else KeyLists).of(spec, ListTile(*keys))
    return first, *(QueryLists.of(spec, ListTile(*tile, ranks)) for tile in queries)
