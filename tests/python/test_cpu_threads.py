"""The CPU path on several threads: the same bits on any number of them, none left behind; and what BLAS is given."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash.check.cases import case
from cupyflash.cpu import attention, products, tiles, workers
from cupyflash.cpu import call as cpu
from cupyflash.cpu.features import Features
from cupyflash.problem import Problem
from cupyflash.sequences import Sequences

# Many tasks of little work: tiles of 16 queries, one head at a time.
SMALL = {"TILE_ROWS": 16, "BLOCK_N": 32, "CHUNK_SCORES": 1}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(tiles, name, value)


def run(p: Problem, x: Any) -> tuple[np.ndarray, ...]:
    given = x.features.named()
    mods = given.pop("mods", None)
    arrays = () if mods is None else tuple(mods.bound()[1].values())
    of = Features(**given, mod_arrays=arrays, wanted=tuple(f"d{name}" for name in x.learned))
    out, lse = cpu.forward(x.q, x.k, x.v, p, of)
    return out, lse, *cpu.backward(x.dout, x.q, x.k, x.v, out, lse, x.dlse, p, of)


def bits(found: tuple[np.ndarray, ...]) -> list[bytes]:
    return [x.tobytes() for x in found]


NAMES = ("gqa", "many-heads", "primes", "nan-in-visible-key-causal", "alibi-causal-d128", "sink-gqa-dlse-d256")


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bit of them, gradients of what heads and sequences share included."""
    p, x = case(name).problem("fp32"), case(name).inputs("fp32")
    found = []
    for count in (1, 2, 3, 16):
        monkeypatch.setattr(workers, "threads", lambda scores, count=count: count)
        found.append(bits(run(p, x)))
    assert found[1:] == found[:1] * 3
    assert len(found[0]) == 5 + len(x.learned)


def test_sums_over_heads_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """The gradient of a bias that all sequences and heads share is added up in their order, whoever is done first."""
    p = Problem("fp32", 3, 40, 40, 4, 4, 8, 0.4)
    q, k, v, dout = rng.standard_normal((4, 3, 40, 4, 8), np.float32)
    of = Features(bias=rng.standard_normal((40, 40), np.float32), wanted=("dbias",))
    out, lse = cpu.forward(q, k, v, p, of)
    original, found = tiles.load, []

    def load(x: np.ndarray, dtype: Any) -> np.ndarray:
        time.sleep(rng.random() / 100)
        return original(x, dtype)

    monkeypatch.setattr(attention, "load", load)
    for count in (1, 2, 5, 5, 5):
        monkeypatch.setattr(workers, "threads", lambda scores, count=count: count)
        found.append(bits(cpu.backward(dout, q, k, v, out, lse, None, p, of)))
    assert len(found[0]) == 4
    assert found[1:] == found[:1] * 4


PARTS = ("packed-unequal", "packed-alibi-shared-d160", "block-mask-blocks", "range-left-causal")


@pytest.mark.parametrize("name", PARTS)
def test_parts_do_not_depend_on_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do sequences and heads that are computed side by side, each of them on one thread."""
    p, x = case(name).problem("fp32"), case(name).inputs("fp32")
    monkeypatch.setattr(workers, "SCORES", 1)
    started, found = [], []
    original = workers._started
    monkeypatch.setattr(workers, "_started", lambda go, n: (started.append(n), original(go, n))[1])
    for cores in (1, 2, 3):
        monkeypatch.setattr(workers, "cores", lambda cores=cores: cores)
        found.append(bits(run(p, x)))
    assert found[1:] == found[:1] * 2
    assert set(started) <= {0, 1, 2}


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one size run side by side and start no threads of their own; a large one among small ones does."""
    started = []
    original = workers._started
    monkeypatch.setattr(workers, "_started", lambda go, n: (started.append(n), original(go, n))[1])
    monkeypatch.setattr(workers, "cores", lambda: 4)
    monkeypatch.setattr(workers, "SCORES", 1)
    for lengths, expected in (([32] * 8, {3: 1, 0: 8}), ([8, 200, 8], {0: 1, 3: 3})):
        cu = np.cumsum([0, *lengths]).astype(np.int32)
        q, k, v = np.ones((3, cu[-1], 1, 8), np.float32)
        p = Problem("fp32", len(lengths), int(cu[-1]), int(cu[-1]), 1, 1, 8, 1.0, packed=True)
        started.clear()
        cpu.forward(q, k, v, p, Features(sequences=Sequences.of(cu)))
        assert Counter(started) == expected


def test_calls_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "threads", lambda scores: 2)
    p, x = case("many-heads").problem("bf16"), case("many-heads").inputs("bf16")
    expected = bits(run(p, x))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: bits(run(p, x)), range(8))) == [expected] * 8


def test_threads_end_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    seen = set()
    original = workers._Work.go

    def go(self: Any) -> None:
        seen.add(threading.current_thread())
        original(self)

    monkeypatch.setattr(workers._Work, "go", go)
    monkeypatch.setattr(workers, "threads", lambda scores: 3)
    p, x = case("many-heads").problem("fp32"), case("many-heads").inputs("fp32")
    run(p, x)
    assert len(seen - before) == 4  # two in each pass beside this one
    assert not any(thread.is_alive() for thread in seen - before)


FORKED = """
import os
import numpy as np
import cupyflash
from cupyflash.cpu import workers
workers.threads = lambda scores: 2
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 600, 3, 16), np.float32)
here = cupyflash.attention(q, k, v).tobytes()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(int(cupyflash.attention(q, k, v).tobytes() != here))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_behind_a_call() -> None:
    environment = os.environ | {"CUPYFLASH_BACKEND": "cpu"}
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120, env=environment)


@pytest.mark.parametrize("count", [1, 3])
def test_errors_end_a_call(count: int) -> None:
    """Whoever meets it; tasks that have not begun are left out."""
    ran: list[int] = []

    def task(i: int) -> Callable[[], None]:
        def work() -> None:
            ran.append(i)
            if i == 5:
                raise ArithmeticError(f"task {i}")

        return work

    with pytest.raises(ArithmeticError, match="task 5"):
        workers.run((task(i) for i in range(10_000)), count)
    assert len(ran) < 10_000
    assert threading.active_count() == len(threading.enumerate())

    def broken() -> Iterator[Callable[[], None]]:
        yield task(0)
        raise KeyError("of the iterator")

    with pytest.raises(KeyError, match="of the iterator"):
        workers.run(broken(), count)


def test_results_are_handed_on_in_order() -> None:
    """However late one is."""
    late, found = threading.Event(), []

    def task(i: int) -> int:
        if i == 0:
            assert late.wait(60)
        if i == 9:
            late.set()
        return i

    workers.run((lambda i=i: task(i) for i in range(10)), 2, found.append)  # type: ignore[misc]
    assert found == list(range(10))


def test_warnings_stay_where_numpy_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have the caller's `errstate`: what it turns into an error is one on any thread."""

    def task() -> None:
        np.float32(1) / np.float32(0)

    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        workers.run((task for _ in range(50)), 3)
    with np.errstate(all="ignore"):
        workers.run((task for _ in range(50)), 3)


def test_where_no_thread_can_start_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found: list[int] = []
    workers.run((lambda i=i: i for i in range(5)), 4, found.append)  # type: ignore[misc]
    assert found == [0, 1, 2, 3, 4]


def test_as_many_threads_as_blas_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in workers.BLAS_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    large = 2**40
    assert workers.threads(large) == 12
    for name, value, count in (("OMP_NUM_THREADS", "7,2", 7), ("MKL_NUM_THREADS", "99", 12),
                               ("OPENBLAS_NUM_THREADS", "3", 3), ("OPENBLAS_NUM_THREADS", "none", 12)):  # fmt: skip
        monkeypatch.setenv(name, value)
        assert workers.threads(large) == count
    assert [workers.threads(n * workers.SCORES) for n in (0, 1, 2, 5)] == [1, 1, 2, 5]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers.threads(large) == 1


sizes = st.integers(0, 70) | st.sampled_from([128, 129, 256, 511, 512, 513])


@given(heads=st.integers(1, 2), rows=sizes, depth=sizes, columns=sizes, turned=st.booleans(), seed=st.integers(0, 99))
def test_products_stay_on_one_thread(
    heads: int, rows: int, depth: int, columns: int, turned: bool, seed: int
) -> None:  # fmt: skip
    """Whatever the shape, BLAS gets no more than it does by itself, and the blocks are the whole product."""
    rng = np.random.default_rng(seed)
    A, B = rng.standard_normal((heads, rows, depth)), rng.standard_normal((heads, depth, columns))
    if turned:
        A, B = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (A, B))
    given: list[tuple[int, int, int]] = []
    original = np.matmul

    def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        given.append((a.shape[-2], a.shape[-1], b.shape[-1]))
        return original(a, b, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", matmul)
        C = products.matmul(A, B)
    np.testing.assert_allclose(C, A @ B, rtol=1e-10, atol=1e-10)
    for m, k, n in given:
        assert m * k * n <= (products.ONE_THREAD_VECTOR if min(m, n) <= 1 else products.ONE_THREAD)


def test_ctrl_c_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for them when it comes waits until they are done; they begin nothing new."""
    begun, waits, ended, join = threading.Event(), threading.Event(), [], threading.Thread.join

    class Tasks:
        """For others than the main thread, without end."""

        def __iter__(self) -> Iterator[workers.Task]:
            return self

        def __next__(self) -> workers.Task:
            if threading.current_thread() is threading.main_thread():
                raise StopIteration
            return task

    def task() -> None:
        begun.set()
        waits.wait(30)
        ended.append(1)

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        assert begun.wait(30)
        monkeypatch.setattr(threading.Thread, "join", join)
        threading.Timer(0.05, waits.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.run(Tasks(), 2)
    assert ended == [1]
