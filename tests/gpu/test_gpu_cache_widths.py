"""A cache whose v has another head_dim than q and k, on a GPU: what the table of cases is too small for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import attention, attention_with_cache
from cupyflash.check.cache_case import CacheCase
from cupyflash.gpu.device import Device
from cupyflash.plan.prefill import Lie, way_of
from tests.gpu.test_gpu_cache import check, copied, draw, many_queries, same
from tests.gpu_arrays import captured

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch")]

WIDTHS = [(192, 128), (64, 128), (256, 64), (72, 40)]


def with_own_v(x: dict[str, Any], width: int) -> dict[str, Any]:
    """The same call with values of that head_dim."""
    import torch

    of_v = {name: torch.randn(*x[name].shape[:-1], width).to(x[name]) for name in ("v", "v_cache")}
    return x | of_v


@pytest.mark.parametrize("page", [0, 8])
@pytest.mark.parametrize(("d", "d_v"), WIDTHS)
def test_a_replay_with_other_lengths(family: str, d: int, d_v: int, page: int) -> None:
    """As fresh calls, bit by bit, caches too."""
    import torch

    x = with_own_v(draw(4, 512, d=d, page=page), d_v)
    graph, (out, lse) = captured(lambda: attention_with_cache(**x, causal=True, return_lse=True))
    assert out.shape == (4, 1, 8, d_v)
    for lengths in ((0, 511, 1, 70), (511, 511, 511, 511), (300, 7, 64, 63)):
        x["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        again = copied(x)
        out.fill_(torch.nan)
        graph.replay()
        fresh = attention_with_cache(**again, causal=True, return_lse=True)
        same(out, fresh[0], f"out, {lengths}")
        same(lse, fresh[1], f"lse, {lengths}")
        for name in ("k_cache", "v_cache"):
            same(x[name], again[name], f"{name}, {lengths}")


@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("heads_k", [1, 16])
def test_ragged_sequences_of_thousands(family: str, batch: int, heads_k: int, rng: np.random.Generator) -> None:
    """By clusters, ranges and tiles of their own; each sequence as by `attention`."""
    import torch

    x = with_own_v(draw(batch, 3000, heads=16, heads_k=heads_k, d=192), 128)
    lengths = rng.integers(0, 2999, batch)
    x["cache_seqlens"].copy_(torch.from_numpy(lengths.astype(np.int32)))
    out, lse = attention_with_cache(**x, causal=True, return_lse=True)
    for b, keys in enumerate(lengths + 1):
        own = (x["q"][b : b + 1], *(x[name][b : b + 1, :keys] for name in ("k_cache", "v_cache")))
        expected, expected_lse = attention(*own, causal=True, return_lse=True)
        torch.testing.assert_close(out[b : b + 1], expected, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(lse[b : b + 1], expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lies", ["contiguous", "pages of 16", "mixed pages of 64"])
@pytest.mark.parametrize(("d", "d_v"), WIDTHS[:3])
def test_many_queries(family: str, d: int, d_v: int, lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the forward, in three parts of the keys: as good as one split of the other way."""
    import torch

    pools, x = many_queries(lies, (d, d_v), appends=True)
    planned = list[int]()

    def three(*_: Any) -> int:
        planned.append(3)
        return 3

    monkeypatch.setattr("cupyflash.plan.splits.key_splits", three)
    found, kept = [], []
    for splits in (None, 1):
        own = [pool.clone() for pool in pools]
        found.append(attention_with_cache(
            **x, k_cache=own[0], v_cache=own[1], causal=True, num_splits=splits, return_lse=True))  # fmt: skip
        kept.append(own)
    assert planned
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    (out, lse), (expected, expected_lse) = found
    assert out.shape == expected.shape == (*x["q"].shape[:-1], d_v)
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 1e-2
    assert float((lse - expected_lse).abs().max()) < 2e-2


MANY_OF_8_BITS = CacheCase("many-int8-mla", "full", (700, 1500), 200, 192, page_size=16, append=True, stored="int8",
                           scale_dims=2, head_dim_v=128, heads_q=16, heads_k=4, capacity=5248)  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_many_queries_over_8_bits(dtype: str, family: str) -> None:
    """By the forward, over rows that stand for the cache; against float64."""
    way = way_of(MANY_OF_8_BITS.problem(dtype), Device.of(0), Lie(), family)
    assert way is not None
    assert way.dequantized
    check(MANY_OF_8_BITS, dtype, "torch")
