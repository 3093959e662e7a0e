"""Block masks of packed sequences on a GPU, through the public API; cases of the table are in test_gpu_varlen.py.

CUPYFLASH_FAMILY is set for each family in turn; sm90 is left out where the GPU has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, attention_varlen, attention_varlen_backward, masks
from tests.gpu.test_gpu_bias_packed import HEADS, LENGTHS, is_close, places, tensors
from tests.gpu_arrays import nothing_waits, to_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.needs("torch"), pytest.mark.usefixtures("family")]
LONGEST = max(LENGTHS)
NAMES = ("out", "dq", "dk", "dv")


def both(q: Any, k: Any, v: Any, dout: Any, cu: Any, **options: Any) -> list[Any]:
    """out, dq, dk, dv."""
    out, lse = attention_varlen(q, k, v, cu, **options, return_lse=True)
    return [out, *attention_varlen_backward(dout, q, k, v, out, lse, cu, **options)]


def seen_of(owners: tuple[int, int]) -> np.ndarray:
    """Blocks of 128 that are full, empty, or drawn element by element."""
    rng, n = np.random.default_rng(0), -(-LONGEST // 128)
    kinds = np.repeat(np.repeat(rng.random((*owners, n, n)), 128, 2), 128, 3)[:, :, :LONGEST, :LONGEST]
    return np.where(kinds < 0.5, False, np.where(kinds < 0.75, True, rng.random(kinds.shape) < 0.3))


@pytest.mark.parametrize("owners", [(1, 1), (len(LENGTHS), HEADS)], ids=["shared", "own"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_sees_what_the_same_booleans_say(d: int, causal: bool, owners: tuple[int, int]) -> None:
    import torch

    seen, arrays = seen_of(owners), tensors(sum(LENGTHS) + 7, d)
    cu, options = places(LENGTHS), {"causal": causal}
    found = both(*arrays, cu, block_mask=masks.from_dense(seen), **options)
    want = both(*arrays, cu, mask=torch.tensor(seen, device="cuda"), **options)
    for name, a, b in zip(NAMES, found, want, strict=True):
        assert is_close(a, b), name


@pytest.mark.parametrize("d", [64, 128, 256])
def test_deterministic_gradients_repeat(d: int) -> None:
    """And a call waits for nothing, once the mask has a copy on the device."""
    mask, arrays, cu = masks.from_dense(seen_of((1, HEADS))), tensors(sum(LENGTHS), d), places(LENGTHS)
    options = {"block_mask": mask, "causal": True, "deterministic": True}
    first = both(*arrays, cu, **options)
    for _ in range(10):
        with nothing_waits():
            again = both(*arrays, cu, **options)
        for name, a, b in zip(NAMES, first, again, strict=True):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b), err_msg=name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sequences_beyond_the_mask(d: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, the others' results are right, and CUPYFLASH_DEBUG=1 says so."""
    mask, arrays, cu = masks.local(704, left=100), tensors(sum(LENGTHS), d), places(LENGTHS)
    options = {"causal": True, "deterministic": deterministic}
    found, want = both(*arrays, cu, block_mask=mask, **options), both(*arrays, cu, window=(100, 0), **options)
    for name, a, b in zip(NAMES, found, want, strict=True):
        assert is_close(a[:701], b[:701]), name
        assert is_close(a[701 + LONGEST :], b[701 + LONGEST :]), name
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    with pytest.raises(ArgumentError, match=r"^block_mask: expected room for at least 1333 queries, .* got 704"):
        attention_varlen(*arrays[:3], cu, block_mask=mask)
