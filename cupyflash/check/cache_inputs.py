"""What the arrays of the named cases of attention over a cache hold, and how the caches lie in memory (`MEMORY`).

A case, `cache_case.CacheCase`, says what is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..mods.description import read
from ..operand import MOD_ARRAYS
from ..problem import Problem
from .cache_stored import drawn, drawn_scales
from .case_bias import draw_added
from .case_masks import draw_mask
from .case_mods import ModInputs, draw_mods

Array = NDArray[Any]
Rng = np.random.Generator
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)  # what may stand in a block table behind the last page in use
ROOM = 2  # packed, queries of each sequence that a bias has more than the longest one


def draw(c: Any, rng: Rng) -> dict[str, Array]:
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
    widths = c.head_dim, c.head_dim_v or c.head_dim
    rows_of_cache = slots, c.page_size or capacity, c.heads_k
    found["k_cache"], found["v_cache"] = (rng.standard_normal((*rows_of_cache, d)) for d in widths)
    _poison(c, found)
    if c.stored:
        _store(c, rng, found, new)
    if c.append:
        new_rows = rows[:1] if packed else (batch, int(new[0]) if batch else 0)
        found["k"], found["v"] = (rng.standard_normal((*new_rows, c.heads_k, d)) for d in widths)
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


def draw_added_to(c: Any, rng: Rng, found: dict[str, Array], dtype: np.dtype[Any]) -> dict[str, Array]:
    """A bias, masks and what mods read of a case, beside its other arrays; `dtype`: that of q."""
    shape = _scores(c, _rows(found))
    added = zip(("bias", "mask"), draw_added(c.bias, rng, shape, dtype), strict=True)
    mods = draw_mods(c.mods, rng, shape)
    made = {name: x for name, x in added if x is not None} | (mods.bound()[1] if mods else {})
    if c.blocks:
        mask = draw_blocks(c, found)
        made |= {"block_tiles": mask.tiles, "block_bits": mask.bits}
    return made


def draw_blocks(c: Any, arrays: Mapping[str, Any]) -> BlockMask:
    """The block mask of a case, for more rows than a sequence can have."""
    rows = _rows(arrays) + c.mask_room
    return draw_mask(c.blocks, c.name, (len(c.lengths), c.heads_q, rows, rows))


def _rows(arrays: Mapping[str, Any]) -> int:
    """How many a sequence can have."""
    pages = arrays["block_table"].shape[1] if "block_table" in arrays else 1
    return int(arrays["k_cache"].shape[1] * pages)


def _scores(c: Any, capacity: int) -> Problem:
    """A problem with the scores that a bias of a case has room for."""
    queries = max(c.queries, default=0) + ROOM if isinstance(c.queries, tuple) else c.queries
    return Problem("fp32", len(c.lengths), queries, capacity, c.heads_q, c.heads_k, c.head_dim, 1.0)


def text_of_mods(c: Any) -> str:
    """Those of a case, which do not depend on how long what they read is."""
    mods = draw_mods(c.mods, np.random.default_rng(0), _scores(c, 1))
    return mods.bound()[0] if mods else ""


def mods_of(text: str, arrays: Mapping[str, Any]) -> ModInputs | None:
    """Mods as `attention_with_cache` takes them, of their text and the arrays of a call."""
    if not text:
        return None
    mods = read(text)
    score, mask = (None if node is None else node.text for node in (mods.score, mods.mask))
    return ModInputs(score, mask, {x.name: arrays[name] for x, name in zip(mods.arrays, MOD_ARRAYS, strict=False)})


def _tables(c: Any, rng: Rng, capacity: int) -> tuple[int, Array]:
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


def _poison(c: Any, found: dict[str, Array]) -> None:
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


def _store(c: Any, rng: Rng, found: dict[str, Array], new: Array) -> None:
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


MEMORY = {
    "contiguous": lambda x: x,
    "heads_first": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "padded_rows": lambda x: _with_gaps(x, 8),
    "misaligned": lambda x: _with_gaps(x, 0, 1),
}
