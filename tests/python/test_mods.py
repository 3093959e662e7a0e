"""Mods through the public API: what expressions and functions mean, derivatives, every error."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import cupyflash
from cupyflash import ArgumentError
from cupyflash.mods import bind, read, where
from cupyflash.mods.evaluate import evaluate
from cupyflash.mods.expression import Node, apply, name, number
from cupyflash.mods.parse import parse
from tests import pretended_gpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")

BATCH, HEADS, SQ, SK = 2, 4, 21, 33
TABLE = np.random.default_rng(1).standard_normal((HEADS, 20)).astype(np.float32)


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    q, dout = rng.standard_normal((2, BATCH, SQ, HEADS, 16))
    k, v = rng.standard_normal((2, BATCH, SK, 2, 16))
    return {"q": q, "k": k, "v": v, "dout": dout}


def places() -> tuple[Any, Any, Any, Any]:
    b, h = np.arange(BATCH).reshape(-1, 1, 1, 1), np.arange(HEADS).reshape(-1, 1, 1)
    return b, h, np.arange(SQ)[:, None], np.arange(SK)


def written_out(x: dict[str, Any], score: Callable[..., Any], shown: Callable[..., Any]) -> np.ndarray:
    """Attention whose scores are changed by NumPy."""
    k, v = (np.repeat(x[name], 2, axis=2) for name in "kv")
    s = np.einsum("bqhd,bkhd->bhqk", x["q"], k) / 4
    s = np.where(shown(*places()), score(s, *places()), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def everything(*_: Any) -> bool:
    return True


def test_an_expression(arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[x] for x in "qkv")
    text = "0.5f * tanh(score) + table[h][max(0, q - k)] * (b + 1)"
    found = cupyflash.attention(q, k, v, score_mod=text, mod_arrays={"table": TABLE})

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 0.5 * np.tanh(s) + TABLE[h, np.clip(i - j, 0, 19)] * (b + 1)  # the last one counts for all beyond

    np.testing.assert_allclose(found, written_out(arrays, score, everything), atol=1e-6)


def test_a_mask(arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[x] for x in "qkv")
    found = cupyflash.attention(q, k, v, mask_mod="k % 3 == h % 3 || k == 0")
    want = written_out(arrays, lambda s, *_: s, lambda b, h, i, j: (j % 3 == h % 3) | (j == 0))
    np.testing.assert_allclose(found, want, atol=1e-12)


@pytest.mark.parametrize(
    "hides", [{"mask_mod": "q < 5 && k != 2"}, {"score_mod": "q < 5 && k != 2 ? score : -inf"}], ids=str
)
def test_rows_that_see_nothing_and_nan_behind_what_is_hidden(hides: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["k"][:, 2], arrays["v"][:, 2] = np.nan, np.nan
    out, lse = cupyflash.attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True, **hides)
    assert np.isfinite(out).all()
    assert not out[:, 5:].any()
    assert (lse[:, :, 5:] == -np.inf).all()
    sliced = cupyflash.attention(arrays["q"], np.delete(arrays["k"], 2, 1), np.delete(arrays["v"], 2, 1))
    np.testing.assert_allclose(out[:, :5], sliced[:, :5], atol=1e-12)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("score > 0.1f ? score : -inf", lambda s, *_: np.where(s > 0.1, s, -np.inf)),
        ("log(score * score)", lambda s, *_: np.log(s * s)),
        ("k == 3 ? -inf : -1 / abs(score)", lambda s, b, h, i, j: np.where(j == 3, -np.inf, -1 / abs(s))),
    ],
)  # fmt: skip
def test_a_score_that_would_be_hidden_at_0(text: str, score: Any, arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[x] for x in "qkv")
    found = cupyflash.attention(q, k, v, score_mod=text)
    np.testing.assert_allclose(found, written_out(arrays, score, everything), atol=1e-6)


def test_integers_of_64_bits_are_the_nearest_of_32(arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[x] for x in "qkv")
    limit = np.array([2**62, -(2**62)])
    found, lse = cupyflash.attention(q, k, v, mask_mod="k < limit[b]", mod_arrays={"limit": limit}, return_lse=True)
    np.testing.assert_allclose(found[0], cupyflash.attention(q, k, v)[0], atol=1e-12)
    assert (lse[1:] == -np.inf).all()
    same = cupyflash.attention(q, k, v, mask_mod="limit[0] == 2147483647", mod_arrays={"limit": limit})
    np.testing.assert_allclose(same, cupyflash.attention(q, k, v), atol=1e-12)


@pytest.mark.parametrize("text", ["pow(score, k % 2)", "pow(score, 0.f * score)", "pow(0.f, score * score)"])
def test_powers_of_0_have_slopes(text: str, arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[x] for x in "qkv")
    q[:, 1] = 0
    out, lse = cupyflash.attention(q, k, v, score_mod=text, return_lse=True)
    for x in cupyflash.attention_backward(np.ones_like(out), q, k, v, out, lse, score_mod=text):
        assert np.isfinite(x).all()


def flex_like(table: Any, where: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., Any]:
    """As FlexAttention has them: `table` is found in the closure."""

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = abs(q_idx - kv_idx)
        return where(distance < 9, tanh(score / 2) * 2**1 + table[h, distance], score / 3)

    return mod


def test_functions_say_what_expressions_do(arrays: dict[str, Any]) -> None:
    text, _ = bind(flex_like(TABLE, np.where, np.tanh), None, None)
    said, _ = bind("abs(q - k) < 9 ? tanh(score / 2) * 2 + table(h, abs(q - k)) : score / 3", None, {"table": TABLE})
    assert text == said
    assert bind(flex_like(TABLE, where, np.tanh), None, None)[0] == text
    given = bind(lambda score, b, h, q, k, table: score + table[h, k], None, {"table": TABLE, "unused": TABLE})
    assert given[0] == bind("score + table(h, k)", None, {"table": TABLE})[0]
    assert list(given[1]) == ["mod_array_0"]


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_functions_of_flex_attention_as_they_are(arrays: dict[str, Any]) -> None:
    """As torch's own flex_attention has them, and gradients as autograd."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.tensor(arrays[x], dtype=torch.float64, requires_grad=True) for x in "qkv")
    document = torch.tensor(np.sort(np.random.default_rng(0).integers(0, 3, (BATCH, SK)), axis=1))
    mod = flex_like(torch.tensor(np.tile(TABLE, 2)), torch.where, torch.tanh)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (document[b, q_idx] == document[b, kv_idx]) | (kv_idx == 0)

    blocks = create_block_mask(mask, BATCH, None, SQ, SK, device="cpu")
    with torch.no_grad():
        turned = [x.detach().transpose(1, 2) for x in (q, k, v)]
        want = flex_attention(*turned, score_mod=mod, block_mask=blocks, enable_gqa=True).transpose(1, 2)
    found = cupyflash.attention(q, k, v, score_mod=mod, mask_mod=mask)
    torch.testing.assert_close(found, want)
    wide_k, wide_v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    b, h, i, j = (torch.as_tensor(x) for x in places())
    scores = mod(torch.einsum("bqhd,bkhd->bhqk", q, wide_k) / 4, b, h, i, j).masked_fill(~mask(b, h, i, j), -torch.inf)
    dense = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), wide_v)
    dout = torch.tensor(arrays["dout"])
    gradients = (
        torch.autograd.grad(out, (q, k, v), dout) for out in (found, dense)
    )  # on the CPU flex_attention has none
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.needs("torch")
def test_gradcheck_func_and_vmap(arrays: dict[str, Any]) -> None:
    import torch

    q, k, v = (torch.tensor(arrays[x][:, :7], requires_grad=True) for x in "qkv")
    options = {"score_mod": "sin(score) + b * score * table(h, k)", "mod_arrays": {"table": torch.tensor(TABLE)}}
    assert torch.autograd.gradcheck(lambda *x: cupyflash.attention(*x, **options), (q, k, v), atol=1e-5)
    many = [torch.stack([x.detach(), 2 * x.detach(), -x.detach()]) for x in (q, k, v)]
    found = torch.func.vmap(lambda *x: cupyflash.attention(*x, **options))(*many)
    want = torch.stack([cupyflash.attention(*x, **options) for x in zip(*many, strict=True)])
    torch.testing.assert_close(found, want)  # b counts within each


def test_packed_sequences_count_from_their_own_start(arrays: dict[str, Any]) -> None:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (arrays["q"], arrays["k"][:, :SQ], arrays["v"][:, :SQ]))
    options = {"score_mod": "score + (b + 1) * table(h, k) - 0.1f * q", "mod_arrays": {"table": TABLE}}
    cu_seqlens = np.array([0, SQ, 2 * SQ], np.int32)
    found, lse = cupyflash.attention_varlen(q, k, v, cu_seqlens, return_lse=True, **options)
    dense = [x.reshape(BATCH, SQ, *x.shape[1:]) for x in (q, k, v)]
    want, want_lse = cupyflash.attention(*dense, return_lse=True, **options)
    np.testing.assert_allclose(found.reshape(want.shape), want, atol=1e-12)
    dout = arrays["dout"].reshape(q.shape)
    grads = cupyflash.attention_varlen_backward(dout, q, k, v, found, lse, cu_seqlens, **options)
    wants = cupyflash.attention_backward(arrays["dout"], *dense, want, want_lse, **options)
    np.testing.assert_allclose(grads.dk.reshape(wants.dk.shape), wants.dk, atol=1e-12)


# ---- Expressions ----

_NUMBERS = st.sampled_from(
    [name("score"), name("q"), name("k"), name("h"), number(2), number(-3), number(0.25), number(0)]
)


def _grow(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    def made(op: str, *args: Node) -> Node:
        try:
            return apply(op, *args)
        except ArgumentError:
            return args[0]

    two = st.builds(
        made,
        st.sampled_from(["+", "-", "*", "divide", "min", "max", "<", "quotient", "floormod", "&", "pow"]),
        inner,
        inner,
    )
    one = st.builds(made, st.sampled_from(["neg", "abs", "exp", "tanh", "sigmoid", "floor", "!", "~"]), inner)
    return one | two | st.builds(made, st.just("?"), inner, inner, inner)


@hypothesis.given(tree=st.recursive(_NUMBERS, _grow, max_leaves=12))
def test_text_is_read_back_as_the_same_tree(tree: Node) -> None:
    assert parse(tree.text, "score_mod", {}) == tree


@hypothesis.given(tree=st.recursive(_NUMBERS, _grow, max_leaves=8), at=st.floats(-2, 2))
def test_derivatives_are_those_of_differences(tree: Node, at: float) -> None:
    names = {"score": np.float64(at), "b": 0, "h": 1, "q": 5, "k": 3}

    def value(x: float) -> float:
        return float(np.asarray(evaluate(tree, names | {"score": np.float64(x)}, {}, np.float64)[0]))

    with np.errstate(all="ignore"):
        slope = float(np.asarray(evaluate(tree, names, {}, np.float64)[1]))
        differences = [(value(at + e) - value(at - e)) / (2 * e) for e in (1e-5, 1e-6)]
        one_sided = [(value(at + s * 1e-6) - value(at)) / (s * 1e-6) for s in (1, -1)]
    smooth = np.isfinite(differences).all() and np.isclose(*differences, rtol=1e-3, atol=1e-6)
    hypothesis.assume(smooth and np.isfinite(slope) and abs(slope) < 1e6 and abs(at) > 1e-3)
    hypothesis.assume(np.isclose(*one_sided, rtol=1e-2, atol=1e-4))  # no kink here
    np.testing.assert_allclose(slope, differences[0], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("tanh(0.5f * score / 2) * 4", 0),
        ("score * x[0] / x[1]", 1.5),
        ("(q > 2 ? x[0] : 1.f) * score", 3),
        ("score * floor(x[0] + 0.5f)", 3),
        ("divide(2.f, score)", 0),
    ],
)
def test_constants_add_nothing_to_the_derivative_at_an_infinite_score(text: str, slope: float) -> None:
    tree, arrays = parse(text, "score_mod", {"x": ("fp32", 1)}), {"x": np.array([3.0, 2.0])}
    for score in (-np.inf, np.inf):
        names = {"score": np.float64(score), "b": 0, "h": 1, "q": 5, "k": 3}
        with np.errstate(all="ignore"):
            assert evaluate(tree, names, arrays, np.float64)[1] == slope


def test_arithmetic_is_that_of_the_language() -> None:
    """C++ cuts quotients of integers off, Python rounds them down; neither divides by 0."""
    for text, want in (("q / 2 - h % k", 1), ("(q - 8) / 2", -1), ("(q - 8) % 2", -1), ("q / 0 + q % 0", 5)):
        names = {"score": np.float64(0), "b": 0, "h": 10, "q": 5, "k": 9}
        assert evaluate(parse(text, "score_mod", {}), names, {}, np.float64)[0] == want, text
    floored, _ = bind(lambda s, b, h, q, k: s + (q - 8) // 2 + (q - 8) % 2, None, None)
    assert "floordiv((q - 8), 2)" in floored
    assert "floormod((q - 8), 2)" in floored


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("score + float(q - k) / 3", "score + divide((q - k) + 0.f, 3)"),
        ("score * (float)h / k", "divide(score * (h + 0.f), k)"),
        ("(float)-q * score", "(-q + 0.f) * score"),
        ("static_cast<float>(q) / static_cast<int>(q > k)", "divide(q + 0.f, (q > k) + 0)"),
        ("(float)score + (q) - (k)", "score + q - k"),
        ("bool(q) ? score : -INFINITY", "q != 0 ? score : -inf"),
        ("std::max(score, 0.f) + fminf(0x1F, score)", "max(score, 0.f) + min(31, score)"),
        ("score // of a pair\n  /* less\n its distance */ - abs(q - k) //", "score - abs(q - k)"),
    ],
)
def test_what_else_c_has(text: str, says: str) -> None:
    assert parse(text, "score_mod", {}) == parse(says, "score_mod", {})


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"score_mod": "score + bais[h]"},
        r"score_mod: 'bais': expected one of score, b, h.*\n    score \+ bais\[h\]\n +\^",
    ),
    ({"score_mod": "score +"}, r"score_mod: expected a value, got 'the end'\n    score \+\n"),
    ({"score_mod": "score; while(1);"}, "score_mod: expected a C\\+\\+ expression"),
    ({"score_mod": "table(h)"}, "table: expected an index for each of its 2 dimensions, got 1"),
    ({"score_mod": "table(h, score)"}, "table: expected integers as indices"),
    ({"score_mod": "score < 3"}, "score_mod: expected a number for each score, got a bool"),
    ({"score_mod": "score //\n + 1 /* 2 */ + bad"}, r"'bad'.*\n     \+ 1 /\* 2 \*/ \+ bad\n {19}\^"),
    ({"score_mod": "int(score)"}, "score_mod: expected a dtype of floats for a float, got int"),
    ({"score_mod": "float(q, k)"}, "score_mod: float: expected 1 value, got 2"),
    ({"score_mod": "score + 010"}, "score_mod: expected a number, and 010 is octal to C\\+\\+"),
    ({"mod_arrays": [TABLE], "score_mod": "score"}, "mod_arrays: expected arrays by their names, a dict, got a list"),
    ({"mod_arrays": {"table": [1.0]}, "score_mod": "score"}, "mod_arrays: table: expected an array, got a list"),
    ({"mask_mod": "score > 0"}, "mask_mod: expected an expression of b, h, q, k, got one of the score"),
    ({"mask_mod": "q - k"}, "mask_mod: expected True or False for each key, got int"),
    ({"score_mod": 3}, "score_mod: expected a C\\+\\+ expression or a function, got a int"),
    ({"score_mod": lambda score, b, h, q, k: score if q > k else 0}, "score_mod: expected an expression without if"),
    ({"score_mod": lambda score, b, h, q, k, other: score}, "score_mod: expected other among mod_arrays"),
    ({"score_mod": lambda score: score}, "score_mod: expected a function of 5 values"),
    ({"score_mod": max}, "score_mod: expected a function of 5 values"),
    ({"score_mod": "score + " + "9" * 5000}, "score_mod: expected an integer of 32 bits, got one of 5000 digits"),
    (
        {"score_mod": lambda score, b, h, q, k: "x"},
        "score_mod: expected symbols, numbers and elements of arrays, got a str",
    ),
    ({"score_mod": lambda score, b, h, q, k: np.arctan(score)}, "score_mod: arctan: expected one of the functions"),
    (
        {"score_mod": "score + h", "mod_arrays": {"h": TABLE}},
        "mod_arrays: expected names of their own, and 'h' is taken",
    ),
    (
        {"score_mod": "score + template(h, k)", "mod_arrays": {"template": TABLE}},
        "mod_arrays: expected names of their own, and 'template' is taken; rename it",
    ),
    (
        {"score_mod": lambda score, b, h, q, k, double: score + double[h, k], "mod_arrays": {"double": TABLE}},
        "mod_arrays: expected names of their own, and 'double' is taken; rename it",
    ),
    ({"score_mod": "c(h, k)", "mod_arrays": {"c": TABLE.astype(complex)}}, "c: expected one of the dtypes"),
    ({"score_mod": "score", "mod_arrays": {"x": 3}}, "x: expected an array, got a int"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_wrong_is_refused(options: dict[str, Any], message: str, arrays: dict[str, Any]) -> None:
    q, k, v = (arrays[x] for x in "qkv")
    with pytest.raises(ArgumentError, match=message):
        cupyflash.attention(q, k, v, **{"mod_arrays": {"table": TABLE}} | options)


CU = np.array([0, 9], np.int32)
# Each way in, of q, k and v of one sequence, the same three times.
DOORS: dict[str, Callable[..., Any]] = {
    "attention": lambda x, lse, cu, **given: cupyflash.attention(x, x, x, **given),
    "backward": lambda x, lse, cu, **given: cupyflash.attention_backward(x, x, x, x, x, lse, **given),
    "varlen": lambda x, lse, cu, **given: cupyflash.attention_varlen(x[0], x[0], x[0], cu, **given),
    "varlen_backward": lambda x, lse, cu, **given: cupyflash.attention_varlen_backward(
        *[x[0]] * 5, lse[0], cu, **given
    ),
    "cache": lambda x, lse, cu, **given: cupyflash.attention_with_cache(x, x, x, cache_seqlens=cu[1:], **given),
    "warmup": lambda x, lse, cu, **given: cupyflash.warmup(**given),
}


@pytest.mark.parametrize("library", ["numpy", *(pytest.param(x, marks=pytest.mark.needs(x)) for x in ("torch", "jax"))])
@pytest.mark.parametrize("door", DOORS)
def test_arrays_that_no_mod_reads_are_refused(door: str, library: str) -> None:
    """They would change nothing; none at all are no mistake."""
    of: Callable[[Any], Any] = np.asarray
    if library != "numpy":
        of = importlib.import_module(library if library == "torch" else "jax.numpy").asarray
    given = of(np.ones((1, 9, 2, 8), np.float32)), of(np.ones((1, 2, 9), np.float32)), of(CU)
    message = (
        r"^mod_arrays: expected none without a mod that reads them, got table; give a score_mod or a mask_mod, or leave"
    )
    with pytest.raises(ArgumentError, match=message):
        DOORS[door](*given, mod_arrays={"table": of(TABLE)})
    with pytest.raises(ArgumentError, match=r"^mod_arrays: expected arrays by their names, a dict, got a list$"):
        DOORS[door](*given, mod_arrays=[])
    if door != "warmup":
        DOORS[door](*given, mod_arrays={})


def test_a_bias_and_a_mask_are_behind_them(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """As a mod that reads both; so are their gradients."""
    q, k, v, dout = (arrays[x] for x in ("q", "k", "v", "dout"))
    bias, mask = rng.standard_normal((4, SQ, SK)), rng.random((SQ, SK)) < 0.7
    text, both = "tanh(score) * 2", {"bias": bias, "mask": mask}
    found = cupyflash.attention(q, k, v, score_mod=text, **both, return_lse=True)
    as_mod = {"score_mod": f"{text} + bias[h, q, k]", "mask_mod": "mask[q, k]", "mod_arrays": both}
    for x, y in zip(found, cupyflash.attention(q, k, v, **as_mod, return_lse=True), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)
    options = {"gradients_of": "bias"}
    grads = cupyflash.attention_backward(dout, q, k, v, *found, score_mod=text, **both, **options)
    like = cupyflash.attention_backward(dout, q, k, v, *found, **as_mod, **options)
    for x, y in zip((*grads, grads.dbias), (*like, like.dmod_arrays["bias"]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_launch_what_is_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have the mod in their source; other shapes of an array take the same ones, another mod others."""
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, text = np.ones((1, 64, 2, 64), np.float16), "score + table(h, k)"
    for columns in (9, 12):
        lse = np.zeros((1, 2, 64), np.float32)
        options = {"score_mod": text, "mod_arrays": {"table": np.ones((2, columns), np.float32)}}
        cupyflash.attention(q, q, q, **options)
        cupyflash.attention_backward(q, q, q, q, q, lse, **options)
    symbols = {x.symbol for x in gpu.launched}
    own = [v for v in gpu.loaded if getattr(v, "mods", "")]
    assert {v.symbol for v in own} < symbols
    assert all("return (score + table(h, k));" in v.source() for v in own)
    cupyflash.attention(q, q, q, score_mod="2 * score")
    assert gpu.launched[-1].symbol not in symbols
    assert read(own[0].mods).arrays[0][:] == ("table", "fp32", 2)  # type: ignore[attr-defined]


@pytest.mark.needs("torch")
def test_an_expression_inside_a_compiled_program(arrays: dict[str, Any]) -> None:
    import torch

    q, table = torch.tensor(arrays["q"]), torch.tensor(TABLE)

    def call(q: Any, table: Any) -> Any:
        return cupyflash.attention(q, q, q, score_mod="score + table(h, k)", mod_arrays={"table": table})

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, table), call(q, table))


def test_what_is_long_is_called() -> None:
    """A mod of many functions is one function in the kernel, whatever reads it; a short one stands where it is used."""
    long = " + ".join(f"sin({i} * score)" for i in range(4))
    for text, is_called in ((long, True), ("sin(score) * tanh(score)", False), ("score", False)):
        source = read(f"score_mod {text}\nmask_mod (q >= k)").source()
        assert ("__noinline__ S score_mod" in source) == is_called
        assert "__device__ bool mask_mod" in source
