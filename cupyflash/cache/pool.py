"""Which page of a pool belongs to which sequences, on the host: counts of owners, no arrays of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, CacheFullError

Integers = NDArray[np.int32]


class Tokens:
    """A sequence: its pages in their order, and how many tokens they hold.

    Attributes:
        count: how many pages it has.
    """

    def __init__(self, pages: Integers, length: int) -> None:
        self._room, self.count, self.length = pages, len(pages), length

    @property
    def pages(self) -> Integers:
        """The row of a table; a view."""
        return self._room[: self.count]

    @property
    def last(self) -> int:
        """The last page."""
        return int(self._room[self.count - 1])

    def add(self, pages: Integers) -> None:
        """More of them, in an array that doubles where it is full."""
        before, self.count = self.count, self.count + len(pages)
        if self.count > len(self._room):
            self._room = np.resize(self._room[:before], max(self.count, 2 * before))
        self._room[before : self.count] = pages

    def cut(self, count: int) -> Integers:
        """Those behind the first `count`, which it no longer has."""
        gone = self.pages[count:].copy()
        self.count = count
        return gone


class Pool:
    """Pages and their owners. A page with several owners is written by none of them.

    Attributes:
        owners: how many sequences have each page.
        free: how many pages none has.
        max_seqlen: how many tokens a sequence can have; None: as many as the pool.
    """

    def __init__(self, pages: int, page_size: int, max_seqlen: int | None) -> None:
        self.page_size, self.max_seqlen = page_size, max_seqlen
        self.owners = np.zeros(pages, np.int64)
        self.free = pages
        self._stack = np.arange(pages, dtype=np.int32)[::-1].copy()  # its first `free` have no owner; the next one last
        self._sequences: dict[int, Tokens] = {}
        self._next = 0

    def of(self, sequence: Any, name: str = "sequence") -> Tokens:
        """The sequence of this number.

        Raises:
            ArgumentError: there is none.
        """
        is_number = isinstance(sequence, (int, np.integer)) and not isinstance(sequence, (bool, np.timedelta64))
        tokens = self._sequences.get(int(sequence)) if is_number else None
        if tokens is None:
            raise ArgumentError(
                f"{name}: expected a number that allocate or fork gave, and not freed, got {sequence!r}"
            )
        return tokens

    def chosen(self, sequences: Sequence[Any]) -> list[Tokens]:
        """Several, each once."""
        found = [self.of(sequence, "sequences") for sequence in sequences]
        if len(set(sequences)) != len(sequences):
            raise ArgumentError(f"sequences: expected each once, got {list(sequences)}")
        return found

    def begin(self, tokens: Tokens | None = None, length: int = 0) -> int:
        """A new sequence, with the first `length` of some tokens in the same pages; its number."""
        shared = np.empty(0, np.int32) if tokens is None else tokens.pages[: self._pages_for(length)].copy()
        self.owners[shared] += 1
        number, self._next = self._next, self._next + 1
        self._sequences[number] = Tokens(shared, length)
        return number

    def shorten(self, tokens: Tokens, length: int) -> None:
        """Keep the first `length` tokens and their pages."""
        gone, tokens.length = tokens.cut(self._pages_for(length))[::-1], length
        self.owners[gone] -= 1
        gone = gone[self.owners[gone] == 0]
        self._stack[self.free : self.free + len(gone)] = gone
        self.free += len(gone)

    def end(self, sequence: int) -> None:
        self.shorten(self.of(sequence), 0)
        del self._sequences[int(sequence)]

    def grow(self, sequences: Sequence[int], chosen: Sequence[Tokens], counts: Sequence[int]) -> list[tuple[int, int]]:
        """So many tokens more for each sequence, of these numbers; the copies (from page, to page) that must be made
        before they are written: of a partly filled page that others have, too.

        Raises:
            ArgumentError: a sequence would be too long.
            CacheFullError: there are too few free pages. Nothing has changed then.
        """
        all_rows = len(self.owners) * self.page_size
        longest, what = min((all_rows, "more pages"), (self.max_seqlen or all_rows + 1, "a larger max_seqlen"))
        for number, tokens, count in zip(sequences, chosen, counts, strict=True):
            if (room := longest - tokens.length) < count:  # which no page that is freed would help
                raise ArgumentError(
                    f"counts: expected at most {room} more tokens of sequence {number}, which has {tokens.length}, got "
                    f"{count}; give PagedCache {what}"
                )
        missing = self._needed(chosen, counts) - self.free
        if missing > 0:
            raise CacheFullError(
                f"PagedCache: {missing} pages too few: {self.free} of {len(self.owners)} are free; free or "
                "truncate a sequence, append to fewer at a time, or make the pool larger"
            )
        return [copy for tokens, count in zip(chosen, counts, strict=True) for copy in self._extend(tokens, count)]

    def shrink(self, chosen: Sequence[Tokens], lengths: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """What `grow` did is taken back: sequences have these lengths again, and the pages that were to be copied."""
        old_of = {new: old for old, new in copies}
        for tokens, length in zip(chosen, lengths, strict=True):
            self.shorten(tokens, length)
            if length and (old := old_of.get(int(tokens.last))) is not None:
                (new,) = tokens.cut(tokens.count - 1)
                tokens.add(np.array([old], np.int32))
                self.owners[old] += 1
                self.owners[new] = 0
                self._stack[self.free] = new
                self.free += 1

    def table(self, chosen: Sequence[Tokens]) -> Integers:
        """The pages of each, as wide as the longest has; entries behind its last are 0."""
        table = np.zeros((len(chosen), max((tokens.count for tokens in chosen), default=0)), np.int32)
        for row, tokens in zip(table, chosen, strict=True):
            row[: tokens.count] = tokens.pages
        return table

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _needed(self, chosen: Sequence[Tokens], counts: Sequence[int]) -> int:
        """How many pages are taken. The last one who has a page that all want to write needs no copy."""
        left: Counter[int] = Counter()  # how many owners of a page get a copy
        needed = 0
        for tokens, count in zip(chosen, counts, strict=True):
            needed += self._pages_for(tokens.length + count) - tokens.count
            if self._is_shared(tokens, count) and self.owners[tokens.last] - left[tokens.last] > 1:
                left[tokens.last] += 1
                needed += 1
        return needed

    def _is_shared(self, tokens: Tokens, count: int) -> bool:
        """Whether the first of so many new tokens goes to a page that others have, too."""
        return bool(count and tokens.length % self.page_size and self.owners[tokens.last] > 1)

    def _extend(self, tokens: Tokens, count: int) -> list[tuple[int, int]]:
        copies = []
        if self._is_shared(tokens, count):
            (new,), (old,) = self._take(1), tokens.cut(tokens.count - 1)
            self.owners[old] -= 1
            tokens.add(np.array([new], np.int32))
            copies = [(int(old), int(new))]
        tokens.length += count
        if (more := self._pages_for(tokens.length) - tokens.count) > 0:
            tokens.add(self._take(more))
        return copies

    def _take(self, count: int) -> Integers:
        self.free -= count
        pages = self._stack[self.free : self.free + count][::-1]
        self.owners[pages] = 1
        return pages
