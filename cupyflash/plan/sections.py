"""How many heads are scheduled together, in sections (schedule.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from .params import UNBOUNDED

# Key blocks of a head that run at the same time, at most, where one adds to dQ after the other: the first share of each
# waits for those before it, later ones follow without waiting (docs/performance.md).
_IN_TURN = 16


@dataclass(frozen=True)
class Sections:
    """What decides, of the kernels of a call.

    Attributes:
        mixed_bytes: as of `Kernels`.
        tail_tiles: how many of the last tiles even out the tail.
        in_turn: how many heads go together at least, where key blocks add to dQ in turn.
    """

    mixed_bytes: int
    tail_tiles: int
    in_turn: int

    @classmethod
    def of(cls, mixed_bytes: int, sm_count: int, blocks_at_once: int, *, uneven: bool, in_turn: bool) -> Sections:
        """Of kernels of which so many blocks run at the same time, on so many multiprocessors.

        Args:
            uneven: whether tiles differ in length.
            in_turn: whether key blocks add to dQ in a fixed order.
        """
        return cls(mixed_bytes, 2 * sm_count * uneven, max(1, blocks_at_once // _IN_TURN) if in_turn else 1)

    def __call__(
        self, bytes_per_head: int, heads: int, tiles_per_head: int, least: int = 1, most: int = UNBOUNDED
    ) -> tuple[int, int]:
        """How many heads a section has, and how many the last one: those of `mixed_bytes`, and at last enough to even
        out the tail.

        A section starts with its longest tiles, so that the last one ends evenly if it has a few for every
        multiprocessor.
        """
        section = self.mixed_bytes // (bytes_per_head or 1)
        section = section if section > least else least
        section = (heads if section > heads else section) or 1
        last = -(-self.tail_tiles // (tiles_per_head or 1))
        last = section if last < section else heads if last > heads else last
        rest = (heads - last) % section  # in a section of their own, unless they are too few
        last += rest if rest < least else 0
        return (section, last) if last <= most else (most if section > most else section, most)
