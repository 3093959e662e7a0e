"""JAX's calls over a cache that take the forward: two custom calls, which launch what torch's tensors launch.

XLA is played by `Xla`, which hands NumPy arrays to the handlers of custom calls, on a pretended GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention_with_cache
from cupyflash.cache.checks import CacheOptions
from cupyflash.plan.prefill import Way
from tests import pretended_gpu
from tests.pretended_gpu import Gpu
from tests.xla_frame import XlaFrame

pytestmark = pytest.mark.needs("jax")

BF16 = np.dtype(ml_dtypes.bfloat16)
NEW = ("k", "v")
# What is called of two sequences of 256 queries with 32 heads over 8; (slots, rows) of the caches.
CALLS: dict[str, dict[str, Any]] = {
    "whole": {},
    "appends": {"new": 256},
    "appends others": {"new": 7},
    "rotates": {"new": 256, "rotary_cos": (4096, 32), "rotary_sin": (4096, 32)},
    "pages": {"caches": (600, 16), "block_table": (2, 256), "new": 256},
    "chosen": {"caches": (5, 4096), "cache_batch_idx": (2,), "new": 256},
    "packed": {"cu_seqlens_q": (3,), "new": 256},
    "packed pages": {"cu_seqlens_q": (3,), "caches": (600, 16), "block_table": (2, 256)},
    "packed, rotated": {"cu_seqlens_q": (3,), "new": 256, "rotary_cos": (4096, 32), "rotary_sin": (4096, 32)},
    "features": {"alibi_slopes": (2, 32), "sink": (32,), "kv_range": (2, 2)},
    "int8": {"caches": (600, 16), "block_table": (2, 256), "new": 256, "k_scale": (600, 8), "v_scale": (600, 8)},
    "int8, packed": {
        "cu_seqlens_q": (3,),
        "k_scale": (8,),
        "v_scale": (8,),
        "new": 256,
        "rotary_cos": (4096, 32),
        "rotary_sin": (4096, 32),
    },
    "in parts": {"batch": 1, "caches": (1, 8192), "new": 256},
    "another head_dim of v, in parts": {"batch": 1, "caches": (1, 8192), "new": 256, "head_dim_v": 128},
}
OPTIONS = {
    "whole": {"window": (100, 3), "softcap": 5.0},
    "features": {"causal": True, "scale": -0.1},
    "in parts": {"causal": True, "softcap": 5.0},
}
INTEGERS = {"block_table", "cache_batch_idx", "cu_seqlens_q", "kv_range"}


def arrays_of(
    batch: int = 2, caches: tuple[int, int] = (2, 4096), new: int = 0, head_dim_v: int = 64, **others: Any
) -> dict[str, Any]:
    """A call's arrays, of zeros."""
    packed = "cu_seqlens_q" in others
    rows = (lambda n: (batch * n,)) if packed else (lambda n: (batch, n))
    found = {"q": np.zeros((*rows(256), 32, 64), BF16)}
    stored = np.int8 if "k_scale" in others else BF16
    widths = {"k": 64, "v": head_dim_v}
    found |= {f"{name}_cache": np.zeros((*caches, 8, width), stored) for name, width in widths.items()}
    found["cache_seqlens"] = np.zeros(batch, np.int32)
    found |= {name: np.zeros((*rows(new), 8, widths[name]), BF16) for name in NEW if new}
    floats = dict.fromkeys(("alibi_slopes", "sink", "k_scale", "v_scale"), np.float32)
    return found | {
        name: np.zeros(shape, np.int32 if name in INTEGERS else floats.get(name, BF16))
        for name, shape in others.items()
    }


def keywords(options: CacheOptions) -> dict[str, Any]:
    """As the function takes them."""
    return {name: x for name, x in options._asdict().items() if name != "mods"}


class Xla:
    """Custom calls of NumPy arrays, run by their handlers: what lies where an input lies is that input.

    Attributes:
        called: the targets.
        made: the results of each.
    """

    def __init__(self, handlers: Mapping[str, Any]) -> None:
        self.called: list[str] = []
        self.made: list[list[np.ndarray]] = []
        self._handlers = handlers

    def call(
        self, name: str, results: Sequence[Any], inputs: Sequence[Any], text: str, same: Mapping[int, int] | None = None
    ) -> list[np.ndarray]:
        aliased = {i: inputs[j] for j, i in (same or {}).items()}
        made = [aliased[i] if i in aliased else np.zeros(x.shape, x.dtype) for i, x in enumerate(results)]
        for x, of in zip(made, results, strict=True):
            assert (x.shape, x.dtype) == (of.shape, of.dtype)
        frame = XlaFrame(text, self._buffers(inputs), self._buffers(made))
        frame.run(self._handlers[name])
        assert frame.errors == []
        self.called.append(name)
        self.made.append(made)
        return made

    def _buffers(self, arrays: Sequence[Any]) -> list[Any]:
        from cupyflash.jax.buffers import Buffer
        from cupyflash.jax.call import CODE_OF

        return [Buffer(x.ctypes.data, x.shape, CODE_OF[x.dtype], 0) for x in map(np.ascontiguousarray, arrays)]


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str) -> tuple[Gpu, Xla]:
    from cupyflash.jax import cached, call, ffi

    gpu = pretended_gpu.pretend(monkeypatch, arch)
    gpu.place = pretended_gpu.crossed  # maps of five dimensions
    monkeypatch.setattr("cupyflash.gpu.device.count", lambda: 1)
    for module in (cached, call):
        monkeypatch.setattr(module, "register", lambda: None)
    runs = {"cupyflash_cache": cached._run, "cupyflash": call._run, "cupyflash_into": call._run_into}
    xla = Xla({name: ffi._handler(run, lambda: 0) for name, run in runs.items()})
    monkeypatch.setattr(ffi, "call", xla.call)
    monkeypatch.setattr("jax.lax.platform_dependent", lambda *x, cpu, cuda: cuda(*x))
    return gpu, xla


def run(arrays: dict[str, Any], options: CacheOptions) -> list[Any]:
    """The call as JAX traces it for a GPU, of NumPy arrays."""
    from cupyflash.jax import cached
    from cupyflash.launch.prepare import family

    static = cached._Static(tuple(arrays), options, family())
    return list(cached._call(static, tuple(arrays.values())))


def params_of(gpu: Gpu, launched: pretended_gpu.Launched) -> Any:
    kinds = {variant.symbol: variant.params for variant in gpu.loaded}
    return np.frombuffer(launched.params, kinds[launched.symbol])[0]


def all_but_addresses(gpu: Gpu) -> list[Any]:
    """What was launched; of addresses, which there are."""
    found = []
    for x in gpu.launched:
        there = {name for name, address in pointers(gpu, x).items() if address}
        found.append((x.symbol, x.grid, pretended_gpu.facts(params_of(gpu, x)), there))
    return found


def pointers(gpu: Gpu, launched: pretended_gpu.Launched) -> dict[str, int]:
    """The addresses that a launch was given."""
    params = params_of(gpu, launched)
    plain = params["plain"] if "plain" in (params.dtype.names or ()) else params
    return {name: int(plain[name]) for name in plain.dtype.names if plain.dtype[name] == np.uint64}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", CALLS)
def test_it_launches_what_torch_launches(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401 (which TORCH needs)

    from cupyflash.arrays.adapters import TORCH

    gpu, xla = pretend(monkeypatch, arch)
    options = CacheOptions(**OPTIONS.get(name, {"causal": True}))
    x = arrays_of(**CALLS[name])
    found = run(x, options)
    packed, count = "cu_seqlens_q" in x, 2 * ("k" in x)
    assert xla.called == ["cupyflash_cache"] * bool(count or packed) + ["cupyflash_into" if packed else "cupyflash"]
    *caches, out, lse = found
    assert len(caches) == count
    assert all(a is x[f"{b}_cache"] for a, b in zip(caches, "kv", strict=False))
    rows = (32, len(x["q"])) if packed else (len(x["q"]), 32, 256)
    assert (out.shape, lse.shape, lse.dtype) == ((*x["q"].shape[:-1], x["v_cache"].shape[-1]), rows, np.float32)
    ours = all_but_addresses(gpu)
    given = pointers(gpu, next(x for x in gpu.launched if x.symbol.startswith("fwd")))
    first = xla.made[0][count + 2 * packed :] if count or packed else []  # what launches before the forward share
    stored = "k_scale" in x
    k = first["rotary_cos" in x] if stored else x["k_cache"]
    assert given["k"] == k.ctypes.data
    assert k.dtype == BF16
    assert np.shares_memory(out, xla.made[-1][0])
    if "rotary_cos" in x:
        assert given["q"] == first[0].ctypes.data != x["q"].ctypes.data
    else:
        assert given["q"] == x["q"].ctypes.data
    if packed:  # rows of sequences with few queries are those of the first call
        assert (out is xla.made[0][count], lse is xla.made[0][count + 1]) == (True, True)
    else:
        assert given["o"] == out.ctypes.data
        assert given["lse"] == xla.made[-1][1].ctypes.data

    gpu.launched.clear()
    tensors = {key: TORCH.from_numpy(y) for key, y in x.items()}
    attention_with_cache(**tensors, **keywords(options), return_lse=True)
    assert ours == all_but_addresses(gpu)


def test_each_program_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of plan/prefill.py; a handler does as its program says, whatever the rule would say there."""
    from cupyflash.jax import cached

    gpu, xla = pretend(monkeypatch, "sm_90")
    x = arrays_of(new=256)
    run(x, CacheOptions(num_splits=1))
    assert xla.called == ["cupyflash_cache"]
    assert [launched.symbol[:6] for launched in gpu.launched[:2]] == ["append", "decode"]
    run(x, CacheOptions())
    assert xla.called[1:] == ["cupyflash_cache", "cupyflash"]
    texts = [cached._Static(tuple(x), CacheOptions(window=(3, None)), "sm80", way) for way in (None, Way(True, True))]
    for static in texts:
        assert cached._Static.parse(static.text().encode()) == static
    gpu.launched.clear()
    xla.call("cupyflash_cache", [x["k_cache"], x["v_cache"]], [*x.values()], texts[1]._replace(way=Way()).text(),
             {1: 0, 2: 1})  # fmt: skip
    assert [launched.symbol[:6] for launched in gpu.launched] == ["append"]


def test_all_is_planned_when_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.launch import cached, find

    _, xla = pretend(monkeypatch, "sm_90")
    x = arrays_of(**CALLS["packed"])
    run(x, CacheOptions(causal=True))

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("prepared while XLA runs")

    monkeypatch.setattr(find, "prepare", fails)
    monkeypatch.setattr(cached, "_prepare", fails)
    run(x, CacheOptions(causal=True))
    assert xla.called == ["cupyflash_cache", "cupyflash_into"] * 2


def traced(monkeypatch: pytest.MonkeyPatch, x: Mapping[str, Any], wrapped: Callable[[Any], Any]) -> str:
    """The program of a call for a GPU."""
    import jax

    from cupyflash.jax import cached, call

    jax.local_devices()
    pretended_gpu.pretend(monkeypatch)
    monkeypatch.setattr("cupyflash.gpu.device.count", lambda: 1)
    for module in (cached, call):
        monkeypatch.setattr(module, "register", lambda: None)
    program = wrapped(lambda **x: attention_with_cache(**x, causal=True, return_lse=True))
    shapes = {name: jax.ShapeDtypeStruct(y.shape, y.dtype) for name, y in x.items()}
    return str(program.trace(**shapes).lower(lowering_platforms=("cuda",)).as_text())


def test_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside jit: the caches are results of the first custom call where the arguments lie, and arguments of the
    second, which writes into what the first made."""
    import jax

    text = traced(
        monkeypatch,
        arrays_of(**CALLS["packed"]),
        lambda f: jax.jit(f, donate_argnames=("k_cache", "v_cache"), keep_unused=True),
    )
    first, second = (line for line in text.splitlines() if "custom_call" in line)
    aliases = [re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", x) for x in (first, second)]
    assert aliases[0] == [("0", "1"), ("1", "2")]
    (target,) = re.findall(r"(%\w+):?\d* = .*@cupyflash_cache\(", first)
    given = re.findall(r"[%\w#]+", re.findall(r"@cupyflash_into\((.*?)\)", second)[0])
    assert given[1:3] == [f"{target}#0", f"{target}#1"]
    assert given[-2:] == [f"{target}#2", f"{target}#3"]
    assert aliases[1] == [("0", str(len(given) - 2)), ("1", str(len(given) - 1))]


@pytest.mark.parametrize("features", [(), ("rotary",), ("sink", "kv_range"), ("none appended",)], ids=str)
def test_it_is_the_same_attention(
    features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """By XLA on the CPU, inside jit; what the first custom call does is done by the CPU path."""
    import jax
    import jax.numpy as jnp

    from cupyflash.cache.values import parts
    from cupyflash.cpu import cache
    from cupyflash.jax import cached

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    x: dict[str, Any] = {"q": draw(3, 130, 4, 16), "k_cache": draw(3, 200, 2, 16), "v_cache": draw(3, 200, 2, 16)}
    x["cache_seqlens"] = np.array([0, 70, 33], np.int32)
    if "none appended" not in features:
        x |= {name: draw(3, 130, 2, 16) for name in NEW}
    if "rotary" in features:
        x |= {"rotary_cos": draw(180, 4), "rotary_sin": draw(180, 4)}
    if "sink" in features:
        x |= {"kv_range": np.array([[0, 200], [5, 90], [40, 40]], np.int32), "sink": draw(4)}
    options = CacheOptions(causal=True, window=(60, 0))
    static = cached._Static(tuple(x), options, None, Way())

    def begin(_: Any, made: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        def append(*given: Any) -> list[Any]:
            own = {name: np.array(y) for name, y in zip(static.names, given, strict=True)}
            problem = cached._problem(own, options)
            cache._append(own, problem, list(parts(problem, own)))
            found = [own["k_cache"], own["v_cache"]]
            if "rotary_cos" in own:
                turns = own["rotary_cos"], own["rotary_sin"]
                found.append(
                    np.stack(
                        [
                            cache.rotated(q, *turns, int(n), False)
                            for q, n in zip(own["q"], own["cache_seqlens"], strict=True)
                        ]
                    )
                )
            return found

        return list(jax.pure_callback(append, list(made), *arrays))

    monkeypatch.setattr(cached, "_begin", begin)
    rotated_q = [jax.ShapeDtypeStruct(x["q"].shape, np.float32)] * ("rotary_cos" in x)
    results = cached._results(static, [*x.values()], cached._problem(x, static.options))
    given = [jnp.asarray(y) for y in x.values()]
    *caches, out, lse = jax.jit(lambda *y: cached._on_gpu(static, results, rotated_q, *y))(*given)
    expected = attention_with_cache(**x, **keywords(options), return_lse=True)
    for a, b in zip((out, lse, *caches), (*expected, x["k_cache"], x["v_cache"]), strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_results_that_lie_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of sequences of few queries would be lost."""
    gpu, xla = pretend(monkeypatch, "sm_90")
    x, call = arrays_of(**CALLS["packed"]), xla.call
    monkeypatch.setattr("cupyflash.jax.ffi.call", lambda *given: call(*given[:4]))
    with pytest.raises(AssertionError, match="k_cache: XLA did not put the result where the argument lies"):
        run(x, CacheOptions())
    monkeypatch.setattr("cupyflash.jax.ffi.call", lambda *given: call(*given[: 4 + (given[0] == "cupyflash_cache")]))
    gpu.launched.clear()
    with pytest.raises(AssertionError, match="out: XLA did not put the result where the argument lies"):
        run(x, CacheOptions())
    assert not any(launched.symbol.startswith("fwd") for launched in gpu.launched)


def test_a_forward_into_results(rng: np.random.Generator) -> None:
    """By XLA on the CPU."""
    import jax
    import jax.numpy as jnp

    from cupyflash.jax.call import Static, forward_on_gpu
    from cupyflash.options import Options

    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 4, 16)), jnp.float32) for _ in range(3))
    static = Static.of("forward", ("q", "k", "v"), Options(causal=True), ("lse",))
    into = jnp.full(q.shape, jnp.nan), jnp.full((2, 4, 9), jnp.nan)
    expected = jax.jit(lambda *x: forward_on_gpu(static, x))(q, k, v)
    found = jax.jit(lambda *x: forward_on_gpu(static, x[:3], x[3:]))(q, k, v, *into)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
