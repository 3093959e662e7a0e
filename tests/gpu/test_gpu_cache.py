"""Attention over a cache on a GPU: every case, graphs with other lengths, clamping, streams, and that nothing waits."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, PagedCache, UnsupportedError, attention, attention_with_cache, combine
from cupyflash.check.cache_case import CacheCase, problem_of
from cupyflash.check.cache_cases import CACHE_CASES
from cupyflash.check.cache_reference import CacheOracle
from cupyflash.gpu.device import Device
from cupyflash.launch import cached
from cupyflash.launch.kept import Kept
from cupyflash.plan.prefill import Lie, way_of
from cupyflash.plan.splits import key_splits
from tests.gpu.test_gpu import poison
from tests.gpu_arrays import captured, nothing_waits, on_gpu, to_numpy
from tests.random_cache import cache_cases

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch")]


# ---- Cases ----


@functools.lru_cache(maxsize=4)
def judge_of(c: CacheCase, dtype: str) -> CacheOracle:
    x = c.inputs(dtype)
    return CacheOracle(problem_of(x, c.options()), x)


def check(c: CacheCase, dtype: str, library: str) -> None:
    x = {name: on_gpu(y, library) for name, y in c.inputs(dtype).items()}
    poison(library)
    out, lse = attention_with_cache(**c.call(x), return_lse=True)
    found = judge_of(c, dtype).judge(*map(to_numpy, (out, lse, x["k_cache"], x["v_cache"])))
    assert all(r.passed for r in found), "\n".join(map(str, found))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("c", CACHE_CASES, ids=lambda c: c.name)
def test_case(c: CacheCase, dtype: str, family: str) -> None:
    check(c, dtype, "cupy")


@pytest.mark.parametrize("c", [c for c in CACHE_CASES if not c.stored], ids=lambda c: c.name)
def test_case_fp32(c: CacheCase) -> None:
    check(c, "fp32", "cupy")


@pytest.mark.parametrize("c", CACHE_CASES, ids=lambda c: c.name)
def test_case_torch(c: CacheCase) -> None:
    check(c, "bf16", "torch")


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    c=cache_cases(300, (8, 64, 96, 128, 256)), dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_call(c: CacheCase, dtype: str, seed: int) -> None:
    hypothesis.assume(dtype != "fp32" or not c.stored)
    host = c.inputs(dtype, seed)
    oracle = CacheOracle(problem_of(host, c.options()), host)
    x = {name: on_gpu(y, "cupy") for name, y in host.items()}
    poison("cupy")
    out, lse = attention_with_cache(**c.call(x), return_lse=True)
    found = oracle.judge(*map(to_numpy, (out, lse, x["k_cache"], x["v_cache"])))
    assert all(r.passed for r in found), "\n".join(map(str, found))


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_8_bits_append_what_the_cpu_appends(library: str, rng: np.random.Generator) -> None:
    """Bit by bit, ties and numbers that are too large included."""
    for stored in ("int8", "e4m3"):
        c = CacheCase("bits", "full", (5, 0, 60), 4, 128, append=True, capacity=64, stored=stored, rotary=64)
        x = c.inputs("bf16")
        x["k_scale"][...], x["v_scale"][...] = 0.125, 0.25
        x["v"][...] = rng.integers(-4000, 4000, x["v"].shape) / 8
        x["v"][0, 0, 0, :3] = np.nan, np.inf, -np.inf
        y = {name: on_gpu(z, library) for name, z in x.items()}
        attention_with_cache(**x, **c.keywords())  # on the CPU
        attention_with_cache(**y, **c.keywords())
        for name in ("k_cache", "v_cache"):
            np.testing.assert_array_equal(to_numpy(y[name]).view(np.uint8), x[name].view(np.uint8), err_msg=name)


# ---- Calls of one's own ----


def draw(
    batch: int, capacity: int, *, heads: int = 8, heads_k: int = 2, d: int = 128, page: int = 0, new: int = 1
) -> Any:
    """Tensors of a call, with as many new keys as queries; the last page is nobody's."""
    import torch

    gpu = {"device": "cuda", "dtype": torch.bfloat16}
    found = {
        "q": torch.randn(batch, new, heads, d, **gpu),
        "cache_seqlens": torch.zeros(batch, dtype=torch.int32).cuda(),
    }
    width = capacity // page if page else 0
    shape = (batch * width + 1, page, heads_k, d) if page else (batch, capacity, heads_k, d)
    found["k_cache"], found["v_cache"] = (torch.randn(shape, **gpu) for _ in range(2))
    found["k"], found["v"] = (torch.randn(batch, new, heads_k, d, **gpu) for _ in range(2))
    if page:
        found["block_table"] = torch.randperm(batch * width, device="cuda").to(torch.int32).view(batch, width)
    return found


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: y.clone() for name, y in x.items()}


def same(a: Any, b: Any, what: str = "") -> None:
    np.testing.assert_array_equal(to_numpy(a).astype(np.float32), to_numpy(b).astype(np.float32), err_msg=what)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_replay_reads_biases_and_masks_as_they_are(family: str, d: int) -> None:
    """Those of a static cache, written in place between replays."""
    import torch

    x = draw(3, 512, d=d)
    x["bias"] = torch.randn(8, 1, 512, device="cuda", dtype=torch.bfloat16)
    x["mask"] = torch.rand(3, 1, 1, 512, device="cuda") < 0.5
    attention_with_cache(**x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_with_cache(**x, return_lse=True)
    for lengths in ((0, 511, 70), (300, 1, 64)):
        x["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        x["bias"].normal_()
        x["mask"].copy_(torch.rand(3, 1, 1, 512, device="cuda") < 0.5)
        graph.replay()
        expected = attention_with_cache(**x, return_lse=True)
        same(out, expected[0])
        same(lse, expected[1])


@pytest.mark.parametrize("page", [0, 1, 16, 64])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_replay_with_other_lengths(family: str, d: int, page: int) -> None:
    """Lengths up to the capacity, tables and new rows; compared with fresh calls bit by bit, caches too."""
    import torch

    x = draw(4, 512, d=d, page=page)
    call = {"causal": True, "return_lse": True}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention_with_cache(**x, **call)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_with_cache(**x, **call)
    for lengths in ((0, 511, 1, 70), (511, 511, 511, 511), (0, 0, 0, 0), (300, 7, 64, 63)):
        x["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        for name in ("q", "k", "v"):
            x[name].normal_()
        if page:
            x["block_table"].copy_(x["block_table"].flip(0))
        again = copied(x)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        fresh = attention_with_cache(**again, **call)
        same(out, fresh[0], f"out, {lengths}")
        same(lse, fresh[1], f"lse, {lengths}")
        for name in ("k_cache", "v_cache"):
            same(x[name], again[name], f"{name}, {lengths}")


@pytest.mark.parametrize("page", [0, 16])
def test_lengths_and_pages_out_of_range_are_clamped(family: str, page: int) -> None:
    """Nothing is read or written elsewhere: as the CPU path does, bit by bit in the caches."""
    import torch

    x, last = draw(6, 96, page=page), 2**31 - 1
    if page:  # the last page is nobody's: were it not for the clamped numbers, nothing would be written there
        x["block_table"][1] = torch.tensor([-1, last, -last - 1, 7, -5, 10**6]).to(torch.int32)
    else:
        x["cache_batch_idx"] = torch.tensor([0, 1, 2, -7, last, 5], dtype=torch.int32, device="cuda")
    x["cache_seqlens"].copy_(torch.tensor([-1, 40, 95, last, 96, -last - 1], dtype=torch.int32))
    if not page:  # who is written twice is left to chance: only lengths at the capacity for those
        x["cache_seqlens"][3:5] = 96
    from cupyflash.arrays.adapters import NUMPY, TORCH
    from cupyflash.cpu import cache

    host = {name: TORCH.to_numpy(y.cpu()).copy() for name, y in x.items()}
    options = CacheCase("clamped", "full", ()).options()
    expected, _ = cache.forward(host, problem_of(host, options))
    out = attention_with_cache(**x, causal=True)
    for name in ("k_cache", "v_cache"):
        same(x[name], host[name], name)
    np.testing.assert_allclose(to_numpy(out).astype(np.float32), expected.astype(np.float32), rtol=0.03, atol=0.03)
    assert NUMPY.dtype_name(expected.dtype) == "bf16"


def test_wrong_entries_are_named_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    x = draw(3, 64, page=16)
    attention_with_cache(**x)
    x["cache_seqlens"][1] = 64
    with pytest.raises(ArgumentError, match=r"cache_seqlens: expected lengths of 0 to 63.*got cache_seqlens\[1\] = 64"):
        attention_with_cache(**x)
    x["cache_seqlens"][1] = 20
    x["block_table"][1, 1] = 13
    with pytest.raises(ArgumentError, match=r"block_table: .*got block_table\[1, 1\] = 13"):
        attention_with_cache(**x)


@pytest.mark.parametrize("page", [0, 16])
def test_nothing_waits(family: str, page: int) -> None:
    import torch

    x = draw(4, 256, page=page)
    more = {"causal": True, "window": (100, 0), "return_lse": True}
    attention_with_cache(**x, **more)
    q = x["q"]
    with nothing_waits():
        for _ in range(3):
            attention_with_cache(**x, **more)
            x["cache_seqlens"] += 1
        attention_with_cache(**x | {"cache_seqlens": 7}, **more)
        attention_with_cache(**x | {"cache_seqlens": x["cache_seqlens"][0]}, **more)
        cache = PagedCache(64, 16, heads_k=2, head_dim=128, like=q)
        one, two = cache.allocate(), cache.allocate()
        places = cache.append([one, two], 5)
        three = cache.fork(one)
        cache.append([one, two, three], 1)
        cache.append([one, two], 1, into=places)
        combine(torch.stack((q, q)), torch.zeros(2, 4, 8, 1, device="cuda"))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_one_length_on_the_device(library: str, dtype: str, rng: np.random.Generator) -> None:
    """An array without dimensions."""
    q = on_gpu(rng.standard_normal((3, 1, 4, 64)).astype(np.float16), library)
    k, v = (on_gpu(rng.standard_normal((3, 50, 2, 64)).astype(np.float16), library) for _ in range(2))
    found = attention_with_cache(q, k, v, cache_seqlens=on_gpu(np.array([17], dtype), library)[0])
    same(found, attention_with_cache(q, k, v, cache_seqlens=17))


def test_one_length_in_a_graph() -> None:
    """It is read at each replay; what int32 cannot hold is as long as the cache."""
    import torch

    x = draw(4, 96)
    x["cache_seqlens"] = torch.tensor(3, device="cuda")
    graph, (out,) = captured(lambda: (attention_with_cache(**x, causal=True),))
    for length in (5, 50, 2**40):
        x["cache_seqlens"].fill_(length)
        graph.replay()
        fresh = copied(x) | {"cache_seqlens": torch.full((4,), min(length, 96), dtype=torch.int32, device="cuda")}
        same(out, attention_with_cache(**fresh, causal=True), f"{length}")


@pytest.mark.parametrize("page", [0, 16])
def test_batch_invariance_is_bitwise(family: str, page: int) -> None:
    """Alone, with others, in another order, and with other lengths around it."""
    import torch

    x = draw(9, 2048, page=page)
    x["cache_seqlens"].copy_(torch.tensor([0, 5, 2047, 1000, 64, 63, 700, 1, 1500], dtype=torch.int32))
    together = attention_with_cache(**copied(x), causal=True, batch_invariant=True)

    def part(rows: list[int]) -> Any:
        chosen = {name: y if page and name.endswith("_cache") else y[rows] for name, y in copied(x).items()}
        return attention_with_cache(**chosen, causal=True, batch_invariant=True)

    for b in range(9):
        same(part([b])[0], together[b], f"sequence {b} alone")
    order = [8, 3, 0, 2]
    same(part(order), together[order])


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 64])
def test_splits_agree(family: str, num_splits: int | None) -> None:
    import torch

    x = draw(2, 4096, heads=8, heads_k=1)
    x["cache_seqlens"].copy_(torch.tensor([4000, 17], dtype=torch.int32))
    out, lse = attention_with_cache(**x, causal=True, num_splits=num_splits, return_lse=True)
    for b, keys in enumerate((4001, 18)):
        own = (x["q"][b : b + 1], *(x[name][b : b + 1, :keys] for name in ("k_cache", "v_cache")))
        expected, expected_lse = attention(*own, causal=True, return_lse=True)
        torch.testing.assert_close(out[b : b + 1], expected, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(lse[b : b + 1], expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["causal", "window", "softcap", "alibi", "sink", "range", "append", "rotary"])
@pytest.mark.parametrize("d", [64, 128])
def test_many_queries(family: str, d: int, how: str) -> None:
    """Which take the forward: as good as one split of attention over a cache, and the same rows are appended."""
    import torch

    torch.manual_seed(d)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    lengths = torch.tensor([0, 700, 650, 130, -3, 3000], device="cuda", dtype=torch.int32)
    x = {"q": torch.randn(6, 200, 16, d, **like), "cache_seqlens": lengths}
    pools = [torch.randn(6, 2000, 4, d, **like) for _ in "kv"]
    for b, n in enumerate((0, 700, 650, 130, 0, 2000)):
        for pool in pools:
            pool[b, n:] = float("nan")
    more: dict[str, Any] = {
        "causal": {"causal": True},
        "window": {"window": (100, 3)},
        "softcap": {"softcap": 2.0, "scale": -0.1},
        "alibi": {"alibi_slopes": torch.rand(6, 16, device="cuda"), "causal": True},
        "sink": {"sink": torch.randn(16, device="cuda"), "causal": True},
        "range": {"kv_range": torch.tensor([[5, 600]] * 6, device="cuda", dtype=torch.int32)},
    }.get(how, {"causal": True})
    if how in ("append", "rotary"):
        more |= {name: torch.randn(6, 200, 4, d, **like) for name in "kv"}
    if how == "rotary":
        more |= {f"rotary_{name}": torch.rand(1000, d // 2, device="cuda") for name in ("cos", "sin")}
    found, kept = [], []
    for splits in (None, 1):
        own = [pool.clone() for pool in pools]
        found.append(cupyflash.attention_with_cache(
            **x, k_cache=own[0], v_cache=own[1], num_splits=splits, return_lse=True, **more))  # fmt: skip
        kept.append(own)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(*kept, strict=True))
    (out, lse), (expected, expected_lse) = found
    assert (out.shape, lse.shape) == (expected.shape, expected_lse.shape)
    assert torch.isfinite(out).all()
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 1e-2
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~lse.isneginf()
    assert float((lse - expected_lse)[seen].abs().max()) < 2e-2


@pytest.mark.parametrize("lies", ["pages of 16", "pages of 48", "chosen", "heads first", "mixed", "mixed pages of 32"])
@pytest.mark.parametrize("how", ["plain", "append", "append some", "features"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_queries_by_table(family: str, d: int, how: str, lies: str) -> None:
    """Of pages and other caches, and beside sequences of few queries: as good as one split of the other way."""
    import torch

    torch.manual_seed(d)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    queries = [1, 300, 0, 128, 127, 700] if "mixed" in lies else [200] * 6
    room, page = 2016, int(lies.split()[-1]) if "pages" in lies else 0
    pools = [torch.randn(*((6 * room // page + 5, page) if page else (9, room)), 4, d, **like) for _ in "kv"]
    if lies == "heads first":
        pools = [pool.transpose(1, 2).contiguous().transpose(1, 2)[:6] for pool in pools]
    elif lies == "mixed":
        pools = [pool[:6] for pool in pools]
    x: dict[str, Any] = {"q": torch.randn(*((sum(queries),) if "mixed" in lies else (6, 200)), 16, d, **like)}
    x["cache_seqlens"] = torch.tensor([0, 700, 650, 130, 17, 1200], device="cuda", dtype=torch.int32)
    if page:
        pages = torch.randperm(len(pools[0]), device="cuda", dtype=torch.int32)
        x["block_table"] = pages[: 6 * room // page].reshape(6, -1)
    elif lies == "chosen":
        x["cache_batch_idx"] = torch.randperm(9, device="cuda", dtype=torch.int32)[:6]
    if "mixed" in lies:
        x["cu_seqlens_q"] = torch.tensor([0, *queries], device="cuda").cumsum(0).to(torch.int32)
    new = {"append": x["q"].shape[:-2], "append some": None if "mixed" in lies else (6, 7)}.get(how)
    if new is not None:
        x |= {name: torch.randn(*new, 4, d, **like) for name in "kv"}
    more: dict[str, Any] = {"causal": how != "plain"}
    if how == "features":
        more |= {"alibi_slopes": torch.rand(16, device="cuda"), "sink": torch.randn(16, device="cuda"), "softcap": 5.0}
    found, kept = [], []
    for splits in (None, 1):
        own = [pool.clone() for pool in pools]  # which keeps their strides
        found.append(cupyflash.attention_with_cache(
            **x, k_cache=own[0], v_cache=own[1], num_splits=splits, return_lse=True, **more))  # fmt: skip
        kept.append(own)
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    (out, lse), (expected, expected_lse) = found
    assert (out.shape, lse.shape) == (expected.shape, expected_lse.shape)
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 1e-2
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~lse.isneginf()
    assert float((lse - expected_lse)[seen].abs().max()) < 2e-2


def many_queries(
    lies: str, widths: tuple[int, int], appends: bool, device: str = "cuda"
) -> tuple[list[Any], dict[str, Any]]:
    """Caches of keys and of values with these head_dims, and the other arrays of a call whose keys the plan divides."""
    import torch

    torch.manual_seed(widths[0])
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    room, page = 12288, int(lies.split()[-1]) if "pages" in lies else 0
    queries = [1, 260, 3] if "mixed" in lies else [260]
    n = len(queries)
    rows = (n * room // page + 3, page) if page else (n, room)
    pools = [torch.randn(*rows, 4, width, **like) for width in widths]
    q = torch.randn(*((sum(queries),) if "mixed" in lies else (1, 260)), 32, widths[0], **like)
    x: dict[str, Any] = {"q": q}
    x["cache_seqlens"] = torch.tensor([500, 11000, 70][:n] if n > 1 else [11000], device=device, dtype=torch.int32)
    if page:
        pages = torch.randperm(len(pools[0]), device=device, dtype=torch.int32)
        x["block_table"] = pages[: n * room // page].reshape(n, -1)
    if "mixed" in lies:
        x["cu_seqlens_q"] = torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32)
    if appends:
        x |= {name: torch.randn(*q.shape[:-2], 4, width, **like) for name, width in zip("kv", widths, strict=True)}
    return pools, x


@pytest.mark.parametrize("lies", ["contiguous", "pages of 16", "mixed pages of 64"])
@pytest.mark.parametrize("how", ["causal", "full", "softcap", "append"])
@pytest.mark.parametrize("d", [64, 72, 128, 256])
def test_keys_in_parts(family: str, d: int, how: str, lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few queries that the plan divides the keys: as good as one split of the other way; a captured call finds other
    lengths, of which some leave parts without keys, and rows without any."""
    import torch

    pools, x = many_queries(lies, (d, d), appends=how == "append")
    x |= {"causal": how != "full", "softcap": 5.0 if how == "softcap" else None, "return_lse": True}

    def call(num_splits: int | None) -> Any:
        return cupyflash.attention_with_cache(**x, k_cache=pools[0], v_cache=pools[1], num_splits=num_splits)

    def agree(found: Any, expected: Any) -> None:
        (out, lse), (other, other_lse) = found, expected
        assert float((out.float() - other.float()).norm()) <= 1e-2 * float(other.float().norm())
        assert torch.equal(lse.isneginf(), other_lse.isneginf())
        difference = (lse - other_lse)[~lse.isneginf()]
        assert difference.numel() == 0 or float(difference.abs().max()) < 2e-2

    planned = list[int]()

    def spy(*asked: Any) -> int:
        planned.append(3 if d == 256 else key_splits(*asked))  # which has tiles enough
        return planned[-1]

    monkeypatch.setattr("cupyflash.plan.splits.key_splits", spy)
    agree(call(None), call(1))
    assert min(planned) > 1
    graph, found = captured(lambda: call(None))
    for length in (0, 100, 1100, 12000):
        x["cache_seqlens"].fill_(length)
        graph.replay()
        agree(found, call(1))


_MANY = {"heads_q": 16, "heads_k": 4, "capacity": 5248}  # room enough to take the forward
MANY_OF_8_BITS = (
    CacheCase("many-int8", "full", (700, 1500), 200, 64, append=True, rotary=32, stored="int8", **_MANY),
    CacheCase("many-e4m3-pages", "full", (700, 1500), 200, 128, page_size=16, append=True, new=7, stored="e4m3",
              scale_dims=2, nonfinite=True, scale_spread=6.0, **_MANY),
    CacheCase("many-int8-chosen", "full", (0, 4000), 200, 128, spare=3, stored="int8", scale_dims=2, softcap=5.0,
              memory="heads_first", **_MANY),
    CacheCase("many-int8-mixed", "full", (700, 900, 300), (1, 400, 127), 64, page_size=48, stored="int8", scale_dims=2,
              sink=True, window=(500, 0), **_MANY),
    CacheCase("many-e4m3-mixed", "full", (700, 0, 300), (1, 400, 127), 96, append=True, stored="e4m3", **_MANY),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("c", MANY_OF_8_BITS, ids=lambda c: c.name)
def test_many_queries_over_8_bits(c: CacheCase, dtype: str, family: str) -> None:
    """By the forward, over rows that stand for the cache; against float64."""
    way = way_of(c.problem(dtype), Device.of(0), Lie(), family)
    assert way is not None
    assert way.dequantized
    check(c, dtype, "torch" if dtype == "bf16" else "cupy")


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("lies", ["whole", "pages", "mixed"])
def test_many_queries_over_8_bits_in_a_graph(lies: str, dims: int) -> None:
    """Replayed with other lengths, queries and scales; as a fresh call, bit by bit."""
    import torch

    torch.manual_seed(0)
    slots, rows = (700, 16) if lies == "pages" else (2, 5248)
    x: dict[str, Any] = {"q": torch.randn(2, 200, 16, 64, device="cuda", dtype=torch.bfloat16), "causal": True}
    x |= {
        f"{name}_cache": torch.randint(-127, 128, (slots, rows, 4, 64), device="cuda").to(torch.int8) for name in "kv"
    }
    x |= {f"{name}_scale": torch.rand((slots, 4)[2 - dims :], device="cuda") / 50 for name in "kv"}
    x["cache_seqlens"] = torch.tensor([100, 3000], device="cuda", dtype=torch.int32)
    if lies == "pages":
        x["block_table"] = torch.randperm(700, device="cuda", dtype=torch.int32)[:656].reshape(2, 328)
    elif lies == "mixed":
        x["q"] = x["q"].flatten(0, 1)
        x["cu_seqlens_q"] = torch.tensor([0, 3, 400], device="cuda", dtype=torch.int32)
    graph, (out,) = captured(lambda: (attention_with_cache(**x),))
    for lengths in ((0, 5248), (2000, 17), (5248, 0)):
        x["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        x["q"].normal_()
        x["v_scale"].mul_(1.25)
        graph.replay()
        same(out, attention_with_cache(**x), str(lengths))


def test_many_queries_by_table_in_a_graph() -> None:
    """Lengths, pages and which sequences have many queries are read on the device."""
    import torch

    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x: dict[str, Any] = {name: torch.randn(800, 16, 4, 128, **like) for name in ("k_cache", "v_cache")}
    x |= {"q": torch.randn(600, 16, 128, **like), "causal": True}
    x["cache_seqlens"] = torch.tensor([100, 200, 300], device="cuda", dtype=torch.int32)
    x["block_table"] = torch.randperm(800, device="cuda", dtype=torch.int32)[:750].reshape(3, 250)
    x["cu_seqlens_q"] = torch.tensor([0, 1, 401, 600], device="cuda", dtype=torch.int32)
    graph, (out,) = captured(lambda: (attention_with_cache(**x),))
    for edges, lengths in (((0, 300, 301, 600), (900, 0, 1300)), ((0, 5, 10, 600), (7, 1000, 1))):
        x["cu_seqlens_q"].copy_(torch.tensor(edges, dtype=torch.int32))
        x["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        x["block_table"].copy_(x["block_table"].flip(0).clone())
        graph.replay()
        same(out, attention_with_cache(**x), str(edges))


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_ragged_steps(library: str, rng: np.random.Generator) -> None:
    """3000 steps of sequences that grow by 0 to 3 keys and end, in pages that go from one to another; each 100th
    compared with attention to all keys of each sequence, and the caches with what was written, bit by bit."""
    heads, heads_k, d, batch = 4, 2, 64, 5
    like = on_gpu(np.zeros(1, np.float16), library)
    cache = PagedCache(80, 16, heads_k=heads_k, head_dim=d, like=like, max_seqlen=320)
    sequences = [cache.allocate() for _ in range(batch)]
    written: list[list[list[np.ndarray]]] = [[[], []] for _ in range(batch)]
    for step in range(3000):
        counts = rng.integers(0, 4, batch)
        for b in range(batch):
            if cache.length(sequences[b]) + counts[b] > 150 + 30 * b:
                cache.free(sequences[b])
                sequences[b], written[b] = cache.allocate(), [[], []]
        total = int(counts.sum())
        if not total:
            continue
        q = rng.standard_normal((total, heads, d)).astype(np.float16)
        k, v = rng.standard_normal((2, total, heads_k, d)).astype(np.float16)
        places = cache.append(sequences, counts.tolist())
        given = [on_gpu(y, library) for y in (q, k, v)]
        out = attention_with_cache(given[0], *cache[0], k=given[1], v=given[2], **places, causal=True)
        starts = np.concatenate(([0], np.cumsum(counts)))
        for b in range(batch):
            for one, new in zip(written[b], (k, v), strict=True):
                one.extend(new[starts[b] : starts[b + 1]])
        if step % 100:
            continue
        found, caches = to_numpy(out), [to_numpy(y) for y in cache[0]]
        table = to_numpy(places["block_table"])
        for b in np.flatnonzero(counts):
            keys, values = (np.array(y) for y in written[b])
            for stored, rows in zip(caches, (keys, values), strict=True):
                np.testing.assert_array_equal(stored[table[b]].reshape(-1, heads_k, d)[: len(rows)], rows)
            own = q[starts[b] : starts[b + 1]].astype(np.float32)
            exact = attention(own[None], keys[None].astype(np.float32), values[None].astype(np.float32), causal=True)
            np.testing.assert_allclose(found[starts[b] : starts[b + 1]], exact[0], rtol=4e-3, atol=4e-3)


def test_a_graph_over_a_paged_cache() -> None:
    """One captured step, replayed while sequences grow from page to page, fork, and end: `append` writes its tables."""
    import torch

    torch.manual_seed(0)
    steps = [[torch.randn(2, 1, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2)] for _ in range(60)]
    like = steps[0][0]
    found: list[list[Any]] = []
    for replayed in (True, False):
        cache = PagedCache(24, 4, heads_k=2, head_dim=64, like=like, max_seqlen=64)
        given, outs = [x.clone() for x in steps[0]], []
        sequences = [cache.allocate(), cache.allocate()]
        places = cache.append(sequences, 1)

        def step(cache: PagedCache = cache, given: Any = given, places: Any = places) -> Any:
            q, k, v = given
            return attention_with_cache(q, *cache[0], k=k, v=v, **places, causal=True)

        run = step
        if replayed:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()

            def run(graph: Any = graph, out: Any = out) -> Any:
                graph.replay()
                return out

        for i, new in enumerate(steps):
            for x, y in zip(given, new, strict=True):
                x.copy_(y)
            outs.append(run().clone())
            if i % 20 == 13:  # the second one goes on from what the first one has
                cache.free(sequences[1])
                sequences[1] = cache.fork(sequences[0], i - 5)
            cache.append(sequences, 1, into=places)
        found.append(outs)
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        same(a, b, f"step {i}")


@pytest.mark.parametrize("page", [0, 16])
def test_torch_compile(page: int) -> None:
    """Whole, and what follows sees the rows that were appended."""
    import torch

    x = draw(3, 96, page=page)

    def step(given: dict[str, Any]) -> Any:
        return attention_with_cache(**given, causal=True) * 2, given["k_cache"].float().sum()

    a, b = copied(x), copied(x)
    found, expected = torch.compile(step, backend="aot_eager", fullgraph=True)(a), step(b)
    for y, z in zip((*found, *a.values()), (*expected, *b.values()), strict=True):
        torch.testing.assert_close(y, z)


def test_two_streams_on_one_pool() -> None:
    """Each appends to sequences of its own and attends to them, 200 times, without waiting for the other."""
    import torch

    pool = draw(4, 512, page=16)
    streams = [torch.cuda.Stream() for _ in range(2)]
    halves = []
    for half in range(2):
        x = copied({name: y[2 * half : 2 * half + 2] for name, y in pool.items() if not name.endswith("_cache")})
        halves.append(x | {name: pool[name] for name in ("k_cache", "v_cache")})
    alone = [copied(x) for x in halves]
    torch.cuda.synchronize()
    outs: list[list[Any]] = [[], []]
    for _ in range(200):
        for half, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[half].append(attention_with_cache(**halves[half], causal=True))
                halves[half]["cache_seqlens"] += 1
                halves[half]["q"].mul_(-1)
                halves[half]["k"].copy_(halves[half]["k"].flip(-1))
    torch.cuda.synchronize()
    for half, x in enumerate(alone):
        for step in range(200):
            same(outs[half][step], attention_with_cache(**x, causal=True), f"half {half}, step {step}")
            x["cache_seqlens"] += 1
            x["q"].mul_(-1)
            x["k"].copy_(x["k"].flip(-1))
        for name in ("k_cache", "v_cache"):
            pages = x["block_table"].flatten().long()
            same(pool[name][pages], x[name][pages], name)


def test_offsets_beyond_32_bits() -> None:
    """A pool of more than 2^32 bytes in each cache, of which the last pages are used."""
    import torch

    pages = 2**31 // (16 * 8 * 128) + 300
    k_cache, v_cache = (torch.empty(pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.arange(pages - 8, pages, device="cuda", dtype=torch.int32).view(2, 4)
    used = table.flatten().long()
    k_cache[used], v_cache[used] = (torch.randn(8, 16, 8, 128, device="cuda").bfloat16() for _ in range(2))
    q, k, v = (torch.randn(2, 1, 8, 128, device="cuda").bfloat16() for _ in range(3))
    lengths = torch.tensor([63, 20], dtype=torch.int32, device="cuda")
    out = attention_with_cache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, block_table=table, causal=True)
    small = attention_with_cache(q, k_cache[used].clone(), v_cache[used].clone(), cache_seqlens=lengths, k=k, v=v,
                                 block_table=table - (pages - 8), causal=True)  # fmt: skip
    same(out, small)
    assert torch.equal(v_cache[table[0, 3].long(), 15], v[0, 0])


def test_what_has_no_kernel_is_refused_by_name() -> None:
    import torch

    x = {name: y if name == "cache_seqlens" else y.float() for name, y in draw(2, 64).items()}
    x |= {name: torch.zeros_like(x[name], dtype=torch.int8) for name in ("k_cache", "v_cache")}
    x |= {name: torch.ones(x["k_cache"].shape[2], device="cuda") for name in ("k_scale", "v_scale")}
    with pytest.raises(UnsupportedError, match="fp32 has no GPU kernel over a cache of 8 bits"):
        attention_with_cache(**x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_combine_of_cupy_arrays(dtype: str, rng: np.random.Generator) -> None:
    """Two halves of a cache, on the device alone."""
    import ml_dtypes

    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    q = rng.standard_normal((2, 3, 4, 64)).astype(kind)
    k, v = rng.standard_normal((2, 2, 200, 2, 64)).astype(kind)
    given = [on_gpu(y, "cupy") for y in (q, k, v)]
    parts = [attention(given[0], given[1][:, a:b], given[2][:, a:b], return_lse=True) for a, b in ((0, 77), (77, 200))]
    out, lse = combine(*zip(*parts, strict=True))
    whole, whole_lse = attention(*given, return_lse=True)
    assert out.dtype == kind
    np.testing.assert_allclose(to_numpy(out).astype(float), to_numpy(whole).astype(float), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(to_numpy(lse), to_numpy(whole_lse), rtol=1e-4, atol=1e-4)


@pytest.mark.needs("jax")
def test_jax_arrays(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    q = jnp.asarray(rng.standard_normal((3, 1, 4, 64)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.standard_normal((3, 50, 2, 64)), jnp.bfloat16) for _ in range(2))
    lengths = jnp.array([0, 20, 50], jnp.int32)
    out = attention_with_cache(q, k, v, cache_seqlens=lengths)
    assert isinstance(out, jax.Array)
    host = [np.array(y) for y in (q, k, v)]
    expected = attention_with_cache(*host, cache_seqlens=np.asarray(lengths))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected.astype(np.float32), rtol=0.02, atol=0.02)
    step = jax.jit(functools.partial(attention_with_cache, causal=True), donate_argnames=("k_cache", "v_cache"))
    for i in range(3):  # appended where the donated caches lie
        new = {name: jnp.asarray(rng.standard_normal((3, 1, 2, 64)), jnp.bfloat16) for name in "kv"}
        used = jnp.array([i, 20 + i, 47 + i], jnp.int32)
        expected = attention_with_cache(*host, cache_seqlens=np.asarray(used), causal=True,
                                        **{name: np.asarray(y) for name, y in new.items()})  # fmt: skip
        places = k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer()
        out, k, v = step(q, k_cache=k, v_cache=v, cache_seqlens=used, **new)
        assert (k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer()) == places
        np.testing.assert_allclose(np.asarray(out, np.float32), expected.astype(np.float32), rtol=0.02, atol=0.02)
        for a, b in zip((k, v), host[1:], strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint16), b.view(np.uint16))


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_example(library: str) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "generate.py"
    done = subprocess.run([sys.executable, example, "--library", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "three three three" in done.stdout


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_that_grows(batch: int, heads_first: bool) -> None:
    """Bit by bit what a call gives of which nothing is known, and what torch's own attention gives; some of the layers
    keep a window of keys."""
    import torch

    def grown(x: Any, keys: int) -> Any:
        return x[:, :, -keys:].clone().transpose(1, 2) if heads_first else x.transpose(1, 2)[:, -keys:].clone()

    wanted = torch.nn.functional.scaled_dot_product_attention
    for n in (*range(250, 262), 700, 701, 703, 702):
        q = torch.randn(batch, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 2, n, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        for keys in (n, 200, n, 200, n):
            x = q.transpose(1, 2), grown(k, keys), grown(v, keys)
            out = attention_with_cache(*x, cache_seqlens=keys)
            exact = wanted(*(y.transpose(1, 2).double() for y in x), enable_gqa=True).transpose(1, 2)
            torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0.01)
            kept, cached.calls = cached.calls, Kept(10)
            try:
                same(out, attention_with_cache(*x, cache_seqlens=keys), f"{n} {keys}")
            finally:
                cached.calls = kept


def test_host_cost() -> None:
    """A warm call with lengths that change costs the host less than 100 us: nothing compiles, plans or waits."""
    import time

    import torch

    x = draw(64, 1024)
    times = []
    for _ in range(300):
        torch.cuda.synchronize()
        start = time.perf_counter()
        attention_with_cache(**x, causal=True)
        times.append(time.perf_counter() - start)
        x["cache_seqlens"] += 1
    assert float(np.median(times)) < 100e-6
    assert cupyflash.attention_with_cache is attention_with_cache
