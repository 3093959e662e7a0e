"""A function is traced again where, and only where, something that it holds has changed (mods/held.py)."""

from __future__ import annotations

import functools
import gc
import math
import operator
import subprocess
import sys
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


# ---- What changes unseen: no equal key may say that it is the same ----


def by_import(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    from settings_of_a_user import factor  # type: ignore[import-not-found]

    return score * factor


def by_globals(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * globals()["FACTOR"]


def by_text(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * eval("FACTOR")


def by_builtin(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * FACTOR_OF_ALL  # type: ignore[name-defined]  # noqa: F821


def by_hidden_name(score: Any, b: Any, h: Any, q: Any, k: Any, FACTOR: Any = 1.0) -> Any:
    def of_module() -> Any:
        global FACTOR
        return FACTOR

    return score * FACTOR * of_module()


@functools.wraps(np.tanh)
def like_tanh(x: Any) -> Any:
    return np.tanh(x) * FACTOR


def by_wrapper(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return like_tanh(score)


def by_random(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * np.random.uniform()  # noqa: NPY002


def by_class(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * Constants.factor


class Constants:
    factor: Any = 0.5


def by_list(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * FACTORS[0]


FACTORS: list[Any] = [0.5, 2.0]


def by_dict(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return OF_NAMES["f"](score)


OF_NAMES: Any = {"f": twice}


def by_absolute(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return abs(score) * 2


@pytest.mark.parametrize(
    ("mod", "target", "value"),
    [
        (by_import, "settings_of_a_user.factor", 0.75),
        (by_globals, f"{__name__}.FACTOR", 0.75),
        (by_text, f"{__name__}.FACTOR", 0.75),
        (by_builtin, "builtins.FACTOR_OF_ALL", 0.75),
        (by_hidden_name, f"{__name__}.FACTOR", 0.75),
        (by_wrapper, f"{__name__}.FACTOR", 0.75),
        (by_random, "numpy.random.uniform", lambda: 0.75),
        (by_class, f"{__name__}.Constants.factor", 0.75),
        (by_list, f"{__name__}.FACTORS", [0.75, 2.0]),
        (by_dict, f"{__name__}.OF_NAMES", {"f": abs}),
        (by_absolute, f"{__name__}.abs", twice),
        (by_absolute, "builtins.abs", twice),
        (by_function, f"{__name__}.twice.__code__", (lambda x: 3 * x).__code__),
        (by_global, f"{__name__}.by_global.__code__", by_absolute.__code__),
    ],
)
def test_what_a_function_finds_elsewhere(
    mod: Mod, target: str, value: Any, traced: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "settings_of_a_user", types.SimpleNamespace(factor=0.5))
    monkeypatch.setattr("builtins.FACTOR_OF_ALL", 0.5, raising=False)
    before = text(mod)
    with monkeypatch.context() as patch:
        patch.setattr(target, value, raising=False)
        after = text(mod)
        given._kept.cache_clear()
        assert after == text(mod) != before


def test_builtins_of_its_own(traced: mock.Mock) -> None:
    texts = []
    for factor in (0.5, 0.75):
        module: dict[str, Any] = {"__builtins__": {"factor": factor}}
        exec("def mod(score, b, h, q, k): return score * factor", module)
        texts.append(text(module["mod"]))
    assert texts[0] != texts[1]


def test_numbers_and_functions_change_in_place(traced: mock.Mock) -> None:
    factors, functions = [0.5, [0.25]], [abs, twice]
    mods: list[Mod] = [
        lambda score, b, h, q, k: score * factors[0],
        lambda score, b, h, q, k: score * factors[1][0],  # type: ignore[index]
        lambda score, b, h, q, k: functions[0](score) * 2,
    ]
    before = [text(mod) for mod in mods]
    factors[:], functions[0] = [0.75, [0.75]], twice
    assert all(text(mod) != old for mod, old in zip(mods, before, strict=True))


@pytest.mark.parametrize("shown", [{}, {"precision": 2}, {"legacy": "1.13"}])
def test_all_digits_of_arrays_without_dimensions_count(traced: mock.Mock, shown: Any) -> None:
    with np.printoptions(**shown):
        for one, other in ((np.array(0.501), np.array(0.502)), (np.array(1 / 3), np.array(np.nextafter(1 / 3, 1)))):
            assert text(holding(one)) != text(holding(other))
            assert text(holding(one[()])) != text(holding(other[()]))


def test_numbers_of_arrays_in_a_tuple(traced: mock.Mock) -> None:
    """They are read while it is traced, also where the array has a name as well."""

    def mod_of(x: Any) -> Mod:
        several = (x, 1)
        return lambda score, b, h, q, k: score * float(several[0][0]) + x[k]

    one = np.full(8, 0.5, np.float32)
    assert text(mod_of(one)) != text(mod_of(2 * one))


def test_arrays_that_change_places(traced: mock.Mock) -> None:
    def mod_of(x: Any, y: Any) -> Mod:
        return lambda score, b, h, q, k: score + 2 * x[k] + y[q]

    one, other = np.ones(8, np.float32), np.zeros(8, np.float32)
    for x, y in ((one, other), (other, one), (one, one), (other, one)):
        found, arrays = bind(mod_of(x, y), None, None)
        assert all(a is b for a, b in zip(arrays.values(), (x, y), strict=False))
        assert len(arrays) == 1 + (x is not y)
        given._kept.cache_clear()
        assert found == text(mod_of(x, y))
    assert bind(mod_of(one, other.astype(np.float64)), None, None)[0] != bind(mod_of(one, other), None, None)[0]


def test_functions_made_in_a_loop_and_by_a_function_that_calls_itself(traced: mock.Mock) -> None:
    mods: list[Mod] = [lambda score, b, h, q, k: score * i for i in (1, 2)]  # noqa: B023
    assert text(mods[0]) == text(mods[1])  # Python binds late

    def power(factor: float) -> Mod:
        def times(x: Any, depth: int = 2) -> Any:
            return times(x * factor, depth - 1) if depth else x

        return lambda score, b, h, q, k: times(score)

    assert text(power(2.0)) != text(power(3.0))
    assert text(power(2.0)) == text(power(2.0))


def test_a_list_that_holds_itself(traced: mock.Mock) -> None:
    several: list[Any] = [0.5]
    several.append(several)
    mod: Mod = lambda score, b, h, q, k: score * several[0]  # noqa: E731
    before = text(mod)
    several[0] = 0.75
    assert text(mod) != before


@pytest.mark.needs("torch")
def test_what_torch_knows_of_its_state_and_its_modules(traced: mock.Mock) -> None:
    import torch

    module = torch.nn.Identity()
    module.factor = 0.5  # type: ignore[assignment]
    mods: list[Mod] = [
        lambda score, b, h, q, k: score * (0.5 if torch.is_grad_enabled() else 0.75),
        lambda score, b, h, q, k: score * module.factor,
    ]
    before = [text(mod) for mod in mods]
    module.factor = 0.75  # type: ignore[assignment]
    with torch.no_grad():
        assert all(text(mod) != old for mod, old in zip(mods, before, strict=True))


def test_functions_of_libraries_are_known(traced: mock.Mock) -> None:
    tanh, of_user = np.tanh, holding

    def ours(x: Any) -> Any:
        return tanh(np.exp(x)) * operator.neg(math.sqrt(2)) * len((of_user,))

    mod: Mod = lambda score, b, h, q, k: where(ours(score) > 0, abs(score), 1.0)  # noqa: E731
    assert text(mod) == text(mod)
    assert traced.call_count == 1


PROGRAM = """
import warnings, torch, cupyflash
FACTOR = 0.5
x = torch.randn(1, 9, 2, 8)
def mod(score, b, h, q, k): return score * FACTOR
def call(x): return cupyflash.attention(x, x, x, score_mod=mod)
compiled = torch.compile(call, backend="eager")
warnings.simplefilter("error", UserWarning)
for FACTOR in (0.5, 0.5, 3.0):
    torch.testing.assert_close(compiled(x), call(x))
"""


@pytest.mark.needs("torch")
def test_programs_take_functions_without_a_warning() -> None:
    """By itself: torch.compile looks through all modules that there are, and not all bear it."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_programs_that_are_to_be_whole_take_expressions_alone(name: str) -> None:
    import torch

    import cupyflash

    def call(x: Any) -> Any:
        return cupyflash.attention(x, x, x, **{name: lambda *places: places[-1] < 3})

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{name}: expected an expression, as text, inside torch.compile"):
        compiled(torch.randn(1, 9, 2, 8))
