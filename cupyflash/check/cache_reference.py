"""What attention over a cache must give, row by row and in float64: what the cache holds then, and attention to that.

The call is written as one of packed sequences, which `accuracy.Oracle` knows: the keys of each sequence are fetched one
by one to where they lie one behind the other. Queries and new keys that are turned by their position are exact in the
exact result and rounded in the plain one, as the call rounds them. What caches of 8 bits mean is exact in the exact
result, and rounded to q's dtype in the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_mask import BlockMask
from ..cache.problem import CacheProblem
from ..mask_tiles import TILE
from ..problem import Problem
from ..sequences import Sequences
from .accuracy import UNIT_ROUNDOFF, Comparison, Oracle
from .cache_inputs import mods_of, place
from .cache_stored import appended, meant
from .features import Features

Array = NDArray[Any]


class CacheOracle:
    """What a call must give, computed from its arrays before they are written.

    Attributes:
        k_cache, v_cache: the caches after the append: what was there, bit by bit, and v; new k rounded once. Of 8 bits,
            new rows in fp32 over their scale, rounded.
        rotated: where new keys were turned, which need not be the same bit by bit.
    """

    def __init__(self, problem: CacheProblem, arrays: Mapping[str, Array]) -> None:
        self.problem = p = problem
        arrays = {name: x.copy() for name, x in arrays.items()}
        self.k_cache, self.v_cache = arrays["k_cache"], arrays["v_cache"]
        self.rotated = np.zeros(self.k_cache.shape, bool)
        self.exact_k = np.zeros(()) if p.stored else self.k_cache.astype(np.float64)
        queries, rows_at, ranges, lengths = arrays["q"].astype(np.float64), [], [], [0]
        for b in range(p.batch):
            own = self._queries(arrays, b)
            used = int(np.clip(arrays["cache_seqlens"][b], 0, p.capacity))
            new = (own.stop - own.start if p.packed else p.seqlen_new) if "k" in arrays else 0
            if "k" in arrays:
                self._append(arrays, b, used, new, own)
            rows = queries[own] if p.packed else queries[b]
            for i in range(len(rows) if p.rotary_dim else 0):
                rows[i] = self._turned(rows[i], used + i, arrays)
            keys = min(used + new, p.capacity)
            rows_at += [place(arrays, b, r) for r in range(keys)]
            start, end = np.clip(arrays["kv_range"][b], 0, keys) if p.kv_range else (0, keys)
            ranges.append((start, max(start, end)))
            lengths.append(lengths[-1] + keys)
        self._oracle = self._packed(arrays, queries, np.array(rows_at, int).reshape(-1, 2), ranges, lengths)

    def judge(self, out: Array, lse: Array, k_cache: Array, v_cache: Array) -> list[Comparison]:
        """Compare results, shaped as the call gives them, and the caches after it."""
        p, q = self.problem, self._oracle.problem
        if not p.packed:
            out = out.reshape(-1, p.heads_q, p.head_dim_v)
            lse = lse.swapaxes(0, 1).reshape(q.rows)
        found = self._oracle.judge_forward(out, lse)
        turned = None if p.stored else np.where(self.rotated, self.exact_k, np.nan)
        return [
            *found,
            self._same("k_cache", k_cache, self.k_cache, turned),
            self._same("v_cache", v_cache, self.v_cache),
        ]

    def _queries(self, arrays: Mapping[str, Array], b: int) -> slice:
        if not self.problem.packed:
            return slice(0, self.problem.seqlen_q)
        return slice(int(arrays["cu_seqlens_q"][b]), int(arrays["cu_seqlens_q"][b + 1]))

    def _append(self, arrays: Mapping[str, Array], b: int, used: int, new: int, own: slice) -> None:
        p = self.problem
        k, v = (arrays[name][own] if p.packed else arrays[name][b] for name in "kv")
        for i in range(min(new, p.capacity - used)):
            at = place(dict(arrays), b, used + i)
            if p.stored:
                self._store(arrays, at, k[i], v[i], used + i)
                continue
            exact = self._turned(k[i].astype(np.float64), used + i, arrays) if p.rotary_dim else k[i]
            self.rotated[at] = p.rotary_dim > 0 and used + i < p.rotary_positions
            self.exact_k[at], self.k_cache[at], self.v_cache[at] = exact, exact.astype(k.dtype), v[i]

    def _store(self, arrays: Mapping[str, Array], at: tuple[int, int], k: Array, v: Array, position: int) -> None:
        """New rows of caches of 8 bits, turned in fp32, each product and sum rounded."""
        p, wide = self.problem, np.float64 if self.problem.dtype == "fp64" else np.float32
        k, v = k.astype(wide), v.astype(wide)
        k = self._turned(k, position, arrays) if p.rotary_dim else k
        for cache, x, scale in ((self.k_cache, k, arrays["k_scale"]), (self.v_cache, v, arrays["v_scale"])):
            cache[at] = appended(x, scale[at[0]] if scale.ndim == 2 else scale, p.stored)

    def _turned(self, x: Array, position: int, arrays: Mapping[str, Array]) -> Array:
        """A row (heads, head_dim), each pair of columns turned by the angle of the position; in x's dtype."""
        p, result, half = self.problem, x.copy(), self.problem.rotary_dim // 2
        if position >= p.rotary_positions:
            return result
        for c in range(half):
            a, b = (2 * c, 2 * c + 1) if p.rotary_interleaved else (c, half + c)
            cos, sin = (x.dtype.type(arrays[name][position, c]) for name in ("rotary_cos", "rotary_sin"))
            result[:, a], result[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, a] * sin + x[:, b] * cos
        return result

    def _packed(
        self, arrays: Mapping[str, Array], queries: Array, rows: Array, ranges: list[Any], cu_k: list[int]
    ) -> Oracle:
        """The call as one of packed sequences: `queries` turned, and the rows of the caches that are keys."""
        p = self.problem
        cu_q = arrays["cu_seqlens_q"] if p.packed else np.arange(p.batch + 1) * p.seqlen_q
        exact_q = queries.reshape(-1, p.heads_q, p.head_dim)
        q = exact_q.astype(arrays["q"].dtype)
        held: list[Array] = [self.k_cache, self.v_cache, self.exact_k, self.v_cache]
        if p.stored:
            exact = [meant(self.k_cache, arrays["k_scale"]), meant(self.v_cache, arrays["v_scale"])]
            held = [*(x.astype(q.dtype) for x in exact), *exact]
        k, v, exact_k, exact_v = (x[rows[:, 0], rows[:, 1]] for x in held)
        packed = Problem(
            p.dtype, p.batch, len(q), len(k), p.heads_q, p.heads_k, p.head_dim, p.scale, p.window,
            softcap=p.softcap, packed=True, alibi=p.alibi, sink=p.sink, bias=p.bias, mods=p.mods,
            mod_shapes=p.mod_shapes, head_dim_v=p.head_dim_v,
        )  # fmt: skip
        kv_range = np.array(ranges).reshape(-1, 2) if p.kv_range else None
        sequences = Sequences(np.array(cu_q), np.array(cu_k), None, kv_range)
        packed = replace(packed, kv_range=p.kv_range)
        names = "alibi_slopes", "sink", "bias", "mask"
        given: dict[str, Any] = {name: arrays[name] for name in names if name in arrays}
        if p.block_mask:
            mask = given.get("mask", np.ones((1, 1), bool))
            room = max(mask.shape[-2:-1], default=0), int(np.diff(cu_q).max(initial=1))
            given["mask"] = mask & self._shown(arrays, max(room), np.diff(cu_q), np.diff(cu_k))
        features = Features(sequences=sequences, mods=mods_of(p.mods, arrays), **given)
        return Oracle(packed, q, k, v, features=features, unrounded=(exact_q, exact_k, exact_v))

    def _shown(self, arrays: Mapping[str, Array], room: int, queries: Array, keys: Array) -> Array:
        """What a block mask shows, element by element, as a mask has it with room for so many queries."""
        p, tiles = self.problem, arrays["block_tiles"]
        n = TILE * tiles.shape[-1]
        mask = BlockMask(tiles, arrays["block_bits"], n, n)
        found = np.zeros((p.batch, p.heads_q, room, p.capacity), bool)
        for b in range(p.batch):
            for h in range(p.heads_q):
                seen = mask.of(b, h)
                for i in range(queries[b]):
                    row = int(keys[b] - queries[b]) + i
                    found[b, h, i] = seen[row, : p.capacity] if row >= 0 else False
        return found

    def _same(self, name: str, got: Array, wanted: Array, exact: Array | None = None) -> Comparison:
        """Bit by bit, but for what was turned, `exact`, NaN elsewhere: off by one rounding at most, and fp32's."""
        turned = np.zeros(got.shape, bool) if exact is None else np.isfinite(exact)
        bits = (np.asarray(x).view(f"u{x.itemsize}") if x.size else x for x in map(np.ascontiguousarray, (got, wanted)))
        differs = ~turned & np.not_equal(*bits)
        error, bound = np.zeros(got.shape), 0.0
        if exact is not None and turned.any():
            error[turned] = np.abs(got.astype(np.float64) - exact)[turned]
            u = UNIT_ROUNDOFF[self.problem.dtype]
            largest = float(np.abs(exact[turned]).max())
            bound = u * largest + 8 * UNIT_ROUNDOFF["fp64" if self.problem.dtype == "fp64" else "fp32"] * largest
            error = np.where(np.isnan(error), np.inf, error)
        worst = float(error.max(initial=0))
        reason = f"{int(differs.sum())} values are not those that must be there" if differs.any() else ""
        reason = reason or ("rotated keys are off" if worst > bound else "")
        flat = int(differs.argmax() if differs.any() else error.argmax()) if got.size else 0
        index = tuple(int(i) for i in np.unravel_index(flat, got.shape)) if got.size else None
        values = (float(got[index]), float(wanted[index])) if index is not None else (np.nan, np.nan)
        return Comparison(
            name, not reason, worst, worst, 0.0, 0.0, bound or 1e-300, bound or 1e-300, index, *values, reason
        )
