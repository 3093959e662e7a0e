"""A cache whose v, and so out, has another head_dim than q and k: in every library, as v padded with zeros would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import UnsupportedError, attention_with_cache
from tests import pretended_gpu
from tests.small_cache import small

OF_V = ("v", "v_cache")


def wide(rng: np.random.Generator, width: int = 24, **more: Any) -> dict[str, Any]:
    """A small call of q and k of 16 columns, and of v of `width`."""
    x = small(rng, **more)
    return x | {name: rng.standard_normal((*x[name].shape[:-1], width)).astype(x[name].dtype) for name in OF_V}


def padded(x: dict[str, Any], width: int) -> dict[str, Any]:
    """The same call with every array of `width` columns."""
    names = ("q", "k", "k_cache", *OF_V)
    return x | {name: np.pad(x[name], [(0, 0)] * 3 + [(0, width - x[name].shape[-1])]) for name in names}


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: y.copy() for name, y in x.items()}


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_as_padded_with_zeros(width: int, dtype: Any, rng: np.random.Generator) -> None:
    x = wide(rng, width, dtype=dtype)
    y = padded(copied(x), 24)
    out, lse = attention_with_cache(**x, causal=True, return_lse=True)
    want, want_lse = attention_with_cache(**y, causal=True, scale=16**-0.5, return_lse=True)
    assert out.shape == (3, 1, 4, width)
    tolerance = 1e-13 if dtype is np.float64 else 2e-3
    np.testing.assert_allclose(out, want[..., :width], atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, atol=tolerance)
    np.testing.assert_array_equal(x["v_cache"], y["v_cache"][..., :width])
    np.testing.assert_array_equal(x["k_cache"], y["k_cache"][..., :16])
    np.testing.assert_array_equal(x["v_cache"][1, 7], x["v"][1, 0])


@pytest.mark.parametrize("width", [20, 264])
def test_what_kernels_do_not_take(width: int, rng: np.random.Generator) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^v_cache: expected a head_dim that is a multiple of 8 .*, got {width}"
    ):
        attention_with_cache(**wide(rng, width))


@pytest.mark.needs("torch")
def test_torch(rng: np.random.Generator) -> None:
    """At once, and compiled whole, with a length that the traced program has not seen."""
    import torch

    x = wide(rng)
    want = attention_with_cache(**copied(x), causal=True)
    tensors = {name: torch.from_numpy(y) for name, y in x.items()}

    def attend(y: dict[str, Any]) -> Any:
        out = attention_with_cache(**y, causal=True)
        assert out.shape[-1] == 24
        return out

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for f in (attend, compiled):
        y = {name: z.clone() for name, z in tensors.items()}
        np.testing.assert_allclose(f(y), want, atol=1e-6)
        np.testing.assert_array_equal(y["v_cache"][1, 7], x["v"][1, 0])
    y = {name: z[:2].clone() for name, z in tensors.items()}
    np.testing.assert_allclose(compiled(y), want[:2], atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.needs("jax")
def test_jax(rng: np.random.Generator) -> None:
    """Inside jit, where caches are results."""
    import jax
    import jax.numpy as jnp

    x = wide(rng)
    want = attention_with_cache(**copied(x), causal=True)
    names = ("q", "k_cache", "v_cache", "cache_seqlens", "k", "v")
    step = jax.jit(lambda *y: attention_with_cache(**dict(zip(names, y, strict=True)), causal=True))
    out, k_cache, v_cache = step(*(jnp.asarray(x[name]) for name in names))
    np.testing.assert_allclose(out, want, atol=1e-6)
    assert (k_cache.shape, v_cache.shape) == (x["k_cache"].shape, x["v_cache"].shape)
    np.testing.assert_array_equal(v_cache[1, 7], x["v"][1, 0])


@pytest.mark.needs("cupy", "torch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("queries", [1, 256])
def test_what_is_launched(queries: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of both head_dims, once for all lengths; results and what kernels share have the columns of v."""
    import torch

    gpu = pretended_gpu.pretend(monkeypatch, arch)
    gpu.place = pretended_gpu.crossed  # maps of five dimensions

    def zeros(*rows: int, width: int = 192) -> Any:
        return torch.zeros(*rows, width, dtype=torch.bfloat16)

    x = {"q": zeros(4, queries, 32), "k": zeros(4, queries, 2), "v": zeros(4, queries, 2, width=128)}
    x |= {"k_cache": zeros(4, 8192, 2), "v_cache": zeros(4, 8192, 2, width=128)}
    for length in (0, 100, 100):
        lengths = torch.full((4,), length, dtype=torch.int32)
        out, lse = attention_with_cache(**x, cache_seqlens=lengths, causal=True, return_lse=True)
        assert (out.shape, lse.shape, out.is_contiguous()) == ((4, queries, 32, 128), (4, 32, queries), True)
    launches = [launch.symbol.split("_")[0] for launch in gpu.launched]
    once = ["append", "decode", "decode"] if queries == 1 else ["append", "fwd"]
    assert launches[: len(once)] == once
    assert launches == once * 3
    assert all("_d192v128_" in variant.symbol for variant in gpu.loaded)
    main = next(launch for launch in gpu.launched if launch.symbol.startswith(("decode_sm", "fwd_sm")))
    kind = next(variant for variant in gpu.loaded if variant.symbol == main.symbol).params
    params = np.frombuffer(main.params, kind)[0]
    plain = params["plain"] if "plain" in (kind.names or ()) else params
    strides = {name: plain[f"{name}_stride"].item()[1:] for name in "qkvo"}
    assert strides == {"q": (32 * 192, 192), "k": (2 * 192, 192), "v": (2 * 128, 128), "o": (32 * 128, 128)}
