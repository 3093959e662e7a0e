"""Calls over a cache that a comparison with the last one knows: they launch what is launched where nothing is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, UnsupportedError, attention_with_cache, masks
from cupyflash.arrays import torch_private
from cupyflash.launch import cached
from tests.pretended_gpu import Gpu, found_in, launched_by

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("cupy")
HALF = torch.float16
Step = dict[str, Any]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of the calls that are not recalled, the names of their arrays."""
    found: list[Any] = []
    forward = cached.forward
    monkeypatch.setattr(
        cached, "forward", lambda library, arrays, *x, **y: found.append([*arrays]) or forward(library, arrays, *x, **y)
    )
    return found


def step(batch: int = 2, heads: int = 8, dtype: Any = HALF, **more: Any) -> Step:
    """A step of generation, by new tensors."""
    found = {"q": torch.zeros(batch, 1, heads, 64, dtype=dtype)}
    found |= {name: torch.zeros(batch, 128, 2, 64, dtype=dtype) for name in ("k_cache", "v_cache")}
    found["cache_seqlens"] = torch.full((batch,), 100, dtype=torch.int32)
    return found | {name: torch.zeros(batch, 1, 2, 64, dtype=dtype) for name in "kv"} | more


KINDS: dict[str, Callable[[], Step]] = {
    "appends": step,
    "reads": lambda: {name: x for name, x in step().items() if name not in ("k", "v")},
    "windowed": lambda: step(window=(64, 0), softcap=5.0),
    "one length": lambda: step(cache_seqlens=99),
    "turned": lambda: step(rotary_cos=torch.ones(128, 16, dtype=HALF), rotary_sin=torch.zeros(128, 16, dtype=HALF)),
    "block mask": lambda: step(block_mask=masks.local(128, left=20)),
    "paged": lambda: step(block_table=torch.zeros(2, 64, dtype=torch.int32)),
    "other v": lambda: step(v_cache=torch.zeros(2, 128, 2, 32, dtype=HALF), v=torch.zeros(2, 1, 2, 32, dtype=HALF)),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_third_of_equal_steps_is_recalled(name: str, gpu: Gpu, looked_at: list[Any]) -> None:
    make = KINDS[name]
    first = launched_by(gpu, lambda: attention_with_cache(**make()))
    attention_with_cache(**make())
    looked_at.clear()
    for _ in range(3):
        x = make()
        gpu.launched.clear()
        out, lse = attention_with_cache(**x, return_lse=True)
        assert found_in(gpu.launched, gpu) == first
        assert (*out.shape, out.dtype) == (*x["q"].shape[:-1], x["v_cache"].shape[-1], HALF)
        assert (*lse.shape, lse.dtype) == (2, 8, 1, torch.float32)
    assert not looked_at


def test_one_length_is_a_number_of_the_launch(gpu: Gpu) -> None:
    """Nothing is filled or copied for it; calls of an integer and of an array of lengths are of two kinds."""
    arrays = [step(cache_seqlens=n) for n in (99, 99, 99, 7, 0)] + [step()] * 3 + [step(cache_seqlens=5)]
    lengths = []
    for x in arrays:
        gpu.launched.clear()
        attention_with_cache(**x)
        kinds = {variant.symbol: variant.params for variant in gpu.loaded}
        params = [np.frombuffer(one.params, kinds[one.symbol])[0] for one in gpu.launched]
        plain = [p["plain"] if "plain" in (p.dtype.names or ()) else p for p in params]
        lengths.append([(int(p["one_length"]), bool(p["cache_seqlens"])) for p in plain])
    append_and_attend = [[(n, False)] * 2 for n in (99, 99, 99, 7, 0)]
    assert lengths[:5] == append_and_attend
    assert all(given for found in lengths[5:8] for _, given in found)
    assert lengths[8] == [(5, False)] * 2
    with pytest.raises(ArgumentError, match="cache_seqlens: expected lengths of 0 to 127"):
        attention_with_cache(**step(cache_seqlens=128))


def with_one_array_twice() -> Step:
    x = step()
    return x | {"v": x["k"]}


# Steps that differ in one thing.
OTHERS: dict[str, Callable[[], Step]] = {
    "batch": lambda: step(3),
    "heads": lambda: step(heads=4),
    "dtype": lambda: step(dtype=torch.bfloat16),
    "strides": lambda: step(k_cache=torch.zeros(2, 2, 128, 64, dtype=HALF).transpose(1, 2)),
    "options": lambda: step(causal=True),
    "odd address": lambda: step(q=torch.zeros(2 * 8 * 64 + 1, dtype=HALF)[1:].view(2, 1, 8, 64)),
    "new arrays": lambda: step(kv_range=torch.zeros(2, 2, dtype=torch.int32)),
    "parameter": lambda: step(q=torch.nn.Parameter(torch.zeros(2, 1, 8, 64, dtype=HALF), requires_grad=False)),
    "one array twice": with_one_array_twice,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_that_differs_is_looked_at(name: str, gpu: Gpu, looked_at: list[Any]) -> None:
    make = OTHERS[name]
    for _ in range(3):
        attention_with_cache(**step())
    looked_at.clear()
    for _ in range(2):
        found = launched_by(gpu, lambda: attention_with_cache(**make()))
    cached.calls.clear()
    assert launched_by(gpu, lambda: attention_with_cache(**make())) == found
    assert len(looked_at) == 3


def test_what_is_refused_is_refused_again(gpu: Gpu) -> None:
    for _ in range(3):
        attention_with_cache(**step())
        attention_with_cache(**step(cache_seqlens=99))
    launches = len(gpu.launched)
    x = step()
    with pytest.raises(UnsupportedError, match="requires_grad"):
        attention_with_cache(**step(q=x["q"].requires_grad_()))
    with pytest.raises(ArgumentError, match="v_cache"):
        attention_with_cache(**step(k_cache=x["k_cache"], v_cache=x["k_cache"].view(2, 128, 2, 64)))
    for length in (-1, 128):
        with pytest.raises(ArgumentError, match="cache_seqlens"):
            attention_with_cache(**step(cache_seqlens=length))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.vmap(lambda q: attention_with_cache(**step(q=q)))(torch.zeros(2, 2, 1, 8, 64, dtype=HALF))
    assert len(gpu.launched) == launches


def test_gradients_that_nobody_recorded_are_refused_where_somebody_would(gpu: Gpu) -> None:
    def call() -> Any:
        return attention_with_cache(**step(q=torch.zeros(2, 1, 8, 64, dtype=HALF, requires_grad=True)))

    for _ in range(4):
        with torch.no_grad():
            call()
        with pytest.raises(UnsupportedError, match="requires_grad"):
            call()


def test_lengths_are_checked_where_that_is_asked_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        attention_with_cache(**step())
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    with pytest.raises(ArgumentError, match="cache_seqlens"):
        attention_with_cache(**step(cache_seqlens=torch.full((2,), 128, dtype=torch.int32)))


def test_another_family_is_another_kind(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        attention_with_cache(**step())
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm80")
    found = launched_by(gpu, lambda: attention_with_cache(**step()))
    assert [symbol for symbol, *_ in found if symbol.startswith("decode_sm80")]


def test_a_torch_that_compares_nothing(gpu: Gpu, looked_at: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_of_programs", lambda name: None)
    first = launched_by(gpu, lambda: attention_with_cache(**step()))
    for _ in range(4):
        assert launched_by(gpu, lambda: attention_with_cache(**step())) == first
    assert len(looked_at) == 5
