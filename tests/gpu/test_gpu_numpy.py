"""NumPy arrays by way of the GPU: staged copies there and back, of all kinds of arrays, threads, streams and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash.check.accuracy import Oracle
from cupyflash.check.cases import Case
from cupyflash.cli.frameworks import Framework
from cupyflash.cli.memory import cupy_poisoned, freed_full_of_nan
from cupyflash.cli.verify.cases import call
from cupyflash.cpu import workers
from cupyflash.gpu import device
from cupyflash.launch import run, staging
from tests.gpu_arrays import on_gpu
from tests.numpy_cases import kinds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("numpy_on_gpu")]

DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
KINDS = (
    *kinds(131, 205, 64, 300),
    Case("odd", "full", 239, 331, 64, batch=3, heads_q=3, heads_k=3, causal=True, dlse=True),
    Case("odd-d72-gqa", "full", 101, 203, 72, batch=2, heads_q=6, heads_k=2),
    Case("fused", "full", 205, 205, 64, batch=2, memory="fused_qkv"),
    Case("wide-every-second", "full", 131, 205, 128, memory="every_second_row"),
    Case("dout-repeats", "full", 131, 205, 64, batch=2, memory="broadcast_dout"),
)


@pytest.fixture(params=["as it is", "small slots, 4 threads"])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept ring, or one through which even small arrays go in many pieces, both ways."""
    if request.param != "as it is":
        in_pieces(monkeypatch)


def in_pieces(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int = 1 << 12, threads: int = 4) -> staging.Ring:
    """Of the current GPU."""
    import cupy

    ordinal = cupy.cuda.runtime.getDevice()
    found = staging.Ring(ordinal, chunk_bytes, threads)
    monkeypatch.setattr(staging, "_rings", {ordinal: found})
    monkeypatch.setattr(staging, "THREAD_BYTES", 1)
    monkeypatch.setattr(workers, "cores", lambda: threads)
    return found


@pytest.mark.usefixtures("ring")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_results(case: Case, dtype: str) -> None:
    """By the 2x rule, in poisoned memory on both sides."""
    inputs = case.inputs(dtype)
    with cupy_poisoned():
        freed_full_of_nan()
        got = call(case, inputs, Framework())
    oracle = Oracle(case.problem(dtype), *inputs)
    verdicts = oracle.judge_forward(got.out, got.lse)
    verdicts += oracle.judge_backward(*(x for x in got[2:5] if x is not None), *got.learned)
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))


def drawn(*shape: int, dtype: str = "bf16", seed: int = 0) -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for _ in range(4)]


def both(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[Any]:
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True, **options)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True, **options)
    return [out, lse, *grads]


def bits(arrays: list[Any]) -> list[bytes]:
    return [(x if isinstance(x, np.ndarray) else x.get()).tobytes() for x in arrays]


def assert_same(found: list[Any], expected: list[bytes]) -> None:
    assert [x == y for x, y in zip(bits(found), expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_arrays_have_the_bits_of_cupy_arrays(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By four threads, with slots as large as they are; strided ones too. The second call finds the slots made."""
    monkeypatch.setattr(workers, "cores", lambda: staging.THREADS)
    arrays = drawn(5, 2111, 17, 64, dtype=dtype)
    assert sum(x.nbytes for x in arrays[:3]) > 2 * staging.THREADS * staging.THREAD_BYTES
    expected = bits(both(*(on_gpu(x, "cupy") for x in arrays)))
    for given in (arrays, arrays, [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in arrays]):
        found = both(*given)
        assert all(type(x) is np.ndarray and x.flags.c_contiguous for x in found)
        assert_same(found, expected)


def test_read_only_arrays_and_memory_maps(tmp_path: Path) -> None:
    arrays = drawn(2, 300, 4, 64, dtype="fp16")
    expected = bits(both(*arrays))
    maps = []
    for i, x in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", x)
        maps.append(np.load(tmp_path / f"{i}.npy", mmap_mode="r"))
    assert_same(both(*maps), expected)


@pytest.mark.usefixtures("ring")
@pytest.mark.parametrize("own_streams", [False, True], ids=["one-stream", "own-streams"])
def test_threads_at_the_same_time(own_streams: bool) -> None:
    """Of different sizes, each several times."""
    import cupy

    sizes = [(2, 301, 4, 64), (1, 1033, 8, 64), (3, 77, 2, 128), (1, 2050, 16, 64)]
    given = [drawn(*size, seed=i) for i, size in enumerate(sizes)]
    expected = [bits(both(*arrays)) for arrays in given]
    found: list[list[list[bytes]]] = [[] for _ in sizes]
    errors: list[BaseException] = []
    start = threading.Barrier(len(sizes))

    def work(i: int) -> None:
        try:
            start.wait(60)
            stream = cupy.cuda.Stream(non_blocking=True) if own_streams else cupy.cuda.get_current_stream()
            with stream:
                found[i] += [bits(both(*given[i])) for _ in range(8)]
        except BaseException as e:
            errors.append(e)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(len(sizes))]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not errors, errors
    for i, results in enumerate(found):
        assert results == [expected[i]] * 8, sizes[i]


def test_default_stream_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which means another stream on each thread that copies."""
    import cupy

    arrays = drawn(2, 501, 8, 64)
    expected = bits(both(*arrays))
    in_pieces(monkeypatch)
    with cupy.cuda.Stream.ptds:
        for _ in range(5):
            assert_same(both(*arrays), expected)


def slots_of(ring: staging.Ring) -> Iterator[np.ndarray]:
    for slot in list(ring._slots._free):
        slot.event.synchronize()
        yield slot.memory


def test_slots_hold_nothing_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are full of NaN between calls."""
    arrays = drawn(2, 301, 4, 64)
    expected = bits(both(*arrays))
    ring = in_pieces(monkeypatch)
    for _ in range(5):
        assert_same(both(*arrays), expected)
        for memory in slots_of(ring):
            memory[...] = 0xFF


def test_nothing_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls of many sizes leave the GPU's memory as it was; pinned is what the ring holds."""
    import cupy

    ring, pool, pinned = in_pieces(monkeypatch), cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
    rng = np.random.default_rng(0)
    both(*drawn(2, 1100, 4, 64))
    used, free = pool.used_bytes(), pinned.n_free_blocks()
    for _ in range(100):
        both(*drawn(2, int(rng.integers(1, 1100)), 4, 64))
    assert pool.used_bytes() <= used + (1 << 20)
    assert pinned.n_free_blocks() <= free + 2
    assert len(list(slots_of(ring))) == ring._slots._made <= 8


@pytest.mark.usefixtures("ring")
def test_an_error_leaves_all_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy to a slot, or from one, among others."""
    arrays = drawn(2, 401, 4, 64)
    expected, copyto = bits(both(*arrays)), np.copyto
    for fails in (0, 2, 5, 30):
        count = fails + 1

        def copy(to: np.ndarray, source: Any, **options: Any) -> None:
            nonlocal count
            count -= not options  # staging gives none
            if count == 0:
                raise MemoryError("in this test")
            copyto(to, source, **options)

        with monkeypatch.context() as patch:
            patch.setattr(np, "copyto", copy)
            try:
                both(*arrays)
                assert count > 0, "the error was lost"
            except MemoryError:
                assert count <= 0
        assert_same(both(*arrays), expected)


def test_work_before_and_behind_on_the_callers_stream() -> None:
    """The caller's own arrays are as its stream has them when the call comes and goes."""
    import cupy

    arrays = drawn(2, 601, 8, 64)
    expected = bits(both(*arrays))
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(5):
            old = [cupy.full(x.size, 7, np.uint16) for x in arrays]
            kept = [x.copy() for x in old]
            del old  # CuPy may hand this memory to the call, while the copies are only queued
            assert_same(both(*arrays), expected)
            assert all((x.get() == 7).all() for x in kept)


def test_the_current_gpu_is_used() -> None:
    if device.count() < 2:
        pytest.skip("needs two GPUs")
    import cupy

    arrays = drawn(2, 301, 4, 64)
    expected = bits(both(*arrays))
    with cupy.cuda.Device(1):
        assert_same(both(*arrays), expected)
    assert 1 in staging._rings


def test_where_calls_run_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense call goes to the GPU, a few keys of a long cache stay; both give what the other way gives."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "auto")
    travelled: list[int] = []
    real = staging.to_gpu
    monkeypatch.setattr(run.staging, "to_gpu", lambda arrays: travelled.append(len(arrays)) or real(arrays))
    q, k, v, _ = drawn(1, 60000, 2, 64)
    few = {"kv_range": np.array([[59990, 60000]], np.int32)}
    for rows, options, goes in ((300, {}, True), (1, few, False)):
        results = []
        for backend in ("auto", "cuda", "cpu"):
            monkeypatch.setenv("CUPYFLASH_BACKEND", backend)
            travelled.clear()
            results.append(cupyflash.attention(q[:, :rows], k, v, return_lse=True, **options))
            assert bool(travelled) == {"auto": goes, "cuda": True, "cpu": False}[backend]
        (out, lse), *others = results
        for other in others:
            np.testing.assert_allclose(other[0].astype(np.float32), out.astype(np.float32), rtol=2**-7, atol=2**-9)
            np.testing.assert_allclose(other[1], lse, rtol=1e-4, atol=1e-4)
            assert (other[0].dtype, other[1].dtype) == (out.dtype, lse.dtype)
