"""What blocks take of a cache of 8 bits: query rows of a warp, as columns of the products by 8, and warps."""

from __future__ import annotations

from ..cache.problem import CacheProblem
from ..gpu.device import Device
from .decode_elements import Elements, Team
from .decode_kernels import DecodeTile
from .decode_shares import rows_of


class _Stored(Elements):
    """Of 8 bits."""

    tma_columns = "64 columns or multiples of 128"

    def by_tma(self, row_bytes: int) -> bool:
        return row_bytes == 64 or super().by_tma(row_bytes)

    def team(self, p: CacheProblem, hopper: bool) -> Team:
        """Query rows that a warp has registers for: with the addresses of cp.async, with O of 256 columns, or beside a
        bias, 16 of them, with both of the latter 8, else 32."""
        rows, most_rows = rows_of(p), 32 if hopper and p.widest <= 128 else 16
        if p.by_element:
            most_rows = 16 if p.widest <= 128 else 8
        warp_rows = next((n for n in (8, 16) if rows <= n <= most_rows), most_rows)
        most = (128 if p.widest <= 128 else 64) // warp_rows
        return Team(next((n for n in (1, 2, 4) if n * warp_rows >= rows), most), warp_rows)

    def in_cluster(self, p: CacheProblem, team: Team) -> Team:
        """A cluster's own numbers take registers."""
        return Team(2 * team.warps, team.rows // 2) if team.rows * p.widest > 2048 else team

    def shape(
        self, p: CacheProblem, device: Device, hopper: bool, team: Team, wide: bool, cluster: int, box: int
    ) -> DecodeTile:
        """12 warps a multiprocessor where they are whole teams, their rows of O leave them the registers, and rings the
        shared memory; else 8, or 4. `wide`: two heads in each of two blocks."""
        small = device.is_small
        few = team.rows == 8 and p.widest <= (256 if hopper else 128)
        few = few or (team.rows == 16 and not cluster and p.widest <= (128 if hopper else 64))
        few = few and not (p.by_element and (team.rows > 8 or p.widest > 128))
        few = few and 12 % team.warps == 0
        warps = 12 if few and not small else 4 if small and p.widest > 128 and team.warps < 8 else 8
        blocks = 2 if wide and not small and (hopper or p.widest <= 128) else 1
        return DecodeTile(
            team.warps, warps // blocks, 1, 2 if wide else 1, 1, cluster, box, blocks_per_sm=blocks,
            kv_bytes=1, warp_rows=team.rows, scale_bytes=0 if hopper else 4,
        )  # fmt: skip


STORED = _Stored()
