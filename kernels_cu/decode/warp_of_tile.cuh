// What a warp knows of its part of a tile, whatever the cache's elements: which rows are its own, and which keys they see.
#ifndef CUPYFLASH_WARP_OF_TILE_CUH
#define CUPYFLASH_WARP_OF_TILE_CUH
#include "decode/row_limits.cuh"
#include "decode/slices.cuh"
#include "attention/score.cuh"

template <class V>
struct WarpOfTile {
    using Smem = DecodeSmem<V>;
    const DecodeParams &p;
    const Smem &smem;
    const Score<V> score;
    const int team, row0;  // row0: the first of its rows
    const PackedRows<V> rows;
    const int length;
    int first_seen, end_seen;    // some row sees some of these keys
    int first_whole, end_whole;  // all rows see all of these

    __device__ WarpOfTile(const DecodeShares<V> &shares, const Smem &smem, const DecodeTile<V> &tile, int warp)
        : p(shares.p),
          smem(smem),
          score(p.problem),
          team(warp / V::kTeam),
          row0(warp % V::kTeam * V::kWarpRows),
          rows(shares, tile),
          length(tile.cached.length) {
        const Mask<V> mask = this->mask();
        const int last = rows.query(rows.count - 1);
        first_seen = mask.first_key(rows.query0), end_seen = mask.end_key(last);
        first_whole = mask.first_key(last), end_whole = mask.end_key(rows.query0);
    }

    __device__ Mask<V> mask() const { return Mask<V>(with_range<V>(rows.sequence, p), p.problem); }
    // Whether some row sees a key, and whether all see all of a slice.
    __device__ bool sees(int key) const { return key < end_seen && (!V::kWindow || key >= first_seen); }
    __device__ bool sees_whole(int key) const {
        return key + kSlice <= end_whole && (!V::kWindow || key >= first_whole);  // @slice-seen-by-all
    }
};

#endif  // CUPYFLASH_WARP_OF_TILE_CUH
