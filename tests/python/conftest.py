"""What the tests of Python share."""

from __future__ import annotations

import pytest

from tests import pretended_gpu
from tests.pretended_gpu import Gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """An H100 that is not there."""
    return pretended_gpu.pretend(monkeypatch)
