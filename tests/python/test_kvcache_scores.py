"""attention_with_cache with what becomes of scores element by element: a bias, a mask and mods."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, UnsupportedError, attention, attention_varlen, attention_with_cache
from cupyflash.bias import WHOLE, Bias
from cupyflash.cache.problem import CacheProblem
from cupyflash.gpu.device import Device
from cupyflash.plan.decode import variants_over_cache
from cupyflash.plan.params_decode import DECODE_PARAMS, DECODE_SM90_PARAMS
from cupyflash.plan.prefill import Lie, way_of
from cupyflash.plan.shipped_cache import problem
from tests import pretended_gpu
from tests.small_cache import small

Arrays = dict[str, Any]


def dense(x: Arrays, b: int, **more: Any) -> tuple[Any, Any]:
    """Sequence b of a call of `small` by itself, after its append."""
    n = int(x["cache_seqlens"][b]) + 1
    caches = [np.concatenate((x[f"{name}_cache"][b, : n - 1], x[name][b]))[None] for name in "kv"]
    return attention(x["q"][b : b + 1], *caches, **more, return_lse=True)


@pytest.mark.parametrize("shape", [(3, 4, 1, 20), (4, 1, 1), (20,), (3, 1, 1, 20), (1, 1), ()])
def test_as_attention_to_the_rows_in_use(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """A bias and a mask of every shape that broadcasts, whose last dimension is the rows that a sequence can have."""
    x = small(rng)
    bias, mask = np.asarray(rng.standard_normal(shape), np.float32), np.asarray(rng.random(shape) < 0.7)
    expected = []
    for b in range(3):
        n = int(x["cache_seqlens"][b]) + 1
        own = {"bias": np.broadcast_to(bias, (3, 4, 1, 20)), "mask": np.broadcast_to(mask, (3, 4, 1, 20))}
        expected.append(dense(x, b, **{name: y[b : b + 1, ..., :n] for name, y in own.items()}))
    out, lse = attention_with_cache(**x, bias=bias, mask=mask, return_lse=True)
    for b, (o, own_lse) in enumerate(expected):
        np.testing.assert_allclose(out[b : b + 1], o, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[b : b + 1], own_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hides", ["bias", "mask"])
def test_what_is_hidden_does_not_leak(hides: str, rng: np.random.Generator) -> None:
    """Rows in use that hold NaN; one query sees none of its keys."""
    x = small(rng)
    clean = {name: y.copy() for name, y in x.items()}
    shown = rng.random((3, 1, 1, 20)) < 0.5
    shown[1], shown[2, ..., 0] = False, True
    for name in ("k_cache", "v_cache"):
        x[name][~shown[:, 0, 0]] = np.nan
    added = shown if hides == "mask" else np.where(shown, 0, -np.inf).astype(np.float32)
    found = attention_with_cache(**x, **{hides: added}, return_lse=True)
    expected = attention_with_cache(**clean, **{hides: added}, return_lse=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not found[0][1].any()
    assert np.isneginf(found[1][1]).all()


def test_packed_as_varlen(rng: np.random.Generator) -> None:
    """With room for more queries than any sequence has."""
    cu_q, lengths = np.array([0, 4, 4, 5], np.int32), np.array([9, 3, 17], np.int32)
    q = rng.standard_normal((5, 4, 16), dtype=np.float32)
    k_cache, v_cache = rng.standard_normal((2, 3, 20, 2, 16), dtype=np.float32)
    bias = rng.standard_normal((4, 6, 20), dtype=np.float32)
    given = {"cache_seqlens": lengths, "cu_seqlens_q": cu_q, "causal": True}
    out = attention_with_cache(q, k_cache, v_cache, bias=bias, **given)
    rows = [x.reshape(60, 2, 16) for x in (k_cache, v_cache)]
    cu_k = np.arange(0, 61, 20, dtype=np.int32)
    expected = attention_varlen(q, *rows, cu_q, cu_k, seqused_k=lengths, bias=bias, causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match=r"bias: expected room for at least 4 queries, those of sequence 0, got 3"):
        attention_with_cache(q, k_cache, v_cache, bias=bias[:, :3], **given)


def test_mods_count_queries_of_the_call_and_rows_of_the_sequence(rng: np.random.Generator) -> None:
    """As `attention` to the rows in use does, where the range begins behind row 0, too."""
    x = small(rng, q=rng.standard_normal((3, 2, 4, 16), dtype=np.float32))
    table = rng.standard_normal((3, 4, 2, 20)).astype(np.float32)
    mods = {"score_mod": "score + table[b, h, q, k]", "mask_mod": "k != 3", "mod_arrays": {"table": table}}
    ranges = np.array([[0, 1], [2, 8], [5, 20]], np.int32)
    out = attention_with_cache(**x, **mods, kv_range=ranges)
    shown = np.arange(20) != 3
    bias = attention_with_cache(**x, bias=table, mask=shown, kv_range=ranges)
    np.testing.assert_allclose(out, bias, rtol=1e-5, atol=1e-6)
    one = {"score_mod": "score + table[0, h, q, k]", "mask_mod": "k != 3", "mod_arrays": {"table": table[2:]}}
    np.testing.assert_allclose(out[2:], dense(x, 2, **one, kv_range=ranges[2:])[0], rtol=1e-5, atol=1e-6)


def test_mods_are_functions_too(rng: np.random.Generator) -> None:
    x, first = small(rng), np.array([0, 2, 15], np.int32)
    out = attention_with_cache(**x, mask_mod=lambda b, h, q, k: k <= first[b] + q)
    seen = np.arange(20) <= first[:, None]
    np.testing.assert_allclose(out, attention_with_cache(**x, mask=seen[:, None, None]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mods", "message"),
    [({"score_mod": "q > k"}, "score_mod: expected a number for each score, got a bool"),
     ({"mask_mod": 3}, "mask_mod: expected a C++ expression or a function, got a int"),
     ({"score_mod": "score + t[k]"}, "score_mod: "),
     ({"score_mod": "score + t[k]", "mod_arrays": {"t": np.zeros(3, np.uint8)}}, "mod_arrays: t: expected one of")],
)  # fmt: skip
def test_wrong_mods_are_named(mods: Arrays, message: str, rng: np.random.Generator) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention_with_cache(**small(rng), **mods)


ONES = np.ones((3, 4, 1, 20), np.float32)
WRONG: tuple[tuple[Arrays, str], ...] = (
    ({"bias": ONES[..., :19]},
     "bias: expected a shape that broadcasts to (batch, heads_q, seqlen_q, capacity) = (3, 4, 1, 20), got (3, 4, 1, "
     "19)"),
    ({"mask": np.ones((1, 3, 4, 1, 20), bool)}, "mask: expected a shape that broadcasts to"),
    ({"bias": ONES.astype(np.float16)}, "bias: expected dtype fp32, got fp16; cast it"),
    ({"mask": ONES}, "mask: expected dtype bool, got fp32; cast it"),
    ({"bias": ONES > 0}, "bias: expected dtype fp32, got bool; cast it"),
)  # fmt: skip


@pytest.mark.parametrize(("more", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(more: Arrays, message: str, rng: np.random.Generator) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention_with_cache(**small(rng), **more)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_is_launched(arch: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays where they lie, with strides of 0 where they are broadcast; what mods read contiguous."""
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    x = {name: y.astype(np.float16) if y.dtype == np.float32 else y for name, y in small(rng).items()}
    bias = np.zeros((20, 4, 2), np.float32)[:, :, 1].T[:, None]
    mask, table = np.ones((3, 1, 1, 21), bool)[..., 1:], np.zeros((4, 7), np.float16).T
    mods = {"score_mod": "score + table[k, h]", "mod_arrays": {"table": table}}
    attention_with_cache(**x, bias=bias, mask=mask, **mods)
    _, main, *_ = gpu.launched
    params = np.frombuffer(main.params, DECODE_SM90_PARAMS if "decode_sm90" in main.symbol else DECODE_PARAMS)[0]
    plain = params["plain"] if "decode_sm90" in main.symbol else params
    assert [plain["bias"], plain["mask"]] == [y.ctypes.data for y in (bias, mask)]
    assert (plain["bias_stride"].tolist(), plain["mask_stride"].tolist()) == ((0, 2, 0, 8), (21, 0, 0, 1))
    assert plain["mod_array_0"] != table.ctypes.data
    assert plain["mod_array_0_lengths"].tolist() == (7, 4, 1, 1)
    assert plain["shares"]["unit"] == 1
    assert "_bias_wide_bias_mask_masked_bias_bias_beside_mods_" in main.symbol
    attention_with_cache(**x, bias=bias.astype(np.float16))
    assert "_bias" in gpu.launched[-2].symbol + gpu.launched[-1].symbol


def many(**more: Any) -> CacheProblem:
    """As many queries as take the forward."""
    return problem("bf16", 128, 8, seqlen_q=512, **more)


@pytest.mark.parametrize("bias", [Bias("bf16"), Bias("fp32", beside=WHOLE), Bias("bool")])
@pytest.mark.parametrize("stored", ["", "int8"])
def test_many_queries_take_the_forward(bias: Bias, stored: str) -> None:
    gpu, more = Device.synthetic("sm_90"), {"stored": stored, "scale_dims": int(stored != "")}
    way = way_of(many(**more), gpu, Lie())
    assert way is not None
    for added in ({"bias": bias}, {"mods": "mask_mod (k < 5)"}):
        assert way_of(many(**more, **added), gpu, Lie()) == way
        found = variants_over_cache(many(**more, **added), gpu, aligned=True, tma=True)
        as_blocks = added.get("bias") == Bias("bool")
        assert all(as_blocks or "_bias" in v.symbol for v in found if v.folder != "decode")
        before = [v.header for v in found if v.folder == "any"][:2]
        assert (before == ["mask_tiles", "key_lists"]) == as_blocks
        assert {v.folder for v in found} == {"sm90", "any"} | ({"decode"} if stored else set())


@pytest.mark.needs("torch")
@pytest.mark.parametrize("append", [False, True])
def test_torch_compiles_it_whole(append: bool, rng: np.random.Generator) -> None:
    import torch

    import cupyflash.torch.cached

    x = small(rng, bias=rng.standard_normal((4, 1, 20), dtype=np.float32).swapaxes(0, 1)[None].swapaxes(1, 2),
              mask=rng.random((3, 1, 1, 20)) < 0.7)  # fmt: skip
    given = {name: torch.from_numpy(y) for name, y in x.items() if append or name not in "kv"}
    a, b = ({name: y.clone() for name, y in given.items()} for _ in range(2))
    step = torch.compile(lambda x: attention_with_cache(**x, return_lse=True), backend="aot_eager", fullgraph=True)
    for found, expected in zip(step(a), attention_with_cache(**b, return_lse=True), strict=True):
        torch.testing.assert_close(found, expected)
    op = cupyflash.torch.cached.APPEND_OP if append else cupyflash.torch.cached.READ_OP
    values = [given.get(row.name) for row in cupyflash.torch.cached._INPUTS]
    torch.library.opcheck(op, (*values, True, None, None, None, None, False, None, False, "", None))
    given["bias"].requires_grad_()
    with pytest.raises(UnsupportedError, match="bias: expected a tensor without requires_grad"):
        attention_with_cache(**given)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("append", [False, True])
def test_torch_compiles_mods(append: bool, rng: np.random.Generator) -> None:
    import torch

    given = {name: torch.from_numpy(y) for name, y in small(rng).items() if append or name not in "kv"}
    a, b = ({name: y.clone() for name, y in given.items()} for _ in range(2))
    table = torch.randn(4, 20)
    mods = {"score_mod": "score + table[h, k]", "mask_mod": "k != 2", "mod_arrays": {"table": table}}
    step = torch.compile(lambda x: attention_with_cache(**x, **mods), backend="aot_eager", fullgraph=True)
    expected = attention_with_cache(**b, **mods)
    torch.testing.assert_close(step(a), expected)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[h, k]

    found = attention_with_cache(**given, score_mod=score_mod, mask_mod=lambda b, h, q, k: k != 2)
    torch.testing.assert_close(found, expected)
    table.requires_grad_()
    with pytest.raises(UnsupportedError, match="expected a tensor without requires_grad"):
        attention_with_cache(**given, **mods)


@pytest.mark.needs("jax")
def test_jax_mods_under_jit(rng: np.random.Generator) -> None:
    import jax

    x, table = small(rng), rng.standard_normal((4, 20), dtype=np.float32)
    mods = {"score_mod": "score + table[h, k]", "mask_mod": "k != 2"}
    expected = attention_with_cache(**{n: y.copy() for n, y in x.items()}, **mods, mod_arrays={"table": table})

    @jax.jit
    def step(x: Arrays, table: Any) -> Any:
        return attention_with_cache(**x, **mods, mod_arrays={"table": table})[0]

    given = {name: jax.numpy.asarray(y) for name, y in x.items()}
    np.testing.assert_allclose(step(given, jax.numpy.asarray(table)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.needs("jax")
def test_jax_under_jit(rng: np.random.Generator) -> None:
    import jax

    x = small(rng, bias=rng.standard_normal((4, 1, 20), dtype=np.float32), mask=rng.random((3, 1, 1, 20)) < 0.7)
    expected = attention_with_cache(**{name: y.copy() for name, y in x.items()})
    for call in (attention_with_cache, jax.jit(attention_with_cache)):
        out, k_cache, _ = call(**{name: jax.numpy.asarray(y) for name, y in x.items()})
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(k_cache[2, 19], x["k"][2, 0])
