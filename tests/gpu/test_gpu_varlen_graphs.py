"""A captured call of packed sequences reads its lengths when it is replayed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu_arrays import captured, to_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch")]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_replay_with_other_lengths(family: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same total, compared with fresh calls bit by bit."""
    from cupyflash.gpu.device import Device
    from tests.gpu.test_gpu_varlen import both, places, tensors

    if family == "sm90" and Device.of(0).capability != (9, 0):
        pytest.skip("the sm90 family needs compute capability 9.0")
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    several = [(131, 0, 1, 257, 64), (0, 0, 453, 0, 0), (90, 91, 90, 91, 91), (200, 1, 2, 100, 70)]
    arrays, cu = tensors(453, d), places(several[0])
    options = {"causal": True, "deterministic": True}
    graph, left = captured(lambda: both(*arrays, cu, **options))
    for lengths in (*several[1:], several[0]):
        for x in left:
            x.fill_(float("nan"))
        cu.copy_(places(lengths))
        graph.replay()
        fresh = both(*arrays, places(lengths), **options)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), left, fresh, strict=True):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b), err_msg=f"{name}, {lengths}")
