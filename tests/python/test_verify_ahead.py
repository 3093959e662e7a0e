"""`verify` on a GPU compiles the kernels of its cases side by side while they run."""

from __future__ import annotations

import threading

import pytest

from cupyflash.check import cases
from cupyflash.cli.verify import cached, kernels
from cupyflash.errors import CompileError
from cupyflash.gpu.device import Device
from cupyflash.plan.families import variants_of_calls


def test_every_kernel_of_the_cases_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, wanted = Device.synthetic("sm_90"), [(c, "bf16") for c in cases.select("smoke")]
    expected = {v.symbol for case, dtype in wanted for v in variants_of_calls(case.problem(dtype), gpu, dalibi=True)}
    over_cache = cached.chosen("smoke", ("bf16",), (), None)
    of_caches = {v.symbol for case, dtype in over_cache for v in cached.variants_of(case, dtype, gpu)}
    assert any(symbol.startswith("decode") for symbol in of_caches)
    expected |= of_caches
    asked: list[str] = []
    all_there = threading.Event()

    def refuse(variant: object, arch: str) -> None:
        asked.append(variant.symbol)  # type: ignore[attr-defined]
        if len(asked) == len(expected):
            all_there.set()
        raise CompileError(variant.symbol, arch, "no")  # type: ignore[attr-defined]

    monkeypatch.setattr(kernels.jit, "compile_kernel", refuse)
    with kernels.compiling_ahead([*wanted, *over_cache], gpu):  # an error is the case's to report
        assert all_there.wait(30)
    assert len(asked) == len(expected) > 4
    assert set(asked) == expected


def test_the_end_does_not_wait_for_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, go = Device.synthetic("sm_90"), threading.Event()
    begun: list[object] = []
    wanted = [(c, "bf16") for c in cases.select("full") if "bf16" in c.dtypes]

    def wait(variant: object, arch: str) -> None:
        begun.append(variant)
        go.wait(30)

    monkeypatch.setattr(kernels.jit, "compile_kernel", wait)
    with kernels.compiling_ahead(wanted, gpu):
        pass
    go.set()
    assert 0 < len(begun) <= (kernels.os.cpu_count() or 1)
