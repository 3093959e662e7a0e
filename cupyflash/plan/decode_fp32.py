"""What blocks take of a cache of fp32, which they multiply without tensor cores (kernels_cu/decode/warp_float.cuh)."""

from __future__ import annotations

from ..cache.problem import CacheProblem
from ..gpu.device import Device
from .decode_elements import Elements, Team
from .decode_kernels import SLICE, DecodeTile
from .decode_shares import rows_of


class _Fp32(Elements):
    """Of fp32. What is chosen was the fastest of two to six on an H200, 2026-11-27 (docs/performance.md)."""

    tma_columns = "elements of 8 and 16 bits"

    def by_tma(self, row_bytes: int) -> bool:
        return False

    def team(self, p: CacheProblem, hopper: bool) -> Team:
        """Rows of a warp: it multiplies each element that it reads by one of each."""
        rows, most = rows_of(p), 16 if p.widest <= 128 else 8
        of_warp = next((n for n in (4, 8) if rows <= n), most)
        return Team(next((n for n in (1, 2, 4) if n * of_warp >= rows), 8), of_warp)

    def shape(
        self, p: CacheProblem, device: Device, hopper: bool, team: Team, wide: bool, cluster: int, box: int
    ) -> DecodeTile:
        """Few warps with several stages each, unless they multiply much, or stages are small; less of all where a block
        has no room for it."""
        most = 4 if p.widest > 64 and team.warps * team.rows <= 8 else 8
        tiles = (
            DecodeTile(own, warps, 1, 1, 1, 0, SLICE, columns, kv_bytes=4, warp_rows=team.rows)
            for own in _halves(team.warps)
            for warps in _halves(most)
            for columns in _halves(64)
            if own <= warps
        )
        return next(tile for tile in tiles if _fits(tile, p, device))


def _halves(n: int) -> list[int]:
    return [n >> i for i in range(n.bit_length())]


def _fits(tile: DecodeTile, p: CacheProblem, device: Device) -> bool:
    least = tile.least_columns(4 * p.head_dim_v)
    return least <= tile.columns <= max(32, least) and tile.smem_bytes(*p.widths, 4) <= device.smem_bytes


FP32 = _Fp32()
