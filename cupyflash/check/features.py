"""What features bring to plain attention: arrays beside q, k and v, and those of one sequence or head alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bias import becomes_blocks, own_of_mask
from ..dropout import kept, limit_of
from ..mods.description import read
from ..operands import BACKWARD
from ..problem import Problem
from ..sequences import Part, Sequences
from .bias import part_of

Array = NDArray[Any]


class OfHead(NamedTuple):
    """What one head of q has of the arrays of these names, and as an array of these numbers their gradients."""

    alibi_slopes: Any = 0.0
    sink: Any = -np.inf


class Features(NamedTuple):
    """The arrays; None: not given.

    Attributes:
        sequences: where the sequences of a packed problem lie, and which of their keys count.
        alibi_slopes: (heads_q,) or (batch, heads_q).
        sink: (heads_q,).
        bias: broadcasts to (batch, heads_q, seqlen_q, seqlen_k); packed, it has room for the longest sequence.
        dropout_seed: (2,) or (2, 2), int32.
        corner: the first sequence and key, as dropout counts.
        block_mask: a `masks.BlockMask`.
        mask: likewise, of bool; beside others, or read by element, a bias of 0 and -inf that has no gradient.
        mods: a `case_mods.ModInputs`.
        by_element: whether it is one of packed sequences whose mask, or mask_mod, kernels read by element.
    """

    sequences: Sequences | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    bias: Array | None = None
    dropout_seed: Array | None = None
    block_mask: Any = None
    mask: Array | None = None
    mods: Any = None
    corner: tuple[int, int] = (0, 0)
    by_element: bool = False

    @property
    def has_mask_alone(self) -> bool:
        """Whether a mask, or a mask_mod, says what queries see, as a block mask does: one with nothing beside it that
        is not read by element."""
        is_one = self.mask is not None if self.mods is None else self.mask is None and self.mods.score_mod is None
        return is_one and self.bias is None and self.block_mask is None and not self.by_element

    def named(self) -> dict[str, Any]:
        """What is given, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None and name not in ("corner", "by_element")}

    def added(self, p: Problem) -> Array | None:
        """What is added to the scores; what hides keys is a bias of 0 and -inf, unless it is a mask alone."""
        found = self.bias
        if self.has_mask_alone:
            return found
        if self.mask is not None:
            found = np.where(self.mask, 0.0 if found is None else found.astype(np.float64), -np.inf)
        if self.mods is None:
            return found
        shape = p.batch, p.heads_q, p.seqlen_q, p.seqlen_k
        shown = np.zeros(shape, bool)
        for b, h in np.ndindex(shape[:2]):
            shown[b, h] = self._shown(p, b, h)
        return np.where(shown, 0.0 if found is None else found.astype(np.float64), -np.inf)

    def modified(self, S: Array, p: Problem, b: int, h: int) -> tuple[Any, Any]:
        """What mods make of the scores of a head of q, and its derivative."""
        return read(p.mods).of_scores(S, *self.at(p, b, h))

    def _shown(self, p: Problem, b: int, h: int) -> Array:
        """Which keys mods show to the queries of a head."""
        shown: Array = read(p.mods).shown((p.seqlen_q, p.seqlen_k), np.float64, *self.at(p, b, h))
        return shown

    def at(self, p: Problem, b: int, h: int) -> tuple[Any, tuple[Array, ...]]:
        """The places of a head of q, and the arrays that mods read."""
        sequence, first = self.corner
        places = sequence + b, h, np.arange(p.seqlen_q)[:, None], first + np.arange(p.seqlen_k)
        return places, tuple(self.mods.bound()[1].values())

    def part(self, p: Problem, part: Part) -> Features:
        """Those of one sequence by itself."""
        slopes, i = self.alibi_slopes, part.corner[0]
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[i : i + 1]
        bias, mask = (part_of(x, part) for x in (self.bias, self.mask))
        first, alone = part.corner[1], part.problem
        keys = slice(first, first + alone.seqlen_k)
        blocks = None if self.block_mask is None else self.block_mask.part(i, alone.seqlen_q, keys)
        own_features = {"alibi_slopes": own, "bias": bias, "mask": mask, "block_mask": blocks}
        is_tiled = self.mask is not None and becomes_blocks(own_of_mask(self.mask.shape), p.packed)
        by_element = p.packed and not is_tiled
        return self._replace(sequences=None, corner=part.corner, by_element=by_element, **own_features)

    def head(self, b: int, h: int) -> OfHead:
        """Those of a head of q."""
        slopes = self.alibi_slopes
        slope = 0.0 if slopes is None else slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return OfHead(alibi_slopes=slope, sink=-np.inf if self.sink is None else self.sink[h])

    def kept(self, p: Problem, b: int, h: int) -> Array | float:
        """Z of a head of q, (seqlen_q, seqlen_k): 1 / (1 - p) where an element is kept, else 0; 1 without dropout."""
        if self.dropout_seed is None:
            return 1.0
        sequence, first = self.corner
        of = np.array([sequence + b]), np.array([h]), slice(0, p.seqlen_q), slice(first, first + p.seqlen_k)
        return np.where(kept(self.dropout_seed, limit_of(p.dropout_p), *of)[0], p.dropout_inverse, 0.0)

    def seen(self, p: Problem, visible: Array, b: int, h: int) -> Array:
        """Of the pairs of query and key that bounds leave, those that a head of q sees."""
        if self.mods is not None and self.has_mask_alone:
            return visible & self._shown(p, b, h)
        if self.mask is not None and self.has_mask_alone:
            whole: Array = self.mask.reshape((1,) * (4 - self.mask.ndim) + self.mask.shape)
            batch, heads, *_ = whole.shape
            return visible & whole[b % batch, h % heads]
        return visible if self.block_mask is None else visible & self.block_mask.of(b, h)

    def gathered(self, found: Array, dbias: Array, of_mods: list[Array]) -> tuple[Array, ...]:
        """What was found for each head of each sequence, (batch, heads_q, OfHead), shaped as the arrays given; and
        that of a bias, and of what mods read."""
        results = {"bias": dbias}
        for i, name in enumerate(OfHead._fields):
            lacks_batch = np.ndim(getattr(self, name)) == 1
            results[name] = found[..., i].sum(axis=0) if lacks_batch else found[..., i]
        return *(results[name] for name in self.learned), *of_mods

    @property
    def learned(self) -> tuple[str, ...]:
        """The arrays that have gradients, but for those of mods."""
        return tuple(name for name in BACKWARD.learned if getattr(self, name) is not None)
