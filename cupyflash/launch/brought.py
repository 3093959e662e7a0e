"""What features bring to a call, as `make_problem` is told it: all that shapes and dtypes of their arrays decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arrays.adapters import Native
from ..bias import max_seqlens, own_of, own_of_mask, room_of_mask
from ..block_mask import code_of
from ..problem import NO_PAGES, Bias
from .passes import Given, pages_of

NO_ROOM = max_seqlens(())  # nothing says how long sequences may be


class Brought(NamedTuple):
    """By the names of `make_problem`; what decides a spec."""

    kv_range: bool
    sink: bool
    alibi: int
    dropout: int
    block_mask: int
    mod_shapes: tuple[tuple[int, ...], ...]
    pages: tuple[int, int, bool]
    bias: Bias | None


def brought_by(given: Given, library: Native, keys: Sequence[tuple[Any, ...]]) -> Brought:
    """That of arrays, which need not fit each other yet."""
    alibi, dropout = (0 if i is None else len(keys[i][0]) for i in (given.alibi, given.dropout))
    bias = None
    if given.added:
        first, *others = given.added
        dtype = "bool" if given.names[first] == "mask" else library.dtype_name(keys[first][2])
        own = own_of_mask(*keys[first][:2]) if dtype == "bool" else own_of(keys[first][0])
        bias = Bias(dtype, own, own_of_mask(*keys[others[0]][:2]) if others else None)
    return Brought(
        kv_range=given.has_kv_range,
        sink=given.has_sink,
        alibi=alibi,
        dropout=dropout,
        block_mask=0 if given.block_mask is None else code_of(keys[given.block_mask][0]),
        mod_shapes=tuple([tuple(keys[i][0]) for i in given.of_mods]),
        pages=NO_PAGES if given.table is None else pages_of(keys[given.qkv[1]][0], keys[given.table][0])[0],
        bias=bias,
    )


def room_of(given: Given, keys: Sequence[tuple[Any, ...]]) -> tuple[int, int]:
    """`max_seqlens` of packed sequences."""
    if given.packed is None:
        return NO_ROOM
    tiles = None if given.block_mask is None else keys[given.block_mask][0]
    queries, of_keys = max_seqlens([keys[i][0] for i in given.added], tiles)
    if given.table is None or tiles is not None or [given.names[i] for i in given.added] != ["mask"]:
        return queries, of_keys
    return room_of_mask(queries, keys[given.table][0][1] * keys[given.qkv[1]][0][1])
