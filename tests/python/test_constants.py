"""Numbers on a GPU that are the same in every call: made once, not while a stream is captured, and not without end."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.launch import constants

CAPTURED = 77


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What was copied."""
    found: list[np.ndarray] = []

    def put(self: constants.Constants, values: np.ndarray) -> int:
        found.append(values)
        return 0x1000 + self._end

    monkeypatch.setattr(constants.Constants, "_is_captured", lambda self, stream: stream == CAPTURED)
    monkeypatch.setattr(constants.Constants, "_put", put)
    return found


def test_each_is_made_once(made: list[np.ndarray]) -> None:
    own = constants.Constants()
    a, b = own.steps(5, 300, 0), own.steps(3, 0, 9)
    assert (a, b) == (0x1000, 0x1020)  # both at multiples of 16 bytes
    assert [x.tolist() for x in made] == [[0, 300, 600, 900, 1200], [0, 0, 0]]
    assert made[0].dtype == np.int32
    assert (own.steps(5, 300, 0), own.steps(3, 0, CAPTURED)) == (a, b)
    assert len(made) == 2


def test_none_is_made_while_a_stream_is_captured(made: list[np.ndarray]) -> None:
    own = constants.Constants()
    assert own.steps(5, 300, CAPTURED) == 0
    assert not made
    assert own.steps(5, 300, 0) == 0x1000


def test_there_is_an_end(made: list[np.ndarray]) -> None:
    own = constants.Constants()
    found = [own.steps(1 << 14, step, 0) for step in range(20)]
    assert all(found[:16])
    assert not any(found[16:])
    assert own.steps(1, 5, 0) == 0
    assert own.steps(1 << 14, 3, 0) == found[3]


def test_what_cuda_refuses_is_tried_again(made: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    own = constants.Constants()
    with monkeypatch.context() as patch:
        patch.setattr(constants.Constants, "_put", lambda self, values: 0)
        assert own.steps(2, 3, 0) == 0
    assert own.steps(2, 3, 0) == 0x1000
