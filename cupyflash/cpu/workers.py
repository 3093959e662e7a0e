"""The tasks of a call on as many threads as BLAS takes; NumPy runs side by side in them, since it releases the lock.

Each call starts its threads and ends them: none is left to a fork, to the next call, or to the end of the process.
Which tasks there are does not depend on how many threads there are, and each of them writes what no other one does:
results repeat bitwise on any number of threads.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

Task = Callable[[], Any]

# How many threads BLAS may take: the variables of the environment, in the order in which it reads them.
BLAS_LIMITS = "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"
SCORES = 2**18  # that make a thread worth its start: about 0.1 ms of 1 ms
_side_by_side = contextvars.ContextVar("side_by_side", default=False)  # whether this is a task beside others


def threads(scores: int) -> int:
    """How many threads compute so many scores: as many as BLAS would take, fewer if there is little to do, and one
    within a task."""
    return 1 if _side_by_side.get() else max(1, min(cores(), scores // SCORES))


def cores() -> int:
    """The cores of this process, or fewer if the user said so to BLAS."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in BLAS_LIMITS:
        limit = os.environ.get(name, "").split(",")[0].strip()
        if limit.isdecimal() and int(limit) > 0:
            return min(found, int(limit))
    return found


def run(tasks: Iterator[Task], count: int, then: Callable[[Any], None] | None = None) -> None:
    """Run all tasks on `count` threads, of which the caller's is one.

    Args:
        tasks: the iterator runs on these threads too, one at a time.
        then: is given what the tasks return, in their order, one at a time.

    Raises:
        BaseException: the first one that a task raised; the tasks that had not begun are left out.
    """
    work = _Work(tasks, then)
    before = _side_by_side.set(_side_by_side.get() or count > 1)
    try:
        helpers = _started(work.go, count - 1)
        work.go()
        try:
            _join(helpers)
        except BaseException as e:  # Ctrl-C: what tasks write must not be written when this has returned
            work.error = work.error or e
            _join(helpers)
    finally:
        _side_by_side.reset(before)
    if work.error is not None:
        raise work.error


def _started(go: Callable[[], None], count: int) -> list[threading.Thread]:
    """Threads in the caller's context, NumPy's `errstate` with it: so many, or as many as can be had."""
    helpers: list[threading.Thread] = []
    for _ in range(count):
        helper = threading.Thread(target=contextvars.copy_context().run, args=(go,), name="cupyflash")
        try:
            helper.start()
        except RuntimeError:
            break
        helpers.append(helper)
    return helpers


def _join(helpers: list[threading.Thread]) -> None:
    for helper in helpers:
        helper.join()


class _Work:
    def __init__(self, tasks: Iterator[Task], then: Callable[[Any], None] | None) -> None:
        self.error: BaseException | None = None
        self._tasks, self._then = enumerate(tasks), then
        self._next, self._done = 0, dict[int, Any]()  # whose turn it is, and results that wait for theirs
        self._lock = threading.Lock()

    def go(self) -> None:
        """Take one task after the other."""
        try:
            while (found := self._take()) is not None:
                number, task = found
                result = task()
                if self._then is not None:
                    self._hand_on(number, result, self._then)
        except BaseException as e:
            self.error = self.error or e

    def _take(self) -> tuple[int, Task] | None:
        with self._lock:
            return None if self.error is not None else next(self._tasks, None)

    def _hand_on(self, number: int, result: Any, then: Callable[[Any], None]) -> None:
        with self._lock:
            self._done[number] = result
            while self._next in self._done:
                then(self._done.pop(self._next))
                self._next += 1
