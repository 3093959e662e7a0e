"""Groups of query heads that the backward divides, with every feature: the plan does so for long sequences alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash.check.accuracy import Oracle
from cupyflash.plan import shares
from tests.ahead import Ahead
from tests.emulator import MODES, attention
from tests.emulator.attention import Session, inputs_of, small_device
from tests.emulator.cases import TABLE
from tests.emulator.require import require_compiler

require_compiler()

# Each feature of the backward at least once, alone or with others.
NAMES = ("softcap-gqa-dlse-d256", "alibi-deterministic", "sink-gqa-dlse-d256", "dropout-softcap-alibi-sink",
         "packed-alibi", "packed-range-deterministic", "range-bhsd", "bias-gqa-dlse-d256", "packed-bias-mask-d160",
         "block-mask-alibi", "block-mask-dropout", "mods-every", "mods-documents-d128",
         "mods-dropout-block-mask")  # fmt: skip


@pytest.fixture(autouse=True)
def _a_share_for_each_head_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_cheapest", lambda group, *of_the_gpu: group)


@functools.lru_cache(maxsize=1)
def oracle(name: str) -> Oracle:
    inputs, problem = inputs_of(TABLE[name], TABLE[name].dtypes[0])
    return Oracle(problem, *inputs)


def gradients(name: str, family: str, forward: Sequence[Any], seed: int) -> tuple[Any, ...]:
    """By the emulator, from what a forward gives: in one family under the race detector, else with late copies."""
    how = ("race", "late")[(NAMES.index(name) + (family == "sm90")) % 2]
    inputs, problem = inputs_of(TABLE[name], TABLE[name].dtypes[0])
    arch = "sm_80" if family == "sm80" else "sm_90"
    gpu, mode = small_device(arch, 64), replace(MODES[how], resident=64)  # all blocks, as the plan counts on
    return Session(gpu, mode, seed, backward_family=family).backward(inputs, *forward, problem)


def _rehearse(name: str, family: str, **_: int) -> None:
    inputs, problem = inputs_of(TABLE[name], TABLE[name].dtypes[0])
    gradients(name, family, (inputs.dout, np.zeros(problem.rows, np.float32)), 0)


AHEAD = Ahead(_rehearse, attention)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("name", NAMES)
def test_feature(name: str, family: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    results = oracle(name).judge_backward(*gradients(name, family, oracle(name).plain_forward, seed))
    wrong = [str(r) for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)
