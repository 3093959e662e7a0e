"""Where NumPy arrays are computed: the choice, the ways to force it, and the way there and back on a pretended GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash.check.cases import Case
from cupyflash.cli.frameworks import Framework
from cupyflash.cli.verify.cases import call
from cupyflash.launch import run, where
from cupyflash.problem import Problem
from cupyflash.sequences import Sequences
from tests.numpy_cases import kinds
from tests.pretended_copies import Cuda, pretend_gpu

CACHE = Problem("bf16", 1, 1, 1 << 16, 8, 8, 128, 1.0, kv_range=True)  # of 256 MiB


def seconds(p: Problem, keys: int | None = None, more_bytes: int = 0, backward: bool = False) -> where.Estimate:
    sequences = None if keys is None else Sequences(kv_range=np.array([[0, keys]] * p.batch, np.int32))
    return where.estimate(p, where.sizes_of(p, sequences), more_bytes, backward=backward)


# ---- The choice ----


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_dense_calls_take_the_gpu(dtype: str, backward: bool) -> None:
    for n in (0, 1, 16, 100, 1000, 10**4, 10**5):
        for heads, head_dim in ((1, 8), (8, 64), (64, 256)):
            assert seconds(Problem(dtype, 1, n, n, heads, heads, head_dim, 1.0), backward=backward).on_gpu


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_estimates_grow_with_the_call(dtype: str, backward: bool) -> None:
    """Along each size, of calls of all kinds."""
    small = Problem(dtype, 2, 100, 200, 4, 2, 64, 1.0, (50, 50))
    for field in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim"):
        for kind in (small, dataclasses.replace(small, alibi=1), dataclasses.replace(small, packed=True)):
            found = [seconds(dataclasses.replace(kind, **{field: 8 * n}), backward=backward) for n in range(1, 50)]
            assert found == sorted(found), (kind, field)
            assert [x.cpu_s for x in found] == sorted(x.cpu_s for x in found), (kind, field)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_few_keys_of_a_long_cache_stay(dtype: str) -> None:
    """The more keys count, the sooner it is the GPU; the longer the cache, the later. Once each."""
    p = dataclasses.replace(CACHE, dtype=dtype)
    by_keys = [seconds(p, 1 << i).on_gpu for i in range(17)]
    assert by_keys == sorted(by_keys)
    assert (by_keys[4], by_keys[-1]) == (False, True)
    by_length = [seconds(dataclasses.replace(p, seqlen_k=1 << i), 16).on_gpu for i in range(5, 21)]
    assert by_length == sorted(by_length, reverse=True)
    assert (by_length[0], by_length[-1]) == (True, False)


def test_a_large_table_that_is_read_little_stays() -> None:
    p = Problem("bf16", 1, 128, 128, 8, 8, 64, 1.0, mods="score + t[h, k]")
    found = [seconds(p, more_bytes=1 << i).on_gpu for i in range(10, 34)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (True, False)


def test_sizes() -> None:
    dense = Problem("bf16", 3, 100, 200, 4, 2, 64, 1.0)
    assert where.sizes_of(dense) == (1, 300, 600, 3 * 4 * 100 * 200)
    assert where.sizes_of(dataclasses.replace(dense, window=(20, 9))).scores == 3 * 4 * 100 * 30
    assert where.sizes_of(dataclasses.replace(dense, block_mask=3)).parts == 6
    ranged = where.sizes_of(dense, Sequences(kv_range=np.array([[0, 200], [190, 200], [5, 5]], np.int32)))
    assert ranged == (3, 300, 210, 4 * 100 * 210)
    packed = dataclasses.replace(dense, packed=True, batch=2, seqlen_q=110, seqlen_k=230)
    cu_q, cu_k = np.array([0, 10, 110], np.int32), np.array([0, 30, 230], np.int32)
    assert where.sizes_of(packed, Sequences(cu_q, cu_k)) == (2, 110, 230, 4 * (10 * 30 + 100 * 200))
    used = Sequences(cu_q, cu_k, np.array([7, 200], np.int32), np.array([[5, 9], [0, 50]], np.int32))
    assert where.sizes_of(packed, used) == (2, 110, 52, 4 * (10 * 2 + 100 * 50))
    assert where.sizes_of(dense, None) == where.sizes_of(dense)


def test_copied_bytes() -> None:
    """All arrays that a call is given and makes."""
    shapes = {"q": (2, 100, 4, 64), "k": (2, 70, 2, 64)}
    q, k = (np.zeros(x, np.float16) for x in shapes.values())
    lse = np.zeros((2, 4, 100), np.float32)
    p = Problem("fp16", 2, 100, 70, 4, 2, 64, 1.0)
    assert where.copied_bytes(p, backward=False) == 2 * (q.nbytes + k.nbytes) + lse.nbytes
    assert where.copied_bytes(p, backward=True) == 4 * (q.nbytes + k.nbytes) + lse.nbytes
    packed = dataclasses.replace(p, packed=True, seqlen_q=200, seqlen_k=140)
    assert where.copied_bytes(packed, backward=True) == where.copied_bytes(p, backward=True)


# ---- The way there and back ----


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return pretend_gpu(monkeypatch)


CASES = (
    *kinds(67, 93, 16, 100),
    Case("causal", "full", 67, 93, 16, batch=2, heads_q=4, causal=True, dlse=True),
    Case("batch-repeats", "full", 67, 93, 16, batch=3, memory="broadcast_batch"),
)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_by_way_of_the_gpu(case: Case, dtype: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All results, in dtype, shape and bits."""
    found = []
    for backend in ("cpu", "cuda"):
        monkeypatch.setenv("CUPYFLASH_BACKEND", backend)
        before = len(cuda.copies)
        got = call(case, case.inputs(dtype), Framework())
        assert (len(cuda.copies) > before) == (backend == "cuda" and case.batch > 0)
        found.append([x for x in (*got[:5], *got.learned) if x is not None])
    for a, b in zip(*found, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


def test_what_repeats_in_a_bias_is_copied_once(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    q = np.zeros((4, 100, 2, 16), np.float16)
    bias = np.broadcast_to(np.zeros((1, 2, 1, 100), np.float16), (4, 2, 100, 100))
    cupyflash.attention(q, q, q, bias=bias)
    copied = sum(size for size, kind in cuda.copies if kind == cuda.memcpyHostToDevice)
    assert copied == 3 * q.nbytes + 2 * 100 * 2


def zeros(dtype: Any, keys: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((1, 1, 2, 64), dtype), np.zeros((1, keys, 2, 64), dtype)


def test_the_choice_is_taken(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """And forced by the variable."""

    def travelled(*arrays: np.ndarray, **options: Any) -> bool:
        before = len(cuda.copies)
        cupyflash.attention(*arrays, **options)
        return len(cuda.copies) > before

    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        q, k = zeros(dtype, 50000)
        for of_few in (False, True):
            ranges = {"kv_range": np.array([[7, 20]], np.int32)} if of_few else {}
            monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
            assert travelled(q, k, k, **ranges) == (not of_few)
            monkeypatch.delenv("CUPYFLASH_BACKEND")
            assert travelled(q, k, k, **ranges) == (not of_few)
            for backend in ("cuda", "cpu"):
                monkeypatch.setenv("CUPYFLASH_BACKEND", backend)
                assert travelled(q, k, k, **ranges) == (backend == "cuda")
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    assert not travelled(*(x.astype(np.float64) for x in (q, k, k)))
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    with pytest.raises(cupyflash.UnsupportedError, match="fp64 has no GPU kernel"):
        travelled(*(x.astype(np.float64) for x in (q, k, k)))


def test_learned_tables_travel(cuda: Cuda) -> None:
    """Of a large table the forward stays; the backward with its gradient does not, the one without does."""
    q, _ = zeros(ml_dtypes.bfloat16, 1)
    table = np.zeros((2, 10**7), np.float32)
    options: dict[str, Any] = {"score_mod": "score + t[h, k]", "mod_arrays": {"t": table}}
    out, lse = cupyflash.attention(q, q, q, return_lse=True, **options)
    cupyflash.attention_backward(q, q, q, q, out, lse, **options)
    assert not cuda.copies
    cupyflash.attention_backward(q, q, q, q, out, lse, gradients_of="t", **options)
    assert cuda.copies


def test_a_call_that_stays_looks_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would load CuPy."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    monkeypatch.setattr(run, "backend", lambda: pytest.fail("asked"))
    q, k = zeros(np.float16, 50000)
    cupyflash.attention(q, k, k, kv_range=np.array([[7, 20]], np.int32))
    cupyflash.attention(*(x.astype(np.float64) for x in zeros(np.float16, 10)[:1] * 3))


def test_torch_tensors_in_host_memory_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")  # which looks for CuPy when it is imported
    cuda = pretend_gpu(monkeypatch)
    x = torch.zeros(1, 300, 2, 64, dtype=torch.bfloat16)
    cupyflash.attention(x, x, x)
    assert not cuda.copies
