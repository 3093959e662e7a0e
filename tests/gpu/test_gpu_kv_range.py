"""Ranges of keys on a GPU: replayed with others, clamped, checked on demand, and that time follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from tests.gpu_arrays import captured, nothing_waits, to_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch")]

NAMES = ("out", "lse", "dq", "dk", "dv")


def tensors(batch: int, seqlen: int, d: int, heads: int = 2) -> list[Any]:
    import torch

    torch.manual_seed(d)
    return [torch.randn(batch, seqlen, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def ranges(*pairs: tuple[int, int]) -> Any:
    import torch

    return torch.tensor(pairs, dtype=torch.int32, device="cuda")


def both(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[Any]:
    out, lse = cupyflash.attention(q, k, v, **options, return_lse=True)
    return [out, lse, *cupyflash.attention_backward(dout, q, k, v, out, lse, **options)]


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_replay_with_other_ranges(family: str, d: int) -> None:
    """Compared with fresh calls bit by bit."""
    x = tensors(3, 453, d)
    several = [((0, 453), (70, 453), (0, 130)), ((453, 453), (0, 1), (64, 128)), ((1, 2), (200, 400), (0, 453))]
    given = ranges(*several[0])
    options = {"causal": True, "deterministic": True}
    graph, replayed = captured(lambda: both(*x, kv_range=given, **options))
    for pairs in (*several[1:], several[0]):
        for tensor in replayed:
            tensor.fill_(float("nan"))
        given.copy_(ranges(*pairs))
        graph.replay()
        fresh = both(*x, kv_range=ranges(*pairs), **options)
        for name, a, b in zip(NAMES, replayed, fresh, strict=True):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b), err_msg=f"{name}, {pairs}")


@pytest.mark.parametrize("d", [64, 128, 256])
def test_ranges_that_contradict_are_clamped(family: str, d: int) -> None:
    x, last = tensors(6, 333, d), 2**31 - 1
    wrong = ranges((-200, 70), (-1, last), (130, 9000), (100, 20), (last, -last - 1), (-90, -1))
    right = ranges((0, 70), (0, 333), (130, 333), (0, 0), (0, 0), (0, 0))
    found, expected = (both(*x, causal=True, deterministic=True, kv_range=r) for r in (wrong, right))
    for name, a, b in zip(NAMES, found, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b), err_msg=name)


def test_wrong_entries_are_named_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    q, k, v, _ = tensors(2, 333, 64)
    with pytest.raises(ArgumentError, match=r"kv_range\[1\] = \[0, 334\]"):
        cupyflash.attention(q, k, v, kv_range=ranges((0, 333), (0, 334)))
    cupyflash.attention(q, k, v, kv_range=ranges((0, 333), (5, 5)))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_as_sliced(family: str, d: int, deterministic: bool) -> None:
    """A range of whole key blocks gives what a call without the other keys gives; nothing waits for the GPU."""
    import torch

    q, k, v, _ = tensors(2, 1024, d)
    kv_range = ranges((256, 768), (256, 768))
    with nothing_waits():
        out = cupyflash.attention(q, k, v, kv_range=kv_range, deterministic=deterministic)
    alone = cupyflash.attention(q, k[:, 256:768], v[:, 256:768], window=(None, 2**20))
    torch.testing.assert_close(out, alone, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_time_follows_the_range(family: str, d: int) -> None:
    """A quarter of the keys takes less than half the time of all, forward and backward."""
    import torch

    x = tensors(2, 8192, d, heads=16)
    some, everything = ranges((6144, 8192), (0, 2048)), ranges((0, 8192), (0, 8192))

    def seconds(kv_range: Any) -> float:
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            both(*x, kv_range=kv_range)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    seconds(everything)
    assert seconds(some) < 0.5 * seconds(everything)
