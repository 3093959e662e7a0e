"""What a named case of attention over a cache is, and its arrays. The table of them is `cache_cases`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..cache.arrays import BY_NAME, CACHE_ARRAYS
from ..cache.checks import CacheOptions, make_cache_options, make_cache_problem
from ..cache.problem import CacheProblem
from ..problem import DTYPES, Window
from .cache_stored import DTYPES as STORED_DTYPES
from .cache_stored import drawn, drawn_scales
from .case import NUMPY_DTYPE

Array = NDArray[Any]
Rng = np.random.Generator
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)  # what may stand in a block table behind the last page in use
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
        nonfinite: NaN and inf in rows in use, of which not all queries see all.
        stored: what caches of 8 bits hold: "int8", "e4m3"; "": elements of q's dtype.
        scale_dims: 1: scales of each head; 2: of each page or sequence of the cache, too, of which those that nobody
            uses have NaN and inf.
        scale_spread: by how many powers of two those of v may differ from what is usual.
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
    num_splits: int | None = None
    batch_invariant: bool = False
    nonfinite: bool = False
    stored: str = ""
    scale_dims: int = 1
    scale_spread: float = 1.0
    memory: str = "contiguous"
    dtypes: tuple[str, ...] = DTYPES

    @property
    def packed(self) -> bool:
        """Whether sequences have different numbers of queries, one behind the other."""
        return isinstance(self.queries, tuple)

    @property
    def tags(self) -> frozenset[str]:
        """`memory`, and: emulator, paged, append, rotary, packed, gqa, masked, softcap, alibi, kv_range, sink,
        nonfinite, stored."""
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
            "nonfinite": self.nonfinite,
            "stored": self.stored != "",
        }
        return frozenset(name for name, holds in facts.items() if holds) | {self.memory}

    def keywords(self) -> dict[str, Any]:
        """The options of `attention_with_cache`."""
        names = ("causal", "scale", "window", "softcap", "rotary_interleaved", "num_splits", "batch_invariant")
        return {name: getattr(self, name) for name in names}

    def options(self) -> CacheOptions:
        """The same as plain values."""
        return make_cache_options(*self.keywords().values())

    def problem(self, dtype: str) -> CacheProblem:
        """The checked problem in `dtype`."""
        return problem_of(self.inputs(dtype), self.options())

    def inputs(self, dtype: str, seed: int = 0) -> dict[str, Array]:
        """Fresh arrays by their names, in the order of `CACHE_ARRAYS`: the same numbers on every machine."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        found = _draw(self, rng)
        kinds = {"": NUMPY_DTYPE[dtype], "sum": np.dtype(np.float64 if dtype == "fp64" else np.float32)}
        kinds |= {"int32": np.dtype(np.int32), "rotary": kinds["sum"] if self.rotary_fp32 else kinds[""]}
        kinds |= {"cache": STORED_DTYPES.get(self.stored, kinds[""]), "fp32": np.dtype(np.float32)}
        cast = {name: np.ascontiguousarray(x, kinds[BY_NAME[name].dtype]) for name, x in found.items()}
        for name in ("k_cache", "v_cache"):
            cast[name] = _MEMORY[self.memory](cast[name])
        return {row.name: cast[row.name] for row in CACHE_ARRAYS if row.name in cast}


def problem_of(arrays: dict[str, Array], options: CacheOptions) -> CacheProblem:
    """The checked problem of arrays."""
    shapes = {name: x.shape for name, x in arrays.items()}
    names = {kind: name for name, kind in NUMPY_DTYPE.items()}
    return make_cache_problem(shapes, {name: names.get(x.dtype, str(x.dtype)) for name, x in arrays.items()}, options)


def _draw(c: CacheCase, rng: Rng) -> dict[str, Array]:
    batch, packed = len(c.lengths), isinstance(c.queries, tuple)
    rows = (sum(c.queries),) if isinstance(c.queries, tuple) else (batch, c.queries)
    found = {"q": rng.standard_normal((*rows, c.heads_q, c.head_dim)), "cache_seqlens": np.array(c.lengths)}
    queries = np.array(c.queries if packed else [c.queries] * batch, int)
    new = queries * c.append if c.new is None else np.full(batch, c.new)
    capacity = max(c.capacity, *(n + m for n, m in zip(c.lengths, new, strict=True)), 1)
    if c.page_size:
        slots, pages = _tables(c, rng, capacity)
        capacity = pages.shape[1] * c.page_size
        found["block_table"] = pages
    else:
        slots = batch + c.spare
        if c.spare:
            found["cache_batch_idx"] = rng.permutation(slots)[:batch]
    shape = (slots, c.page_size or capacity, c.heads_k, c.head_dim)
    found["k_cache"], found["v_cache"] = rng.standard_normal((2, *shape))
    _poison(c, found)
    if c.stored:
        _store(c, rng, found, new)
    if c.append:
        new_rows = rows[:1] if packed else (batch, int(new[0]) if batch else 0)
        found["k"], found["v"] = rng.standard_normal((2, *new_rows, c.heads_k, c.head_dim))
    if packed:
        found["cu_seqlens_q"] = np.concatenate(([0], np.cumsum(queries)))
    if c.rotary:
        turns = rng.uniform(-np.pi, np.pi, (c.positions or capacity, c.rotary // 2))
        found["rotary_cos"], found["rotary_sin"] = np.cos(turns), np.sin(turns)
    if c.alibi:
        found["alibi_slopes"] = 2.0 ** rng.uniform(-8, -1, (batch, c.heads_q)[2 - c.alibi :])
    if c.ranges is not None:
        found["kv_range"] = np.array(c.ranges)
    if c.sink:
        found["sink"] = rng.uniform(-4, 6, c.heads_q)
        found["sink"][1:2] = -np.inf  # which is none
    return found


def _tables(c: CacheCase, rng: Rng, capacity: int) -> tuple[int, Array]:
    """How many pages there are, and a table in which they come in some order; one to spare is of no sequence."""
    assert c.page_size
    batch, width = len(c.lengths), -(-capacity // c.page_size)
    count = batch * width + 1
    table = rng.permutation(count)[: batch * width].reshape(batch, width)
    table[:, : c.prefix] = table[:1, : c.prefix]
    for b, used in enumerate(c.lengths):
        queries = c.queries[b] if isinstance(c.queries, tuple) else c.queries
        total = used + (queries if c.new is None else c.new) * c.append
        behind = slice(-(-total // c.page_size), None)
        table[b, behind] = np.resize(GARBAGE, table[b, behind].shape)
    return count, table


def _poison(c: CacheCase, found: dict[str, Array]) -> None:
    """NaN and inf in all rows that are not in use; with `nonfinite` in a few that are, too."""
    k, v = found["k_cache"], found["v_cache"]
    in_use = np.zeros(k.shape[:2], bool)
    for b, used in enumerate(c.lengths):
        for row in range(used):
            in_use[place(found, b, row)] = True
    k[~in_use], v[~in_use] = np.nan, np.nan
    k[:, 1::3][~in_use[:, 1::3]], v[:, 2::3][~in_use[:, 2::3]] = np.inf, -np.inf
    for b, used in enumerate(c.lengths if c.nonfinite else ()):
        if used:
            k[place(found, b, used - 1)][0, 3], v[place(found, b, used - 1)][-1, 5] = np.nan, np.nan
            v[place(found, b, used // 2)][-1, 1] = np.inf


def _store(c: CacheCase, rng: Rng, found: dict[str, Array], new: Array) -> None:
    """8 bits and scales in place of the caches' numbers."""
    shape = found["k_cache"].shape[:3:2][2 - c.scale_dims :]
    for x, spread in (("k", 1.0), ("v", c.scale_spread)):
        found[f"{x}_cache"] = drawn(found[f"{x}_cache"], c.stored, 6 / 127 if c.stored == "int8" else 6 / 448)
        found[f"{x}_scale"] = drawn_scales(rng, shape, c.stored, spread)
        if c.scale_dims == 2:
            rows = ((b, row) for b, used in enumerate(c.lengths) for row in range(used + int(new[b])))
            nobodys = np.setdiff1d(np.arange(shape[0]), [place(found, b, row)[0] for b, row in rows])
            found[f"{x}_scale"][nobodys] = np.resize((np.nan, np.inf), (len(nobodys), 1))


def place(arrays: dict[str, Array], b: int, row: int) -> tuple[int, int]:
    """Where a row of a sequence lies in the caches."""
    if "block_table" in arrays:
        size = arrays["k_cache"].shape[1]
        return int(arrays["block_table"][b, row // size]), row % size
    return int(arrays["cache_batch_idx"][b]) if "cache_batch_idx" in arrays else b, row


def _with_gaps(x: Array, gap: int, offset: int = 0) -> Array:
    """The same, with gaps of NaN between its rows."""
    slots, rows, heads, columns = x.shape
    gaps = 127 if x.dtype.kind == "i" else np.nan
    flat = np.full(offset + slots * rows * heads * (columns + gap) + 1, gaps, x.dtype)
    steps = np.array([rows * heads, heads, 1, 0]) * (columns + gap) + [0, 0, 0, 1]
    view = as_strided(flat[offset:], x.shape, tuple(int(s) * x.itemsize for s in steps))
    view[...] = x
    return view


_MEMORY = {
    "contiguous": lambda x: x,
    "heads_first": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "padded_rows": lambda x: _with_gaps(x, 8),
    "misaligned": lambda x: _with_gaps(x, 0, 1),
}
