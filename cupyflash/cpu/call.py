"""A call in NumPy: by the dense algorithm at once, or part by part.

Sequences that are packed or have ranges of keys are computed one after the other, and so are heads that have block
masks of their own. Packed arrays are (total, heads, head_dim), lse is (heads_q, total_q).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bias import becomes_blocks, own_of_mask
from ..block_mask import BlockMask
from ..problem import Problem
from ..sequences import parts
from . import attention, workers
from .features import Features, Place, Sums
from .tiles import scores_of

Array = NDArray[Any]
Index = tuple[Any, ...]


def forward(q: Array, k: Array, v: Array, problem: Problem, of: Features) -> tuple[Array, Array]:
    """`attention.forward` of each part by itself. Rows that are of none have out 0 and lse -inf."""
    found = _parts(problem, of)
    if found is None:
        return attention.forward(q, k, v, problem, of)
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), np.full(problem.rows, -np.inf, attention.accumulator(q))

    def task(part: _Part) -> None:
        one = forward(q[part.q], k[part.k], v[part.k], part.problem, part.features)
        out[part.q], lse[part.lse] = one

    _run(task, found)
    return out, lse


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array | None, problem: Problem,
    of: Features,
) -> tuple[Array, ...]:  # fmt: skip
    """`attention.backward` of each part by itself; 0 for rows and keys that are of none."""
    found = _parts(problem, of)
    if found is None:
        return attention.backward(dout, q, k, v, out, lse, dlse, problem, of)
    (dq, dk, dv), sums = (np.zeros(x.shape, x.dtype) for x in (q, k, v)), Sums(of)

    def task(part: _Part) -> tuple[Place, tuple[Array, ...]]:
        dO, Q, K, V, O = dout[part.q], q[part.q], k[part.k], v[part.k], out[part.q]  # noqa: E741 (the paper's name)
        dLSE = None if dlse is None else dlse[part.lse]
        gradients = backward(dO, Q, K, V, O, lse[part.lse], dLSE, part.problem, part.features)
        dq[part.q], dk[part.k], dv[part.k] = gradients[:3]
        return part.place, gradients[3:]

    _run(task, found, lambda found: sums.add(*found))
    return dq, dk, dv, *sums.found()


class _Part(NamedTuple):
    """One part: where it lies in arrays of queries, of keys and in lse, and what it is by itself."""

    q: Index
    k: Index
    lse: Index
    place: Place
    problem: Problem
    features: Features


def _run(task: Callable[[_Part], Any], parts: Iterator[_Part], then: Callable[[Any], None] | None = None) -> None:
    """A task for each part: side by side if none is so large that the others wait for it, else one after the other."""
    known = list(parts)
    scores = [scores_of(part.problem) for part in known]
    count = workers.threads(sum(scores))
    if max(scores, default=0) * count > sum(scores):
        count = 1
    workers.run((partial(task, part) for part in known), count, then)


def _parts(p: Problem, of: Features) -> Iterator[_Part] | None:
    """The parts of a call; None: it is computed at once."""
    if of.sequences is not None:
        return _by_sequence(p, of)
    mask = of.block_mask
    if mask is not None and (mask.own[0] or (mask.own[1] and p.heads_k > 1)):
        return _by_mask(p, of, mask)
    return None


def _by_sequence(p: Problem, of: Features) -> Iterator[_Part]:
    assert of.sequences is not None
    is_tiled = of.mask is not None and becomes_blocks(own_of_mask(of.mask.shape, of.mask.strides), p.packed)
    for one in parts(p, of.sequences):
        b, first = one.corner
        keys, rows = slice(first, first + one.problem.seqlen_k), slice(0, one.problem.seqlen_q)
        place = Place(slice(b, b + 1), keys=keys, rows=rows)
        mask = None if of.block_mask is None else of.block_mask.part(b, one.problem.seqlen_q, place.keys)
        features = replace(of.at(place), block_mask=mask, sequences=None, by_element=p.packed and not is_tiled)
        yield _Part(one.q, one.k, one.lse, place, one.problem, features)


def _by_mask(p: Problem, of: Features, mask: BlockMask) -> Iterator[_Part]:
    """What shares a mask: sequences, or heads of k with the heads of q that share these, or both."""
    own_batch, own_heads = mask.own
    batch, heads_k, group = 1 if own_batch else p.batch, 1 if own_heads else p.heads_k, p.heads_q // p.heads_k
    one = replace(p, batch=batch, heads_k=heads_k, heads_q=group * heads_k)
    for b in range(0, p.batch, batch):
        for h in range(0, p.heads_k, heads_k):
            of_b, of_k = slice(b, b + batch), slice(h, h + heads_k)
            of_q = slice(h * group, (h + heads_k) * group)
            place, tiles = Place(of_b, of_q), mask.tiles[of_b if own_batch else slice(None), of_q]
            features = replace(of.at(place), block_mask=replace(mask, tiles=tiles))
            yield _Part((of_b, slice(None), of_q), (of_b, slice(None), of_k), (of_b, of_q), place, one, features)
