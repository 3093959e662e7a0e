"""A mask_mod becomes a block mask, as a mask of booleans does: what it hides is not computed, and kernels other than
the one that makes it know nothing of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..bias import MAX_SEQLEN, becomes_blocks
from ..mods.description import read
from ..mods.expression import PLACES
from ..operand import MASK_TILE, TILE_WORDS
from ..problem import Problem

_FEW = 64 << 20  # bytes of bits that any call may have
_WIDEST = 128  # head_dim up to which a forward with a score_mod beside a block mask has large tiles


class Apart(NamedTuple):
    """The texts of a score_mod, "" without one, and of a mask_mod, which read the same arrays; and along which
    dimensions, of batch, heads, queries and keys, the mask_mod has tiles of its own."""

    score: str
    mask: str
    own: tuple[bool, ...]


@functools.lru_cache(maxsize=256)
def apart(mods: str) -> Apart | None:
    """None: there is no mask_mod."""
    found = read(mods)
    if found.mask is None:
        return None
    score, mask = found._replace(mask=None), found._replace(score=None)
    return Apart(score.text if score.score else "", mask.text, tuple(mask.uses(place) for place in PLACES))


def own_tiles(own: Sequence[bool], batch: int, heads_q: int, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """How many tiles a mask has that it does not share: along sequences, heads of q, queries and keys; `own`: along
    which of them it has elements of its own."""
    counts = batch, heads_q, -(-seqlen_q // MASK_TILE), -(-seqlen_k // MASK_TILE)
    return tuple(n if has_own else 1 for n, has_own in zip(counts, own, strict=True))


def fit(mods: str, lengths: tuple[int, ...], widths: tuple[int, int]) -> bool:
    """Whether the bits of a mask_mod's tiles take no more memory than q, k, v and out, or not much: beyond, memory
    would grow with the square of lengths.

    Args:
        lengths: batch, seqlen_q, seqlen_k, heads_q, heads_k.
        widths: head_dim of q and k, and of v.
    """
    found = apart(mods)
    if found is None or (found.score and max(widths) > _WIDEST):
        return False
    batch, seqlen_q, seqlen_k, heads_q, heads_k = lengths
    tiles = own_tiles(found.own, batch, heads_q, seqlen_q, seqlen_k)
    return have_room(tiles, batch * (seqlen_q * heads_q + seqlen_k * heads_k) * sum(widths))


def have_room(tiles: Sequence[int], elements: int) -> bool:
    """The same of so many tiles along each dimension; `elements`: of q, k, v and out. Those of a mask of packed
    sequences are for each as many as the longest has."""
    return 4 * TILE_WORDS * math.prod(tiles) <= max(2 * elements, _FEW)


def fit_in(problem: Problem) -> bool:
    """Whether the tiles of what a problem has, a mask or a mask_mod, fit; of a mask with any room they do."""
    widths = problem.head_dim, problem.head_dim_v
    lengths = problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_k
    mask = None if problem.bias is None else problem.bias.mask
    if mask is None:
        return fit(problem.mods, lengths, widths)
    room = problem.max_seqlen_q, problem.max_seqlen_k
    if not problem.packed or problem.page_size or MAX_SEQLEN in room or not becomes_blocks(mask, packed=True):
        return True
    tiles = own_tiles(mask, problem.batch, problem.heads_q, *room)
    rows = problem.seqlen_q * problem.heads_q + problem.seqlen_k * problem.heads_k
    return have_room(tiles, rows * sum(widths))
