"""A bias and a mask of packed sequences on a GPU, through the public API; cases of the table are in test_gpu_varlen.py.

CUPYFLASH_FAMILY is set for each family in turn; sm90 is left out where the GPU has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, attention, attention_backward, attention_varlen, attention_varlen_backward
from tests.gpu_arrays import captured, nothing_waits, to_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch"), pytest.mark.usefixtures("family")]
LENGTHS, HEADS = (700, 0, 1, 1333, 260), 8
ROOM = max(LENGTHS) + 3


def places(lengths: Sequence[int]) -> Any:
    import torch

    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def tensors(total: int, d: int, heads_k: int = 2) -> list[Any]:
    """q, k, v and dout in bf16."""
    import torch

    torch.manual_seed(total + d)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(total, heads, d, **like) for heads in (HEADS, heads_k, heads_k, HEADS)]


def both(q: Any, k: Any, v: Any, dout: Any, cu: Any, **options: Any) -> list[Any]:
    """out, dq, dk, dv and dbias."""
    out, lse = attention_varlen(q, k, v, cu, **options, return_lse=True)
    found = attention_varlen_backward(dout, q, k, v, out, lse, cu, gradients_of="bias", **options)
    return [out, *found, found.dbias]


def is_close(a: Any, b: Any) -> bool:
    """Up to roundings to bf16 at other places."""
    return float((a.float() - b.float()).norm()) <= 2e-2 * float(b.float().norm()) + 1e-3


@pytest.mark.parametrize("keys", [ROOM, ROOM + 1], ids=["even", "odd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("rows_of_mask", [1, ROOM], ids=["by element", "by blocks"])
def test_each_sequence_is_attention_of_its_own(rows_of_mask: int, d: int, causal: bool, keys: int) -> None:
    """T5's: one bias of relative positions for all sequences, learned, and a mask beside it. Compared with dense calls,
    whose tiles lie elsewhere; what is behind the sequences holds NaN."""
    import torch

    q, k, v, dout = tensors(sum(LENGTHS) + 7, d)
    bias = torch.randn(1, HEADS, ROOM, keys, device="cuda", dtype=torch.bfloat16)
    bias[:, :, max(LENGTHS) :], bias[..., max(LENGTHS) :] = float("nan"), float("nan")
    mask = torch.rand(len(LENGTHS), 1, rows_of_mask, keys, device="cuda") < 0.9
    cu = places(LENGTHS)
    out, dq, dk, dv, dbias = both(q, k, v, dout, cu, bias=bias, mask=mask, causal=causal)
    total = torch.zeros(bias.shape, device="cuda")
    for b, (first, n) in enumerate(zip(cu.tolist(), LENGTHS, strict=False)):
        if not n:
            continue
        rows = slice(first, first + n)
        x = [a[None, rows] for a in (q, k, v)]
        own = {"bias": bias[..., :n, :n], "mask": mask[b : b + 1, :, :n, :n], "causal": causal}
        want, lse = attention(*x, **own, return_lse=True)
        of = attention_backward(dout[None, rows], *x, want, lse, gradients_of="bias", **own)
        for name, a, c in (("out", out, want), ("dq", dq, of.dq), ("dk", dk, of.dk), ("dv", dv, of.dv)):
            assert is_close(a[rows], c[0]), (name, b)
        total[..., :n, :n] += of.dbias.float()
    assert is_close(dbias, total)  # 0 behind the longest sequence
    assert not dbias[..., max(LENGTHS) :, :].any()
    assert not dbias[..., max(LENGTHS) :].any()


@pytest.mark.parametrize("d", [64, 128, 192])
def test_nothing_beyond_an_array_is_read_or_written(d: int) -> None:
    """A bias without room: as if it ended in zeros, whatever lies behind it in memory. Nothing waits."""
    import torch

    q, k, v, dout = tensors(sum(LENGTHS), d)
    rows, keys, cu = 900, 800, places(LENGTHS)
    buffer = torch.full((HEADS * rows * keys + 65536,), float("nan"), device="cuda", dtype=torch.bfloat16)
    bias = buffer[: HEADS * rows * keys].view(1, HEADS, rows, keys)
    bias.normal_()
    padded = torch.zeros(1, HEADS, ROOM, ROOM, device="cuda", dtype=torch.bfloat16)
    padded[..., :rows, :keys] = bias
    want = both(q, k, v, dout, cu, bias=padded, deterministic=True)
    with nothing_waits():
        found = both(q, k, v, dout, cu, bias=bias, deterministic=True)
    want[-1] = want[-1][..., :rows, :keys]
    for name, a, c in zip(("out", "dq", "dk", "dv", "dbias"), found, want, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(c), err_msg=name)
    assert torch.isnan(buffer[HEADS * rows * keys :]).all()


def test_room_is_checked_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    q, k, v, _ = tensors(sum(LENGTHS), 64)
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    for shape, message in (((1332, ROOM), "1333 queries, those of sequence 3, got 1332"), ((800,), "1333 keys")):
        bias = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(ArgumentError, match=f"^bias: expected room for at least {message}"):
            attention_varlen(q, k, v, places(LENGTHS), bias=bias)


@pytest.mark.parametrize("d", [64, 128, 192])
def test_a_replay_with_other_lengths(d: int) -> None:
    """And another bias in the same memory, compared with fresh calls bit by bit."""
    import torch

    several = [(700, 0, 1, 1333, 260), (0, 1336, 958, 0, 0), (458, 459, 459, 459, 459)]
    arrays, cu = tensors(sum(several[0]), d), places(several[0])
    bias = torch.randn(1, HEADS, ROOM, ROOM, device="cuda", dtype=torch.bfloat16)
    options = {"causal": True, "deterministic": True, "bias": bias}
    graph, left = captured(lambda: both(*arrays, cu, **options))
    for lengths in (*several[1:], several[0]):
        for x in left:
            x.fill_(float("nan"))
        cu.copy_(places(lengths))
        bias.normal_()
        graph.replay()
        fresh = both(*arrays, places(lengths), **options)
        for name, a, c in zip(("out", "dq", "dk", "dv", "dbias"), left, fresh, strict=True):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(c), err_msg=f"{name}, {lengths}")
