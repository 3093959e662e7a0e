"""Our own calls by the kernels of one family: of `bench`, the contestant `sm80` beside those that Hopper takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .clocks import Work

_VARIABLE = "CUPYFLASH_FAMILY"  # part of the keys under which calls are kept


@contextmanager
def family(name: str) -> Iterator[None]:
    """Calls insist on the kernels of this family."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def by_family(name: str, work: Work) -> Work:
    """The same function by the kernels of a family."""

    def run() -> Any:
        with family(name):
            return work()

    return run
