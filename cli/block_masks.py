"""Block masks by a word: how dense random blocks are, or a pattern by its name. For `bench` and `explain`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from cupyflash import masks
from cupyflash.mask_tiles import EMPTY, TILE
from cupyflash.masks import BlockMask
from cupyflash.problem import Problem

BLOCK = 128  # rows and keys of a random block
NAMED: dict[str, Callable[[int, int], BlockMask]] = {  # of (seqlen_q, seqlen_k)
    "longformer": lambda n, m: masks.global_local(n, m, window=256, global_tokens=64),
    "local": lambda n, m: masks.local(n, m, left=512),
    "prefix": lambda n, m: masks.prefix(n, m, length=m // 4),
    "bigbird": lambda n, m: masks.bigbird(_square(n, m)),
    "strided": lambda n, m: masks.strided(_square(n, m), stride=128),
    "butterfly": lambda n, m: masks.butterfly(_square(n, m)),
    "documents": lambda n, m: masks.causal_document(np.arange(_square(n, m)) // 1024),
}
HELP = f"A density of random blocks of {BLOCK} x {BLOCK}, or one of {', '.join(NAMED)}."


def check(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """A density above 0 and at most 1, or a name."""
    if text is None or text in NAMED:
        return text
    try:
        density = float(text)
    except ValueError:
        density = 0.0
    if not 0 < density <= 1:
        raise click.BadParameter(f"{text!r} is neither a density above 0 and at most 1 nor one of {', '.join(NAMED)}")
    return text


def random_blocks(density: float, seqlen_q: int, seqlen_k: int) -> NDArray[np.bool_]:
    """So much of the blocks, at least those of the diagonal; the same each time."""
    found = np.random.default_rng(0).random((-(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK)))
    np.fill_diagonal(found, -1)
    seen: NDArray[np.bool_] = found <= np.quantile(found, density)
    return seen


@functools.lru_cache(maxsize=8)
def make(text: str, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """The mask that all sequences and heads share."""
    if text in NAMED:
        return NAMED[text](seqlen_q, seqlen_k)
    return masks.from_blocks(random_blocks(float(text), seqlen_q, seqlen_k), BLOCK, seqlen_q, seqlen_k)


def _square(seqlen_q: int, seqlen_k: int) -> int:
    if seqlen_q != seqlen_k:
        raise click.BadParameter(f"this pattern needs as many queries as keys, got {seqlen_q} and {seqlen_k}",
                                 param_hint="--block-mask")  # fmt: skip
    return seqlen_q


@functools.lru_cache(maxsize=64)
def visible_pairs(text: str, problem: Problem) -> int:
    """How many pairs of query and key one head sees by the mask, the window and causality."""
    mask, count = make(text, problem.seqlen_q, problem.seqlen_k), 0
    every, key = slice(0, problem.seqlen_k), np.arange(problem.seqlen_k)
    for rows in _stripes(problem):
        bounds = _bounds(problem, rows)
        seen = mask.sees(rows, every)[0, 0] & (key >= bounds[:, :1]) & (key < bounds[:, 1:])
        count += int(np.count_nonzero(seen))
    return count


class Visited(NamedTuple):
    """Of the tiles of TILE queries by TILE keys in which one head sees a key by its bounds, those that are visited: the
    mask leaves something of them.

    Attributes:
        tiles, visited: how many there are, and how many of these are visited.
        pairs: the pairs of query and key in those, as far as bounds leave them.
    """

    tiles: int
    visited: int
    pairs: int

    @property
    def density(self) -> float:
        return self.visited / self.tiles if self.tiles else 0.0


def visited(text: str, problem: Problem) -> Visited:
    """By the mask of this word."""
    mask = make(text, problem.seqlen_q, problem.seqlen_k)
    key, tiles, seen, pairs = TILE * np.arange(mask.tiles.shape[3]), 0, 0, 0
    for i, rows in enumerate(_stripes(problem)):
        first, end = (x[:, None] for x in _bounds(problem, rows).T)
        by_tile = np.maximum(np.minimum(end, key + TILE) - np.maximum(first, key), 0).sum(axis=0)
        is_visited = (mask.tiles[0, 0, i] != EMPTY) & (by_tile > 0)
        tiles, seen = tiles + int((by_tile > 0).sum()), seen + int(is_visited.sum())
        pairs += int(by_tile[is_visited].sum())
    return Visited(tiles, seen, pairs)


def _stripes(problem: Problem) -> Iterator[slice]:
    for start in range(0, problem.seqlen_q, TILE):
        yield slice(start, min(start + TILE, problem.seqlen_q))


def _bounds(problem: Problem, rows: slice) -> NDArray[np.int64]:
    """First and last key, and one more, that each query sees, mask apart."""
    return np.array([problem.visible(query) for query in range(rows.start, rows.stop)])
