"""What is added to the scores of a tile in NumPy: ALiBi (Press et al. 2022) and a bias; and the gradients of both.

S = S - slope * D + B,  D = |i + seqlen_k - seqlen_q - j|       dslope = -sum(dS * D),  dB = dS

dB is summed over the dimensions along which B is broadcast. Where B is -inf the key is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from .tiles import as_given, by_group, of_chunk

Array = NDArray[Any]
Chunk = tuple[slice, slice]  # of the batch, and of the heads of k


@dataclass
class Added:
    """Of the heads of a chunk.

    Attributes:
        slopes: ALiBi's, (batch * heads_k, group); None: there are none.
        bias: (batch, heads_q, seqlen_q, seqlen_k), some of stride 0; of bool, it is a mask; None: there is none.
        dslopes, dbias: their gradients if they are wanted, so far: shaped as the slopes, and as the bias with 1 for
            each dimension along which it is broadcast.
    """

    problem: Problem
    slopes: Array | None = None
    bias: Array | None = None
    dslopes: Array | None = None
    dbias: Array | None = None

    def to(self, S: Array, rows: slice, keys: slice) -> Array:
        """The scores of a tile with what is added to them; in place."""
        if self.slopes is not None:
            slopes = np.repeat(self.slopes, rows.stop - rows.start, axis=1)[..., None]
            S = np.subtract(S, slopes * _distances(rows, keys, self.problem, S.dtype), out=S)
        if self.bias is not None:
            bias = self._tile(rows, keys).astype(S.dtype)
            S = np.add(S, bias, out=S)
            np.copyto(S, -np.inf, where=np.isneginf(bias))
        return S

    def visible(self, visible: Array | None, rows: slice, keys: slice, lse: Array | None = None) -> Array | None:
        """What each row of a tile sees, given what the mask leaves of it (None: all), and lse, if it is known."""
        if self.bias is None:
            return visible
        hidden = np.isneginf(self._tile(rows, keys))
        if lse is not None:  # -inf where all scores are
            hidden = hidden | np.isneginf(lse)
        if not hidden.any():
            return visible
        return ~hidden if visible is None else visible & ~hidden

    def add_gradients(self, dS: Array, rows: slice, keys: slice) -> None:
        """Add what a tile contributes, whose dS is 0 where nothing is seen."""
        if self.dslopes is not None:
            of_rows = (dS * _distances(rows, keys, self.problem, dS.dtype)).sum(axis=-1)
            self.dslopes -= of_rows.reshape(*self.dslopes.shape, -1).sum(axis=-1)
        if self.dbias is not None and self.bias is not None:
            batch, heads = self.bias.shape[:2]
            tile = dS.reshape(batch, heads, rows.stop - rows.start, -1)
            shared = tuple(axis for axis, n in enumerate(self.dbias.shape) if n == 1)
            part = tuple(s if n != 1 else slice(None) for s, n in zip((rows, keys), self.dbias.shape[2:], strict=True))
            self.dbias[..., part[0], part[1]] += tile.sum(axis=shared, keepdims=True)

    def gradients(self) -> tuple[Array, ...]:
        """Those that are wanted."""
        return tuple(x for x in (self.dslopes, self.dbias) if x is not None)

    def _tile(self, rows: slice, keys: slice) -> Array:
        """The bias of a tile, (batch * heads_k, group * rows, keys)."""
        assert self.bias is not None
        tile, p = self.bias[:, :, rows, keys], self.problem
        if tile.dtype == bool:
            tile = np.where(tile, np.float32(0), np.float32(-np.inf))
        return tile.reshape(-1, p.heads_q // p.heads_k * tile.shape[2], tile.shape[3])


@dataclass
class Adds:
    """What is added to the scores of a call, as the caller gives it, and the gradients that are wanted."""

    problem: Problem
    alibi_slopes: Array | None = None
    bias: Array | None = None
    wanted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._total: dict[str, Array] = {}
        for name, x in (("dalibi_slopes", self.alibi_slopes), ("dbias", self.bias)):
            if x is not None and name in self.wanted:
                double = x.dtype.itemsize == 8
                self._total[name] = np.zeros(x.shape, np.float64 if double else np.float32)

    def of(self, chunk: Chunk, dtype: np.dtype[Any]) -> Added:
        """That of the heads of a chunk."""
        p, found = self.problem, Added(self.problem)
        if self.alibi_slopes is not None:
            found.slopes = of_chunk(by_group(self.alibi_slopes, p), chunk, dtype)
            found.dslopes = np.zeros_like(found.slopes) if "dalibi_slopes" in self._total else None
        if self.bias is not None:
            whole = np.broadcast_to(self.bias, (p.batch, p.heads_q, p.seqlen_q, p.seqlen_k))
            found.bias = whole[chunk[0], self._heads(chunk)]
            if "dbias" in self._total:
                own = (1,) * (4 - self.bias.ndim) + self.bias.shape
                shape = [1 if n == 1 else m for n, m in zip(own, found.bias.shape, strict=True)]
                found.dbias = np.zeros(shape, dtype)
        return found

    def keep(self, chunk: Chunk, added: Added) -> None:
        """Add the gradients of a chunk to those of the call."""
        p = self.problem
        if added.dslopes is not None:
            total = np.zeros((p.batch, p.heads_k, p.heads_q // p.heads_k), added.dslopes.dtype)
            total[chunk] = added.dslopes.reshape(total[chunk].shape)
            own = self._total["dalibi_slopes"]
            own += as_given(total, own, p)
        if added.dbias is not None:
            total = self._total["dbias"]
            shape: tuple[int, ...] = (*[1] * (4 - total.ndim), *total.shape)
            own = total.reshape(shape)
            batch = chunk[0] if shape[0] != 1 else slice(None)
            heads = self._heads(chunk) if shape[1] != 1 else slice(None)
            own[batch, heads] += added.dbias

    def gradients(self) -> dict[str, Array]:
        """Those that are wanted, of the call, by name: sums, in fp32 or fp64."""
        return dict(self._total)

    def _heads(self, chunk: Chunk) -> slice:
        """The heads of q of a chunk."""
        group = self.problem.heads_q // self.problem.heads_k
        return slice(chunk[1].start * group, chunk[1].stop * group)


def _distances(rows: slice, keys: slice, p: Problem, dtype: np.dtype[Any]) -> Array:
    """How far each key lies from each query's own position; rows repeat for each head of the group."""
    query, key = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
    distance = np.abs(query + p.diagonal - key).astype(dtype)
    return np.tile(distance, (p.heads_q // p.heads_k, 1))
