"""attention_with_cache on the CPU: every named case, what it writes and what it does not, steps, libraries."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from cupyflash import ArgumentError, UnsupportedError, attention, attention_with_cache
from cupyflash.cache.arrays import BY_NAME as BY_ARRAY
from cupyflash.cache.arrays import shape_of
from cupyflash.cache.values import parts
from cupyflash.check.cache_case import CacheCase, problem_of
from cupyflash.check.cache_cases import CACHE_CASES
from cupyflash.check.cache_reference import CacheOracle
from cupyflash.cpu import cache as cpu
from cupyflash.operand import broadcasts_to
from cupyflash.problem import DTYPES
from tests.random_cache import cache_cases
from tests.small_cache import small
from tests.turns import in_turn

Arrays = dict[str, np.ndarray]
BY_NAME = {c.name: c for c in CACHE_CASES}
# Those whose reference takes seconds are judged in one dtype each, in turn.
_LONG = [name for name in BY_NAME if name.startswith("cache-many-queries")]
IN_TURN = [
    *((name, x) for name in BY_NAME if name not in _LONG for x in DTYPES),
    *in_turn(_LONG, [(x,) for x in DTYPES]),
]


def of_library(x: Arrays, library: str) -> dict[str, Any]:
    if library == "torch":
        import torch

        return {name: torch.from_numpy(y) for name, y in x.items()}
    if library == "jax":
        import jax.numpy as jnp

        return {name: jnp.asarray(y) for name, y in x.items()}
    return dict(x)


def judged(c: CacheCase, dtype: str, compute: Callable[[Arrays], Any]) -> list[Any]:
    x = c.inputs(dtype)
    oracle = CacheOracle(problem_of(x, c.options()), x)
    out, lse = compute(x)
    return oracle.judge(out, lse, x["k_cache"], x["v_cache"])


@pytest.mark.parametrize(("name", "dtype"), IN_TURN)
def test_case(name: str, dtype: str) -> None:
    c = BY_NAME[name]
    found = judged(c, dtype, lambda x: attention_with_cache(**c.call(x), return_lse=True))
    assert all(r.passed for r in found), "\n".join(map(str, found))


@hypothesis.given(c=cache_cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 10**6))
def test_any_call(c: CacheCase, dtype: str, seed: int) -> None:
    x = c.inputs(dtype, seed)
    oracle = CacheOracle(problem_of(x, c.options()), x)
    out, lse = attention_with_cache(**c.call(x), return_lse=True)
    found = oracle.judge(out, lse, x["k_cache"], x["v_cache"])
    assert all(r.passed for r in found), "\n".join(map(str, found))


def test_the_table_has_what_it_must() -> None:
    names = [c.name for c in CACHE_CASES]
    assert len(set(names)) == len(names)
    assert {1, 2, 16, 64, 100} <= {c.page_size for c in CACHE_CASES}
    assert {64, 80, 128, 256} <= {c.head_dim for c in CACHE_CASES}
    assert {1, 2, 4, 33, 300} <= {c.queries for c in CACHE_CASES}
    assert {1, 4, 8, 32} <= {c.heads_q // c.heads_k for c in CACHE_CASES} | {4}
    assert {c.level for c in CACHE_CASES} == {"smoke", "quick", "full"}
    tags = set().union(*(c.tags for c in CACHE_CASES))
    assert {
        "paged",
        "append",
        "rotary",
        "packed",
        "softcap",
        "alibi",
        "kv_range",
        "sink",
        "bias",
        "blocks",
        "mods",
        "nonfinite",
        "misaligned",
        "own_v",
    } <= tags
    for c in CACHE_CASES:
        p = c.problem("fp16")
        for name, x in c.inputs("fp16").items():
            if BY_ARRAY[name].free:
                continue
            whole = shape_of(name, p)
            if name in ("block_tiles", "block_bits"):  # of which batch and heads may share theirs
                assert [n for n, m in zip(x.shape, whole, strict=True) if n not in (1, m) and m > 0] == []
                continue
            assert broadcasts_to(x.shape, whole) if BY_ARRAY[name].broadcasts else x.shape == whole


# What a kernel may do wrong, each in the one line of the CPU path that does it right, and a case that tells.
FAULTS = {
    "reads behind the rows in use": ("cache-one-query", lambda part: part._replace(keys=slice(0, part.keys.stop + 1))),
    "loses the last key": ("cache-rotary", lambda part: part._replace(keys=slice(0, part.keys.stop - 1))),
    "loses the last key beside a narrower v": (
        "cache-v-narrow-mla",
        lambda part: part._replace(keys=slice(0, part.keys.stop - 1)),
    ),
    "appends one row late": ("cache-append-each-offset", lambda part: part._replace(used=part.used + 1)),
    "appends too little": ("cache-append-more", lambda part: part._replace(new=part.new - 1)),
    "ignores the range": ("cache-range", lambda part: part._replace(keys=slice(0, part.keys.stop))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = FAULTS[fault]
    monkeypatch.setattr(cpu, "parts", lambda p, x: [_again(change(part)) for part in parts(p, x)])
    c = BY_NAME[name]
    found = judged(c, "fp16", lambda x: cpu.forward(x, problem_of(x, c.options())))
    assert not all(r.passed for r in found)


def _again(part: Any) -> Any:
    """The part whose dense problem has the keys that it says."""
    from dataclasses import replace

    return part._replace(problem=replace(part.problem, seqlen_k=max(part.keys.stop - part.keys.start, 0)))


@pytest.mark.parametrize("wrong", ["k_cache", "v_cache"])
def test_one_bit_of_the_cache_is_found(wrong: str) -> None:
    c = BY_NAME["cache-append"]
    x = c.inputs("bf16")
    oracle = CacheOracle(problem_of(x, c.options()), x)
    out, lse = cpu.forward(x, problem_of(x, c.options()))
    x[wrong].view(np.uint16)[2, 5, 1, 7] ^= 1
    assert [r.name for r in oracle.judge(out, lse, x["k_cache"], x["v_cache"]) if not r.passed] == [wrong]


def test_one_length_for_all(rng: np.random.Generator) -> None:
    x = small(rng)
    x["cache_seqlens"] = np.full(3, 11, np.int32)
    expected, caches = attention_with_cache(**x), (x["k_cache"].copy(), x["v_cache"].copy())
    for length in (11, np.int64(11), np.array(11)):
        np.testing.assert_array_equal(attention_with_cache(**x | {"cache_seqlens": length}), expected)
    np.testing.assert_array_equal(caches, (x["k_cache"], x["v_cache"]))


def test_steps_are_attention_over_what_came_so_far(rng: np.random.Generator) -> None:
    """A prompt at once, then token by token, through pages: each output that of a causal call on all."""
    total, prompt = 41, 13
    q = rng.standard_normal((1, total, 4, 16))
    k, v = rng.standard_normal((2, 1, total, 2, 16))
    pool = np.full((2, 9, 5, 2, 16), np.nan)
    table = rng.permutation(9)[None].astype(np.int32)
    expected = attention(q, k, v, causal=True)
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, total))]:
        at = slice(start, stop)
        new = {"k": k[:, at], "v": v[:, at], "block_table": table}
        out = attention_with_cache(q[:, at], *pool, cache_seqlens=start, **new, causal=True)
        np.testing.assert_allclose(out, expected[:, at], rtol=1e-12, atol=1e-13)


def test_thousands_of_ragged_steps(rng: np.random.Generator) -> None:
    """Sequences begin, grow by one or several keys, and end, for 3000 steps; each output is computed again from all
    its keys. Pages go from one to another."""
    page, width, pages, heads, d = 4, 8, 40, 2, 8
    k_pool, v_pool = np.full((2, pages, page, heads, d), np.nan)
    free, tables = list(rng.permutation(pages)), np.full((5, width), -1, np.int32)
    lengths, keys, values = np.zeros(5, np.int32), [[] for _ in range(5)], [[] for _ in range(5)]
    for _ in range(3000):
        for b in np.flatnonzero(lengths + 3 > page * width):
            free += list(tables[b][tables[b] >= 0])
            tables[b], lengths[b], keys[b], values[b] = -1, 0, [], []
        counts = rng.integers(0, 4, 5)
        for b in range(5):
            while (tables[b] >= 0).sum() * page < lengths[b] + counts[b]:
                tables[b, (tables[b] >= 0).sum()] = free.pop()
        cu = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        q, k, v = rng.standard_normal((3, cu[-1], heads, d))
        out = attention_with_cache(q, k_pool, v_pool, cache_seqlens=lengths, k=k, v=v, block_table=tables,
                                   cu_seqlens_q=cu, causal=True)  # fmt: skip
        for b in np.flatnonzero(counts):
            own = slice(cu[b], cu[b + 1])
            keys[b] += list(k[own])
            values[b] += list(v[own])
            K, V, Q = np.array(keys[b]), np.array(values[b]), q[own]
            S = np.einsum("ihd,jhd->hij", Q, K) / d**0.5
            S[:, np.arange(len(Q))[:, None] + len(K) - len(Q) < np.arange(len(K))] = -np.inf
            P = np.exp(S - S.max(axis=2, keepdims=True))
            exact = np.einsum("hij,jhd->ihd", P / P.sum(axis=2, keepdims=True), V)
            np.testing.assert_allclose(out[own], exact, rtol=1e-9, atol=1e-11)
        lengths += counts.astype(np.int32)


def test_threads_share_a_pool(rng: np.random.Generator) -> None:
    """Each appends to a sequence of its own and attends to it, 200 times; pages are those of both, in turn."""
    pool = np.full((2, 26, 16, 2, 8), np.nan)
    rows = rng.standard_normal((3, 2, 200, 4, 8))
    found = np.zeros((2, 200, 4, 8))

    def run(b: int) -> None:
        table = np.arange(b, 26, 2, dtype=np.int32)[None]
        for i in range(200):
            q, k, v = (x[b, None, i : i + 1] for x in rows)
            new = {"k": k[:, :, :2], "v": v[:, :, :2], "block_table": table}
            found[b, i] = attention_with_cache(q, *pool, cache_seqlens=i, **new, causal=True)[0, 0]

    threads = [threading.Thread(target=run, args=(b,)) for b in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = attention(rows[0], rows[1, :, :, :2], rows[2, :, :, :2], causal=True)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_a_sequence_does_not_see_its_batch(rng: np.random.Generator) -> None:
    """Bit by bit, alone or with others."""
    x = small(rng)
    together = attention_with_cache(**{name: y.copy() for name, y in x.items()}, batch_invariant=True)
    for b in range(3):
        alone = attention_with_cache(**{name: y[b : b + 1].copy() for name, y in x.items()}, batch_invariant=True)
        np.testing.assert_array_equal(alone[0], together[b])


def test_numbers_out_of_range_are_clamped_by_the_algorithm(rng: np.random.Generator) -> None:
    """The public call refuses them in host memory; what the kernels promise is what the CPU path does below it."""
    x = small(rng)
    x["cache_seqlens"] = np.array([-5, 20, 1000], np.int32)
    caches = x["k_cache"].copy(), x["v_cache"].copy()
    problem = problem_of(x, CacheCase("clamped", "full", ()).options())
    out, _ = cpu.forward(x, problem)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(x["k_cache"][0, 0], x["k"][0, 0])  # a length below 0 is 0
    np.testing.assert_array_equal(x["k_cache"][1:], caches[0][1:])  # there is no room for a row more
    np.testing.assert_array_equal(x["v_cache"][:, 1:], caches[1][:, 1:])
    paged = small(rng) | {"block_table": np.array([[-9], [2**31 - 1], [2]], np.int32)}
    cpu.forward(paged, problem_of(paged, CacheCase("clamped", "full", ()).options()))
    np.testing.assert_array_equal(paged["k_cache"][0, 0], paged["k"][0, 0])
    np.testing.assert_array_equal(paged["k_cache"][2, 7], paged["k"][1, 0])


# ---- Libraries ----


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_appends_in_place(dtype: str, rng: np.random.Generator) -> None:
    import torch

    x = {name: torch.from_numpy(y) for name, y in small(rng).items()}
    x = {name: y if y.dtype == torch.int32 else y.to(getattr(torch, dtype)) for name, y in x.items()}
    plain = {name: y.float().numpy() if y.dtype != torch.int32 else y.numpy() for name, y in x.items()}
    plain = {name: y.copy() if y.dtype == np.int32 else y.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else y.dtype)
             for name, y in plain.items()}  # fmt: skip
    out, lse = attention_with_cache(**x, return_lse=True)
    expected, expected_lse = attention_with_cache(**plain, return_lse=True)
    assert (out.dtype, lse.dtype) == (x["q"].dtype, torch.float32)
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))
    np.testing.assert_array_equal(lse.numpy(), expected_lse)
    assert torch.equal(x["v_cache"][1, 7], x["v"][1, 0])
    assert torch.equal(x["k_cache"][2, 19], x["k"][2, 0])


@pytest.mark.needs("jax")
@pytest.mark.parametrize("how", ["eager", "jit", "donated"])
@pytest.mark.parametrize("append", [False, True])
def test_jax(append: bool, how: str, rng: np.random.Generator) -> None:
    """As NumPy, but that the caches after the append are results; those that are given stay as they are."""
    import jax
    import jax.numpy as jnp

    plain = small(rng)
    if not append:
        del plain["k"], plain["v"]
    x = {name: jnp.asarray(y) for name, y in plain.items()}
    before = [np.asarray(x[name]).copy() for name in ("k_cache", "v_cache")]
    call = functools.partial(attention_with_cache, causal=True, window=(9, None), return_lse=True)
    if how != "eager":
        caches = ("k_cache", "v_cache") if how == "donated" and append else ()
        call = jax.jit(call, donate_argnames=caches)
    found = call(**x)
    expected = attention_with_cache(**plain, causal=True, window=(9, None), return_lse=True)
    if append:
        expected += (plain["k_cache"], plain["v_cache"])
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_array_equal(np.asarray(a), b)
    if how != "donated":
        for name, y in zip(("k_cache", "v_cache"), before, strict=True):
            np.testing.assert_array_equal(np.asarray(x[name]), y)


@pytest.mark.needs("jax")
def test_jax_steps_in_a_scan(rng: np.random.Generator) -> None:
    """A loop of steps in one program: each output that of a causal call on all."""
    import jax
    import jax.numpy as jnp

    q = jnp.asarray(rng.standard_normal((12, 2, 1, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((12, 2, 1, 2, 16)), jnp.float32) for _ in range(2))

    def step(state: Any, new: Any) -> Any:
        *caches, lengths = state
        out, *caches = attention_with_cache(new[0], *caches, cache_seqlens=lengths, k=new[1], v=new[2], causal=True)
        return (*caches, lengths + 1), out

    empty = jnp.full((2, 12, 2, 16), jnp.nan, jnp.float32)
    _, outs = jax.jit(lambda *new: jax.lax.scan(step, (empty, empty, jnp.zeros(2, jnp.int32)), new))(q, k, v)
    whole = [np.asarray(y)[:, :, 0].swapaxes(0, 1) for y in (q, k, v)]
    np.testing.assert_allclose(
        np.asarray(outs)[:, :, 0].swapaxes(0, 1), attention(*whole, causal=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.needs("jax")
def test_jax_says_what_is_wrong(rng: np.random.Generator) -> None:
    import jax
    import jax.numpy as jnp

    x = {name: jnp.asarray(y) for name, y in small(rng).items()}
    half = {name: y if y.dtype == jnp.int32 else y.astype(jnp.bfloat16) for name, y in x.items()}
    assert attention_with_cache(**half | {"cache_seqlens": 5})[0].dtype == jnp.bfloat16
    with pytest.raises(ArgumentError, match=r"k: expected dtype fp32 of q, got bf16"):
        attention_with_cache(**x | {"k": half["k"]})
    with pytest.raises(ArgumentError, match=r"cache_seqlens: expected shape \(batch,\) = \(3,\)"):
        jax.jit(attention_with_cache)(**x | {"cache_seqlens": jnp.zeros(4, jnp.int32)})
    with pytest.raises(Exception, match=r"cache_seqlens: expected lengths of 0 to 19"):
        jax.block_until_ready(attention_with_cache(**x | {"cache_seqlens": jnp.full(3, 20, jnp.int32)}))
    with pytest.raises(UnsupportedError, match="q: attention over a cache has no gradients"):
        jax.grad(lambda q: attention_with_cache(**x | {"q": q})[0].sum())(x["q"])
    with pytest.raises(UnsupportedError, match="no rule for vmap"):
        jax.vmap(lambda q: attention_with_cache(**x | {"q": q})[0])(x["q"][None])


def test_a_range_may_end_where_the_cache_does(rng: np.random.Generator) -> None:
    """Sequences padded on the left: their range is the same in each step."""
    x = small(rng)
    kv_range = np.array([[0, 20], [3, 20], [5, 20]], np.int32)
    out = attention_with_cache(**x, kv_range=kv_range)
    for b, (start, keys) in enumerate(((0, 1), (3, 8), (5, 20))):
        alone = attention(x["q"][b : b + 1], *(x[name][b : b + 1, start:keys] for name in ("k_cache", "v_cache")))
        np.testing.assert_allclose(out[b], alone[0], rtol=1e-6)


# ---- One length for all ----


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("length", [2**40, 2**32 + 3, 2**31, -1, np.int64(2**33)])
def test_one_length_does_not_wrap(length: Any, library: str, rng: np.random.Generator) -> None:
    x = of_library(small(rng), library)
    with pytest.raises(ArgumentError, match=rf"cache_seqlens: expected 0 to 536870912, got {int(length)}"):
        attention_with_cache(**x | {"cache_seqlens": length})


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_one_length_is_checked_by_the_capacity(library: str, rng: np.random.Generator) -> None:
    x = of_library(small(rng), library)
    with pytest.raises(ArgumentError, match="cache_seqlens: expected lengths of 0 to 19, a capacity of 20 less 1"):
        attention_with_cache(**x | {"cache_seqlens": 20})


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_an_array_without_dimensions_is_not_read(
    library: str, packed: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it would wait for a GPU."""
    plain = small(rng)
    if packed:
        plain |= {name: plain[name][:, 0] for name in "qkv"} | {"cu_seqlens_q": np.arange(4, dtype=np.int32)}
    x = of_library(plain, library)
    expected = attention_with_cache(**x | {"cache_seqlens": 11})
    with monkeypatch.context() as no_reading:
        no_reading.setattr(type(x["q"]), "item", None)
        for kind in ("int32", "int8", "uint8"):
            length = of_library({"": np.array(11, kind)}, library)[""]
            found = attention_with_cache(**x | {"cache_seqlens": length})
            for a, b in zip(*(y if library == "jax" else (y,) for y in (found, expected)), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("length", [2**40, 2**32 + 3, -(2**40)])
def test_a_tensor_without_dimensions_does_not_wrap(length: int, rng: np.random.Generator) -> None:
    import torch

    x = of_library(small(rng), "torch")
    with pytest.raises(ArgumentError, match=r"expected lengths of 0 to 19.*cache_seqlens\[0\] = (2147|-1)"):
        attention_with_cache(**x | {"cache_seqlens": torch.tensor(length)})


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_an_array_without_dimensions_holds_an_integer(library: str, rng: np.random.Generator) -> None:
    x = of_library(small(rng), library)
    for wrong in (np.array(2.0, np.float32), np.array(True)):
        with pytest.raises(ArgumentError, match="cache_seqlens: expected an int32 array or an integer, got"):
            attention_with_cache(**x | {"cache_seqlens": of_library({"": wrong}, library)[""]})


@pytest.mark.needs("jax")
def test_jax_one_length_that_is_traced(rng: np.random.Generator) -> None:
    """The index of a loop, and an argument of a jit."""
    import jax
    import jax.numpy as jnp

    x = of_library({name: y[:, :5] if name.endswith("_cache") else y for name, y in small(rng).items()}, "jax")
    del x["cache_seqlens"]

    def step(i: Any, state: Any) -> Any:
        return attention_with_cache(x["q"], *state[1:], cache_seqlens=i, k=x["k"] * i, v=x["v"])

    caches = x["k_cache"], x["v_cache"]
    found = jax.jit(lambda: jax.lax.fori_loop(1, 4, step, (x["q"], *caches)))()
    expected: Any = (x["q"], *caches)
    for i in range(1, 4):
        expected = step(jnp.int32(i), expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    one = jax.jit(lambda n: attention_with_cache(**x, cache_seqlens=n))(3)
    np.testing.assert_array_equal(np.asarray(one[0]), np.asarray(attention_with_cache(**x, cache_seqlens=3)[0]))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_queries_that_lie_where_rows_are_appended(name: str, rng: np.random.Generator) -> None:
    """They are read as they were."""
    x = small(rng, cache_seqlens=np.full(3, 5, np.int32))
    x["q"] = x[name][:, 5:6]
    apart = {key: y.copy() for key, y in x.items()}
    np.testing.assert_array_equal(attention_with_cache(**x), attention_with_cache(**apart))
    np.testing.assert_array_equal(x[name], apart[name])
