"""Caches of 8 bits on the CPU: which bits are appended, and that all dtypes of a cache and all libraries agree."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ArgumentError, PagedCache, attention_with_cache
from cupyflash.check.cache_cases import CACHE_CASES
from cupyflash.check.cache_stored import appended
from cupyflash.cpu.quantized import quantized
from tests.small_cache import small

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BY_NAME = {c.name: c for c in CACHE_CASES}


def test_int8_is_rounded_to_the_nearest() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.6, 127.5, 1e30, -128.4, -1e30, np.inf, -np.inf, np.nan], np.float32)
    expected = [0, 2, 2, 0, -2, 127, 127, 127, -128, -128, 127, -128, 0]
    np.testing.assert_array_equal(quantized(x, np.float32(1), "int8"), np.array(expected, np.int8))


def test_e4m3_is_rounded_to_the_nearest() -> None:
    x = np.array([1.0625, 1.1875, 2**-10, 3 * 2**-10, 465, 1e30, -np.inf, -0.0, np.nan, -np.nan], np.float32)
    expected = np.array([1, 1.25, 0, 2**-8, 448, 448, -448, -0.0], E4M3).view(np.uint8).tolist()
    assert quantized(x, np.float32(1), "e4m3").tolist() == [*expected, 0x7F, 0x7F]


@pytest.mark.parametrize("stored", ["int8", "e4m3"])
def test_the_cpu_path_rounds_as_the_reference(stored: str, rng: np.random.Generator) -> None:
    """All ties between two numbers that can be stored, and numbers of all sizes."""
    numbers = np.arange(256, dtype=np.uint8).view(np.int8 if stored == "int8" else E4M3).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    ties, any_size = (numbers[1:] + numbers[:-1]) / 2, rng.standard_normal(4000) * 2.0 ** rng.uniform(-14, 12, 4000)
    x = np.concatenate((ties, numbers, any_size)).astype(np.float32)[None]
    for scale in (np.ones(1, np.float32), np.array([0.013], np.float32)):
        bits = quantized(x, scale[:, None], stored), appended(x, scale, stored)
        np.testing.assert_array_equal(*(y.view(np.uint8) for y in bits))


def test_uint8_is_e4m3() -> None:
    c = BY_NAME["cache-e4m3-packed"]
    x, y = c.inputs("fp16"), c.inputs("fp16")
    y |= {name: y[name].view(np.uint8) for name in ("k_cache", "v_cache")}
    a, b = (attention_with_cache(**z, **c.keywords()) for z in (x, y))
    assert a.tobytes() == b.tobytes()
    assert x["k_cache"].tobytes() == y["k_cache"].tobytes()


@pytest.mark.parametrize("library", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("torch", "jax")])
@pytest.mark.parametrize("name", ["cache-int8-append-d128", "cache-e4m3-packed"])
def test_libraries_agree(name: str, library: str) -> None:
    from cupyflash.arrays.adapters import TORCH

    c = BY_NAME[name]
    x = c.inputs("fp16")
    if library == "torch":
        import torch  # noqa: F401 (the adapter asks for what the caller has imported)

        y = {n: TORCH.from_numpy(z.copy()) for n, z in x.items()}
        out = TORCH.to_numpy(attention_with_cache(**y, **c.keywords()))
        caches = [TORCH.to_numpy(y[n]) for n in ("k_cache", "v_cache")]
    else:
        import jax.numpy as jnp

        out, *caches = map(
            np.asarray, attention_with_cache(**{n: jnp.asarray(z) for n, z in x.items()}, **c.keywords())
        )
    assert out.tobytes() == attention_with_cache(**x, **c.keywords()).tobytes()
    for n, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        np.testing.assert_array_equal(cache.view(np.uint8), x[n].view(np.uint8))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_pages_of_8_bits(dtype: str, rng: np.random.Generator) -> None:
    """A fork has what its prompt had; what comes out is near what 32 bits give."""
    q, k, v = rng.standard_normal((3, 1, 21, 2, 16), dtype=np.float32)
    scales: dict[str, Any] = dict.fromkeys(("k_scale", "v_scale"), np.full(2, 4 / 127, np.float32))
    scales |= {} if dtype == "int8" else dict.fromkeys(scales, np.full(2, 4 / 448, np.float32))
    cache = PagedCache(8, 16, heads_k=2, head_dim=16, like=q, dtype=dtype)
    whole = PagedCache(8, 16, heads_k=2, head_dim=16, like=q)
    assert cache.k.dtype.name == dtype
    outs = []
    for pool, more in ((cache, scales), (whole, {})):
        a = pool.allocate()
        attention_with_cache(q, *pool[0], k=k, v=v, **pool.append([a], 21), **more)
        b = pool.fork(a)
        outs.append(attention_with_cache(q, *pool[0], k=k, v=v, **pool.append([b], 21), **more, causal=True))
    np.testing.assert_allclose(*outs, atol=0.15)
    with pytest.raises(ArgumentError, match="dtype: expected None, for that of like, 'int8' or 'float8_e4m3fn'"):
        PagedCache(8, 16, heads_k=2, head_dim=16, like=q, dtype="fp8")


def test_a_scale_of_each_sequence(rng: np.random.Generator) -> None:
    """As its own dequantised cache gives."""
    caches = {name: rng.integers(-127, 128, (3, 20, 2, 16)).astype(np.int8) for name in ("k_cache", "v_cache")}
    scales = {name: rng.uniform(0.01, 0.03, (3, 2)).astype(np.float32) for name in ("k_scale", "v_scale")}
    x = small(rng, **caches, **scales, k=None, v=None)
    plain = {n: caches[n] * scales[s][:, None, :, None] for n, s in zip(caches, scales, strict=True)}
    expected = attention_with_cache(**small(rng, k=None, v=None) | {"q": x["q"]} | plain)
    np.testing.assert_allclose(attention_with_cache(**x), expected, rtol=1e-5, atol=1e-6)
