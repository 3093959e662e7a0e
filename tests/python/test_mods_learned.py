"""The gradients of the arrays that a score_mod reads: against differences, torch's autograd, and every error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError
from cupyflash.check import reference
from cupyflash.check.case import Case
from cupyflash.check.case_mods import ModInputs
from cupyflash.mods import bind, read
from cupyflash.mods.learned import ALONG_DIAGONALS, ALONG_KEYS, ALONG_QUERIES, walk_of
from tests import pretended_gpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")

BATCH, HEADS, SQ, SK = 2, 4, 21, 33


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    q, dout = rng.standard_normal((2, BATCH, SQ, HEADS, 16))
    k, v = rng.standard_normal((2, BATCH, SK, 2, 16))
    return {"q": q, "k": k, "v": v, "dout": dout}


@pytest.fixture
def table(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((HEADS, 20))


def gradients(x: dict[str, Any], wanted: Any, **options: Any) -> Any:
    q, k, v = (x[name] for name in "qkv")
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    return cupyflash.attention_backward(x["dout"], q, k, v, out, lse, gradients_of=wanted, **options)


def differences(f: Any, x: np.ndarray) -> np.ndarray:
    """The derivative of a number by each element of an array, which `f` reads."""
    found = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        before, values = x[i], []
        for step in (1e-5, -1e-5):
            x[i] = before + step
            values.append(f())
        x[i], found[i] = before, (values[0] - values[1]) / 2e-5
    return found


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("mods", ["relative", "scales", "heated", "every", "functions"])
def test_the_reference_is_that_of_differences(mods: str, dropout_p: float) -> None:
    case = Case(mods, "quick", 9, 47, 8, 2, 4, 2, causal=True, softcap=3.0, mods=mods, dlse=True, dropout_p=dropout_p)
    x, plain = case.inputs("fp64"), case.problem("fp64")
    drawn, dlse = x.features.mods, x.dlse
    assert drawn is not None
    assert dlse is not None
    doubles = {name: a.astype(np.float64) if a.dtype.kind in "fV" else a for name, a in drawn.mod_arrays.items()}
    own = ModInputs(drawn.score_mod, drawn.mask_mod, doubles)
    x = x.having(mods=own)
    problem = plain.__class__(**plain.__dict__ | {"mods": own.bound()[0]})

    def loss() -> float:
        out, lse = reference.forward(*x[:3], problem, x.features)
        return float((out * x.dout).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum())

    found = reference.backward(x.dout, *x[:3], problem, dlse, x.features)[3:]
    assert len(found) == len(own.learned)
    for name, got in zip(own.learned, found, strict=True):
        np.testing.assert_allclose(got, differences(loss, doubles[name]), rtol=1e-5, atol=1e-7)


def test_an_index_beyond_an_array_counts_as_the_nearest(arrays: dict[str, Any], table: np.ndarray) -> None:
    wide = np.zeros((HEADS, SQ + SK))
    wide[:, SK : SK + 20], wide[:, SK + 20 :], wide[:, :SK] = table, table[:, -1:], table[:, :1]
    found = gradients(arrays, "table", score_mod="score + table[h, q - k]", mod_arrays={"table": table})
    want = gradients(arrays, ("table",), score_mod=f"score + table[h, q - k + {SK}]", mod_arrays={"table": wide})
    summed = want.dmod_arrays["table"][:, SK : SK + 20].copy()
    summed[:, 0] += want.dmod_arrays["table"][:, :SK].sum(axis=1)
    summed[:, -1] += want.dmod_arrays["table"][:, SK + 20 :].sum(axis=1)
    np.testing.assert_allclose(found.dmod_arrays["table"], summed, atol=1e-12)
    np.testing.assert_array_equal(found.dk, want.dk)


def test_what_is_asked_for_is_given(arrays: dict[str, Any], table: np.ndarray) -> None:
    """By the names of mod_arrays, beside those of arguments, each like its array; and nothing else."""
    kind = np.arange(SK) % 2
    options: dict[str, Any] = {
        "score_mod": "kind[k] == 0 ? score * scale[h] : score + table[h, k]",
        "mod_arrays": {"table": table, "scale": np.ones(HEADS, np.float32), "kind": kind, "unused": table},
        "sink": np.ones(HEADS),
    }
    found = gradients(arrays, ("scale", "sink"), deterministic=True, **options)
    assert list(found.dmod_arrays) == ["scale"]
    assert found.dmod_arrays["scale"].dtype == np.float32
    assert found.dsink.shape == (HEADS,)
    both = gradients(arrays, ("table", "scale"), **options)
    assert both.dmod_arrays["table"].shape == table.shape
    np.testing.assert_array_equal(both.dmod_arrays["scale"], found.dmod_arrays["scale"])
    assert not hasattr(both, "dsink")
    assert not hasattr(gradients(arrays, (), **options), "dmod_arrays")
    for wanted, message in (
        ("unused", "gradients_of: expected .*\"table\", got 'unused'"),
        ("mod_array_0", "gradients_of: expected"),
        ("kind", "gradients_of: expected arrays of floats, and kind is int64"),
        ("bias", "gradients_of: expected the names of arrays that are given, and bias is not"),
    ):
        with pytest.raises(ArgumentError, match=message):
            gradients(arrays, wanted, **options)
    options = {"score_mod": "score + sink[h]", "mod_arrays": {"sink": table[:, 0]}, "sink": np.ones(HEADS)}
    with pytest.raises(ArgumentError, match="sink is an argument and one of mod_arrays; rename it there"):
        gradients(arrays, "sink", **options)


def test_hidden_keys_give_nothing(arrays: dict[str, Any], table: np.ndarray) -> None:
    """NaN behind a mask, and rows that see nothing."""
    arrays["k"][:, 7], arrays["v"][:, 9] = np.nan, np.inf
    mask = "k != 7 && k != 9 && q != 3"
    found = gradients(arrays, "table", score_mod="score + table[h, k]", mask_mod=mask, mod_arrays={"table": table})
    assert np.isfinite(found.dmod_arrays["table"]).all()
    assert not found.dmod_arrays["table"][:, [7, 9]].any()
    assert found.dmod_arrays["table"][:, 8].all()


def test_packed_sequences(arrays: dict[str, Any], table: np.ndarray) -> None:
    x = {name: a[:, :SQ].reshape(-1, *a.shape[2:]) for name, a in arrays.items()}
    options = {"score_mod": "score * table(h, b) + table[h, max(0, q - k)]", "mod_arrays": {"table": table}}
    cu_seqlens = np.array([0, SQ, 2 * SQ], np.int32)
    q, k, v = (x[name] for name in "qkv")
    out, lse = cupyflash.attention_varlen(q, k, v, cu_seqlens, return_lse=True, **options)
    dense = {name: a[:, :SQ] for name, a in arrays.items()}
    found = cupyflash.attention_varlen_backward(
        x["dout"], q, k, v, out, lse, cu_seqlens, gradients_of="table", **options
    )
    want = gradients(dense, "table", **options).dmod_arrays["table"]
    np.testing.assert_allclose(found.dmod_arrays["table"], want, atol=1e-12)


def test_how_kernels_go_through_a_tile(table: np.ndarray) -> None:
    for text, walk in (
        ("score + table[h, max(0, q - k)]", ALONG_DIAGONALS),
        ("score * table[h, 0]", ALONG_KEYS),
        ("score * table[h, q]", ALONG_KEYS),
        ("score + table[h, k / 7]", ALONG_QUERIES),
        ("score * table[h, q] + table[h, k]", ALONG_DIAGONALS),
    ):
        mods = read(bind(text, None, {"table": table})[0])
        assert walk_of(mods.reads((0,))) == walk, text


def test_what_decides_or_is_rounded_has_no_gradient(table: np.ndarray) -> None:
    text = "table[h, 0] > 0 && abs(table[h, 1]) < 1 ? score : score + floor(table[h, 2]) + table[h, 3] + table[h, 3]"
    mods = read(bind(text, None, {"table": table})[0])
    assert [x.text for x in mods.reads((0,))] == ["table(h, 3)"]


# ---- PyTorch ----


def dense(x: Any, table: Any, scale: Any) -> Any:
    """`MOD`, written out in torch."""
    import torch

    q, k, v = x
    k, v = (a.repeat_interleave(2, dim=2) for a in (k, v))
    i, j = torch.arange(SQ)[:, None], torch.arange(SK)
    h = torch.arange(HEADS)[:, None, None]
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    s = torch.tanh(s * scale[h]) * scale[h] + table[h, (i - j).clamp(0, 19)]
    s = s.masked_fill(j > i + SK - SQ, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1), v)


MOD = "tanh(score * scale[h]) * scale[h] + table[h, q - k]"


@pytest.mark.needs("torch")
def test_autograd_makes_them_where_arrays_require_grad(arrays: dict[str, Any], table: np.ndarray) -> None:
    """By mod_arrays, and by the closure of a function."""
    import torch

    q, k, v = (torch.tensor(arrays[x], requires_grad=True) for x in "qkv")
    scale, learned = torch.rand(HEADS, dtype=torch.float64, requires_grad=True), torch.tensor(table, requires_grad=True)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score * scale[h]) * scale[h] + learned[h, q_idx - kv_idx]

    leaves, dout = (q, k, v, learned, scale), torch.tensor(arrays["dout"])
    want = torch.autograd.grad(dense((q, k, v), learned, scale), leaves, dout)
    for given in ({"score_mod": MOD, "mod_arrays": {"table": learned, "scale": scale}}, {"score_mod": mod}):
        out = cupyflash.attention(q, k, v, causal=True, **given)
        for got, expected in zip(torch.autograd.grad(out, leaves, dout), want, strict=True):
            torch.testing.assert_close(got, expected)
    frozen = {"table": learned.detach(), "scale": scale}
    out = cupyflash.attention(q, k, v, causal=True, score_mod=MOD, mod_arrays=frozen)
    torch.testing.assert_close(torch.autograd.grad(out, (scale,), dout)[0], want[-1])


@pytest.mark.needs("torch")
def test_func_vmap_and_compiled_programs(arrays: dict[str, Any], table: np.ndarray) -> None:
    import torch

    q, k, v = (torch.tensor(arrays[x]) for x in "qkv")
    scale, learned, dout = torch.rand(HEADS, dtype=torch.float64), torch.tensor(table), torch.tensor(arrays["dout"])

    def loss(table: Any, scale: Any) -> Any:
        return (
            cupyflash.attention(q, k, v, causal=True, score_mod=MOD, mod_arrays={"table": table, "scale": scale}) * dout
        ).sum()

    want = torch.func.grad(lambda *x: (dense((q, k, v), *x) * dout).sum(), (0, 1))(learned, scale)
    for got, expected in zip(torch.func.grad(loss, (0, 1))(learned, scale), want, strict=True):
        torch.testing.assert_close(got, expected)
    many = torch.stack([scale, 2 * scale])
    mapped = torch.func.vmap(torch.func.grad(loss, 1), (None, 0))(learned, many)
    torch.testing.assert_close(mapped, torch.stack([torch.func.grad(loss, 1)(learned, x) for x in many]))
    leaves = [x.clone().requires_grad_() for x in (learned, scale)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for got, expected in zip(torch.autograd.grad(compiled(*leaves), leaves), want, strict=True):
        torch.testing.assert_close(got, expected)
    options: dict[str, Any] = {"causal": True, "score_mod": MOD}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, mod_arrays={"table": learned, "scale": scale}, **options)

    def backward(table: Any, scale: Any) -> Any:
        given = {"table": table, "scale": scale}
        found = cupyflash.attention_backward(
            dout, q, k, v, out, lse, mod_arrays=given, gradients_of=("scale", "table"), **options
        )
        return found.dmod_arrays["table"], found.dmod_arrays["scale"]

    by_itself = torch.compile(backward, backend="aot_eager", fullgraph=True)(learned, scale)
    for got, expected in zip(by_itself, want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.needs("torch")
def test_arrays_keep_their_dtypes(arrays: dict[str, Any]) -> None:
    """Under autocast, too; what a mask alone reads has a gradient of 0."""
    import torch

    q, k, v = (torch.tensor(arrays[x], dtype=torch.float32) for x in "qkv")
    scale = torch.rand(HEADS, requires_grad=True)
    half, limit = torch.rand(SK).bfloat16().requires_grad_(), torch.zeros(HEADS, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = {"scale": scale, "half": half, "limit": limit}
        text, mask = "score * scale[h] + half[k]", "k == 0 || limit[h] < 1"
        out = cupyflash.attention(q, k, v, score_mod=text, mask_mod=mask, mod_arrays=given)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert [x.grad.dtype for x in (scale, half, limit)] == [torch.float32, torch.bfloat16, torch.float32]
    assert scale.grad.any()
    assert not limit.grad.any()


@pytest.mark.needs("torch")
def test_a_bias_is_learned_beside_them(arrays: dict[str, Any], table: np.ndarray) -> None:
    """As what a mod reads is."""
    import torch

    q, k, v = (torch.tensor(arrays[x], requires_grad=True) for x in "qkv")
    bias = torch.rand(q.shape[1], k.shape[1], dtype=torch.float64, requires_grad=True)
    learned, scale = torch.tensor(table, requires_grad=True), torch.rand(HEADS, dtype=torch.float64)
    given, leaves, dout = {"table": learned, "scale": scale}, (q, k, v, learned, bias), torch.tensor(arrays["dout"])
    out = cupyflash.attention(q, k, v, score_mod=MOD, mod_arrays=given, bias=bias)
    want = cupyflash.attention(q, k, v, score_mod=MOD + " + bias[q, k]", mod_arrays=given | {"bias": bias})
    grads = (torch.autograd.grad(x, leaves, dout) for x in (out, want))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


# ---- What would be launched ----


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_launch_what_is_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels before are those of a call without such gradients; other shapes of arrays take the same ones."""
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, lse = np.ones((2, 64, 2, 64), np.float16), np.zeros((2, 2, 64), np.float32)
    found = []
    for columns, wanted in ((9, ()), (9, "table"), (7000, ("table", "scale")), (12, ("scale", "table"))):
        gpu.launched.clear()
        given = {"table": np.ones((2, columns), np.float32), "scale": np.ones(2, np.float16)}
        options = {"score_mod": "score * scale(h) + table(h, k)", "mod_arrays": given, "gradients_of": wanted}
        made = cupyflash.attention_backward(q, q, q, q, q, lse, **options)
        found.append([x.symbol for x in gpu.launched])
        asked = (wanted,) if isinstance(wanted, str) else wanted
        for name in asked:
            assert (made.dmod_arrays[name].shape, made.dmod_arrays[name].dtype) == (
                given[name].shape,
                given[name].dtype,
            )
        kinds = [x.symbol.split("_fp16")[0] for x in gpu.launched[len(found[0]) :]]
        assert kinds == ["bwd_dmods_sums", "bwd_dmods", "bwd_dmods_sums"] * bool(wanted)
        if columns == 7000:
            assert gpu.launched[-1].grid == -(-2 * columns // 4096)
            assert gpu.launched[-2].grid == 4
    assert all(symbols[: len(found[0])] == found[0] for symbols in found)
    assert found[2] == found[3] != found[1]


def test_sums_in_no_order_are_refused_where_order_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended_gpu.pretend(monkeypatch, "sm_80")
    q, lse = np.ones((2, 64, 2, 64), np.float16), np.zeros((2, 2, 64), np.float32)
    options: dict[str, Any] = {"score_mod": "score * scale(h)", "mod_arrays": {"scale": np.ones(2, np.float16)}}
    cupyflash.attention_backward(q, q, q, q, q, lse, deterministic=True, **options)
    with pytest.raises(
        UnsupportedError, match="deterministic: expected False where gradients of mod_arrays are wanted"
    ):
        cupyflash.attention_backward(q, q, q, q, q, lse, deterministic=True, gradients_of="scale", **options)
