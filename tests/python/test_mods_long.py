"""Long expressions, and constants that fp32 does not hold: the same value on every path, or an error at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.mods import bind
from cupyflash.mods.expression import SIZE_LIMIT, Node, apply, name, number
from cupyflash.mods.parse import parse
from tests.mod_unit import compile_mod

pytestmark = pytest.mark.usefixtures("on_the_cpu")
X = np.random.default_rng(0).standard_normal((1, 9, 2, 16)).astype(np.float32)

LONG = {
    "sum": "score" + " + 1" * 1000,
    "choices": "".join(f"q < {i} ? {i} : " for i in range(800)) + "score",
    "parentheses": "(" * 3000 + "score" + ")" * 3000,
    "signs": "-" * 1000 + "score",
    "nested": "min(score, " * 1000 + "score" + ")" * 1000,
    "indices": "table[" * 1000 + "q" + "]" * 1000 + " * score",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_expressions_are_computed(text: str) -> None:
    table = np.arange(20, dtype=np.int32)
    out, lse = cupyflash.attention(X, X, X, score_mod=text, mod_arrays={"table": table}, return_lse=True)
    grads = cupyflash.attention_backward(X, X, X, X, out, lse, score_mod=text, mod_arrays={"table": table})
    assert np.isfinite([x.sum() for x in grads[:3]]).all()
    bound, _ = bind(text, None, {"table": table})
    assert bind(bound.rpartition("score_mod ")[2], None, {"table": table})[0] == bound  # read back as the same


def test_the_sum_of_a_thousand_is_what_it_says() -> None:
    out, lse = cupyflash.attention(X, X, X, score_mod=LONG["sum"], return_lse=True)
    want, want_lse = cupyflash.attention(X, X, X, return_lse=True)
    np.testing.assert_allclose(lse - 1000, want_lse, atol=1e-3)
    np.testing.assert_allclose(out, want, atol=1e-3)


def test_a_tree_of_any_depth_compares_and_hashes() -> None:
    def chain(last: float) -> Node:
        found = name("score")
        for i in range(1500):
            found = apply("+", number(float(i)), found)
        return apply("*", found, number(last))

    assert chain(2.0) == chain(2.0)
    assert hash(chain(2.0)) == hash(chain(2.0))
    assert chain(2.0) != chain(3.0)
    assert number(1) != number(True)
    assert parse(chain(2.0).text, "score_mod", {}) == chain(2.0)


def grows(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for _ in range(60):
        score = score * score + score
    return score


@pytest.mark.parametrize("mod", [grows, "score" + "+1" * SIZE_LIMIT], ids=["function", "expression"])
def test_what_is_too_long_is_refused_at_once(mod: Any) -> None:
    start = time.perf_counter()
    with pytest.raises(ArgumentError, match=f"score_mod: expected at most {SIZE_LIMIT} operations and values"):
        cupyflash.attention(X, X, X, score_mod=mod)
    assert time.perf_counter() - start < 1


CONSTANTS = [
    ("1e39", "inf()"),
    ("-1e39", "(-inf())"),
    ("3.4028236e38f", "inf()"),
    ("3.4028235e38", "3.4028234663852886e+38f"),
    ("1e-50", "0.0f"),
    ("1e-46", "0.0f"),
    ("2.0f", "2.0f"),
    ("0.1", "0.1f"),
]


@pytest.mark.parametrize(("said", "held"), CONSTANTS)
def test_constants_are_what_a_kernel_holds(said: str, held: str) -> None:
    assert parse(said, "score_mod", {}).text == held
    value = float(said.rstrip("f"))
    assert bind(lambda score, *_: score + value, None, None)[0] == f"score_mod (score + {held})"


def test_a_number_beyond_fp32_hides_a_key_on_every_path() -> None:
    x = X.astype(np.float64)
    found = cupyflash.attention(x, x, x, score_mod="q >= k ? score : -1e39")
    np.testing.assert_array_equal(found, cupyflash.attention(x, x, x, mask_mod="q >= k"))
    tiny, none = ({"score_mod": f"score * {c}"} for c in ("1e-50", "0.0"))
    np.testing.assert_array_equal(cupyflash.attention(x, x, x, **tiny), cupyflash.attention(x, x, x, **none))


@pytest.mark.parametrize("text", [LONG["sum"], *(f"score * {said} + {said}" for said, _ in CONSTANTS), "score * 1e-45"])
def test_they_compile(text: str) -> None:
    compile_mod(bind(text, None, None)[0])
