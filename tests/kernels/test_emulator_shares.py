"""Groups of query heads that the backward divides, with every feature: the plan does so for long sequences alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulator import MODES
from emulator.attention import Session, inputs_of, small_device
from emulator.cases import TABLE
from emulator.require import require_compiler

from cupyflash.check.accuracy import Oracle
from cupyflash.plan import shares

require_compiler()

# Each feature of the backward at least once, alone or with others.
NAMES = ("softcap-gqa-dlse-d256", "alibi-deterministic", "sink-gqa-dlse-d256", "dropout-softcap-alibi-sink",
         "packed-alibi", "packed-range-deterministic", "range-bhsd", "bias-gqa-dlse-d256", "packed-bias-mask-d160",
         "block-mask-alibi", "block-mask-dropout", "mods-every", "mods-documents-d128",
         "mods-dropout-block-mask")  # fmt: skip


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("name", NAMES)
def test_feature(name: str, family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share for each head of q; each case under the race detector in one family and with late copies in the other."""
    monkeypatch.setattr(shares, "_cheapest", lambda group, *of_the_gpu: group)
    case, how = TABLE[name], ("race", "late")[(NAMES.index(name) + (family == "sm90")) % 2]
    inputs, problem = inputs_of(case, case.dtypes[0])
    exact = Oracle(problem, *inputs)
    arch = "sm_80" if family == "sm80" else "sm_90"
    gpu, mode = small_device(arch, 64), replace(MODES[how], resident=64)  # all blocks, as the plan counts on
    session = Session(gpu, mode, seed, backward_family=family)
    results = exact.judge_backward(*session.backward(inputs, *exact.plain_forward, problem))
    wrong = [str(r) for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)
