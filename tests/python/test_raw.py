"""A compiled kernel with all that its launch needs: from NVRTC, and run by what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, DeviceError, UnsupportedError
from cupyflash.check.case import NUMPY_DTYPE
from cupyflash.gpu.device import Device
from cupyflash.plan.families import plan_call
from cupyflash.plan.variant import kernel_sources
from cupyflash.problem import make_problem

Q, K = (2, 70, 4, 40), (2, 90, 2, 40)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and softcap": {"window": (30, 10), "softcap": 3.0, "scale": 0.2, "dtype": "fp16"},
    "bhsd": {"layout": "bhsd"},
    "fp32": {"causal": True, "dtype": "fp32"},
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_cubin_holds_the_kernel(arch: str) -> None:
    found = cupyflash.raw_kernel(Q, K, causal=True, arch=arch)
    assert found.cubin.startswith(b"\x7fELF")
    assert found.symbol.encode() in found.cubin
    assert found.symbol.startswith("fwd_sm80_bf16_d40")
    assert found.arch == arch
    assert 0 < found.registers <= 255
    assert not any(found.params[name] for name in ("q", "k", "v", "o", "lse"))
    assert found.params["problem"]["seqlen_k"] == 90


@pytest.mark.needs("g++")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_its_launch_computes_attention(options: dict[str, Any], rng: np.random.Generator) -> None:
    """In the emulator, which takes the kernel's source and otherwise what is said of the cubin."""
    from cupyflash.emulator.launch import MODES, EmulatedKernel, Memory

    options = {"dtype": "bf16", **options}
    kind = NUMPY_DTYPE[options["dtype"]]
    shapes = [(b, h, n, d) if options.get("layout") == "bhsd" else (b, n, h, d) for b, n, h, d in (Q, K, K)]
    q, k, v = (rng.standard_normal(shape).astype(kind) for shape in shapes)
    found = cupyflash.raw_kernel(q.shape, k.shape, arch="sm_80", **options)
    call = {name: x for name, x in options.items() if name != "dtype"}
    problem = make_problem(shapes, [options["dtype"]] * 3, **call)
    (launch,) = plan_call(problem, Device.synthetic("sm_80"), tma=False, family="sm80").launches
    assert launch.variant.symbol == found.symbol
    kernel = EmulatedKernel(launch.variant.source(), kernel_sources(), found.symbol)
    with Memory() as memory:
        for name, x in zip("qkv", (q, k, v), strict=True):
            found.params[name] = memory.input(name, x)
        found.params["o"], out = memory.output("o", q.shape, kind)
        found.params["lse"], lse = memory.output("lse", (2, 4, 70), np.float32)
        kernel(found.grid, found.threads, found.smem_bytes, [found.params], MODES["late"])
        want, want_lse = cupyflash.attention(q, k, v, return_lse=True, **call)
        np.testing.assert_allclose(out.astype("f4"), np.asarray(want).astype("f4"), rtol=0.02, atol=0.02)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for change, error, message in (
        ({"arch": "sm_70"}, ArgumentError, 'arch: expected "sm_75"'),
        ({"dtype": "fp64"}, UnsupportedError, "q: fp64 has no GPU kernel yet"),
        ({"dtype": np.float16}, ArgumentError, 'dtype: expected .*"fp16"'),
        ({"window": (1, 2, 3)}, ArgumentError, "window"),
    ):
        with pytest.raises(error, match=message):
            cupyflash.raw_kernel(Q, K, **{"arch": "sm_80", **change})
    with pytest.raises(ArgumentError, match="heads"):
        cupyflash.raw_kernel(Q, (2, 90, 3, 40), arch="sm_80")
    monkeypatch.setattr("cupyflash.gpu.device.count", lambda: 0)
    with pytest.raises(DeviceError, match='arch: expected one, such as "sm_90", where there is no usable GPU'):
        cupyflash.raw_kernel(Q, K)


@pytest.mark.parametrize("shape", [None, (), (-1, 16, 2, 64), (1, 16.5, 2, 64), (1, "16", 2, 64), (1, 16, 64)])
def test_shapes_that_no_array_has(shape: Any) -> None:
    with pytest.raises(ArgumentError, match="q_shape"):
        cupyflash.raw_kernel(shape, (1, 16, 2, 64), arch="sm_80")
