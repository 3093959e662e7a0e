"""What a named case of attention over a cache is, and its arrays. The table of them is `cache_cases`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache.arrays import BY_NAME, CACHE_ARRAYS
from ..cache.checks import CacheOptions, make_cache_options, make_cache_problem
from ..cache.problem import CacheProblem
from ..operand import MOD_ARRAYS
from ..problem import DTYPES, Window
from .cache_inputs import MEMORY, draw, draw_added_to, draw_blocks, mods_of, text_of_mods
from .cache_stored import DTYPES as STORED_DTYPES
from .case import NUMPY_DTYPE

Array = NDArray[Any]
EMULATOR_KEYS, EMULATOR_ROWS = 400, 260  # as many as a case may have where kernels run some thousand times slower


@dataclass(frozen=True)
class CacheCase:
    """One named case. All rows of the caches that are not in use before the append hold NaN and inf.

    Attributes:
        lengths: rows of each sequence that are in use before the append.
        queries: of each sequence; as a tuple: packed, one number a sequence.
        capacity: rows of a sequence; of a paged cache so many at least.
        page_size: None: no pages.
        prefix: pages at the beginning that all sequences share.
        new: how many rows are appended to each sequence; None: as many as there are queries.
        append: whether there are any.
        rotary: rotary_dim; 0: none.
        positions: rows of the rotary tables; 0: as many as the capacity.
        spare: sequences of the caches that none of the batch is; the others come in some order, by cache_batch_idx.
        head_dim_v: of v; None: that of q and k.
        nonfinite: NaN and inf in rows in use, of which not all queries see all.
        stored: what caches of 8 bits hold: "int8", "e4m3"; "": elements of q's dtype.
        scale_dims: 1: scales of each head; 2: of each page or sequence of the cache, too, of which those that nobody
            uses have NaN and inf.
        scale_spread: by how many powers of two those of v may differ from what is usual.
        bias: a bias, a mask or both, in words of `case_bias`, where keys are the rows that a sequence can have.
        blocks: a block mask, by its name in `case_masks.MASKS`; mask_room: for so many rows more than there may be.
        mods: a user's expressions, by their name in `case_mods.MODS`.
        one_length: cache_seqlens is given as an integer, the length of all.
        memory: how the caches lie: "contiguous", "heads_first", "padded_rows", or "misaligned" by one element.
    """

    name: str
    level: str
    lengths: tuple[int, ...]
    queries: int | tuple[int, ...] = 1
    head_dim: int = 64
    heads_q: int = 4
    heads_k: int = 2
    capacity: int = 0
    page_size: int | None = None
    prefix: int = 0
    append: bool = False
    new: int | None = None
    rotary: int = 0
    rotary_interleaved: bool = False
    rotary_fp32: bool = False
    positions: int = 0
    spare: int = 0
    causal: bool = True
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None
    sink: bool = False
    bias: str = ""
    blocks: str = ""
    mask_room: int = 0
    mods: str = ""
    num_splits: int | None = None
    batch_invariant: bool = False
    head_dim_v: int | None = None
    nonfinite: bool = False
    stored: str = ""
    scale_dims: int = 1
    scale_spread: float = 1.0
    one_length: bool = False
    memory: str = "contiguous"
    dtypes: tuple[str, ...] = DTYPES

    @property
    def packed(self) -> bool:
        """Whether sequences have different numbers of queries, one behind the other."""
        return isinstance(self.queries, tuple)

    @property
    def tags(self) -> frozenset[str]:
        """`memory`, and: emulator, paged, append, rotary, packed, gqa, masked, softcap, alibi, kv_range, sink,
        bias, blocks, mods, nonfinite, stored, own_v."""
        rows = sum(self.queries) if isinstance(self.queries, tuple) else self.queries * len(self.lengths)
        facts = {
            "emulator": sum(self.lengths) <= EMULATOR_KEYS and rows * self.heads_q <= EMULATOR_ROWS,
            "paged": self.page_size is not None,
            "append": self.append,
            "rotary": self.rotary > 0,
            "packed": self.packed,
            "gqa": self.heads_q != self.heads_k,
            "masked": self.causal or self.window is not None,
            "softcap": self.softcap is not None,
            "alibi": self.alibi > 0,
            "kv_range": self.ranges is not None,
            "sink": self.sink,
            "bias": self.bias != "",
            "blocks": self.blocks != "",
            "mods": self.mods != "",
            "nonfinite": self.nonfinite,
            "stored": self.stored != "",
            "own_v": self.head_dim_v is not None,
        }
        return frozenset(name for name, holds in facts.items() if holds) | {self.memory}

    def keywords(self) -> dict[str, Any]:
        """The options of `attention_with_cache`, but for mods."""
        names = ("causal", "scale", "window", "softcap", "rotary_interleaved", "num_splits", "batch_invariant")
        return {name: getattr(self, name) for name in names}

    def options(self) -> CacheOptions:
        """The same as plain values."""
        return make_cache_options(*self.keywords().values())._replace(mods=text_of_mods(self))

    def call(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of `attention_with_cache`; `arrays`: as `inputs` has them, or the same in another library."""
        mods = mods_of(self.options().mods, arrays)
        others = {name: x for name, x in arrays.items() if name not in (*MOD_ARRAYS, "block_tiles", "block_bits")}
        if self.blocks:
            others["block_mask"] = draw_blocks(self, arrays)
        if self.one_length:
            others["cache_seqlens"] = self.lengths[0]
        return others | self.keywords() | (mods._asdict() if mods else {})

    def problem(self, dtype: str) -> CacheProblem:
        """The checked problem in `dtype`."""
        return self.problem_with(self.inputs(dtype))

    def problem_with(self, arrays: dict[str, Array]) -> CacheProblem:
        """That of these arrays."""
        return problem_of(arrays, self.options(), one_length=self.one_length)

    def inputs(self, dtype: str, seed: int = 0) -> dict[str, Array]:
        """Fresh arrays by their names, in the order of `CACHE_ARRAYS`: the same numbers on every machine."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        found = draw(self, rng)
        kinds = {"": NUMPY_DTYPE[dtype], "sum": np.dtype(np.float64 if dtype == "fp64" else np.float32)}
        kinds |= {"int32": np.dtype(np.int32), "rotary": kinds["sum"] if self.rotary_fp32 else kinds[""]}
        kinds |= {"cache": STORED_DTYPES.get(self.stored, kinds[""]), "fp32": np.dtype(np.float32)}
        cast = {name: np.ascontiguousarray(x, kinds[BY_NAME[name].dtype]) for name, x in found.items()}
        for name in ("k_cache", "v_cache"):
            cast[name] = MEMORY[self.memory](cast[name])
        cast |= draw_added_to(self, rng, cast, NUMPY_DTYPE[dtype])
        return {row.name: cast[row.name] for row in CACHE_ARRAYS if row.name in cast}


def problem_of(arrays: dict[str, Array], options: CacheOptions, *, one_length: bool = False) -> CacheProblem:
    """The checked problem of arrays; `one_length`: of which cache_seqlens is given as an integer."""
    shapes = {name: x.shape for name, x in arrays.items() if not (one_length and name == "cache_seqlens")}
    names = {kind: name for name, kind in NUMPY_DTYPE.items()}
    return make_cache_problem(shapes, {name: names.get(x.dtype, str(x.dtype)) for name, x in arrays.items()}, options)
