# ruff: noqa: E501 (source texts to be replaced)
"""Hopper's instructions on the CPU: a small warp-specialised kernel is right in every mode, and bugs in it are reported."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import MODES, EmulatorError
from tests.emulator.require import require_compiler
from tests.probing import micro

require_compiler()

SHAPES = ((64, 64, 1), (100, 330, 2), (1, 17, 1), (130, 700, 1))
# name, edit of kernels/hopper_micro.cuh, what the race detector says ("": the numbers are wrong)
BUGS = {
    "wrong-initial-parity": ("ring.parity(b) ^ 1);", "ring.parity(b));", r"DEADLOCK(.|\n)*mbarrier\.try_wait at .*hopper_micro"),
    "wrong-expect-tx": ("expect_tx(ring.full_of(b), 2 * kTileBytes)", "expect_tx(ring.full_of(b), 2 * kTileBytes + 16)", "DEADLOCK"),
    "no-wait-for-empty": ("        mbarrier_wait(ring.empty_of(b), ring.parity(b) ^ 1);  // the consumers have left this stage\n", "",
                          r"RACE|PHASE OVERRUN|more arrivals"),
    "no-wait-for-full": ("        mbarrier_wait(ring.full_of(b), ring.parity(b));\n", "", r"RACE, read after write"),
    "stage-released-early": ("        wgmma_wait_group<0>();\n        wgmma_pin(o);\n        mbarrier_arrive(ring.empty_of(b));",
                             "        mbarrier_arrive(ring.empty_of(b));\n        wgmma_wait_group<0>();\n        wgmma_pin(o);",
                             r"RACE, write after read: .*hopper_micro\.cuh:\d+"),
    "phase-overtaken": ("mbarrier_init(ring.empty + 8 * s, 128);", "mbarrier_init(ring.empty + 8 * s, 32);",
                        r"PHASE OVERRUN: .*hopper_micro\.cuh:\d+|RACE, write after read"),
    "accumulators-read-early": ("        wgmma_wait_group<0>();\n        wgmma_pin(s);", "        wgmma_pin(s);", ""),
    "no-wgmma-fence": ("        wgmma_pin(o);\n        wgmma_fence();", "        wgmma_pin(o);", r"no wgmma\.fence"),
    "no-proxy-fence": ("    fence_proxy_async();\n", "", r"RACE, fence\.proxy\.async is missing.*hopper_micro\.cuh:\d+"),
    "no-barrier-before-the-store": ("    bar_sync(1, 128);\n", "", r"RACE, read after write: .*hopper_micro\.cuh:\d+"),
    "no-bulk-wait": ("        cp_async_bulk_wait_group<0>();\n", "", r"without waiting for the bulk copy that it issued at .*hopper_micro"),
    "no-barrier-after-init": ("    bar_sync();\n", "", r"mbarrier"),
    "wrong-swizzle": ("16 * (chunk ^ row_of % 8)", "16 * chunk", ""),
    "wrong-descriptor-stride": ("kStrideBytes = 1024", "kStrideBytes = 512",
                                r"RACE, .*hopper_micro\.cuh:\d+"),
    "wrong-descriptor-leading": ("tile_descriptor(V + 2048 * d, kTileBytes)", "tile_descriptor(V + 1024 * d, kTileBytes)", ""),
    "divergent-elect": ("if (thread_index() < 32 && elect_sync())", "if (thread_index() < 31 && elect_sync())",
                        "DEADLOCK|divergence"),
    "tile-beyond-shared-memory": ("sQ = (dynamic_smem() + 1023) & ~1023u", "sQ = ((dynamic_smem() + 1023) & ~1023u) + 8192", "outside"),
    "tile-not-aligned": ("sQ = (dynamic_smem() + 1023) & ~1023u", "sQ = ((dynamic_smem() + 1023) & ~1023u) + 128",
                         "not aligned to 1024"),
}  # fmt: skip


def is_right(got: np.ndarray, exact: np.ndarray) -> bool:
    return bool(np.abs(got - exact).max() <= 2e-3 * max(1.0, np.abs(exact).max()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_right_in_every_mode(shape: tuple[int, int, int], mode: str, request: pytest.FixtureRequest) -> None:
    for seed in range(2 + request.config.getoption("--emulator-seeds")):
        assert is_right(*micro.run(*shape, MODES[mode], seed))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_reported(name: str) -> None:
    old, new, message = BUGS[name]
    if message:
        with pytest.raises(EmulatorError, match=message):
            micro.run(100, 330, 1, MODES["race"], edit=(old, new))
    else:
        assert not is_right(*micro.run(100, 330, 1, MODES["race"], edit=(old, new)))
