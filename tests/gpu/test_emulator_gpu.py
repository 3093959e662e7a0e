"""The emulator against a GPU: the same cases on both give the same results, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash.check.accuracy import UNIT_ROUNDOFF, compare_lse
from cupyflash.check.cases import case
from cupyflash.gpu.device import Device
from tests.emulator import MODES
from tests.emulator.attention import Session, inputs_of
from tests.emulator.require import require_compiler

require_compiler()

NAMES = (
    "dense-d64",
    "causal-d128",
    "window",
    "gqa",
    "deterministic",
    "dense-d256",
    "nan-in-visible-key-causal",
    "misaligned",
)
ROUNDINGS = 4  # fp32 sums in another order can round a result to a neighbour, and P and dS before it


def assert_close(name: str, a: np.ndarray, b: np.ndarray, dtype: str) -> None:
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert np.array_equal(np.isnan(a), np.isnan(b)), f"{name}: NaN at different places"
    finite = np.isfinite(a) & np.isfinite(b)
    assert np.array_equal(a[~finite & ~np.isnan(a)], b[~finite & ~np.isnan(b)]), f"{name}: inf at different places"
    bound = ROUNDINGS * UNIT_ROUNDOFF[dtype] * np.abs(a).max(where=finite, initial=0.0)
    error = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), 0)
    at = np.unravel_index(error.argmax(), error.shape)
    assert error[at] <= bound, f"{name}: {a[at]} on the GPU, {b[at]} on the emulator at {at}"


@pytest.mark.usefixtures("numpy_on_gpu")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_emulator_agrees_with_gpu(name: str, dtype: str) -> None:
    """NumPy arrays run on the GPU where there is one."""
    c = case(name)
    inputs, problem = inputs_of(c, dtype)
    options = c.options(layout="bshd")
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **options)
    arrays = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    gradients = cupyflash.attention_backward(*arrays, dlse=inputs.dlse, **options)

    session = Session(Device.of(0), MODES["late"])
    emulated = session.forward(inputs, problem)
    assert_close("out", out, emulated[0], dtype)
    verdict = compare_lse(lse, emulated[1].astype(np.float64), emulated[1], dtype)  # of ex2.approx and lg2.approx
    assert verdict.passed, verdict
    names = ("dq", "dk", "dv")
    for which, a, b in zip(names, gradients, session.backward(inputs, out, lse, problem), strict=True):
        assert_close(which, np.asarray(a), b, dtype)
