"""Random arrays of a call that `bench --decode` times, by the names of `attention_with_cache`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np

from .cell import Cell
from .decode_cell import DecodeCell
from .work import Bench

_LARGEST = {"int8": 127, "e4m3": 448}
_DRAWN = 1 << 20  # elements of a cache of 8 bits that are drawn; they repeat


def arrays(bench: Bench, cell: DecodeCell) -> dict[str, Any]:
    """All that the cell asks for; queries of different numbers are packed."""
    rows_of_cache = cell.slots, cell.page or cell.capacity, cell.heads_k
    rows = (sum(cell.queries),) if cell.chunk else (cell.batch, cell.seqlen_q)
    found = {"q": bench.random(cell.dtype, (*rows, cell.heads, cell.head_dim))}
    for name, width in zip(("k_cache", "v_cache"), cell.widths, strict=True):
        shape = *rows_of_cache, width
        found[name] = _stored(bench, cell, shape) if cell.cache_dtype else bench.random(cell.dtype, shape)
    found["cache_seqlens"] = bench.array(np.array(cell.lengths, np.int32))
    if cell.chunk:
        found["cu_seqlens_q"] = cu_seqlens(bench, cell.queries)
    if cell.page:
        pages = bench.rng.permutation(cell.slots)[: cell.batch * cell.pages_per_sequence]
        found["block_table"] = bench.array(pages.astype(np.int32).reshape(cell.batch, -1))
    if cell.cache_dtype:
        scales = np.full((cell.slots, cell.heads_k) if cell.page else cell.heads_k, _scale(cell), np.float32)
        found |= {name: bench.array(scales) for name in ("k_scale", "v_scale")}
    if cell.kv_range:
        found["kv_range"] = bench.array(np.array(cell.ranges, np.int32))
    return found | {name: bench.array(x) for name, x in as_dense(cell).brought().items()}


def as_dense(cell: DecodeCell) -> Cell:
    """Its sizes, slopes and sinks, without what only a cache has."""
    sizes = cell.head_dim, False, cell.capacity, cell.batch, cell.heads, cell.heads_k
    return Cell(cell.dtype, *sizes, alibi=cell.alibi, sink=cell.sink, head_dim_v=cell.head_dim_v)


def cu_seqlens(bench: Bench, lengths: list[int]) -> Any:
    """0, and the lengths added up."""
    return bench.array(np.array(list(accumulate(lengths, initial=0)), np.int32))


def _scale(cell: DecodeCell) -> float:
    """What is beyond 6 standard deviations becomes the largest number."""
    return 6 / _LARGEST[cell.cache_dtype]


def _stored(bench: Bench, cell: DecodeCell, shape: tuple[int, ...]) -> Any:
    """A cache of 8 bits; e4m3 as uint8, its bits."""
    most = _LARGEST[cell.cache_dtype]
    drawn = (bench.rng.standard_normal(_DRAWN, np.float32) / _scale(cell)).clip(-most, most)
    if cell.cache_dtype == "int8":
        return bench.array(np.resize(drawn.round().astype(np.int8), shape))
    return bench.array(np.resize(drawn.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), shape))
