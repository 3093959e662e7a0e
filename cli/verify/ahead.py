"""Compiles kernels ahead of the cases that need them, in a process beside the one that runs these.

In threads of that one, compilations hold up the reference, which waits for Python's lock and for the memory that
each of them takes from the system.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from cupyflash.check.cache_case import CacheCase
from cupyflash.check.cases import Case
from cupyflash.compile import cache, jit
from cupyflash.gpu.device import Device
from cupyflash.launch.prepare import family
from cupyflash.plan.variant import Variant

from .needed import variants_of, variants_over_cache_of

_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from cupyflash.cli.verify import ahead; ahead.work()"
)
_NICENESS = 10  # the cases come first


@contextlib.contextmanager
def compiling_ahead(wanted: Sequence[tuple[Case | CacheCase, str]], gpu: Device) -> Iterator[None]:
    """Compile the kernels of these cases side by side, in their order, into the cache, while the cases run.

    A kernel that does not compile is the matter of the case that needs it: its call meets the same error. So is one
    that is not there yet: its call waits for it, or compiles it. Where nothing is kept, nothing is compiled ahead.
    """
    if cache.default().problem:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            for each in (sys.path, (wanted, gpu)):
                pickle.dump(each, process.stdin)
            process.stdin.flush()
        yield
    finally:
        process.kill()  # what it was at is written by nobody; its locks end with it
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def needed(wanted: Iterable[tuple[Case | CacheCase, str]], gpu: Device) -> Iterator[Variant]:
    """The kernels of these cases, each once."""
    found: set[Variant] = set()
    for case, dtype in wanted:
        for variant in _of(case, dtype, gpu):
            if variant not in found:
                found.add(variant)
                yield variant


def _of(case: Case | CacheCase, dtype: str, gpu: Device) -> Iterable[Variant]:
    if isinstance(case, CacheCase):
        return variants_over_cache_of(case, dtype, gpu, family())
    return variants_of(case, dtype, gpu, family())


def work() -> None:
    """In that process: compile what the other one says, until it is done or the other one is gone."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    wanted, gpu = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for variant in needed(wanted, gpu):
            pool.submit(jit.compile_kernel, variant, gpu.arch)


def _end_with_the_other() -> None:
    sys.stdin.buffer.read()  # returns when nobody holds the other end any more
    os._exit(0)
