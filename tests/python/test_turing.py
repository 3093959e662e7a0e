"""Turing: fp16 alone, 64 KiB of shared memory, and no cp.async."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pretended_gpu
import pytest
from click.testing import CliRunner

import cupyflash
from cupyflash.arrays.adapters import NUMPY
from cupyflash.cli import main
from cupyflash.cli.doctor import checks as doctor
from cupyflash.errors import UnsupportedError
from cupyflash.gpu import device
from cupyflash.gpu.device import KIB, Device, usual_dtype
from cupyflash.launch import run
from cupyflash.plan.decode import variants_over_cache
from cupyflash.plan.families import variants_of_calls
from cupyflash.plan.shipped import in_its_dtype
from cupyflash.plan.shipped_cache import shipped_calls
from cupyflash.plan.spec import CHUNKS, LEARNED
from cupyflash.problem import Problem
from tests.emulator.cases import SHIPPED, TABLE

T4 = Device.synthetic("sm_75")


def test_the_device() -> None:
    """A block may have all of a multiprocessor's shared memory, of which the system keeps nothing for itself."""
    assert (T4.smem_bytes, T4.smem_per_sm_bytes, T4.dtypes) == (64 * KIB, 64 * KIB, ("fp16",))
    assert [Device.synthetic(arch).is_tiny for arch in ("sm_75", "sm_86", "sm_90")] == [True, False, False]


@pytest.mark.parametrize("name", [*SHIPPED, *TABLE])
def test_every_call_has_kernels_that_fit(name: str) -> None:
    problem = (SHIPPED | TABLE)[name].problem("fp16")
    for learned, aligned, deterministic in itertools.product((False, True), repeat=3):
        for paired in (0, CHUNKS) if problem.bias else (0,):
            known = dict.fromkeys(LEARNED, learned) | {"paired_bias": paired, "aligned": aligned}
            for v in variants_of_calls(replace(problem, deterministic=deterministic), T4, **known):
                assert v.smem_bytes <= T4.smem_bytes, v.symbol


def test_every_call_over_a_cache_has_kernels_that_fit() -> None:
    for call, known in shipped_calls():
        for v in variants_over_cache(in_its_dtype(T4, call), T4, **known):
            assert v.smem_bytes <= T4.smem_bytes, v.symbol


def test_bf16_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended_gpu.pretend(monkeypatch, "sm_75")
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    q = np.zeros((1, 16, 2, 64), ml_dtypes.bfloat16)
    expected = r"q: expected fp16 on sm_75, got bf16.*compute capability 8\.0.*has 7\.5; cast q.* to fp16"
    with pytest.raises(UnsupportedError, match=expected):
        cupyflash.attention(q, q, q)
    with pytest.raises(UnsupportedError, match=r"fp64 has no GPU kernel yet, expected fp16; cast q, k and v"):
        cupyflash.attention(*[q.astype(np.float64)] * 3)
    with pytest.raises(UnsupportedError, match=expected.replace("bf16", "fp32")):
        cupyflash.attention(*[q.astype(np.float32)] * 3)
    with pytest.raises(UnsupportedError, match=expected):
        variants_over_cache(next(shipped_calls())[0], T4, aligned=True, tma=True)


def test_numpy_arrays_that_it_has_no_kernel_for_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asks for the GPU; fp16 goes there."""
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(Device, "of", lambda ordinal: T4)
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    problem = Problem("fp16", 1, 256, 256, 4, 4, 64, 0.125)
    assert run._on_gpu(NUMPY, problem, lambda: True)
    assert not run._on_gpu(NUMPY, replace(problem, dtype="bf16"), lambda: True)
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    with pytest.raises(UnsupportedError, match="expected fp16 on sm_75"):
        run._on_gpu(NUMPY, replace(problem, dtype="bf16"), lambda: True)


def test_a_backward_that_has_no_kernel_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, of heads that are too wide for 99 KiB of shared memory; the forward has one."""
    gpu = pretended_gpu.pretend(monkeypatch, "sm_86")
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(NUMPY, "signature", type(NUMPY)().signature)
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    monkeypatch.setattr(run.where, "worth_the_gpu", lambda *of: True)
    monkeypatch.setattr(run, "_through_gpu", lambda *of: pytest.fail("to the GPU"))
    q = np.random.default_rng(0).standard_normal((1, 8, 2, 256), np.float32)
    lse = np.zeros((1, 2, 8), np.float32)
    assert cupyflash.attention_backward(q, q, q, q, q, lse).dq.shape == q.shape
    assert not gpu.launched
    with pytest.raises(pytest.fail.Exception, match="to the GPU"):
        cupyflash.attention(q, q, q)
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    with pytest.raises(pytest.fail.Exception, match="to the GPU"):
        cupyflash.attention_backward(q, q, q, q, q, lse)


def test_warmup_prepares_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended_gpu.pretend(monkeypatch, "sm_75")
    monkeypatch.setattr(device, "_probe", lambda: (1, ""))
    ready = cupyflash.warmup(head_dims=64, causal=False)
    assert len(ready) > 3
    assert all("_fp16_" in symbol for symbol in ready)


def test_commands_take_its_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    def said(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == code, result.output
        return result.output

    assert "fwd_sm80_fp16" in said("explain", "--arch", "sm_75", "--no-compile")
    assert "expected fp16 on sm_75" in said("explain", "--arch", "sm_75", "--dtype", "bf16", "--no-compile", code=4)
    assert "expected fp16 on sm_75" in said(
        "compile", "--arch", "sm_75", "--dtype", "bf16", "--out", str(tmp_path), code=4
    )
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(Device, "of", lambda ordinal: T4)
    assert (usual_dtype(on_gpu=True), usual_dtype(on_gpu=False)) == ("fp16", "bf16")
    (finding,) = doctor.gpus()
    assert (finding.status, finding.fix) == ("OK", "")
    assert finding.text.endswith("kernels of fp16 alone")


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [((7, 0), "float16", "older than Turing"), ((7, 5), "float16", ""), ((7, 5), "bfloat16", "fp16 on a GPU older"),
     ((8, 0), "bfloat16", ""), ((7, 5), "float32", "fp16 on a GPU older"),
     ((8, 0), "float32", ""), ((8, 0), "float64", "expected fp16, bf16 or fp32")],
)  # fmt: skip
def test_what_goes_to_torch(
    capability: tuple[int, int], dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from cupyflash.torch import sdpa

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tensor = SimpleNamespace(device=torch.device("cuda"), layout=torch.strided, dtype=getattr(torch, dtype))
    found = sdpa._why_not_device(tensor)
    assert (reason in found) if reason else (found == "")


@pytest.mark.parametrize(("arch", "most"), [("sm_80", 256), ("sm_86", 224), ("sm_90", 256)])
def test_wide_heads_of_fp32_without_a_backward(arch: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from cupyflash.torch import sdpa

    monkeypatch.setattr(Device, "of", lambda ordinal: Device.synthetic(arch))
    like = {"device": torch.device("cuda"), "dtype": torch.float32}
    for head_dim, learns in ((256, False), (224, True), (232, True), (256, True)):
        x = SimpleNamespace(**like, shape=(1, 1, 8, head_dim), requires_grad=learns)
        reason = sdpa._why_not_learned(x, x, x)
        assert bool(reason) == (learns and head_dim > most), reason
        with torch.no_grad():
            assert not sdpa._why_not_learned(x, x, x)
