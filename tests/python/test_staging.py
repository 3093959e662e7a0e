"""Copies by way of pinned memory, on a pretended GPU whose copies run as late as they may."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash.cpu import workers
from cupyflash.launch import staging
from tests.pretended_copies import Cuda, Error, GpuArray, pretend

CHUNK = 1 << 12
DTYPES = [np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, bool)]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return pretend(monkeypatch)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many threads, however little there is to do."""
    monkeypatch.setattr(workers, "cores", lambda: request.param)
    monkeypatch.setattr(staging, "THREAD_BYTES", 1)
    return int(request.param)


@pytest.fixture
def small_slots(cuda: Cuda, threads: int, monkeypatch: pytest.MonkeyPatch) -> staging.Ring:
    """The ring of GPU 0 has slots of 4 KiB."""
    ring = staging.Ring(0, CHUNK, threads)
    monkeypatch.setattr(staging, "_rings", {0: ring})
    return ring


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.uint16) -> np.ndarray:
    """Any bits; a bool has two values."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    values = rng.integers(0, 2 if np.dtype(dtype).kind == "b" else 256, size, np.uint8)
    return values.view(dtype).reshape(shape)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def oddly(rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Arrays of all kinds of strides and sizes, of less than a slot and of many."""
    whole = random(rng, (3, 37, 5, 24), dtype)
    return {
        "contiguous": whole,
        "no-elements": whole[:0],
        "no-dimensions": np.array(whole[0, 0, 0, 0]),
        "one": whole[:1, :1, :1, :1],
        "strided": whole[::2, 3::3, 1:, 8:16],
        "backwards": whole[:, ::-1],
        "turned": whole.transpose(2, 0, 3, 1),
        "repeated": np.broadcast_to(whole[:, :, :1], (3, 37, 7, 24)),
        "long-rows": random(rng, (2, 3, 2 * CHUNK + 10), dtype),
        "strided-rows": random(rng, (2, 3, 4 * CHUNK + 20), dtype)[..., ::2],
        "read-only": np.frombuffer(whole.tobytes(), dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(cuda: Cuda, small_slots: staging.Ring, rng: np.random.Generator, dtype: np.dtype) -> None:
    arrays = oddly(rng, dtype)
    expected = {name: bits(x).copy() for name, x in arrays.items()}
    copies = dict(zip(arrays, staging.to_gpu(list(arrays.values())), strict=True))
    for x in arrays.values():  # the caller may write them again
        if x.flags.writeable and x.flags.owndata:
            x.view(np.uint8 if x.ndim else x.dtype)[...] = 0
    assert {(x.shape, x.dtype) for x in copies.values()} == {(x.shape, x.dtype) for x in arrays.values()}
    cuda.current.synchronize()  # which waits for the copies
    for name, x in copies.items():
        assert np.array_equal(bits(x.x), expected[name]), name
    back = staging.to_host(list(copies.values()))
    for (name, x), made in zip(arrays.items(), back, strict=True):
        assert (made.shape, made.dtype) == (x.shape, x.dtype)
        assert made.flags.c_contiguous
        assert np.array_equal(bits(made), expected[name]), name


def empty(cuda: Cuda, shape: tuple[int, ...]) -> GpuArray:
    return GpuArray(np.full(shape, 0xA5A5, np.uint16), cuda)


def test_results_are_of_all_that_was_queued_before(
    cuda: Cuda, small_slots: staging.Ring, rng: np.random.Generator
) -> None:
    """The caller's stream writes them; that has not run yet when they are asked for."""
    x, made = random(rng, (9, CHUNK)), empty(cuda, (9, CHUNK))
    cuda.current.queue(lambda: np.copyto(made.x, x))
    assert np.array_equal(staging.to_host([made])[0], x)


def test_copies_begin_behind_what_was_queued_before(
    cuda: Cuda, small_slots: staging.Ring, rng: np.random.Generator
) -> None:
    """Memory that the caller's stream still reads is written when it is done with it."""
    x, there, read = random(rng, (9, CHUNK)), empty(cuda, (9, CHUNK)), np.empty((9, CHUNK), np.uint16)
    before = there.x.copy()
    cuda.current.queue(lambda: np.copyto(read, there.x))
    small_slots.copy_in([(x, there.data.ptr)])
    cuda.current.synchronize()
    assert np.array_equal(read, before)
    assert np.array_equal(there.x, x)


def test_the_ring_is_bounded(cuda: Cuda, small_slots: staging.Ring, threads: int, rng: np.random.Generator) -> None:
    x = random(rng, (100, CHUNK))
    for _ in range(5):
        assert np.array_equal(staging.to_host(staging.to_gpu([x, x[:7]]))[0], x)
    assert CHUNK <= cuda.pinned <= 2 * threads * CHUNK


def test_small_arrays_need_no_slot(cuda: Cuda, rng: np.random.Generator) -> None:
    """CUDA's own copy takes what is contiguous; the arrays may be written again before it has run."""
    few = [random(rng, (2, n, 8)) for n in (3, 17, 100)]
    expected = [x.copy() for x in few]
    there = staging.to_gpu(few)
    for x in few:
        x[...] = 0
    cuda.current.synchronize()
    for x, back in zip(expected, staging.to_host(there), strict=True):
        assert np.array_equal(x, back)
    assert cuda.pinned == 0


def test_small_strided_arrays_share_one_slot(cuda: Cuda, rng: np.random.Generator) -> None:
    few = [random(rng, (2, n, 16))[..., ::2] for n in (3, 17, 100)]
    for _ in range(10):
        for x, back in zip(few, staging.to_host(staging.to_gpu(few)), strict=True):
            assert np.array_equal(x, back)
    assert cuda.pinned <= 2 * staging.CHUNK_BYTES  # the second one where the first is still on the bus
    assert cuda.threads == {threading.get_ident()}


def test_more_threads_than_one(cuda: Cuda, small_slots: staging.Ring, threads: int, rng: np.random.Generator) -> None:
    """A thread that has begun its first task waits for the others."""
    count, all_here = min(threads, 4), threading.Barrier(threads)
    copyto, seen = np.copyto, threading.local()

    def slow(to: np.ndarray, source: np.ndarray) -> None:
        if not hasattr(seen, "once"):
            seen.once = True
            all_here.wait(30)
        copyto(to, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "copyto", slow)
        staging.to_gpu([random(rng, (100, CHUNK))])
    assert len(cuda.threads) == count


@pytest.mark.parametrize("number", [0, 3, 25])
def test_an_error_leaves_all_usable(
    cuda: Cuda, small_slots: staging.Ring, threads: int, rng: np.random.Generator, number: int
) -> None:
    x = random(rng, (20, CHUNK))
    there = staging.to_gpu([x])
    for fails in (lambda: staging.to_gpu([x]), lambda: staging.to_host(there)):
        for _ in range(2 * threads + 1):  # more often than there are slots
            cuda.fails = len(cuda.copies) + number
            with pytest.raises(Error, match="IllegalAddress"):
                fails()
            assert not cuda.streams[0].queued, "a copy is left that runs"
            assert np.array_equal(staging.to_host(staging.to_gpu([x]))[0], x)


def test_without_memory_to_pin(cuda: Cuda, small_slots: staging.Ring, rng: np.random.Generator) -> None:
    cuda.can_pin = False
    x = random(rng, (20, CHUNK))
    assert np.array_equal(staging.to_host(staging.to_gpu([x]))[0], x)


def test_two_callers_at_a_time(cuda: Cuda, small_slots: staging.Ring, rng: np.random.Generator) -> None:
    given = [random(rng, (40, CHUNK)) for _ in range(4)]
    right = []

    def call(x: np.ndarray) -> None:
        right.extend(np.array_equal(staging.to_host(staging.to_gpu([x]))[0], x) for _ in range(5))

    callers = [threading.Thread(target=call, args=(x,)) for x in given]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert right == [True] * 20


def test_each_gpu_has_a_ring(cuda: Cuda, threads: int, rng: np.random.Generator) -> None:
    """New threads begin with GPU 0; events and streams are those of the ring's."""
    x = random(rng, (9, staging.CHUNK_BYTES // 2))
    for ordinal in (0, 1, 0):
        cuda.setDevice(ordinal)
        cuda.current.ordinal = ordinal
        assert np.array_equal(staging.to_host(staging.to_gpu([x]))[0], x)
    assert len(cuda.streams) == 2
    assert [s.ordinal for s in cuda.streams] == [0, 1]


def test_slots_are_written_while_others_are_on_the_bus(
    cuda: Cuda, small_slots: staging.Ring, threads: int, rng: np.random.Generator
) -> None:
    """Nobody waits for a copy while there is a slot to be had."""
    staging.to_gpu([random(rng, (100, CHUNK))])
    assert cuda.pinned == 2 * threads * CHUNK


def test_many_odd_arrays_fit_slots(cuda: Cuda, small_slots: staging.Ring, rng: np.random.Generator) -> None:
    few = [random(rng, (n % 67,), np.uint8) for n in range(500)]
    for x, back in zip(few, staging.to_host(staging.to_gpu(few)), strict=True):
        assert np.array_equal(x, back)


def test_pieces_are_on_the_bus_while_the_slot_is_written(
    cuda: Cuda, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a quarter of a slot waits for the rest."""
    monkeypatch.setattr(staging, "_rings", {0: staging.Ring(0, CHUNK, 1)})
    written, copyto = [], np.copyto

    def copy(to: np.ndarray, source: np.ndarray) -> None:
        copyto(to, source)
        written.append((to.nbytes, len(cuda.copies)))

    monkeypatch.setattr(np, "copyto", copy)
    staging.to_gpu([random(rng, (CHUNK // 2,)), random(rng, (3, 100))])
    assert [queued for _, queued in written] == list(range(len(written)))
    assert max(size for size, _ in written) == CHUNK // 4
