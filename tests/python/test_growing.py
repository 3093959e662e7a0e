"""Calls over caches that grow: one that is prepared launches for longer ones what theirs would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from cupyflash import ArgumentError, attention_with_cache
from cupyflash.launch import cached
from tests.pretended_gpu import Gpu, found_in, launched_by, pretend

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("cupy")
HALF = torch.float16
Step = dict[str, Any]


def caches(keys: int, layout: str, batch: int = 2, heads: int = 3, head_dim: int = 64) -> Any:
    """What torch.cat makes of the keys so far and a new one."""
    if layout == "bshd":
        return torch.zeros(batch, keys, heads, head_dim, dtype=HALF)
    return torch.zeros(batch, heads, keys, head_dim, dtype=HALF).transpose(1, 2)


def step(keys: int, layout: str = "bhsd", batch: int = 2, **more: Any) -> Step:
    found = {name: caches(keys, layout, batch) for name in ("k_cache", "v_cache")}
    return {"q": torch.zeros(batch, 1, 6, 64, dtype=HALF), **found, "cache_seqlens": keys} | more


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The capacities of the calls that are prepared."""
    found: list[int] = []
    real = cached.decode.prepare

    def prepare(problem: Any, *x: Any, **more: Any) -> Any:
        found.append(problem.capacity)
        return real(problem, *x, **more)

    monkeypatch.setattr(cached.decode, "prepare", prepare)
    return found


def afresh(gpu: Gpu, call: Step) -> Any:
    """What a call launches of which nothing is known."""
    cached.calls.clear()
    return launched_by(gpu, lambda: attention_with_cache(**call))


RANGES: Step = {"kv_range": torch.tensor([[0, 400], [3, 77]], dtype=torch.int32)}
KINDS: dict[str, Callable[[int], Step]] = {
    "heads first": step,
    "rows first": lambda n: step(n, "bshd"),
    "K and V differ": lambda n: step(n) | {"v_cache": caches(n, "bshd")},
    "one sequence": lambda n: step(n, batch=1),
    "lengths": lambda n: step(n, cache_seqlens=torch.full((2,), n, dtype=torch.int32)),
    "ranges": lambda n: step(n, **RANGES),
    "four queries": lambda n: step(n, q=torch.zeros(2, 4, 6, 64, dtype=HALF), causal=True),
    "windowed": lambda n: step(n, window=(64, 0), softcap=5.0),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", KINDS)
def test_longer_caches_are_launched_as_if_afresh(
    name: str, arch: str, prepared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, make, numbers = pretend(monkeypatch, arch), KINDS[name], random.Random(0)
    lengths = [300, 301, *(numbers.randrange(257, 513) for _ in range(20)), *range(505, 520), 511, 512, 300]
    expected = [afresh(gpu, make(n)) for n in lengths]
    cached.calls.clear()
    prepared.clear()
    for n, want in zip(lengths, expected, strict=True):
        assert launched_by(gpu, lambda n=n: attention_with_cache(**make(n))) == want
    assert prepared == [300, 301, 513, 511]


def test_layers_take_turns_between_two_lengths(gpu: Gpu, prepared: list[int]) -> None:
    """As where some have a window and keep no more than its keys."""
    expected = {keys: afresh(gpu, step(keys)) for keys in (280, *range(300, 330))}
    cached.calls.clear()
    prepared.clear()
    for n in range(300, 330):
        for keys in (280, n) * 3:
            assert launched_by(gpu, lambda keys=keys: attention_with_cache(**step(keys))) == expected[keys]
    assert prepared == [280, 300]


def test_a_call_that_served_longer_caches_serves_its_own_again(gpu: Gpu, prepared: list[int]) -> None:
    """Also where it is found by its key: of arrays that nothing compares, or of another order of what is kept."""
    expected = afresh(gpu, step(301))
    cached.calls.clear()
    prepared.clear()
    for n in (300, 301, 310, 320):
        attention_with_cache(**step(n))
    assert prepared == [300, 301]
    cached.calls.last.clear()
    assert launched_by(gpu, lambda: attention_with_cache(**step(301))) == expected
    assert prepared == [300, 301]


def wider(keys: int) -> Any:
    """Rows that are no multiple of 16 bytes apart from head to head."""
    return torch.zeros(2, 3, 64 * keys + 1, dtype=HALF)[:, :, :-1].view(2, 3, keys, 64).transpose(1, 2)


# Caches that follow those of 300 and 301 keys, but are not of the same kind.
OTHERS: dict[str, Callable[[], Step]] = {
    "V is longer": lambda: step(310) | {"v_cache": caches(311, "bhsd")},
    "odd strides": lambda: step(310) | {"k_cache": wider(310)},
    "expanded heads": lambda: step(310) | {"k_cache": torch.zeros(2, 310, 1, 64, dtype=HALF).expand(2, 310, 3, 64)},
    "far": lambda: step(1000),
    "a batch more": lambda: step(310, batch=3),
    "appends": lambda: step(310, cache_seqlens=309, **{x: torch.zeros(2, 1, 3, 64, dtype=HALF) for x in "kv"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_caches_of_another_kind_are_looked_at(name: str, gpu: Gpu, prepared: list[int]) -> None:
    make = OTHERS[name]
    for n in (300, 301, 302):
        attention_with_cache(**step(n))
    assert prepared == [300, 301]
    if name == "V is longer":
        with pytest.raises(ArgumentError, match="v_cache: expected the shape of k_cache"):
            attention_with_cache(**make())
        return
    found = launched_by(gpu, lambda: attention_with_cache(**make()))
    assert len(prepared) == 3
    assert found == afresh(gpu, make())


def test_lengths_and_memory_are_checked(gpu: Gpu) -> None:
    for n in (300, 301, 302):
        attention_with_cache(**step(n))
    launches = len(gpu.launched)
    with pytest.raises(ArgumentError, match=r"expected lengths of 0 to 310, got 311"):
        attention_with_cache(**step(310, cache_seqlens=311))
    gone = step(311)
    gone["v_cache"].untyped_storage().resize_(1000)
    with pytest.raises(ArgumentError, match=r"v_cache: .* bytes of memory"):
        attention_with_cache(**gone)
    assert len(gpu.launched) == launches


def test_maps_that_the_driver_refuses(gpu: Gpu, prepared: list[int]) -> None:
    """Longer caches are read without TMA then."""
    for n in (300, 301, 302):
        attention_with_cache(**step(n))
    gpu.refuses = lambda sizes: sizes[1] == 310
    attention_with_cache(**step(310))
    assert prepared == [300, 301, 310]
    assert gpu.launched[-1].symbol.startswith(("decode_sm80", "decode_combine"))
    assert found_in(gpu.launched[-1:], gpu)
