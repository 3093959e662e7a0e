"""The emulator can fail: planted bugs in the shipped kernels are reported, with the kernel's own line."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from cupyflash.check.accuracy import Comparison, Oracle
from cupyflash.plan.families import kernels_of
from cupyflash.plan.spec import Spec
from cupyflash.plan.variant import kernel_sources
from tests.ahead import Ahead
from tests.emulator import MODES, EmulatorError, attention
from tests.emulator.attention import Session, find_case, inputs_of, small_device, units_of
from tests.emulator.require import require_compiler
from tests.planted import mutants, shared
from tests.planted.markers import without
from tests.planted.mutants import Bug
from tests.planted.mutants_bwd_sm90 import BACKWARD_SM90
from tests.planted.mutants_dropout import BACKWARD_DROPOUT, FORWARD_DROPOUT
from tests.planted.mutants_fp32 import BACKWARD_FP32, FORWARD_FP32
from tests.planted.mutants_held import BACKWARD_HELD, FORWARD_HELD
from tests.planted.mutants_masks import BACKWARD_MASKS, FORWARD_MASKS
from tests.planted.mutants_mods import BACKWARD_MODS, FORWARD_MODS
from tests.planted.mutants_packed import BACKWARD_PACKED, FORWARD_PACKED
from tests.planted.mutants_range import BACKWARD_RANGE, FORWARD_RANGE
from tests.planted.mutants_shares import BACKWARD_SHARES
from tests.planted.mutants_sm90 import FORWARD_SM90
from tests.planted.mutants_wide import BACKWARD_WIDE
from tests.planted.mutants_widths import BACKWARD_WIDTHS, FORWARD_WIDTHS

require_compiler()

FORWARD = (
    *mutants.FORWARD, *FORWARD_SM90, *FORWARD_PACKED, *FORWARD_RANGE, *FORWARD_MASKS, *FORWARD_DROPOUT, *FORWARD_MODS,
    *FORWARD_WIDTHS, *FORWARD_HELD, *FORWARD_FP32,
)  # fmt: skip
BACKWARD = (
    *mutants.BACKWARD, *BACKWARD_SM90, *BACKWARD_PACKED, *BACKWARD_RANGE, *BACKWARD_MASKS, *BACKWARD_DROPOUT,
    *BACKWARD_MODS, *BACKWARD_SHARES, *BACKWARD_WIDE, *BACKWARD_WIDTHS, *BACKWARD_HELD,
    *BACKWARD_FP32,
)  # fmt: skip


@functools.lru_cache(maxsize=16)
def oracle(name: str, dtype: str) -> Oracle:
    inputs, problem = inputs_of(find_case(name), dtype)
    return Oracle(problem, *inputs)


def launched(bug: Bug, headers: Mapping[str, str]) -> tuple[np.ndarray, ...]:
    inputs, problem = inputs_of(find_case(bug.case), bug.dtype)
    session = Session(small_device(bug.arch, bug.sm_count), MODES["race"], headers=headers, left_over=3.0)
    if bug in FORWARD:
        return session.forward(inputs, problem)
    return session.backward(inputs, *oracle(bug.case, bug.dtype).plain_forward, problem)


def judged(bug: Bug, headers: Mapping[str, str]) -> list[Comparison]:
    exact = oracle(bug.case, bug.dtype)
    return (exact.judge_forward if bug in FORWARD else exact.judge_backward)(*launched(bug, headers))


AHEAD = Ahead(lambda bug: launched(bug, bug.headers()), attention)


@pytest.mark.parametrize("bug", [*FORWARD, *BACKWARD], ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            judged(bug, bug.headers())
    else:
        assert not all(result.passed for result in judged(bug, bug.headers()))


def test_a_kernel_that_a_bug_does_not_touch_is_as_shipped() -> None:
    device, headers = small_device("sm_80"), Bug("", without("p-and-ds-complete"), "").headers()
    variants = kernels_of(Spec("bf16", 64, backward=True), device).variants
    touched = [unit.symbols[0] for unit in units_of(variants, device, headers) if unit.headers != kernel_sources()]
    assert len(variants) > 1
    assert [symbol.startswith("bwd_sm80") for symbol in touched] == [True]


def often(bugs: tuple[Bug, ...]) -> list[Bug]:
    """One for each case that shows at least four."""
    of_case = {(bug.case, bug.arch, bug.sm_count): bug for bug in bugs}
    count = Counter((bug.case, bug.arch, bug.sm_count) for bug in bugs)
    return [bug for key, bug in of_case.items() if count[key] >= 4]


@pytest.mark.parametrize("bug", often(FORWARD) + often(BACKWARD), ids=lambda bug: f"{bug.case}-{bug.arch}")
def test_nothing_is_wrong_of_the_shared_text(bug: Bug) -> None:
    """With none of its bugs alive. `tests/python/test_markers.py` compares it with the shipped one."""
    assert all(result.passed for result in judged(bug, shared.without_bugs()))
