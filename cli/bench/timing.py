"""How `bench` measures: sustained, in turns, in a random order; medians and their spread; and the peak of memory.

A GPU slows down as it warms up, so each function runs until the clock is steady and is then timed for a quarter of a
second. All functions of a cell take turns. Who runs after whom moves a figure by some percent, so each round has an
order of its own, and the median of the rounds counts.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .clocks import Clock, Recorded, Stepped, Work

BATCH_MS = 10.0  # calls between two events take at least this long: what the first one costs the host vanishes
MIN_BATCH, MAX_BATCH = 4, 1000
ROUNDS = 5  # fewer say little about the spread


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds over all functions, seconds to warm up and to measure each."""

    rounds: int = ROUNDS
    warm_s: float = 0.1
    run_s: float = 0.25


QUICK = Effort(warm_s=0.02, run_s=0.05)
WARM_UP = Effort(rounds=1, warm_s=0.05, run_s=0.1)  # nobody looks at the time
SUSTAINED = Effort()


@dataclass(frozen=True)
class Timing:
    """What one function took, a value for each round, in the unit of whoever measured it."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest - fastest round) / median."""
        return (max(self.rounds) - min(self.rounds)) / self.median


def orders(contestants: int, rounds: int) -> Iterator[list[int]]:
    """A random order for each round, never that of the round before (where there is more than one)."""
    order = list(range(contestants))
    before: list[int] = []
    for _ in range(rounds):
        random.shuffle(order)
        while order == before and contestants > 1:
            random.shuffle(order)
        before = list(order)
        yield before


def in_turns(works: Sequence[Work], rounds: int, measure: Callable[[Work], float]) -> list[Timing]:
    """`measure` each function once a round, in the order of that round."""
    found: list[list[float]] = [[] for _ in works]
    for order in orders(len(works), rounds):
        for i in order:
            found[i].append(measure(works[i]))
    return [Timing(tuple(values)) for values in found]


def timings_ms(works: Sequence[Work], clock: Clock, effort: Effort) -> list[Timing]:
    """Milliseconds of each function, in turns; each round's value is a median of its own."""

    def measure(work: Work) -> float:
        return _median_ms(work, clock, effort) / (work.calls if isinstance(work, Recorded) else 1)

    return in_turns(works, effort.rounds, measure)


def sustained_ms(works: Sequence[Work], clock: Clock, effort: Effort) -> list[float]:
    """The medians of `timings_ms`."""
    return [t.median for t in timings_ms(works, clock, effort)]


def _median_ms(work: Work, clock: Clock, effort: Effort) -> float:
    work()
    clock.synchronize()
    start = time.perf_counter()
    single = clock.batch_ms(work, 1)
    while time.perf_counter() - start < effort.warm_s:
        single = clock.batch_ms(work, MIN_BATCH if single < BATCH_MS else 1)
    fewest = MIN_BATCH if single < 1e3 * effort.run_s else 1
    calls = min(MAX_BATCH, max(fewest, math.ceil(BATCH_MS / max(single, 1e-3))))
    samples: list[float] = []
    start = time.perf_counter()
    while not samples or time.perf_counter() - start < effort.run_s:
        samples.append(clock.batch_ms(work, calls))
    return statistics.median(samples)


def host_us(works: Sequence[Work], clock: Clock, calls: int = 400, rounds: int = 9) -> list[Timing]:
    """Microseconds that the host spends in a warm call of each function, in turns, the device left to itself."""

    def measure(work: Work) -> float:
        for _ in range(50):
            work()
        clock.synchronize()
        seconds = _host_seconds(work, calls)
        clock.synchronize()
        return seconds / calls * 1e6

    return in_turns(works, rounds, measure)


def _host_seconds(work: Work, calls: int) -> float:
    """Of all calls; of `Stepped` ones without what happens between them, and with 0.1 us each to read the time."""
    if not isinstance(work, Stepped):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return time.perf_counter() - start
    seconds = 0.0
    for _ in range(calls):
        work.step()
        start = time.perf_counter()
        work.call()
        seconds += time.perf_counter() - start
    return seconds
