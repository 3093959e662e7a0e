// Slices of an 8-bit cache of which some rows do not see some keys, or that end behind the last one.
#ifndef CUPYFLASH_EDGES_STORED_CUH
#define CUPYFLASH_EDGES_STORED_CUH
#include "decode/rows.cuh"

// Scores of StoredWarp: those of keys that their query does not see become -inf. row0: the warp's first row; key: the slice's.
template <class V, int kTiles>
__device__ __forceinline__ void hide_scores(const PackedRows<V> &rows, int row0, int key, float (&S)[kTiles][4]) {
    const Mask<V> mask(with_range<V>(rows.sequence, rows.p), rows.p.problem);
    const int t = fresh_lane() % 4, own_key = key + fresh_lane() / 4;
    #pragma unroll
    for (int n = 0; n < kTiles; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row0 + 8 * n + 2 * t + e % 2, its = own_key + e / 2 * 8;
            const int query = rows.query(min(row, rows.count - 1)), end = mask.end_key(query);
            // @keys-of-a-packed-row-stored
            if (its >= end || (V::kWindow && its < mask.first_key(query))) S[n][e] = -ptx::infinity();
        }
}
// Which keys some row sees, as bits of what a lane has of V: of those of the first and of the second half of a slice.
template <class V>
__device__ __forceinline__ void see_values(const PackedRows<V> &rows, int key, ptx::u32 (&seen)[2]) {
    const Mask<V> mask(with_range<V>(rows.sequence, rows.p), rows.p.problem);
    const int first = mask.first_key(rows.query0), end = mask.end_key(rows.query(rows.count - 1));
    const auto is_seen = [&](int k) { return k < end && (!V::kWindow || k >= first); };
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int own_key = key + 2 * (lane() % 4) + 8 * j;
        seen[j] = (is_seen(own_key) ? 0xffffu : 0) | (is_seen(own_key + 1) ? 0xffff0000u : 0);
    }
}

#endif  // CUPYFLASH_EDGES_STORED_CUH
