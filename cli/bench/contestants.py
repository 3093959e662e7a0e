"""What an implementation runs in a cell of `bench`, whichever the two are."""

from __future__ import annotations

from dataclasses import replace

from . import decode
from .cell import ORDERED, OURS, SM80
from .clocks import Work
from .decode_cell import AnyCell, DecodeCell
from .family import by_family, family
from .lengths import DENSE
from .work import Bench


def works_of(bench: Bench, name: str, cell: AnyCell) -> dict[str, Work]:
    """A function of no arguments for each direction.

    Raises:
        NotImplementedError: a peer lacks what the cell asks for.
    """
    if isinstance(cell, DecodeCell):
        return decode.works(bench, name, cell)
    if name == ORDERED:
        return bench.works(OURS, replace(cell, deterministic=True))
    if name == DENSE:
        return bench.works(OURS, cell.dense)
    if name != SM80:
        return bench.works(name, cell)
    with family(SM80):
        ours = bench.works(OURS, cell)
    return {direction: by_family(SM80, work) for direction, work in ours.items()}
