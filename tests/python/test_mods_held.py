"""A function is traced again where, and only where, something that it holds has changed (mods/held.py)."""

from __future__ import annotations

import gc
import math
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupyflash.mods import bind, given, where

FACTOR: Any = 0.5
SETTINGS = types.SimpleNamespace(factor=0.5)
Mod = Callable[..., Any]


def twice(x: Any) -> Any:
    return 2 * x


def by_global(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * FACTOR


def by_function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return twice(score) + math.pi


def by_object(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * SETTINGS.factor


def holding(held: Any) -> Mod:
    return lambda score, b, h, q, k: score * held


def of_array(x: Any) -> Mod:
    return lambda score, b, h, q, k: score + x[k]


def of_all(masks: Any) -> Mod:
    def every(b: Any, h: Any, q: Any, k: Any) -> Any:
        return where(masks[0](b, h, q, k), masks[1](b, h, q, k), 0 > 1)

    return every


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < 7


@pytest.fixture
def traced() -> Iterator[mock.Mock]:
    """Counts what is traced, from nothing that is known."""
    given._kept.cache_clear()
    with mock.patch.object(given, "trace", wraps=given.trace) as found:
        yield found


def text(score_mod: Any = None, mask_mod: Any = None) -> str:
    return bind(score_mod, mask_mod, None)[0]


def test_what_holds_the_same_is_traced_once(traced: mock.Mock) -> None:
    found = {text(holding(0.5)) for _ in range(3)}
    assert len(found) == traced.call_count == 1
    assert text(holding(0.5), causal) == text(holding(0.5), causal)
    assert traced.call_count == 3


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.25), (2, 2.0), (True, 1), (0.0, -0.0), (np.float32(2), 2)])
def test_another_number_is_another_function(traced: mock.Mock, before: Any, after: Any) -> None:
    text(holding(before)), text(holding(after))
    assert traced.call_count == 2


def test_a_number_of_the_module(traced: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [text(by_global), text(by_global)]
    monkeypatch.setitem(globals(), "FACTOR", 0.75)
    found.append(text(by_global))
    assert found[0] == found[1] != found[2]
    assert traced.call_count == 2


def test_another_function_by_the_same_name(traced: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [text(by_function), text(by_function)]
    monkeypatch.setitem(globals(), "twice", lambda x: 3 * x)
    found.append(text(by_function))
    assert found[0] == found[1] != found[2]
    assert traced.call_count == 2


def test_functions_in_a_tuple(traced: mock.Mock) -> None:
    found = [text(mask_mod=of_all(masks)) for masks in ((causal, near), (causal, near), (near, causal))]
    assert found[0] == found[1] != found[2]
    assert traced.call_count == 2


def test_an_object_that_may_change_unseen_is_asked_each_time(
    traced: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = text(by_object)
    monkeypatch.setattr(SETTINGS, "factor", 0.75)
    assert text(by_object) != before
    assert traced.call_count == 2


def test_what_is_no_function_of_python_is_asked_each_time(traced: mock.Mock) -> None:
    class Scaled:
        factor = 0.5

        def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score * self.factor

    mod = Scaled()
    before = text(mod)
    mod.factor = 0.75
    assert text(mod) != before
    assert text(mod.__call__) != before


def test_defaults_count(traced: mock.Mock) -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, k: Any, factor: float = 0.5) -> Any:
        return score * factor

    before = text(mod)
    mod.__defaults__ = (0.75,)
    assert text(mod) != before


def test_arrays_count_by_name_and_kind_not_by_what_they_hold(traced: mock.Mock) -> None:
    one, other = np.ones(8, np.float32), np.zeros(9, np.float32)
    found = bind(of_array(one), None, None), bind(of_array(other), None, None)
    assert found[0][0] == found[1][0]
    assert [next(iter(arrays.values())) is x for (_, arrays), x in zip(found, (one, other), strict=True)] == [True] * 2
    assert traced.call_count == 1
    bind(of_array(one.astype(np.int32)), None, None)
    assert traced.call_count == 2


def test_no_array_is_kept_alive(traced: mock.Mock) -> None:
    array = np.ones(8, np.float32)
    gone = weakref.ref(array)
    bind(of_array(array), None, None)
    del array
    traced.reset_mock()
    gc.collect()
    assert gone() is None
