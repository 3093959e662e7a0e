"""tools/as_gpu.py: with which tiles it plans, and that as many blocks share a multiprocessor as on the smaller GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pretended_gpu
import pytest
from click.testing import CliRunner, Result

import cupyflash
from cupyflash.cli import watchdog
from cupyflash.compile import jit
from cupyflash.errors import UnsupportedError
from cupyflash.gpu.device import KIB, Device
from cupyflash.launch import prepared as launch
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.shipped import shipped
from cupyflash.plan.shipped_cache import shipped_over_cache
from cupyflash.plan.variant import Variant
from cupyflash.problem import Problem
from tools import as_gpu
from tools.as_gpu import as_if, limited, padded, resident

HOPPER = Device.synthetic("sm_90")


class Gpu:
    """An H100 that writes down what kernels are allowed and what they are launched with, by their symbols."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.allowed: dict[str, int] = {}
        self.launched: dict[str, int] = {}

    def load(self, variant: Variant, device: Device) -> jit.Kernel:
        self.variants.append(variant)
        return jit.Kernel(variant, len(self.variants) - 1, None)

    def allow(self, function: int, attribute: int, value: int) -> None:
        assert attribute == 8
        self.allowed[self.variants[function].symbol] = value

    def launch(self, function: int, grid: int, *rest: Any) -> None:
        variant = self.variants[function]
        assert rest[:5] == (1, 1, variant.threads, 1, 1)
        assert rest[6] == 0  # the stream
        self.launched[variant.symbol] = rest[5]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    import cupy
    from cupy.cuda import driver, runtime

    found, load = Gpu(), jit.load
    pretended_gpu.pretend(monkeypatch)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(jit, "_load", found.load)
    monkeypatch.setattr(jit, "launcher", lambda: found.launch)
    monkeypatch.setattr(driver, "funcSetAttribute", found.allow)
    monkeypatch.setattr(runtime, "streamIsCapturing", lambda stream: False)
    monkeypatch.setattr(cupy.cuda, "Device", lambda ordinal: contextlib.nullcontext())
    return found


def both_passes(head_dim: int) -> None:
    q = np.zeros((1, 64, 1, head_dim), np.float16)
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    cupyflash.attention_backward(q, q, q, q, out, lse)


# ---- how much ----


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_120"])
def test_as_many_blocks_as_on_the_smaller_gpu(arch: str) -> None:
    small = Device.synthetic(arch)
    for variant in (*shipped(small), *shipped_over_cache(small)):
        smem, threads = variant.smem_bytes, variant.threads
        room = padded(smem, threads, HOPPER, small)
        assert smem <= room <= HOPPER.smem_bytes, variant.symbol
        if smem:
            assert resident(room, threads, HOPPER) == resident(smem, threads, small), variant.symbol
        else:
            assert room == 0


def test_residents() -> None:
    """By hand: multiprocessors have 228, 164 and 100 KiB, of which each block takes 1 KiB more."""
    a100, rtx = Device.synthetic("sm_80"), Device.synthetic("sm_86")
    assert [resident(68 * KIB, 128, gpu) for gpu in (HOPPER, a100, rtx)] == [3, 2, 1]
    assert [resident(49 * KIB, 128, rtx), resident(49 * KIB + 1, 128, rtx)] == [2, 1]
    assert [resident(KIB, 256, gpu) for gpu in (HOPPER, a100, rtx)] == [8, 8, 6]  # by threads
    assert padded(68 * KIB, 128, HOPPER, a100) == 113 * KIB
    assert padded(68 * KIB, 128, HOPPER, rtx) == 227 * KIB
    assert padded(99 * KIB, 256, HOPPER, rtx) == 227 * KIB
    with pytest.raises(UnsupportedError, match="do not fit sm_86"):
        padded(99 * KIB + 1, 256, HOPPER, rtx)


def test_the_rest_is_this_gpu() -> None:
    found = limited(HOPPER, "sm_86")
    assert (found.smem_bytes, found.smem_per_sm_bytes) == (99 * KIB, 100 * KIB)
    assert (found.arch, found.sm_count, found.l2_bytes) == ("sm_90", HOPPER.sm_count, HOPPER.l2_bytes)
    with pytest.raises(UnsupportedError, match="sm_86 has less shared memory than sm_80"):
        limited(Device.synthetic("sm_86"), "sm_80")


def test_an_older_gpu_in_full() -> None:
    found = limited(HOPPER, "sm_75", ptx=True)
    assert (found.capability, found.dtypes, found.smem_bytes) == ((7, 5), ("fp16",), 64 * KIB)
    assert (found.sm_count, found.l2_bytes) == (HOPPER.sm_count, HOPPER.l2_bytes)
    with pytest.raises(UnsupportedError, match="sm_80 has fewer instructions than sm_86"):
        limited(Device.synthetic("sm_80"), "sm_86", ptx=True)


# ---- what is launched ----


@pytest.mark.parametrize("arch", ["sm_86", "sm_80"])
def test_kernels_and_launches(gpu: Gpu, arch: str) -> None:
    small = Device.synthetic(arch)
    with as_if(arch):
        both_passes(128)
    expected = variants_of_calls(Problem("fp16", 1, 64, 64, 1, 1, 128, 1.0), small)
    assert [v.symbol for v in gpu.variants] == [v.symbol for v in expected] == list(gpu.launched)
    for v in gpu.variants:
        assert v.smem_bytes <= small.smem_bytes
        assert gpu.launched[v.symbol] == gpu.allowed.get(v.symbol, 0) == padded(v.smem_bytes, v.threads, HOPPER, small)
    assert len(gpu.allowed) == 3  # bwd_delta needs none


def test_kernels_by_ptx(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other architecture, on which the driver is not asked to load a cubin."""
    loaded: list[bytes] = []

    class Module:
        def load(self, program: bytes) -> None:
            loaded.append(program)

        def get_function(self, symbol: str) -> Any:
            gpu.variants.append(next(v for v in expected if v.symbol == symbol))
            return SimpleNamespace(ptr=len(gpu.variants) - 1)

    import cupy

    monkeypatch.setattr(cupy.cuda, "Module", Module)
    t4 = Device.synthetic("sm_75")
    expected = variants_of_calls(Problem("fp16", 1, 64, 64, 1, 1, 64, 1.0), t4)
    with as_if("sm_75", ptx=True):
        both_passes(64)
        q = np.zeros((1, 64, 1, 64), ml_dtypes.bfloat16)
        with pytest.raises(UnsupportedError, match="expected fp16"):
            cupyflash.attention(q, q, q)
    assert [v.symbol for v in gpu.variants] == [v.symbol for v in expected] == list(gpu.launched)
    assert all(b".target sm_75" in program for program in loaded)


def test_it_ends(gpu: Gpu) -> None:
    """Of two limits one after the other, each has kernels of its own, and none is left behind."""
    before = dict(jit._kernels)
    for arch in ("sm_86", "sm_80"):
        with as_if(arch):
            both_passes(48)
            assert launch.specs.values() != []
        assert launch.specs.values() == []
    forwards = [v.symbol for v in gpu.variants if v.header == "fwd_sm80"]
    assert forwards == ["fwd_sm80_fp16_d48_m128n96w4s2_q_in_regs"] * 2
    assert gpu.launched[forwards[0]] == gpu.allowed[forwards[0]] == 44.5 * KIB  # five blocks of an A100
    assert Device.of(0).smem_bytes == HOPPER.smem_bytes
    assert jit.launcher() == gpu.launch
    assert jit._load == gpu.load
    assert jit._kernels == before


# ---- the command ----


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(as_gpu.main, list(arguments))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In the place of cupyflash's own: what it is called with, on which GPU, and whether it would start a child."""
    calls: list[Any] = []

    def run(arguments: tuple[str, ...], prog_name: str) -> None:
        calls.append((arguments, prog_name, Device.of(0), watchdog.is_watched()))
        raise SystemExit(5)

    monkeypatch.setattr(as_gpu, "cupyflash", run)
    monkeypatch.setattr(Device, "of", lambda ordinal: HOPPER)
    return calls


def test_the_command(command: list[Any]) -> None:
    result = invoke("sm_86", "bench", "--pass", "fwd", "--help")
    assert result.exit_code == 5
    assert command == [(("bench", "--pass", "fwd", "--help"), "cupyflash", limited(HOPPER, "sm_86"), True)]
    assert not watchdog.is_watched()


def test_a_smaller_gpu(command: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", lambda ordinal: Device.synthetic("sm_86"))
    result = invoke("sm_80", "verify")
    assert result.exit_code == 4
    assert "sm_86 has less shared memory than sm_80" in result.output
    assert command == []


def test_usage(command: list[Any]) -> None:
    assert "sm_86" in invoke("sm_70", "verify").output
    assert invoke("sm_86").exit_code == 2
    assert "Run `cupyflash COMMAND ...`" in invoke("--help").output
