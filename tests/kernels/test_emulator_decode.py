"""Attention over a cache on the CPU: the kernels' text under the race detector, in both families, against float64."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from cupyflash.cache.problem import CacheProblem
from cupyflash.check.cache_case import CacheCase, problem_of
from cupyflash.check.cache_reference import CacheOracle
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import plan_append, plan_decode, variants_over_cache
from cupyflash.plan.decode_kernels import Decode
from cupyflash.plan.decode_shares import shared_out
from cupyflash.plan.prefill import Lie, way_of
from cupyflash.plan.shipped_cache import shipped_over_cache
from cupyflash.plan.variant import Variant
from tests.ahead import Ahead
from tests.cache_cases import ALL, SHIPPED, TABLE, TILES, tiled
from tests.emulator import MODES, EmulatorError, decode
from tests.emulator.attention import kernels_of, small_device
from tests.emulator.decode import CacheSession
from tests.emulator.require import require_compiler
from tests.over_cache import check, check_that_it_is_reported, with_bug
from tests.planted.mutants import Bug
from tests.planted.mutants_decode import CLAMPED_CACHE, DECODE
from tests.random_cache import cache_cases

require_compiler()

ARCHS = ("sm_80", "sm_90")
BLOCKS = 4  # multiprocessors: so few that sequences share blocks and blocks sequences


def session(arch: str, mode: str = "race", **more: Any) -> CacheSession:
    return CacheSession(small_device(arch, BLOCKS), MODES[mode], **more)


def run_of(name: str, arch: str, seed: int) -> tuple[CacheSession, CacheCase, str]:
    """Of a case of the table, or of one that is shipped: the kernels that a large problem gets, on a small one."""
    if name in TABLE:
        dtypes = ("bf16", "fp16", "fp32") if arch == "sm_80" and not TABLE[name].stored else ("fp16", "bf16")
        return session(arch, seed=seed), TABLE[name], dtypes[list(TABLE).index(name) % len(dtypes)]
    case, call, known = SHIPPED[name]
    variant = variant_of(call, Device.synthetic(arch), known)
    p, small = problem_of(case.inputs(call.dtype), case.options()), small_device(arch, BLOCKS)
    return session(arch, seed=seed, plan=shared_out(p, small, variant)), case, call.dtype


def _rehearse(name: str, arch: str, **_: int) -> None:
    how, case, dtype = run_of(name, arch, 0)
    how.run_case(case, dtype)


AHEAD = Ahead(_rehearse, decode)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", TABLE)
def test_case(name: str, arch: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    check(*run_of(name, arch, seed))


@pytest.mark.parametrize("arch", ARCHS)
@hypothesis.settings(max_examples=6)
@hypothesis.given(c=cache_cases(150, (64,)), dtype=st.sampled_from(["fp16", "bf16", "fp32"]))
def test_any_call(arch: str, c: CacheCase, dtype: str) -> None:
    """What no table of cases thought of; --hypothesis-seed draws others."""
    rows = sum(c.queries) if isinstance(c.queries, tuple) else c.queries * len(c.lengths)
    hypothesis.assume(rows <= 80 and not (c.stored and dtype == "fp32"))
    check(session(arch), c, dtype)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", TILES)
def test_tiles_of_large_problems(name: str, arch: str, seed: int) -> None:
    case, facts = TILES[name]
    arrays = case.inputs("bf16")
    plan = tiled(problem_of(arrays, case.options()), small_device(arch, BLOCKS), facts)
    check(session(arch, seed=seed, plan=plan), case, "bf16")


def variant_of(call: CacheProblem, device: Device, known: dict[str, Any]) -> Decode:
    """The main kernel of a shipped call, or the one beside the forward that it takes."""
    way = way_of(call, device, Lie())
    return plan_decode(way.left(call) if way else call, device, **known).variant


def is_own(v: Variant) -> bool:
    """Not the forward, which tests/kernels/test_emulator_prefill.py runs."""
    return v.folder == "decode"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str, arch: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    check(*run_of(name, arch, seed))


def test_every_shipped_variant_is_run() -> None:
    for arch in ARCHS:
        device, found = Device.synthetic(arch), set()
        for case, call, known in SHIPPED.values():
            p = problem_of(case.inputs(call.dtype), case.options())
            plan = shared_out(p, small_device(arch, BLOCKS), variant_of(call, device, known))
            found |= {plan.variant, plan.combine} | {(plan_append(p, device) or (None,))[0]}
            assert set(filter(is_own, variants_over_cache(call, device, **known))) <= found
        assert found >= set(filter(is_own, shipped_over_cache(device)))


@pytest.mark.parametrize("mode", ["any", "starve", "lanes"])
@pytest.mark.parametrize("arch", ARCHS)
def test_results_do_not_depend_on_the_schedule(arch: str, mode: str, seed: int) -> None:
    case = TABLE["cache-packed"]
    arrays = case.inputs("bf16")
    p = problem_of(arrays, case.options())
    first, second = (session(arch, how, seed=seed).run(arrays, p) for how in ("early", mode))
    for a, b in zip(first, second, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("splits", [None, 3])
def test_batch_invariant(arch: str, splits: int | None) -> None:
    """A sequence alone has the same bits as among others."""
    lengths = (1100, 0, 1024, 1025, 33)
    case = CacheCase("invariant", "full", lengths, 2, 64, batch_invariant=True, num_splits=splits)
    arrays = case.inputs("bf16")
    together = session(arch, "any").run(arrays, problem_of(arrays, case.options()))
    for b in range(len(lengths)):
        own = {name: x[b : b + 1] for name, x in arrays.items()}
        alone = session(arch, "any").run(own, problem_of(own, case.options()))
        for x, y in zip(together[:2], alone[:2], strict=True):
            assert x[b].tobytes() == y[0].tobytes()


@pytest.mark.parametrize("arch", ARCHS)
def test_batch_invariant_of_many_parts(arch: str) -> None:
    """So many that several threads add those of one element, unless there are as many elements as threads."""
    lengths = (4200, 900, 33, 1100)
    case = CacheCase("invariant", "full", lengths, heads_q=32, heads_k=2, head_dim=64, batch_invariant=True)
    arrays = case.inputs("bf16")
    own = {name: x[:1] for name, x in arrays.items()}
    together, alone = (session(arch, "early").run(x, problem_of(x, case.options()))[:2] for x in (arrays, own))
    for x, y in zip(together, alone, strict=True):
        assert x[0].tobytes() == y[0].tobytes()


def packed_among_others(width: int) -> tuple[CacheCase, dict[str, Any]]:
    """Sequences of one tile, of two and three with parts of their own size, and of none; tables of so many columns."""
    case = CacheCase("invariant-packed", "full", (1100, 2070, 70, 2060, 1024), (1, 9, 0, 20, 2), page_size=64,
                     append=True, batch_invariant=True)  # fmt: skip
    arrays = case.inputs("bf16")
    table = arrays["block_table"]
    arrays["block_table"] = np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)
    return case, arrays


@pytest.mark.parametrize("arch", ARCHS)
def test_batch_invariant_of_packed_queries(arch: str) -> None:
    """Alone in a narrower table, too."""
    case, arrays = packed_among_others(40)
    p = problem_of(arrays, case.options())
    results = session(arch, "any").run(arrays, p)
    found = CacheOracle(p, arrays).judge(*results)
    assert all(r.passed for r in found), "\n".join(map(str, found))
    edges = arrays["cu_seqlens_q"]
    for b in range(len(case.lengths)):
        rows, pages = slice(edges[b], edges[b + 1]), -(-(case.lengths[b] + edges[b + 1] - edges[b]) // 64)
        if rows.start == rows.stop:
            continue
        own = dict(arrays) | {name: arrays[name][rows] for name in "qkv"}
        own |= {"cache_seqlens": arrays["cache_seqlens"][b : b + 1]}
        own |= {"block_table": np.ascontiguousarray(arrays["block_table"][b : b + 1, :pages])}
        own |= {"cu_seqlens_q": np.array([0, rows.stop - rows.start], np.int32)}
        out, lse, *_ = session(arch, "any").run(own, problem_of(own, case.options()))
        assert out.tobytes() == results[0][rows].tobytes()
        assert lse.tobytes() == results[1][:, rows].tobytes()


@pytest.mark.parametrize("arch", ARCHS)
def test_batch_invariant_in_tables_of_any_width(arch: str) -> None:
    """In which order parts are added does not follow from how many there might be."""
    case = CacheCase("invariant-wide", "full", (4200,), heads_q=2, heads_k=1, page_size=64, batch_invariant=True)
    arrays = case.inputs("bf16")
    narrow, wide = ({**arrays, "block_table": np.pad(arrays["block_table"], ((0, 0), (0, n)))} for n in (0, 512))
    first, second = (session(arch, "early").run(x, problem_of(x, case.options())) for x in (narrow, wide))
    for a, b in zip(first[:2], second[:2], strict=True):
        assert a.tobytes() == b.tobytes()


# ---- Lengths and tables that say anything ----

WILD: dict[str, tuple[CacheCase, dict[str, list[Any]]]] = {
    "contiguous": (
        CacheCase("wild", "full", (0, 33, 70, 5), 2, append=True, capacity=80),
        {"cache_seqlens": [-5, 79, 2**31 - 1, 5]},
    ),
    "paged": (
        CacheCase("wild-pages", "full", (0, 33, 70), 1, page_size=16),
        {
            "cache_seqlens": [-(2**31), 33, 9000],
            "block_table": [[-7, 2**31 - 1, 0, 1, 2], [1, 10**6, 4, 5, -9], [3] * 5],
        },
    ),
    "chosen": (
        CacheCase("wild-chosen", "full", (4, 33, 70), 1, spare=2, head_dim=128),
        {"cache_batch_idx": [-3, 2**31 - 1, 1]},
    ),
}  # fmt: skip


# Edges of packed queries that go back: several sequences have all rows, more together than there are.
BACK = (
    CacheCase("wild-ranges", "full", (60, 33, 70, 64, 64), (2, 9, 7, 1, 1), append=True),
    CacheCase("wild-splits", "full", (60, 33, 70, 64, 64), (2, 9, 7, 1, 1), num_splits=2),
    CacheCase("wild-invariant", "full", (1100, 33, 1030, 64, 64), (1, 0, 0, 0, 0), batch_invariant=True),
)


def wild(name: str) -> tuple[dict[str, Any], dict[str, Any], CacheCase]:
    """The arrays as they are given, and as they are to be taken; all rows of the caches hold numbers."""
    case, garbage = WILD[name]
    arrays = case.inputs("bf16")
    rng = np.random.default_rng(0)
    for cache in ("k_cache", "v_cache"):
        arrays[cache] = rng.standard_normal(arrays[cache].shape).astype(arrays[cache].dtype)
    given = {n: np.array(garbage[n], np.int32) if n in garbage else x for n, x in arrays.items()}
    p = problem_of(given, case.options())
    taken = dict(given)
    taken["cache_seqlens"] = np.clip(given["cache_seqlens"], 0, p.capacity)
    for n in {"block_table", "cache_batch_idx"} & given.keys():
        taken[n] = np.clip(given[n], 0, p.slots - 1)
    return given, taken, case


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", WILD)
def test_what_is_out_of_range_is_clamped(name: str, arch: str) -> None:
    given, taken, case = wild(name)
    p = problem_of(given, case.options())
    found = CacheOracle(p, taken).judge(*session(arch).run(given, p))
    assert all(r.passed for r in found), "\n".join(map(str, found))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", BACK, ids=lambda case: case.name)
def test_edges_that_go_back(case: CacheCase, arch: str) -> None:
    """Nothing beyond the arrays is read or written; what rows of several sequences hold is left to chance."""
    arrays = case.inputs("bf16")
    arrays["cu_seqlens_q"] = np.array([0, *[len(arrays["q"]), 0] * 3], np.int32)[: len(case.lengths) + 1]
    session(arch, "any").run(arrays, problem_of(arrays, case.options()))


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_block_mask_hides_is_not_read(arch: str) -> None:
    """By the asynchronous copies: as many for each slice whose tile of the mask is not empty; by TMA also Q."""
    how, copies, slices = session(arch), [], []
    for blocks in ("nothing", "blocks", "everything"):
        case = CacheCase(f"cache-blocks-read-{blocks}", "full", (385, 130), heads_q=2, heads_k=1, blocks=blocks)
        arrays = case.inputs("bf16")
        p = case.problem_with(arrays)
        how.run(arrays, p)
        plan = plan_decode(p, how.device, aligned=True, tma=True)
        variants = [plan.variant] if plan.combine is None or not plan.combine_grid else [plan.variant, plan.combine]
        copies.append(kernels_of(variants, how.device)[0].stats.async_ops)
        of_row = [arrays["block_tiles"][0, :, (n - 1) // 64, : -(-n // 64)].any(0) for n in case.lengths]
        slices.append(sum(int(np.repeat(x, 4)[: -(-n // 16)].sum()) for x, n in zip(of_row, case.lengths, strict=True)))
    assert slices[0] == 0 < slices[1] < slices[2] == 25 + 9
    each = (copies[2] - copies[0]) / slices[2]
    assert each > 0
    assert copies[1] - copies[0] == each * slices[1]


# ---- Planted bugs ----


def _rehearse_with(bug: Bug) -> None:
    with_bug(bug).run_case(ALL[bug.case], "bf16")


AHEAD_OF_BUGS = Ahead(_rehearse_with, decode)


@pytest.mark.parametrize("bug", DECODE, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug, request: pytest.FixtureRequest) -> None:
    AHEAD_OF_BUGS(request)
    check_that_it_is_reported(bug, ALL[bug.case], "bf16")


@pytest.mark.parametrize("bug", CLAMPED_CACHE, ids=lambda bug: f"{bug.name.replace(' ', '-')}")
def test_a_missing_clamp_is_reported(bug: Bug) -> None:
    given, taken, case = wild(bug.case)
    p = problem_of(given, case.options())
    how = session(bug.arch, headers=bug.headers())
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            how.run(given, p)
    else:
        assert not all(r.passed for r in CacheOracle(p, taken).judge(*how.run(given, p)))
