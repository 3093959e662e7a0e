"""Ranges of keys by the public API, on the CPU: against one call a sequence without the other keys, and every error."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, attention, attention_backward, attention_varlen, attention_varlen_backward
from cupyflash.sequences import Sequences, check_lengths

SHAPE = (3, 19, 4, 16)
RANGES = np.array([[0, 19], [7, 19], [3, 11]], np.int32)
NAMES = ("out", "lse", "dq", "dk", "dv")


def arrays(rng: np.random.Generator, *shape: int) -> list[np.ndarray]:
    return [rng.standard_normal(shape or SHAPE) for _ in range(4)]


def both(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[np.ndarray]:
    out, lse = attention(q, k, v, **options, return_lse=True)
    return [out, lse, *attention_backward(dout, q, k, v, out, lse, **options)]


@pytest.mark.parametrize("window", [(None, None), (None, 0), (4, 2)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_each_sequence_sees_its_keys_alone(window: Any, layout: str, rng: np.random.Generator) -> None:
    """By hand: softmax over the pairs that the window of the full lengths and the range both let through."""
    q, k, v, dout = arrays(rng)
    for b, (start, end) in enumerate(RANGES):
        k[b, :start], k[b, end:], v[b, :start], v[b, end:] = (np.nan,) * 4
    turned = [x.swapaxes(1, 2) for x in (q, k, v, dout)] if layout == "bhsd" else [q, k, v, dout]
    out, lse, dq, dk, dv = both(*turned, window=window, layout=layout, kv_range=RANGES)
    out, dq, dk, dv = (x.swapaxes(1, 2) if layout == "bhsd" else x for x in (out, dq, dk, dv))
    left, right = window
    for b, (start, end) in enumerate(RANGES):
        assert not dk[b, :start].any()
        assert not dk[b, end:].any()
        assert not dv[b, :start].any()
        assert not dv[b, end:].any()
        for i in range(19):
            first = start if left is None else max(start, i - left)
            stop = end if right is None else min(end, i + right + 1)
            if first >= stop:
                assert np.isneginf(lse[b, :, i]).all()
                assert not out[b, i].any()
                assert not dq[b, i].any()
                continue
            scores = np.einsum("hd,jhd->hj", q[b, i], k[b, first:stop]) / 4
            P = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
            np.testing.assert_allclose(out[b, i], np.einsum("hj,jhd->hd", P, v[b, first:stop]), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(lse[b, :, i], np.logaddexp.reduce(scores, axis=1), rtol=1e-12)


def test_a_range_of_all_keys_changes_nothing(rng: np.random.Generator) -> None:
    x = arrays(rng)
    whole = np.tile(np.array([0, 19], np.int32), (3, 1))
    for name, a, b in zip(NAMES, both(*x, causal=True, kv_range=whole), both(*x, causal=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14, err_msg=name)


def test_left_padding_is_packing(rng: np.random.Generator) -> None:
    """Sequences padded on the left give what they give packed."""
    q, k, v, dout = arrays(rng)
    starts = [0, 7, 16]
    kv_range = np.array([[start, 19] for start in starts], np.int32)
    padded = both(q, k, v, dout, causal=True, kv_range=kv_range)
    rows = np.concatenate([b * 19 + np.arange(start, 19) for b, start in enumerate(starts)])
    packed = [x.reshape(-1, 4, 16)[rows] for x in (q, k, v, dout)]
    cu = np.concatenate(([0], np.cumsum([19 - start for start in starts]))).astype(np.int32)
    out, lse = attention_varlen(*packed[:3], cu, causal=True, return_lse=True)
    grads = attention_varlen_backward(packed[3], *packed[:3], out, lse, cu, causal=True)
    np.testing.assert_allclose(padded[0].reshape(-1, 4, 16)[rows], out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(padded[1].swapaxes(0, 1).reshape(4, -1)[:, rows], lse, rtol=1e-12)
    for name, a, b in zip(("dk", "dv"), padded[3:], grads[1:], strict=True):
        np.testing.assert_allclose(a.reshape(-1, 4, 16)[rows], b, rtol=1e-9, atol=1e-12, err_msg=name)


def test_packed_ranges_count_from_each_sequence(rng: np.random.Generator) -> None:
    """And leave of seqused_k what they leave."""
    q, k, v, dout = arrays(rng, 20, 4, 16)
    cu, used = np.array([0, 12, 12, 20], np.int32), np.array([10, 0, 8], np.int32)
    kv_range = np.array([[3, 12], [0, 0], [0, 5]], np.int32)
    options = {"seqused_k": used, "kv_range": kv_range, "causal": True}
    out, lse = attention_varlen(q, k, v, cu, **options, return_lse=True)
    grads = attention_varlen_backward(dout, q, k, v, out, lse, cu, **options)
    for b, (row, rows) in enumerate(((0, 12), (12, 0), (12, 8))):
        at, keys = slice(row, row + rows), slice(row, row + used[b])
        if not rows:
            continue
        alone = both(q[None, at], k[None, keys], v[None, keys], dout[None, at], causal=True,
                     kv_range=np.minimum(kv_range[b : b + 1], used[b]))  # fmt: skip
        np.testing.assert_allclose(out[at], alone[0][0])
        np.testing.assert_allclose(lse[:, at], alone[1][0])
        for a, x, where in zip(grads, alone[2:], (at, keys, keys), strict=True):
            np.testing.assert_allclose(a[where], x[0])
    assert not grads.dk[:3].any()
    assert not grads.dv[10:12].any()


@pytest.mark.needs("torch")
def test_torch_differentiates_it(rng: np.random.Generator) -> None:
    import torch

    q, k, v, dout = (torch.from_numpy(x) for x in arrays(rng))
    for x in (q, k, v):
        x.requires_grad_()
    kv_range = torch.from_numpy(RANGES)
    out = attention(q, k, v, causal=True, kv_range=kv_range)
    out.backward(dout)
    expected = both(*(x.detach().numpy() for x in (q, k, v, dout)), causal=True, kv_range=RANGES)
    for name, x, exact in zip(("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), (expected[0], *expected[2:]),
                              strict=True):  # fmt: skip
        np.testing.assert_allclose(x.detach().numpy(), exact, err_msg=name)
    call = lambda *x: attention(*x, causal=True, kv_range=kv_range)  # noqa: E731
    few = [x.detach()[:, :, :1, :8].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(call, few, fast_mode=True)


@pytest.mark.needs("jax")
def test_jax(rng: np.random.Generator) -> None:
    import jax.numpy as jnp

    q, k, v, _ = (x.astype(np.float32) for x in arrays(rng))
    out = attention(*map(jnp.asarray, (q, k, v)), causal=True, kv_range=jnp.asarray(RANGES))
    np.testing.assert_allclose(np.asarray(out), attention(q, k, v, causal=True, kv_range=RANGES), rtol=1e-6)


def test_it_need_not_be_contiguous(rng: np.random.Generator) -> None:
    q, k, v, _ = arrays(rng)
    strided = np.stack([RANGES, RANGES], axis=2)[..., 0]
    assert not strided.flags.c_contiguous
    np.testing.assert_array_equal(attention(q, k, v, kv_range=strided), attention(q, k, v, kv_range=RANGES))


def int32(*pairs: list[int]) -> np.ndarray:
    return np.array(pairs, np.int32)


WRONG = (
    (RANGES.astype(np.int64), 'kv_range: expected dtype int32, got int64; give kv_range.astype("int32")'),
    (RANGES[:2], "kv_range: expected shape (batch, 2) = (3, 2) as q has it, got (2, 2)"),
    (RANGES[:, 0], "kv_range: expected shape (batch, 2) = (3, 2) as q has it, got (3,)"),
    ([[0, 19]] * 3, "kv_range: expected an array of CuPy, NumPy, PyTorch or JAX"),
    (RANGES + int32([0, 0], [0, 1], [0, 0]), "<= 19, the keys of sequence 1, got kv_range[1] = [7, 20]"),
    (RANGES - int32([0, 0], [0, 0], [4, 0]), "0 <= start <= end <= 19, the keys of sequence 2, got kv_range[2] = [-1"),
    (RANGES[:, ::-1].copy(), "got kv_range[0] = [19, 0]"),
)  # fmt: skip


@pytest.mark.parametrize(("kv_range", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(kv_range: Any, message: str, rng: np.random.Generator) -> None:
    q, k, v, dout = arrays(rng)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention(q, k, v, kv_range=kv_range)
    out, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention_backward(dout, q, k, v, out, lse, kv_range=kv_range)


def test_packed_ranges_that_are_wrong() -> None:
    cu = np.array([0, 4, 9], np.int32)
    check_lengths(Sequences.of(cu, kv_range=np.array([[0, 4], [5, 5]], np.int32)), 9, 9)
    with pytest.raises(ArgumentError, match=r"<= 5, the keys of sequence 1, got kv_range\[1\] = \[0, 6\]"):
        check_lengths(Sequences.of(cu, kv_range=np.array([[0, 4], [0, 6]], np.int32)), 9, 9)


def test_an_empty_batch() -> None:
    q = np.zeros((0, 5, 2, 8), np.float32)
    assert attention(q, q, q, kv_range=np.zeros((0, 2), np.int32)).shape == q.shape
    assert cupyflash.Gradients._fields == ("dq", "dk", "dv")
