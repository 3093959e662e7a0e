"""Packed sequences on the CPU: each is attention of its own, in any library; what is outside counts for nothing."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from cupyflash import ArgumentError, attention_varlen, attention_varlen_backward, options
from cupyflash.arrays.adapters import CPU, NUMPY
from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import PACKED_CASES, Case
from cupyflash.sequences import Sequences, check_lengths
from tests.producer import Producer

pytestmark = pytest.mark.usefixtures("on_the_cpu")

Lengths = tuple[int, ...]
Everything = list[np.ndarray]


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def cumulative(lengths: Lengths) -> np.ndarray:
    return int32(0, *accumulate(lengths))


def draw(total_q: int, total_k: int, heads_q: int = 4, heads_k: int = 2, head_dim: int = 16, seed: int = 0) -> Any:
    """q, k, v, dout and dlse in float64."""
    rng = np.random.default_rng(seed)
    q, dout = rng.standard_normal((2, total_q, heads_q, head_dim))
    k, v = rng.standard_normal((2, total_k, heads_k, head_dim))
    return q, k, v, dout, rng.standard_normal((heads_q, total_q))


def everything(q: Any, k: Any, v: Any, dout: Any, dlse: Any, *lengths: Any, **given: Any) -> list[Any]:
    """out, lse, dq, dk, dv, and dalibi_slopes, dsink and dbias where there are slopes, sinks and a bias."""
    out, lse = attention_varlen(q, k, v, *lengths, **given, return_lse=True)
    of = tuple(name for name in ("alibi_slopes", "sink", "bias") if name in given)
    grads = attention_varlen_backward(dout, q, k, v, out, lse, *lengths, dlse=dlse, gradients_of=of, **given)
    return [out, lse, *grads, *(getattr(grads, f"d{name}") for name in of)]


def one_by_one(
    q: Any, k: Any, v: Any, dout: Any, dlse: Any, lengths_q: Lengths, lengths_k: Lengths, used: Lengths, **given: Any
) -> Everything:
    """The same by a dense call for each sequence."""
    found = [np.zeros_like(q), np.full(dlse.shape, -np.inf), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)]
    for (a, b), (c, _), n in zip(
        pairwise(accumulate(lengths_q, initial=0)), pairwise(accumulate(lengths_k, initial=0)), used, strict=True
    ):
        Q, dO, K, V = q[None, a:b], dout[None, a:b], k[None, c : c + n], v[None, c : c + n]
        out, lse = cupyflash.attention(Q, K, V, **given, return_lse=True)
        grads = cupyflash.attention_backward(dO, Q, K, V, out, lse, dlse=dlse[None, :, a:b].copy(), **given)
        found[0][a:b], found[1][:, a:b], found[2][a:b] = out[0], lse[0], grads.dq[0]
        found[3][c : c + n], found[4][c : c + n] = grads.dk[0], grads.dv[0]
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda c: c.name)
def test_case(case: Case, dtype: str) -> None:
    inputs, given = case.inputs(dtype), case.options()
    sequences = inputs.features.sequences
    assert sequences is not None
    q, k, v, dout = (case.in_layout(x) for x in inputs[:4])
    brought = inputs.brought()
    given_arrays = q, k, v, dout, *(x for x in brought.values() if isinstance(x, np.ndarray))
    before = [x.tobytes() for x in given_arrays]
    out, lse, dq, dk, dv, *learned = everything(q, k, v, dout, inputs.dlse, **brought, **given)
    assert {x.dtype for x in (out, dq, dk, dv)} == {q.dtype}
    assert lse.dtype == (np.float64 if dtype == "fp64" else np.float32)
    assert (out.shape, dk.shape, lse.shape) == (q.shape, k.shape, (case.heads_q, case.seqlen_q))
    assert all(x.flags.c_contiguous for x in (out, dq, dk, dv, lse))
    oracle = Oracle(case.problem(dtype), *inputs)
    verdicts = oracle.judge_forward(case.in_layout(out), lse) + oracle.judge_backward(
        *map(case.in_layout, (dq, dk, dv)), *learned
    )
    assert len(learned) == len(inputs.learned)
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))
    assert [x.tobytes() for x in given_arrays] == before  # inputs are never written


@st.composite
def packed(draw_: st.DrawFn) -> dict[str, Any]:
    """Lengths of up to six sequences, how many keys are used, rows outside, options."""
    several = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)), max_size=6)
    lengths = draw_(several)
    bound = st.none() | st.integers(-20, 20)
    return {
        "lengths_q": tuple(n for n, _, _ in lengths),
        "lengths_k": tuple(m for _, m, _ in lengths),
        "used": tuple(min(m, u) for _, m, u in lengths),
        "outside": draw_(st.tuples(st.integers(0, 9), st.integers(0, 9))),
        "causal": draw_(st.booleans()),
        "window": draw_(st.tuples(bound, bound).filter(lambda w: -1 not in w and (None in w or sum(w) >= 0))),
        "softcap": draw_(st.sampled_from([None, 1.5])),
        "deterministic": draw_(st.booleans()),
        "scale": draw_(st.sampled_from([None, 0.0, -0.4])),
    }


@given(drawn=packed(), seed=st.integers(0, 1000))
def test_equals_one_dense_call_a_sequence(drawn: dict[str, Any], seed: int) -> None:
    lengths_q, lengths_k, used = drawn.pop("lengths_q"), drawn.pop("lengths_k"), drawn.pop("used")
    more_q, more_k = drawn.pop("outside")
    x = draw(sum(lengths_q) + more_q, sum(lengths_k) + more_k, seed=seed)
    got = everything(*x, cumulative(lengths_q), cumulative(lengths_k), seqused_k=int32(*used), **drawn)
    for a, b in zip(got, one_by_one(*x, lengths_q, lengths_k, used, **drawn), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("given", [{"causal": True}, {"window": (9, 3), "softcap": 2.0}, {}], ids=str)
def test_equal_lengths_are_a_dense_batch(given: dict[str, Any]) -> None:
    q, k, v, dout, dlse = draw(3 * 33, 3 * 47)
    Q, K, V, dO = (x.reshape(3, -1, *x.shape[1:]) for x in (q, k, v, dout))
    dLSE = np.ascontiguousarray(dlse.reshape(4, 3, 33).swapaxes(0, 1))
    out, lse = cupyflash.attention(Q, K, V, **given, return_lse=True)
    grads = cupyflash.attention_backward(dO, Q, K, V, out, lse, dlse=dLSE, **given)
    got = everything(q, k, v, dout, dlse, cumulative((33,) * 3), cumulative((47,) * 3), **given)
    for a, b in zip(got, (out, lse.swapaxes(0, 1), *grads), strict=True):
        np.testing.assert_allclose(a, b.reshape(a.shape), rtol=1e-12, atol=1e-13)


def test_rows_outside_and_unused_keys_have_no_part() -> None:
    q, k, v, dout, dlse = draw(20, 30)
    lengths = {"cu_seqlens_q": int32(0, 5, 12), "cu_seqlens_k": int32(0, 11, 21), "seqused_k": int32(0, 7)}
    out, lse, dq, dk, dv = everything(q, k, v, dout, dlse, **lengths)
    for rows in (slice(0, 5), slice(12, None)):  # without a key, without a sequence
        assert not out[rows].any()
        assert not dq[rows].any()
        assert np.isneginf(lse[:, rows]).all()
    for keys in (slice(0, 11), slice(18, None)):
        assert not dk[keys].any()
        assert not dv[keys].any()
    for x in (out[5:12], dq[5:12], dk[11:18], dv[11:18]):
        assert x.any(axis=(1, 2)).all()


def test_keys_that_lie_as_queries_do() -> None:
    x, cu = draw(50, 50), int32(0, 20, 43)
    alone, again = everything(*x, cu, causal=True), everything(*x, cu, cu.copy(), causal=True)
    for a, b in zip(alone, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_max_seqlens_change_nothing() -> None:
    x, cu = draw(50, 50), int32(0, 20, 43)
    want = everything(*x, cu)
    for longest in (0, 23, np.int64(7), 10**6):
        for a, b in zip(everything(*x, cu, max_seqlen_q=longest, max_seqlen_k=longest), want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_minus_one_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_minus_one_is_known", False)
    q, k, v, _, _ = draw(9, 9)
    with pytest.warns(UserWarning, match="bound of -1") as caught:
        attention_varlen(q, k, v, int32(0, 9), window=(-1, 3))
    assert caught[0].filename == __file__
    attention_varlen(q, k, v, int32(0, 9), window=(-1, 3))


# ---- Libraries ----


def test_other_dlpack_producers_get_numpy() -> None:
    x, lengths = draw(20, 30), (int32(0, 5, 12), int32(0, 11, 21))
    used = int32(3, 7)
    q, k, v, dout, dlse, cu_q, cu_k, used_k = map(Producer, (*x, *lengths, used))
    got = attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used_k, return_lse=True)
    results = map(Producer, got)
    got += attention_varlen_backward(dout, q, k, v, *results, cu_q, cu_k, seqused_k=used_k, dlse=dlse)
    for a, b in zip(got, everything(*x, *lengths, seqused_k=used), strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_array_equal(a, b)


@pytest.mark.needs("jax")
def test_jax() -> None:
    import jax
    import jax.numpy as jnp

    x = [a.astype(t) for a, t in zip(draw(20, 30), [ml_dtypes.bfloat16] * 4 + [np.float32], strict=True)]
    lengths = {"cu_seqlens_q": int32(0, 5, 12), "cu_seqlens_k": int32(0, 11, 21), "seqused_k": int32(3, 7)}
    with jax.default_device(jax.devices("cpu")[0]):
        got = everything(*map(jnp.asarray, x), **{name: jnp.asarray(a) for name, a in lengths.items()}, causal=True)
    for a, b in zip(got, everything(*x, **lengths, causal=True), strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_array_equal(np.asarray(a), b)
    q, k, v = (jnp.asarray(a) for a in x[:3])
    with pytest.raises(ArgumentError, match=r'cu_seqlens_q: expected dtype int32, got int16; .*astype\("int32"\)'):
        attention_varlen(q, k, v, jnp.asarray(int32(0, 20)).astype("int16"), jnp.asarray(int32(0, 30)))
    traced = jax.jit(lambda cu: attention_varlen(q, k, v, cu, cu))(jnp.asarray(int32(0, 20)))
    np.testing.assert_array_equal(traced, attention_varlen(*x[:3], int32(0, 20), int32(0, 20)))


# ---- Errors ----

CU = int32(0, 5, 12)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": CU.astype(np.int64)}, 'dtype int32, got int64; give cu_seqlens_q.astype("int32")'),
    ({"cu_seqlens_k": CU.astype(np.float32)}, "cu_seqlens_k: expected dtype int32, got fp32"),
    ({"seqused_k": int32(1, 1).astype(np.uint32)}, "seqused_k: expected dtype int32, got uint32"),
    ({"cu_seqlens_q": CU[None]}, "cu_seqlens_q: expected shape (batch + 1,), got (1, 3)"),
    ({"cu_seqlens_q": CU[:0]}, "expected shape (batch + 1,), got (0,); a batch of none has the one entry 0"),
    ({"cu_seqlens_q": np.array(0, np.int32)}, "cu_seqlens_q: expected shape (batch + 1,), got ()"),
    ({"cu_seqlens_k": CU[:2]}, "cu_seqlens_k: expected shape (batch + 1,) = (3,) as cu_seqlens_q has it, got (2,)"),
    ({"seqused_k": CU}, "seqused_k: expected shape (batch,) = (2,) as cu_seqlens_q has it, got (3,)"),
    ({"cu_seqlens_q": [0, 5]}, "cu_seqlens_q: expected an array of CuPy, NumPy, PyTorch or JAX"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q: expected an array of CuPy, NumPy, PyTorch or JAX"),
    ({"cu_seqlens_k": None}, "cu_seqlens_k: expected an array, since k has 30 rows and q has 20"),
    ({"cu_seqlens_q": int32(1, 5, 12)}, "cu_seqlens_q: expected 0 as its first entry, got cu_seqlens_q[0] = 1"),
    ({"cu_seqlens_q": int32(0, 7, 5)}, "expected at least cu_seqlens_q[1] = 7 as entry 2, got cu_seqlens_q[2] = 5"),
    ({"cu_seqlens_q": int32(0, 5, 21)}, "expected at most the 20 rows of q as entry 2, got cu_seqlens_q[2] = 21"),
    ({"cu_seqlens_k": int32(0, 31, 5)}, "expected at most the 30 rows of k as entry 1, got cu_seqlens_k[1] = 31"),
    ({"cu_seqlens_k": int32(0, -3, 5)}, "expected at least cu_seqlens_k[0] = 0 as entry 1, got cu_seqlens_k[1] = -3"),
    ({"seqused_k": int32(5, 8)}, "the keys of each sequence, 0 to 7 for sequence 1, got seqused_k[1] = 8"),
    ({"seqused_k": int32(-1, 8)}, "0 to 5 for sequence 0, got seqused_k[0] = -1"),
    ({"max_seqlen_q": -1}, "max_seqlen_q: expected an integer of at least 0 or None, got -1; it may be left out"),
    ({"max_seqlen_k": 2.5}, "max_seqlen_k: expected an integer or None, got 2.5"),
    ({"q": np.ones((1, 20, 4, 16))}, "q: expected 3 dimensions (total, heads, head_dim), got shape (1, 20, 4, 16)"),
    ({"layout": "bhsd", "k": np.ones((1, 2, 30, 16))}, "k: expected 3 dimensions (heads, total, head_dim)"),
    ({"k": np.ones((30, 3, 16)), "v": np.ones((30, 3, 16))}, "heads_k to divide heads_q = 4, got heads_k = 3"),
    ({"v": np.ones((29, 2, 16))}, "v: expected the shape of k but for head_dim, (30, 2, 16), got (29, 2, 16)"),
    ({"q": np.ones((20, 4, 32))[..., ::2]}, "q: expected a stride of 1 along head_dim, got 2"),
    ({"window": (-5, 3)}, "window: expected left + right >= 0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    q, k, v, _, _ = draw(20, 30)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": CU, "cu_seqlens_k": CU} | change
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention_varlen(**arguments)
    if "window" not in change and not {"q", "k", "v"} & set(change):
        lse = np.zeros((4, 20))
        with pytest.raises(ArgumentError, match=re.escape(message)):
            attention_varlen_backward(q, out=q, lse=lse, **arguments)


def test_results_of_the_forward_are_checked() -> None:
    q, k, v, dout, dlse = draw(20, 30)
    out, lse = attention_varlen(q, k, v, CU, CU, return_lse=True)
    for name, rows in (("lse", lse.T), ("dlse", dlse[None])):
        message = rf"{name}: expected shape \(heads_q, total_q\) = \(4, 20\), dtype fp64, on the CPU; got"
        with pytest.raises(ArgumentError, match=message):
            attention_varlen_backward(
                dout, q, k, v, out, **({"lse": lse} | {name: rows}), cu_seqlens_q=CU, cu_seqlens_k=CU
            )
    with pytest.raises(ArgumentError, match=r"dout: expected shape \(20, 4, 16\) and dtype fp64 of q"):
        attention_varlen_backward(dout[1:], q, k, v, out, lse, CU, CU)


def test_one_array_of_lengths_fits_queries_and_keys() -> None:
    """Given twice on purpose, it may leave rows of either over, and reaches beyond neither."""
    q, k, v, _, _ = draw(20, 10)
    assert attention_varlen(q, k, v, int32(0, 3, 10), (cu := int32(0, 3, 10))).shape == q.shape
    assert attention_varlen(q, k, v, cu, cu).shape == q.shape
    cu = int32(0, 3, 12)
    with pytest.raises(ArgumentError, match=re.escape("expected at most the 10 rows of k as entry 2")):
        attention_varlen(q, k, v, cu, cu)


def test_check_lengths_takes_what_is_right() -> None:
    check_lengths(Sequences.of(int32(0)), 0, 0)
    check_lengths(Sequences.of(int32(0, 0, 4, 4), int32(0, 5, 5, 9), int32(5, 0, 0)), 4, 9)
    check_lengths(Sequences.of(int32(0, 2**31 - 1)), 2**31 - 1, 2**31)
    with pytest.raises(ArgumentError, match="as entry 2"):  # the difference overflows int32
        check_lengths(Sequences.of(int32(0, 2**31 - 1, -(2**31))), 2**31 - 1, 2**31)


@pytest.mark.needs("torch")
def test_libraries_are_not_mixed() -> None:
    import torch

    q, k, v, _, _ = draw(20, 20)
    with pytest.raises(ArgumentError, match="cu_seqlens_q: expected an array of numpy like q, got one of torch"):
        attention_varlen(q, k, v, torch.from_numpy(CU))
    with pytest.raises(ArgumentError, match="seqused_k: expected an array of torch like q, got one of numpy"):
        attention_varlen(*map(torch.from_numpy, (q, k, v, CU)), seqused_k=int32(1, 1))


def test_devices_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths seem to lie on a GPU and the rest does not."""
    plain = NUMPY.signature
    monkeypatch.setattr(NUMPY, "signature", lambda x: (*plain(x)[:3], 1 if x.ndim == 1 else CPU))
    q, k, v, _, _ = draw(20, 20)
    with pytest.raises(ArgumentError, match="cu_seqlens_q: expected the device of q, the CPU, got GPU 1; move"):
        attention_varlen(q, k, v, CU)
