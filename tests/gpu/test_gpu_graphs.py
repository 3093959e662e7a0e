"""The sm90 family in CUDA graphs: they may run beside anything, so every captured launch has its own tile counter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cupyflash.launch import counters
from cupyflash.launch.counters import Counters
from tests import hopper
from tests.hopper import NUMBERS, bits, make, new_stream, quiet, synchronize

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hopper.clean(monkeypatch):
        yield


def capture(calls: Sequence[Callable[[], Any]], stream: Any) -> tuple[Any, list[Any]]:
    """A CuPy graph of the calls, and what they returned."""
    from cupy.cuda import runtime

    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture(runtime.streamCaptureModeRelaxed)
        try:
            outs = [call() for call in calls]
        finally:
            graph = stream.end_capture()
    return graph, outs


def poison(outs: Sequence[Any], stream: Any) -> None:
    """All bits set is a NaN in every dtype."""
    for out in outs:
        out.data.memset_async(0xFF, out.nbytes, stream)


def test_every_captured_launch_has_its_own_counter() -> None:
    calls, stream = [make(i) for i in NUMBERS], new_stream()
    with stream:
        calls[0]()
    free = len(counters.of(0)._free)
    capture([*calls, *calls], stream)
    assert free - len(counters.of(0)._free) == 2 * len(calls)


@pytest.mark.parametrize("counted", [True, False])
def test_replays(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them, of a graph with several launches; also without counters, when none are left."""
    expected, calls, stream = [quiet(i) for i in NUMBERS], [make(i) for i in NUMBERS], new_stream()
    with stream:
        calls[0]()
    if not counted:
        monkeypatch.setattr(Counters, "_take", lambda self: 0)
    graph, outs = capture(calls, stream)
    for _ in range(20):
        poison(outs, stream)
        for _ in range(10):
            graph.launch(stream)
        stream.synchronize()
        assert [bits(out) for out in outs] == expected


def test_replays_beside_eager_launches_on_other_streams() -> None:
    expected, calls = [quiet(i) for i in NUMBERS], [make(i) for i in NUMBERS]
    mine, streams = new_stream(), [new_stream() for _ in NUMBERS]
    graph, outs = capture(calls, mine)
    eager = []
    for _ in range(20):
        poison(outs, mine)
        graph.launch(mine)
        for stream, call in zip(streams, calls, strict=True):
            with stream:
                eager.append(call())
        graph.launch(mine)
        mine.synchronize()
        assert [bits(out) for out in outs] == expected
    synchronize()
    assert all(bits(out) == expected[i % len(expected)] for i, out in enumerate(eager))


def test_two_graphs_at_the_same_time() -> None:
    """Each on a stream of its own, and each graph now and then on the other's stream."""
    expected, calls = [quiet(i) for i in NUMBERS], [make(i) for i in NUMBERS]
    streams = new_stream(), new_stream()
    halves = (1, 4, 5), (2, 3, 5)
    captured = [capture([calls[i] for i in half], stream) for half, stream in zip(halves, streams, strict=True)]
    for turn in range(40):
        for i, (graph, _) in enumerate(captured):
            graph.launch(streams[i if turn % 8 else 1 - i])
    synchronize()
    for stream, (graph, outs) in zip(streams, captured, strict=True):
        poison(outs, stream)
        graph.launch(stream)
    synchronize()
    for half, (_, outs) in zip(halves, captured, strict=True):
        assert [bits(out) for out in outs] == [expected[i] for i in half]


def test_a_capture_while_another_thread_launches() -> None:
    expected, calls = [quiet(i) for i in NUMBERS], [make(i) for i in NUMBERS]
    for call in calls:
        call()
    synchronize()
    started, done, eager = threading.Event(), threading.Event(), []

    def work() -> None:
        with new_stream() as stream:
            while not done.is_set() and len(eager) < 500:
                eager.append(calls[1]())
                started.set()
            stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(timeout=60)
        stream = new_stream()
        captured = [capture(calls, stream) for _ in range(5)]
        for graph, _ in captured:
            graph.launch(stream)
        stream.synchronize()
    finally:
        done.set()
        thread.join()
    assert all([bits(out) for out in outs] == expected for _, outs in captured)
    assert all(bits(out) == expected[1] for out in eager)


@pytest.mark.needs("torch")
def test_torch_graphs_beside_eager_launches() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    expected, calls = [quiet(i) for i in NUMBERS], [make(i, "torch") for i in NUMBERS]
    for call in calls:
        call()
    torch.cuda.synchronize()
    captured = []
    for order in (NUMBERS, NUMBERS[::-1]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append((graph, order, [calls[i]() for i in order]))
    streams, side, eager = [torch.cuda.Stream() for _ in captured], torch.cuda.Stream(), []
    for turn in range(60):
        for stream, (graph, _, outs) in zip(streams, captured, strict=True):
            with torch.cuda.stream(stream):
                for out in outs:
                    out.fill_(float("nan"))
                graph.replay()
        with torch.cuda.stream(side):
            eager.append(calls[turn % len(calls)]())
        if turn % 10 == 9:
            torch.cuda.synchronize()
            for _, order, outs in captured:
                assert [bits(out) for out in outs] == [expected[i] for i in order]
    assert all(bits(out) == expected[turn % len(calls)] for turn, out in enumerate(eager))
