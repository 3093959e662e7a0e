"""What is kept for later: by key, and never more than so many."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol, TypeVar


class Recent(Protocol):
    """A value that remembers whether it was asked for."""

    recent: bool


V = TypeVar("V", bound=Recent)


class Kept(OrderedDict[Hashable, V]):
    """At most `limit` values. For a new one the oldest goes; one that was found since it was put in, or since it was
    last spared, is spared once and counts as new. To find a value costs no more than in a dict."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> V | None:
        """The value of `key`; None for a new one, and for keys that cannot be hashed."""
        try:
            found = self.get(key)
        except TypeError:
            return None
        if found is not None:
            found.recent = True
        return found

    def keep(self, key: Hashable, value: V) -> V:
        """Keep a value, if its key can be hashed; returns it."""
        try:
            hash(key)
        except TypeError:
            return value
        with self._lock:
            while len(self) >= self._limit:
                oldest, old = self.popitem(last=False)
                if old.recent:
                    old.recent = False
                    self[oldest] = old
            self[key] = value
        return value
