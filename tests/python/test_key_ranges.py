"""The launch that makes ranges of keys from padding masks, on a pretended GPU."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.launch import key_ranges
from cupyflash.plan.key_ranges import KEY_RANGE_PARAMS, KEY_RANGES
from cupyflash.plan.params import UNBOUNDED
from tests.pretended_gpu import pretend


def test_what_the_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch all of it, since the params are those of the last one."""
    gpu = pretend(monkeypatch)
    monkeypatch.setattr(key_ranges, "_on", {})
    asked = (
        ((0x10, 0, 0x30, 0x40), {"stride": 99, "keys": 90, "used": 80, "first": 7, "window": (None, 5)}),
        ((0, 0x20, 0x30, 0x40), {"stride": 0, "keys": 70, "used": 70, "first": 0, "window": (3, 1 << 40)}),
    )
    for addresses, numbers in asked:
        key_ranges.on(0, 0)(0, 3, *addresses, **numbers)  # type: ignore[arg-type]
    assert len(gpu.loaded) == 1
    for launched, (addresses, numbers) in zip(gpu.launched, asked, strict=True):
        assert (launched.symbol, launched.grid) == (KEY_RANGES.symbol, 3)
        params = np.frombuffer(launched.params, KEY_RANGE_PARAMS)[0]
        left, right = (UNBOUNDED if n is None else min(n, UNBOUNDED) for n in numbers["window"])  # type: ignore[attr-defined]
        own = [numbers[name] for name in ("stride", "keys", "used", "first")]
        assert params.tolist() == (*addresses, *own, left, right)
