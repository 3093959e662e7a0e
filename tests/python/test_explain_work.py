"""What `cupyflash explain` computes: pairs, bytes, and the blocks that fit an SM."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupyflash.arrays.adapters import Signature
from cupyflash.cli import block_masks
from cupyflash.cli.explain import work as explain_work
from cupyflash.gpu.device import Device
from cupyflash.plan.shipped import shipped
from cupyflash.problem import Problem

WINDOWS = ((None, None), (None, 0), (0, 0), (3, None), (None, -4), (5, -2), (-3, 9), (7, 40), (None, 100), (-50, None))


def test_visible_pairs() -> None:
    for n, m in itertools.product((0, 1, 5, 33), repeat=2):
        for window in WINDOWS:
            problem = Problem("bf16", 1, n, m, 1, 1, 64, 1.0, window)
            expected = sum(end - first for first, end in map(problem.visible, range(n)))
            assert explain_work.visible_pairs(problem) == expected, (n, m, window)


@pytest.mark.parametrize("word", [*block_masks.NAMED, "0.3"])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (70, 30), (None, -190), (-50, None)])
def test_pairs_and_tiles_of_block_masks(word: str, window: tuple[int | None, int | None]) -> None:
    """Counted element by element."""
    for n, m in ((200, 200), (1, 1), (150, 333)):
        if n != m and word in ("bigbird", "strided", "butterfly", "documents"):
            continue
        problem = Problem("bf16", 1, n, m, 1, 1, 64, 1.0, window)
        bounds, seen = np.zeros((n, m), bool), block_masks.make(word, n, m).of(0, 0)
        for query in range(n):
            bounds[query, slice(*problem.visible(query))] = True
        assert block_masks.visible_pairs(word, problem) == (bounds & seen).sum()
        tiles = [(slice(i, i + 64), slice(j, j + 64)) for i in range(0, n, 64) for j in range(0, m, 64)]
        reached = [tile for tile in tiles if bounds[tile].any()]
        visited = [tile for tile in reached if seen[tile].any()]
        expected = len(reached), len(visited), sum(int(bounds[tile].sum()) for tile in visited)
        assert block_masks.visited(word, problem) == expected


@pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 1])
def test_random_blocks_are_as_dense_as_they_are_called(density: float) -> None:
    mask = block_masks.make(str(density), 8192, 8192)
    assert mask.density == pytest.approx(density, abs=1e-3)
    assert all(mask.tiles[0, 0, i, i] == 1 for i in range(128))


def test_long_sequences_take_no_time() -> None:
    n = 2**29
    assert explain_work.visible_pairs(Problem("bf16", 1, n, n, 1, 1, 64, 1.0, (None, 0))) == n * (n + 1) // 2


def test_distinct_bytes() -> None:
    x = np.zeros((2, 7, 1, 64), np.float16)
    strides = tuple(s // 2 for s in np.broadcast_to(x, (2, 7, 5, 64)).strides)
    assert explain_work.distinct_bytes(Signature((2, 7, 5, 64), strides, "fp16", 0), 2) == x.nbytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_as_many_blocks_fit_as_the_tiles_are_made_for(arch: str) -> None:
    """The launch bound caps the registers; shared memory and threads leave room for as many."""
    gpu = Device.synthetic(arch)
    for v in shipped(gpu):
        most = 65536 // (v.threads * v.tile.blocks_per_sm) // 8 * 8
        assert min(explain_work.resident_blocks(v, gpu, most).values()) >= v.tile.blocks_per_sm, v.symbol
