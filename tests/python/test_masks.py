"""Block masks: the generators against their definitions, combinations, torch's BlockMask, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import BlockMask, masks
from cupyflash.check.accuracy import Oracle
from cupyflash.check.case import NUMPY_DTYPE
from cupyflash.problem import make_problem

Array = np.ndarray
N = 331  # a multiple of nothing


def dense(mask: BlockMask) -> Array:
    """(batch or 1, heads or 1, seqlen_q, seqlen_k)."""
    return mask.sees(slice(0, mask.seqlen_q), slice(0, mask.seqlen_k))


def pairs(seqlen_q: int = N, seqlen_k: int = N) -> tuple[Array, Array]:
    """Positions of queries, aligned at the bottom right, and keys."""
    return np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)


def test_local_is_the_window() -> None:
    i, j = pairs(203, N)
    assert (dense(masks.local(203, N, left=70, right=9)) == ((j >= i - 70) & (j <= i + 9))).all()


def test_global_tokens_see_all_and_are_seen_by_all() -> None:
    i, j = pairs()
    for tokens in (3, [5, 200]):
        positions = range(3) if tokens == 3 else tokens
        wanted = abs(i - j) <= 40
        for t in positions:  # type: ignore[attr-defined]
            wanted = wanted | (i == t) | (j == t)
        assert (dense(masks.global_local(N, window=40, global_tokens=tokens)) == wanted).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [32, 64, 128])
def test_bigbird_has_its_blocks_in_each_row(block: int) -> None:
    mask = masks.bigbird(20 * block, block=block, window_blocks=3, global_blocks=2, random_blocks=3, heads=2, seed=5)
    seen = dense(mask)[0].reshape(2, 20, block, 20, block)
    blocks = seen.all(axis=(2, 4))
    assert (blocks == seen.any(axis=(2, 4))).all()
    assert blocks[:, :2].all()
    assert blocks[:, :, :2].all()
    for row in range(2, 20):
        window = {0, 1, row - 1, row, min(row + 1, 19)}
        assert blocks[:, row, sorted(window)].all()
        assert (blocks[:, row].sum(axis=1) == len(window) + 3).all()
    assert (blocks[0] != blocks[1]).any()


def test_strided_is_that_of_the_sparse_transformer() -> None:
    i, j = pairs()
    assert (dense(masks.strided(N, stride=50)) == ((j <= i) & ((i - j < 50) | ((i - j) % 50 == 0)))).all()


def test_butterfly_differs_in_one_bit() -> None:
    seen = dense(masks.butterfly(1024, block=128))[0, 0].reshape(8, 128, 8, 128).any(axis=(1, 3))
    wanted = [[bin(a ^ b).count("1") <= 1 for b in range(8)] for a in range(8)]
    assert (seen == wanted).all()


def test_documents_and_prefixes_of_each_sequence() -> None:
    i, j = pairs()
    ids = np.stack([np.arange(N) // 50, np.arange(N) // 121])
    wanted = (ids[:, :, None] == ids[:, None, :]) & (j <= i)
    assert (dense(masks.causal_document(ids))[:, 0] == wanted).all()
    found = dense(masks.prefix(N, length=[10, 200]))[:, 0]
    assert (found == np.stack([(j < n) | (j <= i) for n in (10, 200)])).all()


def test_blocks_of_any_size() -> None:
    blocks = np.random.default_rng(3).random((2, 7, 4)) < 0.5
    found = dense(masks.from_blocks(blocks, (50, 90), N, N))[0]
    assert (found == np.repeat(np.repeat(blocks, 50, 1), 90, 2)[:, :N, :N]).all()


def test_masks_combine() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.random((2, 1, N, N)) < 0.3, rng.random((1, 3, N, N)) < 0.3
    a[:, :, 64:128], b[..., 64:128] = True, False
    one, other = masks.from_dense(a), masks.from_dense(b)
    assert (dense(one & other) == (a & b)).all()
    assert (dense(one | other) == (a | b)).all()
    with pytest.raises(cupyflash.ArgumentError, match="same lengths"):
        one & masks.local(N, 64, left=3)


def test_patterns_are_kept_once() -> None:
    """A window has the same tiles along its diagonals."""
    assert len(masks.local(4096, left=100, right=100).bits) < 8


def attend(mask: Any, **options: Any) -> None:
    """attention with a mask against the reference with its booleans."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, N, 2, 64)).astype(NUMPY_DTYPE["fp32"])
    out, lse = cupyflash.attention(q, k, v, block_mask=mask, return_lse=True, **options)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, block_mask=mask, **options)
    oracle = Oracle(make_problem((q.shape,) * 3, ("fp32",) * 3, **options), q, k, v, dout, block_mask=mask)
    results = oracle.judge_forward(out, lse) + oracle.judge_backward(*grads)
    assert all(r.passed for r in results), "\n".join(map(str, results))


def test_attention_sees_what_the_mask_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    attend(masks.bigbird(N, heads=2) & masks.causal_document(np.arange(N) // 140))
    attend(masks.global_local(N, window=30, global_tokens=2), causal=True)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (masks.local(N - 1, left=3), "of 331 queries and 331 keys"),
        (np.ones((N, N), bool), "masks.from_dense takes booleans"),
        (masks.from_dense(np.ones((1, 3, N, N), bool)), "heads_q of 1 or 2"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, words: str) -> None:
    q = np.zeros((2, N, 2, 64), np.float32)
    with pytest.raises(cupyflash.ArgumentError, match=words):
        cupyflash.attention(q, q, q, block_mask=mask)


@pytest.mark.needs("torch")
def test_a_mask_of_flex_attention_is_taken_as_it_is() -> None:
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    documents = torch.arange(N) // 70

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q >= k) & ((q - k) % (h + 2) != 1)

    block_mask = flex.create_block_mask(mod, None, 2, N, N, device="cpu")
    i, j = torch.arange(N)[:, None], torch.arange(N)
    seen = torch.stack([mod(0, h, i, j) for h in range(2)])
    assert (dense(masks.from_torch(block_mask))[0] == seen.numpy()).all()
    q, k, v = (torch.randn(2, N, 2, 64, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = cupyflash.attention(q, k, v, block_mask=block_mask)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wanted = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen).transpose(1, 2)
    dout = torch.randn_like(out)
    torch.testing.assert_close(out, wanted)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(a, b)
