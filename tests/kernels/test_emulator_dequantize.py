"""Rows of 16 bits that stand for a cache of 8 bits, on the CPU under the race detector: products, rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash.check.cache_case import CacheCase, problem_of
from cupyflash.check.cache_inputs import GARBAGE, place
from cupyflash.check.cache_stored import meant
from cupyflash.plan.kernels import LEAST_QUERIES_OF_8_BITS
from cupyflash.plan.prefill import dequantized
from tests.emulator import MODES, EmulatorError
from tests.emulator.attention import small_device
from tests.emulator.decode import CacheSession
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_prefill import DEQUANTIZE

require_compiler()

BEHIND = 256  # rows of zeros, if there is room
CASES = {
    case.name: case
    for case in (
        CacheCase("int8", "full", (33, 0, 70), 130, append=True, capacity=600, stored="int8"),
        CacheCase("int8-pages", "full", (90, 7), 130, 128, page_size=48, append=True, new=7, stored="int8",
                  scale_dims=2),
        CacheCase("int8-chosen", "full", (60, 33), 128, 80, spare=3, stored="int8", scale_dims=2, memory="heads_first"),
        CacheCase("e4m3", "full", (301, 60), 130, 96, stored="e4m3", nonfinite=True, memory="heads_first"),
        CacheCase(
            "e4m3-mixed", "full", (90, 20, 0, 33), (1, 140, 130, 127), page_size=16, append=True, stored="e4m3",
            scale_dims=2, nonfinite=True,
        ),
        CacheCase("int8-v-narrow", "full", (60, 33), 128, 96, spare=1, stored="int8", scale_dims=2, head_dim_v=48),
        CacheCase("int8-many", "full", (3,) * 38, (130, *(0, 1) * 17, 128, 131, 129), heads_q=2, stored="int8"),
        CacheCase("int8-none", "full", (100, 0), 130, capacity=100, stored="int8"),
        CacheCase("int8-large", "full", (100, 30), 128, stored="int8", dtypes=("fp16",)),
    )
}  # fmt: skip


def arrays_of(name: str, dtype: str) -> dict[str, Any]:
    """Those of a case; of the last one scales beyond all that fp16 has, and some that are not finite."""
    arrays = CASES[name].inputs(dtype)
    if name == "int8-large":
        arrays["k_scale"][:] = 1e30, 3000.0
        arrays["v_scale"][:] = np.inf, np.nan
    return arrays


def wanted(arrays: dict[str, Any], name: str, caches: tuple[Any, Any]) -> list[Any]:
    """The rows of K and of V: products, zeros, and NaN where nothing is written; packed, the slots of sequences."""
    p = problem_of(arrays, CASES[name].options())
    queries = np.diff(arrays["cu_seqlens_q"]) if p.packed else np.full(p.batch, LEAST_QUERIES_OF_8_BITS)
    taken = np.flatnonzero(queries >= LEAST_QUERIES_OF_8_BITS)
    new = queries * (p.seqlen_new > 0) if p.packed else np.full(p.batch, p.seqlen_new)
    found = []
    for stored, scale in zip(caches, ("k_scale", "v_scale"), strict=True):
        products = meant(stored, arrays[scale])
        if p.dtype == "fp16":
            products = np.where(np.isfinite(products), np.clip(products, -65504, 65504), products)
        rows = np.full((dequantized(p).slots, p.capacity, p.heads_k, stored.shape[-1]), np.nan)
        for slot, b in enumerate(taken):
            keys = min(int(np.clip(arrays["cache_seqlens"][b], 0, p.capacity)) + new[b], p.capacity)
            rows[slot, keys : keys + BEHIND] = 0
            for row in range(keys):
                at = place(arrays, b, row)
                rows[slot, row] = products[int(np.clip(at[0], 0, p.slots - 1)), at[1]]
        found.append(rows)
    return [*found, taken] if p.packed else found


def check(name: str, dtype: str, how: CacheSession, **changed: Any) -> None:
    arrays = arrays_of(name, dtype) | changed
    p = problem_of(arrays, CASES[name].options())
    *_, k_cache, v_cache = how.run(arrays, p)
    k, v, *taken = wanted(arrays, name, (k_cache, v_cache))
    for found, rows in zip(how.shared, (k, v), strict=False):
        with np.errstate(over="ignore"):
            rounded = rows.astype(np.float32).astype(found.dtype)
        np.testing.assert_array_equal(found.astype(np.float32), rounded.astype(np.float32))
    assert len(how.shared) == 2 + len(taken)
    for each in taken:
        np.testing.assert_array_equal(how.shared[2][each, 0], np.arange(len(each)))


def session(mode: str = "race", **more: Any) -> CacheSession:
    return CacheSession(small_device("sm_80", 4), MODES[mode], attends=False, dequantizes=True, **more)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: str, seed: int) -> None:
    if dtype in CASES[name].dtypes:
        check(name, dtype, session(seed=seed))


@pytest.mark.parametrize("name", ["int8-pages", "int8-chosen"])
def test_what_is_out_of_range_is_clamped(name: str) -> None:
    """Nothing outside of a buffer is touched: the emulator would report it."""
    arrays = arrays_of(name, "bf16")
    table = "block_table" if "block_table" in arrays else "cache_batch_idx"
    changed = {table: np.resize(np.array((0, *GARBAGE), np.int32), arrays[table].shape)}
    changed |= {"cache_seqlens": np.array([2**31 - 1, -5], np.int32)}
    changed |= {x: np.ones_like(arrays[x]) for x in ("k_scale", "v_scale")}  # of whichever place
    check(name, "bf16", session("any"), **changed)


@pytest.mark.parametrize("bug", DEQUANTIZE, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with pytest.raises((EmulatorError, AssertionError), match=bug.finds or "Arrays are not equal"):
        check(bug.case, "fp16", session(headers=bug.headers()))
