"""Tile counters without a GPU: a fake runtime hands out memory that is only numbers."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import types
from typing import Any

import pytest

from cupyflash.launch import counters
from cupyflash.launch.counters import Counters

CHUNK = 64


class Runtime:
    """cupy.cuda.runtime as `Counters` needs it; remembers what was cleared and waited for."""

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.cleared: list[tuple[int, int, int]] = []
        self.waited: list[int] = []
        self.idle = 0  # how often all work was waited for
        self.ids: dict[int, int] = {}  # of streams that had another one's handle before

    def streamIsCapturing(self, stream: int) -> bool:
        return stream in self.capturing

    def memset(self, address: int, value: int, size: int) -> None:
        assert not self.capturing, "no memory is touched while a graph is captured"
        self.cleared.append((address, value, size))

    def streamSynchronize(self, stream: int) -> None:
        self.waited.append(stream)

    def deviceSynchronize(self) -> None:
        self.idle += 1

    def stream_id(self, stream: int) -> int:
        return self.ids.get(stream, stream + 10**6 * (threading.get_ident() if stream == 2 else 1))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A CuPy that has these few names alone, whether there is a real one or not."""
    fake, addresses = Runtime(), itertools.count(1 << 40, 1 << 20)

    class Memory:
        def __init__(self, size: int) -> None:
            assert not fake.capturing, "nothing is allocated while a graph is captured"
            self.ptr, self.size = next(addresses), size

    names: dict[str, dict[str, Any]] = {
        "cupy": {},
        "cupy.cuda": {"runtime": fake},
        "cupy.cuda.memory": {"Memory": Memory},
    }
    for name, contents in names.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(counters, "_CHUNK", CHUNK)
    monkeypatch.setattr(counters, "_stream_id", fake.stream_id)
    return fake


def test_a_stream_keeps_its_counter_and_shares_it_with_no_other(runtime: Runtime) -> None:
    found = Counters()
    addresses = [found.address(stream) for stream in range(1000, 1050)]
    assert len(set(addresses)) == 50
    assert all(address % 8 == 0 and address > 0 for address in addresses)
    assert [found.address(stream) for stream in range(1000, 1050)] == addresses


def test_counters_are_zeros_before_anyone_uses_them(runtime: Runtime) -> None:
    found = Counters()
    found.reserve(5)
    first = found.address(5)
    ((start, value, size),) = runtime.cleared
    assert (value, size) == (0, 16 * CHUNK)
    assert start <= first < start + size
    assert runtime.waited == [0]


def test_each_captured_launch_has_a_counter_of_its_own(runtime: Runtime) -> None:
    found = Counters()
    eager = found.address(7)
    runtime.capturing.add(7)
    captured = [found.address(7) for _ in range(20)]
    runtime.capturing.clear()
    assert len({eager, *captured}) == 21
    assert found.address(7) == eager


def test_memory_is_allocated_before_a_capture_and_not_in_it(runtime: Runtime) -> None:
    """`reserve` keeps half a chunk ahead; a capture that takes more goes without rather than allocate."""
    found = Counters()
    found.reserve(7)
    runtime.capturing.add(7)
    found.reserve(7)
    captured = [found.address(7) for _ in range(CHUNK + 3)]
    assert captured[CHUNK:] == [0, 0, 0]
    assert len(set(captured[:CHUNK])) == CHUNK
    runtime.capturing.clear()
    found.reserve(7)
    assert found.address(7) not in (0, *captured[:CHUNK])
    assert len(runtime.cleared) == 2


def test_reserve_does_nothing_while_many_are_free(runtime: Runtime) -> None:
    found = Counters()
    for stream in range(CHUNK // 2 - 1):
        found.reserve(stream)
        found.address(stream)
    assert len(runtime.cleared) == 1
    for stream in range(CHUNK):
        found.reserve(stream)
        found.address(stream)
    assert len(runtime.cleared) == 2


def test_a_cold_capture_goes_without(runtime: Runtime) -> None:
    runtime.capturing.add(7)
    assert Counters().address(7) == 0


def test_the_stream_that_each_thread_has_of_its_own(runtime: Runtime) -> None:
    """Handle 2 names another stream in each thread."""
    found, seen = Counters(), []
    barrier = threading.Barrier(3)

    def work() -> None:
        barrier.wait()
        seen.append((found.address(2), found.address(2), found.address(1)))
        barrier.wait()  # thread identifiers are reused once a thread ends

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(first == second for first, second, _ in seen)
    assert len({first for first, _, _ in seen}) == 3
    assert len({legacy for _, _, legacy in seen}) == 1


def test_a_stream_with_the_handle_of_another(runtime: Runtime) -> None:
    """Its kernels may run beside what the destroyed stream left behind."""
    found = Counters()
    first = found.address(70)
    runtime.ids[70] = 5
    second = found.address(70)
    assert second not in (0, first)
    assert found.address(70) == second
    runtime.ids[70] = 6
    assert found.address(70) not in (0, first, second)


def test_streams_that_come_and_go_take_no_more_memory(runtime: Runtime) -> None:
    """Counters of streams that are gone are used again, but only once all work has been waited for."""
    found, recent = Counters(), set()
    idle = 0
    for i in range(20 * CHUNK):
        runtime.ids[70] = i
        counter = found.address(70)
        if runtime.idle != idle:
            idle, recent = runtime.idle, set()
        assert counter not in (0, *recent)
        recent.add(counter)
    assert len(runtime.cleared) <= 2
    assert 0 < runtime.idle <= 20 * CHUNK // (CHUNK // 2)


def test_a_stream_that_found_no_counter_gets_one_later(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counters()
    with monkeypatch.context() as empty:
        empty.setattr(Counters, "_take", lambda self: 0)
        assert found.address(70) == 0
    assert found.address(70) != 0


def test_the_driver_is_asked_for_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_id(stream: int, to: int) -> int:
        ctypes.c_uint64.from_address(to).value = stream + 1
        return 0

    monkeypatch.setattr(counters, "_get_id", lambda: get_id)
    assert counters._stream_id(0x7F0012345678) == 0x7F0012345679
    monkeypatch.setattr(counters, "_get_id", lambda: lambda stream, to: 201)
    assert counters._stream_id(0x7F0012345678) == 0


def test_threads_that_meet_on_new_streams(runtime: Runtime) -> None:
    """All threads get the same counter for a stream, no two streams the same."""
    found, results = Counters(), []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        results.append([found.address(stream) for stream in range(100, 300)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(r == results[0] for r in results)
    assert len(set(results[0])) == 200


def test_one_pool_a_gpu(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_counters", {})
    assert counters.of(0) is counters.of(0)
    assert counters.of(0) is not counters.of(1)
    assert counters.of(0).address(5) != counters.of(1).address(5)
