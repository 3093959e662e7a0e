"""What is kept for later: by key, and never more than so many."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar


class Recent(Protocol):
    """A value that remembers whether it was asked for."""

    recent: bool


V = TypeVar("V", bound=Recent)


def make_room(values: dict[Any, Any], limit: int) -> None:
    """Where as many are kept as may be, drop the older half of them."""
    if len(values) >= limit:
        for key in [*values][: -(-limit // 2)]:
            values.pop(key, None)


class Kept(Generic[V]):
    """At most `limit` values. For a new one the oldest goes; one that was found since it was put in, or since it was
    last spared, is spared once and counts as new. To find a value costs no more than in a dict.

    Attributes:
        last: the values that were found last, for who knows them at less cost than by their keys (last.py).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.last: dict[Hashable, Any] = {}
        self._values: OrderedDict[Hashable, V] = OrderedDict()  # a subclass of it hashes a key three times to drop it
        self._get = self._values.get
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> V | None:
        """The value of `key`; None for a new one, and for keys that cannot be hashed."""
        try:
            found = self._get(key)
        except TypeError:
            return None
        if found is not None:
            found.recent = True
        return found

    def keep(self, key: Hashable, value: V) -> V:
        """Keep a value, if its key can be hashed; returns it."""
        values = self._values
        with self._lock:
            value.recent = True  # it is not the one to go, even where all others were found
            try:
                values[key] = value
            except TypeError:
                return value
            while len(values) > self._limit:
                oldest, old = values.popitem(last=False)
                if old.recent:
                    old.recent = False
                    values[oldest] = old
                    values.move_to_end(key)
            value.recent = False
        return value

    def values(self) -> list[V]:
        """All that are kept, the oldest first."""
        return list(self._values.values())

    def clear(self) -> None:
        self._values.clear()
        self.last.clear()

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
