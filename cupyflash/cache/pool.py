"""Which page of a pool belongs to which sequences, on the host: counts of owners, no arrays of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, CacheFullError


class Tokens:
    """A sequence: its pages in their order, and how many tokens they hold."""

    def __init__(self, pages: list[int], length: int) -> None:
        self.pages, self.length = pages, length


class Pool:
    """Pages and their owners. A page with several owners is written by none of them.

    Attributes:
        owners: how many sequences have each page.
        free: pages that none has, the next one last.
        pages_per_sequence: how many a sequence can have.
    """

    def __init__(self, pages: int, page_size: int, pages_per_sequence: int) -> None:
        self.page_size, self.pages_per_sequence = page_size, pages_per_sequence
        self.owners = np.zeros(pages, np.int64)
        self.free = list(range(pages))[::-1]
        self._sequences: dict[int, Tokens] = {}
        self._next = 0

    def of(self, sequence: Any) -> Tokens:
        """The sequence of this number.

        Raises:
            ArgumentError: there is none.
        """
        tokens = self._sequences.get(int(sequence)) if isinstance(sequence, (int, np.integer)) else None
        if tokens is None:
            raise ArgumentError(
                f"sequence: expected a number that allocate or fork gave, and not freed, got {sequence!r}"
            )
        return tokens

    def chosen(self, sequences: Sequence[Any]) -> list[Tokens]:
        """Several, each once."""
        found = [self.of(sequence) for sequence in sequences]
        if len(set(sequences)) != len(sequences):
            raise ArgumentError(f"sequences: expected each once, got {list(sequences)}")
        return found

    def begin(self, tokens: Tokens | None = None, length: int = 0) -> int:
        """A new sequence, with the first `length` of some tokens in the same pages; its number."""
        shared = [] if tokens is None else tokens.pages[: self._pages_for(length)]
        self.owners[shared] += 1
        number, self._next = self._next, self._next + 1
        self._sequences[number] = Tokens(shared, length)
        return number

    def shorten(self, tokens: Tokens, length: int) -> None:
        """Keep the first `length` tokens and their pages."""
        keep = self._pages_for(length)
        gone, tokens.pages, tokens.length = tokens.pages[keep:], tokens.pages[:keep], length
        self.owners[gone] -= 1
        self.free += [page for page in reversed(gone) if not self.owners[page]]

    def end(self, sequence: int) -> None:
        self.shorten(self.of(sequence), 0)
        del self._sequences[sequence]

    def grow(self, sequences: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """So many tokens more for each sequence; the copies (from page, to page) that must be made before they are
        written: of a partly filled page that others have, too.

        Raises:
            ArgumentError: a sequence would be too long.
            CacheFullError: there are too few free pages. Nothing has changed then.
        """
        chosen = self.chosen(sequences)
        for number, tokens, count in zip(sequences, chosen, counts, strict=True):
            room = self.pages_per_sequence * self.page_size - tokens.length
            if count > room:
                raise ArgumentError(
                    f"counts: expected at most {room} more tokens of sequence {number}, which has {tokens.length}, got "
                    f"{count}; give PagedCache a larger max_seqlen"
                )
        missing = self._needed(chosen, counts) - len(self.free)
        if missing > 0:
            raise CacheFullError(
                f"PagedCache: {missing} pages too few: {len(self.free)} of {len(self.owners)} are free; free or "
                "truncate a sequence, append to fewer at a time, or make the pool larger"
            )
        return [copy for tokens, count in zip(chosen, counts, strict=True) for copy in self._extend(tokens, count)]

    def table(self, chosen: Sequence[Tokens]) -> NDArray[np.int32]:
        """The pages of each; entries behind the last are 0."""
        table = np.zeros((len(chosen), self.pages_per_sequence), np.int32)
        for row, tokens in zip(table, chosen, strict=True):
            row[: len(tokens.pages)] = tokens.pages
        return table

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _needed(self, chosen: Sequence[Tokens], counts: Sequence[int]) -> int:
        """How many pages are taken. The last one who has a page that all want to write needs no copy."""
        owners, needed = self.owners.copy(), 0
        for tokens, count in zip(chosen, counts, strict=True):
            needed += self._pages_for(tokens.length + count) - len(tokens.pages)
            if count and tokens.length % self.page_size and owners[tokens.pages[-1]] > 1:
                owners[tokens.pages[-1]] -= 1
                needed += 1
        return needed

    def _extend(self, tokens: Tokens, count: int) -> list[tuple[int, int]]:
        copies = []
        if count and tokens.length % self.page_size and self.owners[tokens.pages[-1]] > 1:
            copies = [(tokens.pages[-1], self._take())]
            self.owners[tokens.pages[-1]] -= 1
            tokens.pages[-1] = copies[0][1]
        tokens.length += count
        tokens.pages += [self._take() for _ in range(self._pages_for(tokens.length) - len(tokens.pages))]
        return copies

    def _take(self) -> int:
        page = self.free.pop()
        self.owners[page] = 1
        return page
