"""The arrays of a call of attention over a cache, by name, in the order in which a launch gets their addresses."""

from __future__ import annotations

from typing import NamedTuple

from ..operand import MOD_ARRAYS, TILE_WORDS
from .problem import CacheProblem

# What an array is to a call. A cache is written where k is given, behind the rows in use.
INPUT, CACHE, RESULT = "input", "cache", "result"


class CacheArray(NamedTuple):
    """One array.

    Attributes:
        dims: its dimensions; those of `packed` where sequences of different lengths lie one after the other.
        dtype: "" is that of q, "cache" that or one of 8 bits, "sum" fp32, and fp64 for fp64, "added" that of q, or fp32
            beside 16 bits.
        strided: it may have any strides but along its last dimension; others are contiguous.
        optional: a call may lack it.
        broadcasts: it may have any shape that broadcasts to its dimensions, and any strides.
        single: dimensions whose length may be 1, since it is the same for all.
        free: it has the shape and dtype that mods say.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = ""
    role: str = INPUT
    strided: bool = False
    optional: bool = False
    broadcasts: bool = False
    single: tuple[str, ...] = ()
    free: bool = False

    @property
    def contiguous(self) -> bool:
        """Whether kernels take it contiguous alone."""
        return not (self.strided or self.broadcasts)

    @property
    def packed(self) -> tuple[str, ...]:
        """Its dimensions in a packed call: no batch where there are queries or new keys; or, of what broadcasts to
        scores, room for the most queries that a sequence has."""
        if self.broadcasts:
            return tuple(d.replace("seqlen", "max_seqlen") for d in self.dims)
        has_rows = any(d.startswith("seqlen") for d in self.dims)
        return tuple(d for d in self.dims if d != "batch") if has_rows else self.dims


_Q, _NEW = ("batch", "seqlen_q", "heads_q", "head_dim"), ("batch", "seqlen_new", "heads_k", "head_dim")
_CACHE = ("slots", "slot_rows", "heads_k", "head_dim")
_OUT, _NEW_V, _V_CACHE = ((*dims[:3], "head_dim_v") for dims in (_Q, _NEW, _CACHE))
_ROTARY = ("rotary_positions", "rotary_dim / 2")
_SCORES = ("batch", "heads_q", "seqlen_q", "capacity")
_TILES = ("batch", "heads_q", "mask_tiles", "mask_tiles")

CACHE_ARRAYS = (
    CacheArray("q", _Q, strided=True),
    CacheArray("k_cache", _CACHE, "cache", role=CACHE, strided=True),
    CacheArray("v_cache", _V_CACHE, "cache", role=CACHE, strided=True),
    CacheArray("cache_seqlens", ("batch",), "int32"),
    CacheArray("k", _NEW, strided=True, optional=True),
    CacheArray("v", _NEW_V, strided=True, optional=True),
    CacheArray("block_table", ("batch", "pages_per_sequence"), "int32", strided=True, optional=True),
    CacheArray("cache_batch_idx", ("batch",), "int32", optional=True),
    CacheArray("cu_seqlens_q", ("batch + 1",), "int32", optional=True),
    CacheArray("rotary_cos", _ROTARY, "rotary", optional=True),
    CacheArray("rotary_sin", _ROTARY, "rotary", optional=True),
    CacheArray("alibi_slopes", ("batch", "heads_q"), "sum", optional=True),
    CacheArray("kv_range", ("batch", "2"), "int32", optional=True),
    CacheArray("sink", ("heads_q",), "sum", optional=True),
    CacheArray("k_scale", ("slots", "heads_k"), "fp32", optional=True),
    CacheArray("v_scale", ("slots", "heads_k"), "fp32", optional=True),
    CacheArray("bias", _SCORES, "added", optional=True, broadcasts=True),
    CacheArray("mask", _SCORES, "bool", optional=True, broadcasts=True),
    CacheArray("block_tiles", _TILES, "int32", optional=True, single=("batch", "heads_q")),
    CacheArray("block_bits", ("any", "tile_words"), "int32", optional=True),
    *(CacheArray(name, (), "any", optional=True, free=True) for name in MOD_ARRAYS),
    CacheArray("out", _OUT, role=RESULT),
    CacheArray("lse", ("batch", "heads_q", "seqlen_q"), "sum", role=RESULT, optional=True),
)
BY_NAME = {array.name: array for array in CACHE_ARRAYS}
MAY_LACK = ("alibi_slopes", "k_scale", "v_scale")  # their first dimension


def shape_of(name: str, p: CacheProblem) -> tuple[int, ...]:
    """What the array must be, or is made."""
    array = BY_NAME[name]
    dims = array.packed if p.packed else array.dims
    if name in MAY_LACK:
        dims = dims[2 - (p.alibi if name == "alibi_slopes" else p.scale_dims) :]
    return tuple(length_of(d, p) for d in dims)


def length_of(dim: str, p: CacheProblem) -> int:
    """The length of one dimension; -1: any."""
    derived = {
        "slot_rows": p.page_size or p.capacity,
        "rotary_dim / 2": p.rotary_dim // 2,
        "batch + 1": p.batch + 1,
        "2": 2,
        "tile_words": TILE_WORDS,
        "any": -1,
    }
    return derived[dim] if dim in derived else int(getattr(p, dim))
