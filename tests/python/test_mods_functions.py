"""Python functions as mods: what libraries' functions, methods and indexing mean of symbols, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.mods import bind
from cupyflash.mods.evaluate import evaluate
from cupyflash.mods.functions import KNOWN
from cupyflash.mods.symbols import called
from cupyflash.mods.trace import trace
from tests.mod_unit import compile_mod

pytestmark = pytest.mark.usefixtures("on_the_cpu")

AT = np.array([-30.5, -2.5, -1.0, -0.25, 0.25, 1.0, 1.5, 2.5, 30.5])
TABLE = np.random.default_rng(1).standard_normal((4, 20)).astype(np.float32)
DOCUMENT = np.arange(40) // 7

# Calls of a function f of x, by its name. Values of conditions are doubled, since a score is a number.
OF_ONE = ("abs", "fabs", "neg", "negative", "positive", "exp", "exp2", "expm1", "sigmoid", "tanh", "sin", "cos",
          "tan", "relu", "relu6", "silu", "square", "reciprocal", "sign", "floor", "ceil", "trunc", "fix",
          "absolute")  # fmt: skip
OF_POSITIVE = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")
OF_TWO = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder",
          "mod", "fmod", "maximum", "minimum", "fmax", "fmin", "logaddexp")  # fmt: skip
POWERS = ("pow", "power", "float_power")
TESTS = ("isinf", "isnan", "isfinite", "isposinf", "isneginf")
COMPARED = ("eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt", "greater", "ge", "greater_equal")
LOGICAL = ("logical_and", "logical_or", "logical_xor")
Call = Callable[[Any, Callable[..., Any]], Any]
CALLS: dict[str, Call] = dict.fromkeys((*OF_ONE, *OF_POSITIVE), lambda x, f: f(x))
CALLS |= dict.fromkeys(OF_TWO, lambda x, f: f(x, x * 0 + 1.75)) | dict.fromkeys(POWERS, lambda x, f: f(x, 1.75))
CALLS |= dict.fromkeys(TESTS, lambda x, f: 2.0 * f(x)) | dict.fromkeys(COMPARED, lambda x, f: 2.0 * f(x, x * 0 + 1.0))
CALLS |= dict.fromkeys(LOGICAL, lambda x, f: 2.0 * f(x < 1, x > -1))
CALLS |= {
    "logical_not": lambda x, f: 2.0 * f(x < 0),
    "clip": lambda x, f: f(x, -1.25, 2),
    "where": lambda x, f: f(x < 0, x * x, x),
}
OF_TORCH: dict[str, Call] = {
    "clamp": lambda x, f: f(x, -1.25, max=2) + f(x, max=-1) + f(x, min=1.25),
    "clamp_min": lambda x, f: f(x, -1.25),
    "clamp_max": lambda x, f: f(x, 1.25),
    "leaky_relu": lambda x, f: f(x, negative_slope=0.3) + f(x),
    "softplus": lambda x, f: f(x) + f(x, beta=2, threshold=10),
    "masked_fill": lambda x, f: f(x, x < 0, 3.0),
    "add": lambda x, f: f(x, x * x, alpha=2),
    "sub": lambda x, f: f(x, x * x, alpha=2),
    "div": lambda x, f: f(x, x * 0 + 1.75, rounding_mode="trunc") + f(x, x * 0 + 1.75, rounding_mode="floor"),
    "where": lambda x, f: f(other=x, input=x * x, condition=x < 0),
}
INTEGERS: dict[str, Call] = dict.fromkeys(
    ("bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder", "fmod", "mod", "maximum", "minimum"),
    lambda x, f: f(x, 3),
)
INTEGERS |= dict.fromkeys(
    ("bitwise_left_shift", "bitwise_right_shift", "left_shift", "right_shift"), lambda x, f: f(x, 2)
)
INTEGERS |= dict.fromkeys(("bitwise_not", "invert", "square", "sign", "floor", "ceil", "trunc"), lambda x, f: f(x))


def value_and_slope(function: Callable[[Any], Any], at: Any) -> tuple[np.ndarray, np.ndarray]:
    """Those of a function of the score."""
    tree = trace(lambda score, *_: function(score), "score_mod", {}, {})
    names = {"score": at, "b": 0, "h": 1, "q": 5, "k": 3}
    with np.errstate(all="ignore"):
        found = evaluate(tree, names, {}, np.float64)
    value, slope = (np.broadcast_to(x, at.shape).astype(float) for x in found)
    return value, slope


def points(name: str) -> np.ndarray:
    return AT[AT > 0] if name in (*OF_POSITIVE, *POWERS) else AT


@pytest.mark.filterwarnings("ignore:numpy.fix is deprecated")  # from 2.5 on; it is what users may have
@pytest.mark.parametrize("name", [name for name in CALLS if hasattr(np, name)])
def test_functions_are_those_of_numpy(name: str) -> None:
    call, at = CALLS[name], points(name)
    np.testing.assert_allclose(
        value_and_slope(lambda x: call(x, getattr(np, name)), at)[0],
        call(at, getattr(np, name)),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "log", "log2"])
def test_a_slope_of_0_stays_0(name: str) -> None:
    """Where it is multiplied by an infinite one: below 0 nothing depends on the score."""
    found = value_and_slope(lambda x: called(name, (called("relu", (x,)),)), AT)[1]
    assert (found[AT < 0] == 0).all()
    assert (found[AT > 0] != 0).all()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("is_method", [False, True], ids=["function", "method"])
@pytest.mark.parametrize("name", [*CALLS, *OF_TORCH])
def test_functions_and_their_derivatives_are_those_of_torch(name: str, is_method: bool) -> None:
    import torch

    homes = (torch.Tensor,) if is_method else (torch, torch.nn.functional)
    function = next((getattr(home, name) for home in homes if hasattr(home, name)), None)
    if function is None or (name == "where" and is_method):  # is not torch's, or has its operands in another order
        return

    def of_symbol(x: Any) -> Any:
        method = lambda x, *args, **options: getattr(x, name)(*args, **options)  # noqa: E731
        return call(x, method if is_method else function)

    for call in {CALLS.get(name), OF_TORCH.get(name)} - {None}:
        x = torch.tensor(points(name), requires_grad=True)
        want = call(x, function)  # type: ignore[misc]
        has_slope = want.requires_grad and name != "floor_divide"  # for which torch has none
        slope = torch.autograd.grad(want.sum(), x)[0] if has_slope else None
        found = value_and_slope(of_symbol, points(name))
        np.testing.assert_allclose(found[0], want.detach(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found[1], 0 if slope is None else slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in INTEGERS if hasattr(np, name)])
def test_integers_stay_integers(name: str) -> None:
    tree = trace(lambda score, b, h, q, k: INTEGERS[name](q - 8, getattr(np, name)), "score_mod", {}, {})
    q = np.arange(20)
    found = evaluate(tree, {"score": 0.0, "b": 0, "h": 0, "q": q, "k": 0}, {}, np.float64)[0]
    assert tree.kind == "int"
    np.testing.assert_array_equal(found, INTEGERS[name](q - 8, getattr(np, name)))


@pytest.mark.needs("jax")
def test_functions_are_those_of_jax() -> None:
    import jax
    import jax.numpy as jnp
    from jax import lax, nn

    of_floats = [
        lambda x: lax.clamp(-1.25, x, 2.0) + lax.rem(x, jnp.full_like(x, 1.75)),
        lambda x: (
            nn.relu(x) + nn.silu(x) + nn.softplus(x) + nn.relu6(x) + nn.leaky_relu(x, 0.3) + lax.integer_pow(x, 3)
        ),
        lambda x: jnp.clip(x, min=-1.25) + jnp.clip(x, None, 2.0) + jnp.where(jnp.isinf(x), 0.0, jnp.square(x)),
    ]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        at = jnp.asarray(AT)
        for f in of_floats:
            tree = trace(_of_score(f), "score_mod", {}, {})
            with np.errstate(all="ignore"):
                found = evaluate(tree, {"score": AT, "b": 0, "h": 1, "q": 5, "k": 3}, {}, np.float64)
            np.testing.assert_allclose(found[0], f(at), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(found[1], jax.vmap(jax.grad(f))(at), rtol=1e-12, atol=1e-12)
    assert value_and_slope(lambda x: called("lax.div", (7, 2)) + x, np.zeros(1))[0] == 3


def _of_score(f: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda score, b, h, q, k: f(score)


def test_every_function_compiles() -> None:
    """Of the score, of integers and with a derivative, by NVRTC, for which it has to be C++."""
    every = CALLS | OF_TORCH
    others = ("equal", "expit", "integer_pow", "lax.clamp", "lax.div", "log_sigmoid", "max", "min", "rem", "swish")
    assert set(KNOWN) <= {*every, *INTEGERS, *others, "floordiv", "floormod", "quotient"}

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        of = [(x, n, f) for n, f in every.items() for x in (score, q, q < k)] + [(q, n, f) for n, f in INTEGERS.items()]
        return functools.reduce(lambda x, y: x + y, (f(x, functools.partial(_called, n)) for x, n, f in of))

    text, _ = bind(mod, None, None)
    compile_mod(text)


@pytest.mark.needs("torch")
def test_torch_log_sigmoid() -> None:
    import torch

    f, x = torch.nn.functional.logsigmoid, torch.tensor(AT, requires_grad=True)
    found = value_and_slope(f, AT)
    np.testing.assert_allclose(found[0], f(x).detach(), atol=3e-9)  # from -20 down it is x itself, as softplus is
    np.testing.assert_allclose(found[1], torch.autograd.grad(f(x).sum(), x)[0], atol=3e-9)


def _called(name: str, *args: Any, **options: Any) -> Any:
    return called(name, args, options)


# ---- As FlexAttention has them ----


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return causal(b, h, q_idx, kv_idx) & same_document(b, h, q_idx, kv_idx)


def of_documents(document: Any) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]


def text_of(mask_mod: Any) -> str:
    return bind(None, mask_mod, None)[0]


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_torch_masks_of_masks(rng: np.random.Generator) -> None:
    """What and_masks, or_masks and noop_mask make, of functions with arrays of the same name."""
    import torch
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, noop_mask, or_masks

    q, k, v = (torch.tensor(x) for x in rng.standard_normal((3, 2, 40, 4, 16)))
    one, other = (of_documents(torch.arange(40) // n) for n in (7, 13))
    for mask in (and_masks(causal, one, other), or_masks(and_masks(causal, one), other), noop_mask, and_masks(causal)):
        found = cupyflash.attention(q, k, v, mask_mod=mask)
        blocks = create_block_mask(mask, None, None, 40, 40, device="cpu")
        want = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks).transpose(1, 2)
        torch.testing.assert_close(found, want)
    bound, arrays = bind(None, and_masks(one, other), None)
    assert "document(q)" in bound
    assert "document_2(q)" in bound
    assert len(arrays) == 2


def test_functions_that_a_mod_calls_may_hold_arrays() -> None:
    wanted = bind(None, "q >= k && DOCUMENT[q] == DOCUMENT[k]", {"DOCUMENT": DOCUMENT})[0].replace("&&", "&")
    assert text_of(both) == wanted
    assert text_of(lambda b, h, q, k: both(b, h, q, k)) == wanted

    def with_a_default(b: Any, h: Any, q: Any, k: Any, table: Any = DOCUMENT) -> Any:
        return table[q] == table[k]

    assert text_of(with_a_default) == bind(None, "table[q] == table[k]", {"table": DOCUMENT})[0]


def test_a_function_may_call_itself() -> None:
    def power(x: Any, n: int) -> Any:
        return x if n == 1 else x * power(x, n - 1) + TABLE[0, 0]

    text, arrays = bind(lambda score, b, h, q, k: power(score, 3), None, None)
    assert text.endswith("score_mod ((score * ((score * score) + TABLE(0, 0))) + TABLE(0, 0))")
    assert len(arrays) == 1


def test_arrays_are_indexed_one_dimension_after_the_other() -> None:
    for mod in (lambda s, b, h, q, k: s + TABLE[h][k], lambda s, b, h, q, k: s + TABLE[(h,)][(k,)]):
        assert bind(mod, None, None)[0] == bind("score + TABLE[h][k]", None, {"TABLE": TABLE})[0]


def text(mod: Callable[..., Any]) -> str:
    return bind(mod, None, None)[0].removeprefix("score_mod ")


def test_dtypes_of_integers_and_bools() -> None:
    assert text(lambda s, b, h, q, k: s + q.long() + q.to(np.int32).float()) == "((score + q) + q)"
    assert text(lambda s, b, h, q, k: s * (q >= k).int()) == "(score * ((q >= k) + 0))"
    assert text(lambda s, b, h, q, k: s * q.bool()) == "(score * (q != 0))"
    assert text(lambda s, b, h, q, k: s.new_zeros(()) + q.new_ones([]) + s.new_full((), -2.5)) == (
        "((0.0f + 1) + (-2.5f))"
    )


def test_booleans_are_as_in_libraries() -> None:
    """Two of them make one, where C++ counts."""
    assert text(lambda s, b, h, q, k: s * ((q >= k) + (k > 3))) == "(score * ((q >= k) || (k > 3)))"
    assert text(lambda s, b, h, q, k: np.where(~((q >= k) * (k > 3)), s, -1.0)) == (
        "((!((q >= k) && (k > 3))) ? score : (-1.0f))"
    )
    assert text(lambda s, b, h, q, k: s * np.minimum(q >= k, k > 3)) == "(score * ((q >= k) && (k > 3)))"
    assert text(lambda s, b, h, q, k: s * np.maximum(q >= k, k > 3)) == "(score * ((q >= k) || (k > 3)))"
    assert text(lambda s, b, h, q, k: s * ((q >= k).add(k > 3))) == "(score * ((q >= k) || (k > 3)))"
    assert text(lambda s, b, h, q, k: s * ((q >= k) + 1)) == "(score * ((q >= k) + 1))"


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda s, b, h, q, k: s.cumsum(0), "score_mod: cumsum: symbols have no such method or attribute; expected one"),
    (lambda s, b, h, q, k: s.add_(1), "add_: symbols have no such method"),
    (lambda s, b, h, q, k: np.arctan2(s, s), "arctan2: expected one of the functions"),
    (lambda s, b, h, q, k: np.clip(s, 0, 1, dtype=np.float32), "expected symbols, numbers"),
    (lambda s, b, h, q, k: s.clamp(lowest=0), "clamp: expected values, and no options but those of a number; .*lowest"),
    (lambda s, b, h, q, k: s.add(None), "add: expected values"),
    (lambda s, b, h, q, k: s.new_ones(3), r"new_ones: expected one value, of size \(\), got 3"),
    (lambda s, b, h, q, k: s.long(), "expected a dtype of floats for a float, got long; use floor"),
    (lambda s, b, h, q, k: s * ((q > k) - (k > 3)), "-: expected numbers, got two booleans; use \\^"),
    (lambda s, b, h, q, k: s.div(2, rounding_mode="up"), "div: expected a rounding_mode of None, 'floor' or 'trunc'"),
    (lambda s, b, h, q, k: s + TABLE, "TABLE: expected an index for each of its 2 dimensions, got 0"),
    (lambda s, b, h, q, k: s + TABLE[h], "TABLE: expected an index for each of its 2 dimensions, got 1"),
    (
        lambda s, b, h, q, k: s + TABLE[h][q][k],
        "TABLE: expected an index for each of its 2 dimensions, got 3|subscript",
    ),
    (lambda s, b, h, q, k: s + TABLE[h, :], "TABLE: expected an index for each of its 2 dimensions, got slice"),
    (lambda s, b, h, q, k: s + TABLE[h, -1], "TABLE: expected an index from 0 on, got -1"),
    (lambda s, b, h, q, k: s + TABLE.shape[0], "TABLE.shape: expected elements alone"),
    (lambda s, b, h, q, k: s + sum(TABLE), "TABLE: expected an element of it, such as .*, got a loop"),
    (lambda s, b, h, q, k: s + max(q - k, 0), "expected an expression without if, and, or, not, min"),
    (lambda s, b, h, q, k: s + [1.0, 2.0][h], "expected no int"),
]


@pytest.mark.parametrize(("mod", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_cannot_be_taken_is_refused_by_name(mod: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bind(mod, None, None)


@pytest.mark.needs("torch")
def test_an_array_held_elsewhere_is_refused_by_name() -> None:
    import torch

    held = {"table": torch.tensor(TABLE)}
    with pytest.raises(ArgumentError, match="expected arrays of mod_arrays, or such that the function itself names"):
        bind(lambda s, b, h, q, k: s + held["table"][h, k], None, None)


def test_symbols_say_that_they_lack_what_they_lack() -> None:
    """Code that asks for an attribute before it uses it is answered."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s.tanh() if hasattr(s, "tanh") and not hasattr(s, "cumsum") else s

    assert bind(mod, None, None)[0] == "score_mod tanh(score)"


@pytest.mark.needs("torch")
def test_an_array_of_another_library_is_named_as_the_caller_names_it(rng: np.random.Generator) -> None:
    import torch

    q = rng.standard_normal((1, 8, 2, 16))
    with pytest.raises(ArgumentError, match=r"^mod_arrays: slopes: .* of torch; give numpy\.asarray\(slopes\)$"):
        cupyflash.attention(q, q, q, score_mod="score * slopes[h]", mod_arrays={"slopes": torch.ones(2)})
