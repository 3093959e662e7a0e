"""What tests on a GPU share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sm80", "sm90"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels that calls take."""
    from cupyflash.gpu.device import Device

    if request.param == "sm90" and Device.of(0).capability != (9, 0):
        pytest.skip("the sm90 family needs compute capability 9.0")
    monkeypatch.setenv("CUPYFLASH_FAMILY", request.param)
    return str(request.param)


@pytest.fixture
def numpy_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy arrays are copied to the GPU, whatever would be faster."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
