"""Attention over a cache in the emulator, judged; also with a planted bug."""

from __future__ import annotations

import pytest

from cupyflash.check.cache_case import CacheCase
from tests.emulator import MODES, EmulatorError
from tests.emulator.attention import small_device
from tests.emulator.decode import CacheSession
from tests.planted.mutants import Bug


def check(how: CacheSession, case: CacheCase, dtype: str) -> None:
    wrong = [str(r) for r in how.judge(case, dtype) if not r.passed]
    assert not wrong, "\n".join(wrong)


def with_bug(bug: Bug) -> CacheSession:
    return CacheSession(small_device(bug.arch, 12), MODES["race"], headers=bug.headers())


def check_that_it_is_reported(bug: Bug, case: CacheCase, dtype: str) -> None:
    with pytest.raises((EmulatorError, AssertionError), match=bug.finds or "FAILED"):
        check(with_bug(bug), case, dtype)
