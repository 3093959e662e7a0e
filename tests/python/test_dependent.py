"""Launches that may start before the kernel in front of them has ended."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.gpu import dependent
from cupyflash.gpu.dependent import DependentLaunch
from tests.pretended_gpu import pretend

FACTS = 7, 300, 1, 1, 128, 1, 1, 4096  # as `jit.launcher` takes them: function, grid, block, shared memory


def _backward(arch: str, monkeypatch: pytest.MonkeyPatch, heads: int, head_dim: int, **options: Any) -> dict[str, bool]:
    """Of the kernels that a backward of 512 tokens launches, by what they do: whether each may start early."""
    gpu = pretend(monkeypatch, arch)
    x = np.zeros((1, 512, heads, head_dim), np.float16)
    cupyflash.attention_backward(x, x, x, x, x, np.zeros((1, heads, 512), np.float32), **options)
    return {"_".join(one.symbol.split("_")[:2]): one in gpu.dependent_ones for one in gpu.launched}


def test_a_hopper_backward_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts before what is in front of the call has ended: nobody knows what that is."""
    found = _backward("sm_90", monkeypatch, 64, 128)
    assert found == {"bwd_delta": False, "bwd_sm90": True, "bwd_convert": True}
    found = _backward("sm_90", monkeypatch, 64, 256)
    assert found == {"bwd_delta": False, "bwd_dkv": True, "bwd_dq": True}


def test_kernels_of_features_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = np.zeros(64, np.float32)
    found = _backward("sm_90", monkeypatch, 64, 128, alibi_slopes=slopes, gradients_of="alibi_slopes")
    assert found.pop("bwd_slopes") is False
    assert found == {"bwd_delta": False, "bwd_sm90": True, "bwd_convert": True}


def test_few_tiles_and_other_gpus_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that overlaps costs the host more."""
    assert not any(_backward("sm_90", monkeypatch, 2, 128).values())
    assert not any(_backward("sm_80", monkeypatch, 64, 128).values())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """What cuLaunchKernelEx was called with: the config's numbers, its one attribute, the function, the arguments."""
    calls: list[tuple[int, ...]] = []

    def launch(config: int, function: int, arguments: int, extra: None) -> int:
        words = (ctypes.c_uint * 7).from_address(config)
        stream, attributes = (ctypes.c_void_p * 2).from_address(config + 32)
        (count,) = (ctypes.c_uint * 1).from_address(config + 48)
        key, _, value = (ctypes.c_int * 3).from_address(attributes or 0)
        calls.append((*words, stream or 0, count, key, value, function, arguments))
        return 0

    monkeypatch.setattr(dependent, "_launcher", lambda: launch)
    monkeypatch.setattr(dependent, "driver_version", lambda: (12, 3))
    dependent._graphs_know_it.cache_clear()
    yield calls
    dependent._graphs_know_it.cache_clear()


def test_the_driver_gets_the_facts(driver: list[tuple[int, ...]]) -> None:
    launch = DependentLaunch(*FACTS)
    launch(0x70, 0x1000)
    launch(0x80, 0x2000, 0)
    assert driver == [(*FACTS[1:], stream, 1, 6, 1, FACTS[0], at) for stream, at in ((0x70, 0x1000), (0x80, 0x2000))]


def test_drivers_whose_graphs_do_not_know_it(driver: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its attribute the launch waits for all in front of it."""
    monkeypatch.setattr(dependent, "driver_version", lambda: (12, 2))
    DependentLaunch(*FACTS)(0x70, 0x1000)
    assert driver[0][7:9] == (0x70, 0)


def test_what_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent, "_launcher", lambda: lambda *_: 719)
    with pytest.raises(cupyflash.DeviceError, match="cuLaunchKernelEx: the driver returned 719"):
        DependentLaunch(*FACTS)(0, 0)
    monkeypatch.setattr(dependent, "_launcher", lambda: None)
    with pytest.raises(cupyflash.DeviceError, match="install a newer one"):
        DependentLaunch(*FACTS)(0, 0)
