"""Attention over a cache on the CPU: the kernels' text under the race detector, in both families, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulator import MODES, EmulatorError, decode
from emulator.attention import small_device
from emulator.cache_cases import ALL, SHIPPED, TABLE, TILES, tiled
from emulator.decode import CacheSession
from emulator.mutants import Bug
from emulator.mutants_decode import CLAMPED_CACHE, DECODE
from emulator.require import require_compiler

from cupyflash.cache.problem import CacheProblem
from cupyflash.check.cache_case import CacheCase, problem_of
from cupyflash.check.cache_reference import CacheOracle
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import plan_append, plan_decode, variants_over_cache
from cupyflash.plan.decode_kernels import Decode
from cupyflash.plan.decode_shares import shared_out
from cupyflash.plan.kernels import Main
from cupyflash.plan.prefill import Lie, way_of
from cupyflash.plan.shipped_cache import shipped_over_cache
from cupyflash.plan.variant import Variant
from tests.ahead import Ahead

require_compiler()

ARCHS = ("sm_80", "sm_90")
BLOCKS = 4  # multiprocessors: so few that sequences share blocks and blocks sequences


def session(arch: str, mode: str = "race", **more: Any) -> CacheSession:
    return CacheSession(small_device(arch, BLOCKS), MODES[mode], **more)


def judge(how: CacheSession, case: CacheCase, dtype: str) -> None:
    arrays = case.inputs(dtype)
    p = problem_of(arrays, case.options())
    found = CacheOracle(p, arrays).judge(*how.run(arrays, p))
    assert all(r.passed for r in found), "\n".join(map(str, found))


def run_of(name: str, arch: str, seed: int) -> tuple[CacheSession, CacheCase, str]:
    """Of a case of the table, or of one that is shipped: the kernels that a large problem gets, on a small one."""
    if name in TABLE:
        dtype = ("bf16", "fp16")[(list(TABLE).index(name) + ARCHS.index(arch)) % 2]
        return session(arch, seed=seed), TABLE[name], dtype
    case, call, known = SHIPPED[name]
    variant = variant_of(call, Device.synthetic(arch), known)
    p, small = problem_of(case.inputs(call.dtype), case.options()), small_device(arch, BLOCKS)
    return session(arch, seed=seed, plan=shared_out(p, small, variant)), case, call.dtype


def _rehearse(name: str, arch: str, **_: int) -> None:
    how, case, dtype = run_of(name, arch, 0)
    arrays = case.inputs(dtype)
    how.run(arrays, problem_of(arrays, case.options()))


AHEAD = Ahead(_rehearse, decode)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", TABLE)
def test_case(name: str, arch: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    judge(*run_of(name, arch, seed))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", TILES)
def test_tiles_of_large_problems(name: str, arch: str, seed: int) -> None:
    case, facts = TILES[name]
    arrays = case.inputs("bf16")
    plan = tiled(problem_of(arrays, case.options()), small_device(arch, BLOCKS), facts)
    judge(session(arch, seed=seed, plan=plan), case, "bf16")


def variant_of(call: CacheProblem, device: Device, known: dict[str, Any]) -> Decode:
    """The main kernel of a shipped call, or the one beside the forward that it takes."""
    way = way_of(call, device, Lie())
    return plan_decode(way.left(call) if way else call, device, **known).variant


def is_own(v: Variant) -> bool:
    """Not the forward, which tests/kernels/test_emulator_prefill.py runs."""
    return not isinstance(v, Main)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str, arch: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    judge(*run_of(name, arch, seed))


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


# ---- Planted bugs ----


@pytest.mark.parametrize("bug", DECODE, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug) -> None:
    how = dataclasses.replace(session(bug.arch), headers=bug.headers(), device=small_device(bug.arch, 12))
    with pytest.raises((EmulatorError, AssertionError), match=bug.finds or "FAILED"):
        judge(how, ALL[bug.case], "bf16")


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
