"""How blocks share out attention over a cache, by the room that it has: 32 heads of q over 8 of k, head_dim 128."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.cache.problem import CacheProblem
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import plan_decode
from cupyflash.plan.decode_kernels import SLICE
from cupyflash.plan.decode_shares import DecodePlan, rows_of
from cupyflash.plan.shipped_cache import problem
from cupyflash.problem import ITEMSIZE


def plan(
    batch: int, capacity: int, arch: str = "sm_90", seqlen_q: int = 1, num_splits: int | None = None
) -> DecodePlan:
    problem = CacheProblem(
        "bf16", batch, seqlen_q, 32, 8, 128, 128, batch, None, capacity, 0.088, num_splits=num_splits
    )
    return plan_decode(problem, Device.synthetic(arch), aligned=True, tma=arch == "sm_90")


@pytest.mark.parametrize(
    ("batch", "capacity", "cluster"),
    [
        (1, 8192, 8),
        (1, 131072, 8),
        (2, 8192, 4),
        (4, 1024, 2),
        (4, 4096, 2),
        (4, 8192, 0),
        (4, 131072, 0),
        (7, 8192, 0),
        (8, 8192, 2),
        (8, 131072, 2),
        (16, 512, 0),
    ],
)
def test_few_sequences_are_split_by_clusters_while_that_is_faster(batch: int, capacity: int, cluster: int) -> None:
    assert plan(batch, capacity).variant.tile.cluster == cluster


@pytest.mark.parametrize(
    ("batch", "capacity", "more", "combines"),
    [
        (1, 8192, {}, False),
        (2, 8192, {}, False),
        (2, 8192, {"one_length": False}, True),
        (2, 8192, {"kv_range": True}, True),
        (64, 8192, {}, False),
        (64, 8192, {"one_length": False}, True),
        (64, 8192, {"kv_range": True}, True),
        (64, 8192, {"packed": True}, True),
        (64, 8192, {"num_splits": 3}, True),
        (64, 8192, {"num_splits": 1}, False),
        (7, 8192, {}, True),
    ],
)
def test_nothing_is_combined_where_equal_sequences_leave_no_parts(
    batch: int, capacity: int, more: dict[str, Any], combines: bool
) -> None:
    """And where the plan knows that they are equal: one length is given for all, and no ranges."""
    call = replace(problem("bf16", 128, batch, capacity=capacity), **{"one_length": True} | more)
    found = plan_decode(call, Device.synthetic("sm_90"), aligned=True, tma=True)
    assert (found.combine is not None) == combines
    assert (found.places > 0) == (found.combine_grid > 0) == combines


@pytest.mark.parametrize(
    ("batch", "heads_k", "elements"), [(64, 1, 256), (70, 1, 256), (9, 1, 256), (4, 8, 256), (3, 8, 128)]
)
def test_blocks_that_combine_are_there_at_the_same_time(batch: int, heads_k: int, elements: int) -> None:
    call = problem("bf16", 128, batch, heads_k=heads_k)
    found = plan_decode(call, Device.synthetic("sm_90"), aligned=True, tma=True, clusters=False)
    assert found.shares["combine_elements"] == elements
    assert found.combine_grid <= 4 * 132  # those of 64 registers


@pytest.mark.parametrize(
    ("batch", "capacity", "one_each"),
    [(16, 512, True), (16, 1024, True), (16, 1040, False), (14, 512, False), (15, 512, True), (17, 512, False),
     (64, 512, False)],
)  # fmt: skip
def test_as_many_short_tiles_as_blocks_leave_nothing_to_combine(batch: int, capacity: int, one_each: bool) -> None:
    found = plan(batch, capacity)
    assert (found.combine is None) == one_each
    if one_each:
        assert (found.grid, found.shares["splits"], found.places) == (8 * batch, 1, 0)
    assert plan(batch, capacity, num_splits=3).shares["splits"] == 3


def test_other_gpus_have_another_number_of_blocks() -> None:
    device = Device.synthetic("sm_80")
    alone = device.sm_count // 8
    assert plan(alone, 512, "sm_80").combine is None
    assert plan(alone + 1, 512, "sm_80").combine is not None


@pytest.mark.parametrize(
    ("batch", "heads_q", "head_dim", "expected"),
    [
        # header, cluster, rows of a warp, warps of a team, warps of a multiprocessor
        (64, 32, 128, ("decode_sm90", 0, 8, 1, 12)),
        (64, 128, 128, ("decode_sm90", 0, 16, 1, 12)),
        (64, 256, 128, ("decode_sm90", 0, 32, 1, 8)),
        (64, 32, 64, ("decode_sm90", 0, 8, 1, 12)),
        (64, 32, 256, ("decode_sm90", 0, 8, 1, 12)),
        (1, 32, 128, ("decode_sm90", 8, 8, 1, 12)),
        (1, 256, 128, ("decode_sm90", 8, 16, 2, 8)),
        (64, 32, 80, ("decode_sm80", 0, 8, 1, 12)),
    ],
)
def test_caches_of_8_bits_have_rows_as_columns(
    batch: int, heads_q: int, head_dim: int, expected: tuple[str, int, int, int, int]
) -> None:
    problem = CacheProblem(
        "bf16", batch, 1, heads_q, 8, head_dim, head_dim, batch, None, 8192, 0.088, stored="int8", scale_dims=1
    )
    variant = plan_decode(problem, Device.synthetic("sm_90"), aligned=True, tma=True).variant
    tile = variant.tile
    warps = tile.warps * tile.blocks_per_sm
    assert (variant.header, tile.cluster, tile.warp_rows, tile.team, warps) == expected
    assert (tile.scale_bytes, tile.kv_bytes) == (0 if variant.header == "decode_sm90" else 4, 1)


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", ""), ("bf16", "int8"), ("fp32", "")])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_every_tile_can_be_launched(arch: str, dtype: str, stored: str) -> None:
    """Teams of whole warps, which fit the shared memory, for any number of rows; parts of a cluster fit the rings."""
    device = Device.synthetic(arch)
    widths = *((d, d) for d in (8, 64, 80, 128, 192, 256)), (192, 128), (64, 256), (256, 64)
    for (head_dim, head_dim_v), rows, batch, heads_k in itertools.product(
        widths, (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300), (1, 4, 16, 64), (1, 8)
    ):
        for tma, capacity in itertools.product((True, False), (512, 1 << 15)):
            call = CacheProblem(
                dtype, batch, rows, heads_k, heads_k, head_dim, head_dim_v, batch, None, capacity, 0.1, stored=stored,
                scale_dims=int(bool(stored)),
            )  # fmt: skip
            variant = plan_decode(call, device, aligned=True, tma=tma).variant
            tile = variant.tile
            assert tile.warps % tile.team == 0, call
            assert tile.warps // tile.team % (tile.heads // tile.pair) == 0, call
            assert variant.smem_bytes <= min(
                device.smem_bytes, device.smem_per_sm_bytes // tile.blocks_per_sm - 1024
            ), call
            rings = variant.smem_bytes - tile.fixed_bytes(head_dim, ITEMSIZE[dtype])
            assert not tile.cluster or 32 * tile.block_m * head_dim_v // 4 <= rings, call


@pytest.mark.parametrize(("queries", "rows"), [(319, 4), (320, 20), (64, 4)])
def test_rows_beside_the_forward(queries: int, rows: int) -> None:
    """One query each, unless all may have as many."""
    p = problem("bf16", 128, 64, packed=True, seqlen_q=queries)
    assert rows_of(replace(p, most_queries=127)) == rows
    assert rows_of(p) == 4 * -(-queries // 64)


@pytest.mark.parametrize("heads_q", [32, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_the_order_of_parts_does_not_follow_from_the_batch(heads_q: int, packed: bool) -> None:
    """How many threads share an element of a result says in which order its parts are added (parts.cuh): nor does it
    follow from the room in a block table, which may be as wide as its longest sequence."""

    def elements(batch: int, capacity: int) -> int:
        how = {"batch_invariant": True, "packed": packed, "seqlen_q": 3 * batch if packed else 1, "capacity": capacity}
        call = problem("bf16", 128, batch, heads_q, **how)
        return plan_decode(call, Device.synthetic("sm_90"), aligned=True, tma=True).shares["combine_elements"]

    assert len({elements(batch, room) for batch in (1, 4, 64, 500) for room in (512, 4096, 1 << 17, 1 << 20)}) == 1


@pytest.mark.parametrize(
    ("batch", "queries", "how"),
    [
        (64, 64, {"packed": True}),
        (64, 4096, {"packed": True}),
        (256, 2048, {"packed": True, "batch_invariant": False, "num_splits": 8}),
        (8, 256, {}),
        (1, 8192, {}),
    ],
)
def test_parts_do_not_take_a_gpus_memory(batch: int, queries: int, how: dict[str, Any]) -> None:
    """A prompt beside sequences that decode, and prompts alone, in a cache with room for 32k each."""
    call = replace(problem("bf16", 128, batch, capacity=1 << 15, seqlen_q=queries), **{"batch_invariant": True} | how)
    for arch in ("sm_80", "sm_90"):
        found = plan_decode(call, Device.synthetic(arch), aligned=True, tma=arch == "sm_90")
        assert found.places * call.head_dim * 4 < 600e6
        assert found.combine_grid < 100_000


@pytest.mark.parametrize("how", [{"batch_invariant": True}, {"num_splits": 5}, {"num_splits": 1}])
def test_packed_parts_have_blocks(how: dict[str, Any], rng: np.random.Generator) -> None:
    """However rows are divided among sequences, and however long these are: as the kernels count (shares.cuh)."""
    fullest = 0.0
    for turn in range(300):
        batch, queries = int(rng.integers(1, 20)), int(rng.integers(1, 300))
        call = replace(problem("bf16", 128, batch, capacity=20_000, seqlen_q=queries, packed=True), **how)
        found = plan_decode(call, Device.synthetic("sm_90"), aligned=True, tma=True)
        edges = rng.integers(0, queries + 1, batch) if rng.random() < 0.7 else np.minimum(np.arange(batch), queries)
        goes_back = turn % 3 == 0
        edges = np.concatenate(([0], edges if goes_back else np.sort(edges), [queries]))
        counts = np.maximum(0, np.diff(edges))  # the last one: rows behind the last sequence
        lengths = rng.choice([1, 1025, 7000, 20_000], len(counts))
        slices = np.maximum(1, -(-lengths // SLICE))
        row_tiles = -(-counts * call.group // found.variant.tile.block_m)
        of_part = found.shares["split_slices"] * row_tiles
        of_part = np.where(of_part > 0, of_part, -(-slices // found.shares["splits"]))
        parts = np.repeat(-(-slices // of_part), row_tiles * found.shares["head_turns"])  # of each tile
        pieces = -(-found.variant.tile.block_m * call.head_dim // 4 // found.shares["combine_elements"])
        combined = found.combine_grid // pieces
        assert parts[:combined].sum() <= found.shares["ranges"] == found.grid
        if not goes_back:
            assert parts.sum() <= found.grid
            assert found.combine is None or len(parts) <= combined
        fullest = max(fullest, parts.sum() / found.grid)
    assert fullest > 0.6


@pytest.mark.parametrize("capacity", [1 << 20, (1 << 20) + 1, 1 << 22])
def test_a_cache_of_more_parts_than_threads_read_at_once(capacity: int) -> None:
    call = problem("bf16", 128, 1, capacity=capacity, batch_invariant=True)
    found = plan_decode(call, Device.synthetic("sm_90"), aligned=True, tma=True)
    assert found.shares["splits"] == -(-capacity // 1024)
    assert found.shares["combine_elements"] == 16
