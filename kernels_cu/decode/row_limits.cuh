// Which keys the two rows see of which a lane has scores over a cache of 16 bits: kept, or, where wide rows of O and what a bias
// needs leave no registers for them, found again for each slice that has an edge.
#ifndef CUPYFLASH_ROW_LIMITS_CUH
#define CUPYFLASH_ROW_LIMITS_CUH
#include "decode/rows.cuh"

struct KeyRange { int first, end; };

template <class V, bool kKeeps = V::kHeadDimV <= 128 || !V::kBias>
struct RowLimits {
    int first[2], end[2];

    __device__ void keep(int r, const Mask<V> &mask, const PackedRows<V> &rows, int row) {
        first[r] = mask.first_key(rows.query(row));
        end[r] = mask.end_key(rows.query(row));  // @keys-of-a-packed-row
    }
    __device__ KeyRange of(int r, const PackedRows<V> &, int /* row */) const { return {first[r], end[r]}; }
};
template <class V>
struct RowLimits<V, false> {
    __device__ void keep(int, const Mask<V> &, const PackedRows<V> &, int) {}
    __device__ KeyRange of(int, const PackedRows<V> &rows, int row) const {
        const Mask<V> mask(with_range<V>(rows.sequence, rows.p), rows.p.problem);
        const int query = rows.query(ptx::opaque(min(row, rows.count - 1)));
        return {mask.first_key(query), mask.end_key(query)};  // @keys-of-a-row-found-again
    }
};

#endif  // CUPYFLASH_ROW_LIMITS_CUH
