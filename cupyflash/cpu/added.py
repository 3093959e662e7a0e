"""What is added to the scores of a tile in NumPy, behind mods: ALiBi (Press et al. 2022), a bias, a mask; and the
gradients.

S = S - slope * D + B,  D = |i + seqlen_k - seqlen_q - j|       dslope = -sum(dS * D),  dB = dS

dB is summed over the dimensions along which B is broadcast. Where B is -inf or a mask is False, the key is
hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mods.description import read
from ..problem import Problem
from .features import Features
from .modified import Modified, Reads, modified_of
from .tiles import by_group

Array = NDArray[Any]


@dataclass
class Added:
    """Of the heads of a chunk.

    Attributes:
        problem: of the chunk.
        slopes: ALiBi's, (batch * heads_k, group); None: there are none.
        bias, mask: (batch, heads_q, seqlen_q, seqlen_k), some of stride 0; None: there is none.
        mods: what a user makes of scores; None: nothing.
        has_mask_alone: whether the mask, or the mask_mod, says what queries see, as a block mask does: one with nothing
            beside it that is not read by element. Others are a bias of 0 and -inf.
        dslopes, dbias: their gradients if they are wanted, so far: shaped as the slopes, and as the bias with 1 for
            each dimension along which it is broadcast.
    """

    problem: Problem
    slopes: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    mods: Modified | None = None
    has_mask_alone: bool = False
    dslopes: Array | None = None
    dbias: Array | None = None

    def to(self, S: Array, rows: slice, keys: slice) -> Array:
        """The scores of a tile with what is made of them and added to them; in place."""
        hidden = self._hidden(rows, keys, S) if self.may_hide else None
        if self.mods is not None:
            S[...] = self.mods.of(S, rows, keys)[0]
        if self.slopes is not None:
            slopes = np.repeat(self.slopes, rows.stop - rows.start, axis=1)[..., None]
            S = np.subtract(S, slopes * _distances(rows, keys, self.problem, S.dtype), out=S)
        if self.bias is not None:
            S = np.add(S, self._tile(self.bias, rows, keys).astype(S.dtype), out=S)
        if hidden is not None:
            np.copyto(S, -np.inf, where=hidden)
        return S

    def visible(
        self, S: Array, visible: Array | None, rows: slice, keys: slice, lse: Array | None = None
    ) -> Array | None:
        """What each row of a tile of scores sees, given what the mask leaves of it (None: all), and lse, if it is
        known."""
        if not self.may_hide:
            return visible
        hidden = self._hidden(rows, keys, S)
        if lse is not None and not self.has_mask_alone:  # -inf where all scores are
            hidden = hidden | np.isneginf(lse)
        if not hidden.any():
            return visible
        return ~hidden if visible is None else visible & ~hidden

    def add_gradients(self, dS: Array, rows: slice, keys: slice, reads: Reads) -> None:
        """Add what a tile contributes, whose dS is 0 where nothing is seen; `reads`: of mods."""
        if self.mods is not None:
            self.mods.add_gradients(dS, reads)
        if self.dslopes is not None:
            of_rows = (dS * _distances(rows, keys, self.problem, dS.dtype)).sum(axis=-1)
            self.dslopes -= of_rows.reshape(*self.dslopes.shape, -1).sum(axis=-1)
        if self.dbias is not None and self.bias is not None:
            batch, heads = self.bias.shape[:2]
            tile = dS.reshape(batch, heads, rows.stop - rows.start, -1)
            shared = tuple(axis for axis, n in enumerate(self.dbias.shape) if n == 1)
            part = tuple(s if n != 1 else slice(None) for s, n in zip((rows, keys), self.dbias.shape[2:], strict=True))
            self.dbias[..., part[0], part[1]] += tile.sum(axis=shared, keepdims=True)

    @property
    def is_learned(self) -> bool:
        """Whether a gradient is wanted."""
        of_mods = self.mods is not None and bool(self.mods.sums)
        return of_mods or self.dslopes is not None or self.dbias is not None

    @property
    def may_hide(self) -> bool:
        """Whether keys are hidden one by one; unless by a mask alone, a row whose scores are all -inf sees none."""
        return self.bias is not None or self.mask is not None or self.mods is not None

    def _hidden(self, rows: slice, keys: slice, S: Array) -> Array:
        """Which keys of a tile of scores a bias, a mask or mods hide."""
        of_mask = False if self.mask is None else ~self._tile(self.mask, rows, keys)
        if self.mods is not None:
            of_mask = of_mask | self.mods.hidden(rows, keys, S.dtype)
        if self.bias is None:
            return np.asarray(of_mask)
        hidden: Array = np.isneginf(self._tile(self.bias, rows, keys)) | of_mask
        return hidden

    def _tile(self, x: Array, rows: slice, keys: slice) -> Array:
        """A tile of the bias or the mask, (batch * heads_k, group * rows, keys)."""
        tile, p = x[:, :, rows, keys], self.problem
        return tile.reshape(-1, p.heads_q // p.heads_k * tile.shape[2], tile.shape[3])


def added_of(of: Features, p: Problem, dtype: np.dtype[Any]) -> Added:
    """That of a chunk, a problem by itself."""
    found, shape = Added(p, mods=modified_of(of, p)), (p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
    if of.alibi_slopes is not None:
        found.slopes = by_group(of.alibi_slopes, p, dtype)
        found.dslopes = np.zeros_like(found.slopes) if of.wants("alibi_slopes") else None
    if of.bias is not None:
        found.bias = np.broadcast_to(of.bias, shape)
        found.dbias = np.zeros((1,) * (4 - of.bias.ndim) + of.bias.shape, dtype) if of.wants("bias") else None
    if of.mask is not None:
        found.mask = np.broadcast_to(of.mask, shape)
    is_one = of.mask is not None if not p.mods else of.mask is None and read(p.mods).score is None
    found.has_mask_alone = is_one and of.bias is None and of.block_mask is None and not of.by_element
    return found


def _distances(rows: slice, keys: slice, p: Problem, dtype: np.dtype[Any]) -> Array:
    """How far each key lies from each query's own position; rows repeat for each head of the group."""
    query, key = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
    distance = np.abs(query + p.diagonal - key).astype(dtype)
    return np.tile(distance, (p.heads_q // p.heads_k, 1))
