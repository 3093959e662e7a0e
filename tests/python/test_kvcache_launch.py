"""What a call of attention over a cache hands to the launches, on a GPU that is not there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, attention_with_cache
from cupyflash.arrays.adapters import NUMPY
from cupyflash.gpu.device import Device
from cupyflash.launch import cached, decode
from cupyflash.launch.kept import Kept
from tests.small_cache import small

WORKSPACES = (((2, 3), "fp32"), ((5,), "int32"))


class Launches:
    """Attributes: what was prepared, and the addresses of each launch."""

    copied: tuple[str, ...] = ()
    made = WORKSPACES

    def __init__(self) -> None:
        self.prepared: list[dict[str, Any]] = []
        self.launched: list[list[int]] = []

    def prepare(self, problem: Any, names: Any, signatures: Any, device: Any, **more: Any) -> Launches:
        self.prepared.append({"problem": problem, "names": tuple(names), "signatures": signatures} | more)
        return self

    def __call__(self, addresses: list[int], stream: int, length: int | None = None) -> None:
        assert stream == 77
        self.launched.append(addresses)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found, device = Launches(), dataclasses.replace(Device.synthetic("sm_90"), ordinal=0)
    monkeypatch.setattr(NUMPY, "signature", lambda x, of=NUMPY.signature: (*of(x)[:3], 0))
    monkeypatch.setattr(NUMPY, "stream", lambda _: 77)
    monkeypatch.setattr(Device, "of", lambda ordinal: device)
    monkeypatch.setattr(cached, "calls", Kept(100))
    monkeypatch.setattr(decode, "prepare", found.prepare)
    return found


def address(x: np.ndarray) -> int:
    return int(x.ctypes.data)


def test_addresses_come_in_the_order_of_names(gpu: Launches, rng: np.random.Generator) -> None:
    x = small(rng, np.float16)
    out, lse = attention_with_cache(**x, block_table=np.zeros((3, 2), np.int32), return_lse=True)
    (prepared,), (addresses,) = gpu.prepared, gpu.launched
    names = ("q", "k_cache", "v_cache", "cache_seqlens", "k", "v", "block_table", "out", "lse")
    assert prepared["names"] == names
    assert set(prepared["signatures"]) == set(names[:-2])
    assert addresses[:6] == [address(x[name]) for name in names[:6]]
    assert addresses[7:9] == [address(out), address(lse)]
    assert len(addresses) == len(names) + len(WORKSPACES)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (x["q"].shape, np.float16, (3, 4, 1), np.float32)


def test_a_call_is_prepared_once(gpu: Launches, rng: np.random.Generator) -> None:
    """Lengths are not looked at; other shapes, options and places in memory are other calls."""
    x = small(rng, np.float16)
    for lengths in ([0, 0, 0], [100, -1, 7]):
        attention_with_cache(**x | {"cache_seqlens": np.array(lengths, np.int32)})
    assert len(gpu.prepared) == 1
    attention_with_cache(**x, causal=True)
    attention_with_cache(**x, num_splits=3)
    attention_with_cache(**x, batch_invariant=True)
    attention_with_cache(**x | {"k_cache": np.zeros((3, 24, 2, 16), np.float16)[:, :20]})
    assert len(gpu.prepared) == 5
    assert len(gpu.launched) == 6
    assert [p["problem"].num_splits for p in gpu.prepared] == [None, None, 3, None, None]


def test_what_must_be_contiguous_is_copied(gpu: Launches, rng: np.random.Generator) -> None:
    x = small(rng, np.float16)
    x["cache_seqlens"] = np.array([1, 9, 2, 9, 3, 9], np.int32)[::2]
    x["q"] = np.zeros((3, 4, 2, 16), np.float16)[:, :, :1].swapaxes(1, 2)
    gpu.copied = ("q",)
    attention_with_cache(**x)
    (addresses,) = gpu.launched
    assert address(x["q"]) != addresses[0]
    assert address(x["cache_seqlens"]) != addresses[3]
    assert address(x["k"]) == addresses[4]


def test_alignment(gpu: Launches, rng: np.random.Generator) -> None:
    x = small(rng, np.float16)
    flat = np.zeros(3 * 64 + 8, np.float16)
    start = -(address(flat) // 2) % 8
    attention_with_cache(**x | {"q": flat[start : start + 192].reshape(3, 1, 4, 16)})
    attention_with_cache(**x | {"q": flat[start + 1 : start + 193].reshape(3, 1, 4, 16)})
    assert [p["aligned"] for p in gpu.prepared][1] is False
    some = np.zeros(16, np.uint8)
    start = (1 - address(some)) % 4
    with pytest.raises(ArgumentError, match="cache_seqlens: expected an address that is a multiple of 4"):
        attention_with_cache(**x | {"cache_seqlens": some[start : start + 12].view(np.int32)})


def test_two_caches_at_one_address(gpu: Launches, rng: np.random.Generator) -> None:
    x = small(rng, np.float16)
    with pytest.raises(ArgumentError, match="v_cache: expected memory of its own"):
        attention_with_cache(**x | {"v_cache": x["k_cache"]})
    assert not gpu.launched


def test_lengths_are_checked_on_demand(
    gpu: Launches, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = small(rng, np.float16)
    wrong = {"cache_seqlens": np.array([0, 21, 3], np.int32)}
    pages = {"block_table": np.array([[0, 9], [9, 0], [0, 9]], np.int32)}
    attention_with_cache(**x | wrong)
    attention_with_cache(**x | pages)
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    with pytest.raises(ArgumentError, match=r"got cache_seqlens\[1\] = 21"):
        attention_with_cache(**x | wrong)
    with pytest.raises(ArgumentError, match=r"block_table: expected numbers of the 3 pages of the pool.*\[1, 0\] = 9"):
        attention_with_cache(**x | pages)
    with pytest.raises(ArgumentError, match=r"block_table: .* sequences 0 and 1 both write row 3 of page 1"):
        attention_with_cache(**x | {"cache_seqlens": 3, "block_table": np.ones((3, 2), np.int32)})
    assert len(gpu.launched) == 2
    attention_with_cache(**x)
    with pytest.raises(ArgumentError, match=r"cache_seqlens: expected lengths of 0 to 19"):
        attention_with_cache(**x | {"cache_seqlens": 20})


def test_dimensions_are_told_by_name(gpu: Launches, rng: np.random.Generator) -> None:
    """Nothing looks at a shape before the checks do."""
    x = small(rng, np.float16)
    with pytest.raises(ArgumentError, match=r"^q: expected"):
        attention_with_cache(**x | {"q": x["q"][0, 0]})
    assert not gpu.prepared
