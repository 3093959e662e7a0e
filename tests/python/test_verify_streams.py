"""`verify`'s check of streams on a simulated GPU: it passes, fails, or says that it could show nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cupyflash import api
from cupyflash.cli.frameworks import Framework
from cupyflash.cli.verify import checks as verify_checks
from cupyflash.cli.verify import report as verify_report

COPY_BYTES = 1 << 20
HOST_US = 5.0  # that queueing takes


class Gpu(Framework):
    """NumPy arrays and streams: what is queued happens in the order of the times at which a GPU would have finished it.

    Attributes:
        copy_us: how long a large copy takes.
        strays: calls of attention run on a stream of their own, whatever the caller's is.
    """

    can = frozenset({"stream"})

    def __init__(self, copy_us: float, strays: bool) -> None:
        super().__init__()
        self.copy_us, self.strays, self.copies = copy_us, strays, 0
        self.now, self.current, self.ends = 0.0, 0, {0: 0.0}
        self.queued: list[tuple[float, Callable[[], None]]] = []

    def queue(self, work: Callable[[], None], us: float, stream: int) -> None:
        self.now += HOST_US
        self.ends[stream] = max(self.ends[stream], self.now) + us
        self.queued.append((self.ends[stream], work))

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        out, lse = np.full_like(q, np.nan), np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)

        def work() -> None:
            out[...], lse[...] = right_forward(q, k, v, **options)

        self.queue(work, 10, self.new() if self.strays else self.current)
        return out, lse

    def attention_backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> Any:
        gradients = [np.full_like(x, np.nan) for x in (q, k, v)]

        def work() -> None:
            for to, x in zip(gradients, right_backward(dout, q, k, v, out, lse, **options), strict=True):
                to[...] = x

        self.queue(work, 10, self.current)
        return gradients

    def new(self) -> int:
        self.ends[len(self.ends)] = 0.0
        return len(self.ends) - 1

    def write(self, target: Any, source: Any) -> None:
        is_large = target.nbytes == COPY_BYTES
        self.copies += is_large
        self.queue(lambda: np.copyto(target, source), self.copy_us if is_large else 1, self.current)

    def synchronize(self) -> None:
        for _, work in sorted(self.queued, key=lambda x: x[0]):
            work()
        self.queued.clear()
        self.now = max(self.now, *self.ends.values())

    def to_numpy(self, x: Any) -> Any:
        self.synchronize()
        return np.array(x)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        number = self.new()

        class Again(contextlib.AbstractContextManager[None]):
            """Can be entered more than once."""

            def __enter__(this) -> None:
                this.entered = self.on(number)
                this.entered.__enter__()

            def __exit__(this, *error: Any) -> None:
                this.entered.__exit__(*error)

        return Again()

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        self.synchronize()
        with self.stream():
            yield
        self.synchronize()

    def mark(self) -> Callable[[], bool]:
        end = self.ends[self.current]
        return lambda: self.now >= end


right_forward, right_backward = api.attention, api.attention_backward


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[verify_checks.CheckResult, Gpu]]:
    def run(*, copy_us: float, strays: bool = False) -> tuple[verify_checks.CheckResult, Gpu]:
        gpu = Gpu(copy_us, strays)
        monkeypatch.setattr(verify_checks, "COPY_BYTES", COPY_BYTES)
        monkeypatch.setattr(api, "attention", gpu.attention)
        monkeypatch.setattr(api, "attention_backward", gpu.attention_backward)
        return verify_checks.run_check("non-default-stream", verify_checks.Context(gpu, "fp16", 0)), gpu

    return run


def test_it_passes_at_once_where_copies_are_slow(check: Callable[..., Any]) -> None:
    result, gpu = check(copy_us=40)
    assert (result.passed, result.shown, result.detail) == (True, True, "")
    assert gpu.copies == 16


def test_copies_grow_until_they_outlast_the_host(check: Callable[..., Any]) -> None:
    """At 6 us a copy gains 1 us on the host, and the calls take 20 us to queue."""
    result, gpu = check(copy_us=HOST_US + 1)
    assert result.passed
    assert gpu.copies > 16


def test_a_call_on_another_stream_is_found(check: Callable[..., Any]) -> None:
    result, _ = check(copy_us=40, strays=True)
    assert (result.passed, result.shown) == (False, True)
    assert "out" in result.detail


@pytest.mark.parametrize("strays", [False, True])
def test_nothing_is_shown_where_copies_are_too_fast(check: Callable[..., Any], strays: bool) -> None:
    """Right and wrong calls look alike there: no verdict, which is not a pass."""
    result, gpu = check(copy_us=0.5, strays=strays)
    assert (result.passed, result.shown) == (False, False)
    assert "4096 copies" in result.detail
    assert gpu.copies == 16 * (2**verify_checks.ATTEMPTS - 1)
    document = result.document()
    assert (document["passed"], document["shown"]) == (False, False)


def test_what_was_not_shown_is_said() -> None:
    """It is no failure; and it alone verifies nothing."""
    streams = verify_checks.CheckResult("non-default-stream", False, "too fast", 0.1, shown=False)
    threads = verify_checks.CheckResult("two-threads", True, "", 0.1)
    options = {"level": "smoke", "framework": "cupy", "backend": "auto", "seed": 0}
    both = verify_report.Report(options, gpu="a GPU", checks=[threads, streams])
    assert (both.exit_code, both.reproduce) == (0, None)
    assert both.verdict == "VERIFIED: 0 cases and 2 checks on a GPU; not shown: non-default-stream"
    assert verify_report.check_line(streams).splitlines() == [f"{'non-default-stream':<88}NOT SHOWN", "    too fast"]
    assert verify_report.Report(options, gpu="a GPU", checks=[streams]).verdict.startswith("NOT SHOWN: ")
