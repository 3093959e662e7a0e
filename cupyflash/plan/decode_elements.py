"""What follows from how many bits the elements of a cache have: what of it TMA brings, and what blocks take of it.

`HALVES`, of 16 bits, stands here, `STORED`, of 8 bits, in decode_stored.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ..cache.problem import CacheProblem
from ..gpu.device import Device
from .decode_kernels import SLICE, DecodeTile
from .decode_shares import rows_of


class Team(NamedTuple):
    """Warps that share slices of K and V, and query rows of each."""

    warps: int
    rows: int


class Elements:
    """Of 16 bits.

    Attributes:
        tma_columns: in words, those of rows that TMA brings.
    """

    tma_columns = "columns by 64"

    def by_tma(self, row_bytes: int) -> bool:
        """Whether TMA brings rows of so many bytes."""
        return row_bytes % 128 == 0

    def team(self, p: CacheProblem, hopper: bool) -> Team:
        most = 8 if p.widest <= 128 else 4  # 128 wide rows leave too few registers, or stages
        # Beside a bias, of the widest rows, the addresses of cp.async of a team of two do not fit.
        sizes = (1, 4) if p.by_element and p.widest > 192 and not hopper else (1, 2, 4)
        return Team(next((n for n in sizes if 16 * n >= rows_of(p)), most), 16)

    def in_cluster(self, p: CacheProblem, team: Team) -> Team:
        """The team of a block that is one of a cluster."""
        return team

    def shape(
        self, p: CacheProblem, device: Device, hopper: bool, team: Team, wide: bool, cluster: int, box: int
    ) -> DecodeTile:
        """What a block takes, with one stage. `wide`: two heads in each of two blocks a multiprocessor, or in one of
        few warps."""
        chunks = -(-p.widest // 64)
        small = device.is_small
        if wide and chunks <= 2 and not small:
            pair = 2 if p.widths == (64, 64) and box == SLICE else 1
            return DecodeTile(team.warps, 4, 1, 2, pair, 0, box, blocks_per_sm=2)
        if wide:
            return DecodeTile(team.warps, 4, 1, 2, 1, 0, box)
        warps = 4 if team.warps <= 4 and (small or (chunks > 2 and team.warps == 1)) else 8
        if device.is_tiny and chunks > 3:
            warps = max(2, team.warps)
        columns = 64 if (chunks, team.warps) == (2, 2) else 32
        return DecodeTile(team.warps, warps, 1, 1, 1, cluster, box, columns=columns)


HALVES = Elements()
