"""Attention over a cache of fp32 on the CPU: rows of a warp, widths and the memory of small cards, and planted bugs."""

from __future__ import annotations

import pytest

from cupyflash.check.cache_case import CacheCase
from cupyflash.plan.decode import plan_decode
from tests.ahead import Ahead
from tests.emulator import MODES, decode
from tests.emulator.attention import small_device
from tests.emulator.require import require_compiler
from tests.over_cache import check, check_that_it_is_reported, with_bug
from tests.planted.mutants import Bug
from tests.planted.mutants_float import DECODE_FP32

require_compiler()

# With the rows of a warp and the warps of a team that they take where a block has 163 KiB of shared memory, and 99.
CASES = {
    case.name: (case, shapes)
    for case, *shapes in (
        (CacheCase("four-rows-d64", "full", (150, 0, 77), heads_q=8, heads_k=2), (4, 1, 8), (4, 1, 8)),
        (CacheCase("four-rows-d256", "full", (70, 33), 1, 256, heads_q=4, heads_k=1), (4, 1, 4), (4, 1, 2)),
        (CacheCase("three-rows-d80-v24", "full", (70, 33), 1, 80, heads_q=3, heads_k=1, head_dim_v=24, page_size=3),
         (4, 1, 4), (4, 1, 4)),
        (CacheCase("eight-rows-d128", "full", (70, 33), 2, 128, heads_q=8, heads_k=2, alibi=2, causal=True, append=True,
                   rotary=64, sink=True), (8, 1, 4), (8, 1, 4)),
        (CacheCase("five-rows-d256", "full", (70, 3), 5, 256, heads_q=1, heads_k=1, nonfinite=True, softcap=3.0),
         (8, 1, 4), (8, 1, 2)),
        (CacheCase("33-rows-d128", "full", (150, 70), 33, 128, heads_q=1, heads_k=1, causal=True),
         (16, 4, 8), (16, 4, 8)),
        (CacheCase("20-rows-d256", "full", (70,), 20, 256, heads_q=1, heads_k=1, bias="hqk fp32 hides", num_splits=2),
         (8, 4, 8), (8, 4, 4)),
        (CacheCase("window-nonfinite-d64", "full", (150, 90), (9, 3), heads_q=2, heads_k=1, window=(20, 0),
                   page_size=16, nonfinite=True), (16, 1, 8), (16, 1, 8)),
    )
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, arch: str, seed: int) -> None:
    case, shapes = CASES[name]
    device = small_device(arch, 4)
    tile = plan_decode(case.problem("fp32"), device, aligned=True, tma=False).variant.tile
    assert (tile.warp_rows, tile.team, tile.warps) == shapes[arch == "sm_86"]
    check(decode.CacheSession(device, MODES["race"], seed), case, "fp32")


def _rehearse_with(bug: Bug) -> None:
    with_bug(bug).run_case(CASES[bug.case][0], "fp32")


AHEAD = Ahead(_rehearse_with, decode)


@pytest.mark.parametrize("bug", DECODE_FP32, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    check_that_it_is_reported(bug, CASES[bug.case][0], "fp32")
