"""Batches of random problems, one after the other, in a process of their own; and how a failure is made smaller."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from random import Random

from .generate import has_its_ranges, kind, legal, problem, simpler
from .run import check
from .spec import Spec

BATCH = 20  # problems of one kind, by one process
BATCH_SECONDS = 900.0  # a kernel that hangs does not hang longer than this
BATCHES_A_PROCESS = 25  # compiled kernels stay in the memory of the process that runs them


def batch(seed: int, where: str, number: int, size: int = BATCH) -> Iterator[Spec]:
    """The specs of one batch."""
    rng = Random(f"{seed} {where} {number}")
    of = kind(rng, where)
    for _ in range(size):
        yield problem(rng, where, of)


def run_batch(seed: int, where: str, number: int, size: int, until: float) -> tuple[int, list[tuple[str, str]]]:
    """How many problems were seen until then, and (spec, what went wrong) of those that failed."""
    failures, seen = [], 0
    for spec in batch(seed, where, number, size):
        if time.time() > until:
            break
        seen += 1
        if wrong := check(spec, where):
            failures.append((str(spec), wrong))
    return seen, failures


def shrunk(spec: Spec, where: str, seconds: float = 60.0) -> Spec:
    """A simpler problem that fails, too: one change at a time, as long as it helps."""
    until, tried = time.time() + seconds, {str(spec)}
    while True:
        for other in simpler(spec):
            if time.time() > until:
                return spec
            if str(other) in tried or not legal(other) or not has_its_ranges(other):
                continue
            tried.add(str(other))
            if check(other, where):
                spec = other
                break
        else:
            return spec


def fuzz(
    places: list[str], seed: int, minutes: float, problems: int | None
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """Batches of each place in turn. How many problems each saw, and the failures of the batch that had some."""
    until, seen, number = time.time() + 60 * minutes, dict.fromkeys(places, 0), 0
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=BATCHES_A_PROCESS) as pool:
        while time.time() < until and (problems is None or min(seen.values()) < problems):
            for where in places:
                size = BATCH if problems is None else max(0, min(BATCH, problems - seen[where]))
                try:
                    job = pool.apply_async(run_batch, (seed, where, number, size, until))
                    count, failures = job.get(BATCH_SECONDS)
                except multiprocessing.TimeoutError:
                    count, failures = 0, [("", f"batch {number} of seed {seed} died or hung for {BATCH_SECONDS:.0f} s")]
                seen[where] += count
                if sys.stderr.isatty():
                    print(f"\r{seen} problems, {until - time.time():.0f} s left ", end="", file=sys.stderr)
                if failures:
                    return seen, [{"where": where, "spec": spec, "wrong": wrong} for spec, wrong in failures]
            number += 1
    return seen, []
