// The query rows of a tile: those of all heads of q that share a K/V head, packed. Row r of a sequence is query r / group, head
// r % group of the group.
#ifndef CUPYFLASH_ROWS_CUH
#define CUPYFLASH_ROWS_CUH
#include "decode/shares.cuh"

template <class V>
struct PackedRows {
    const DecodeParams &p;
    const Sequence<V::kPacked> sequence;
    const int head_k;  // the tile's first
    int query0, skip;  // the tile's first row: this query, this head of the group
    int count;

    __device__ PackedRows(const DecodeShares<V> &shares, const DecodeTile<V> &tile)
        : p(shares.p), sequence(tile.sequence(p.problem)), head_k(shares.head_k(tile)), query0(0), skip(0) {
        const int first = shares.row_tile(tile) * V::kBlockM;  // @row-of-its-tile
        if (first > 0) query0 = first / p.shares.group, skip = first % p.shares.group;
        count = min(V::kBlockM, sequence.seqlen_q * p.shares.group - first);  // @rows-that-exist-decode
    }
    __device__ int query(int row) const { return query0 + quick_divide(skip + row, p.shares.by_group); }
    // head: from head_k on.
    __device__ int head_q(int head, int row) const {
        return (head_k + head) * p.shares.group + skip + row - (query(row) - query0) * p.shares.group;
    }
    __device__ long long at(const Strides &s, int head, int row) const {  // in elements
        return sequence.q_offset(s, head_q(head, row)) + query(row) * s.row;
    }
    __device__ float &lse(int head, int row) const {
        return p.lse[sequence.lse_row(p.problem, head_q(head, row)) + query(row)];
    }
};

// Where a key of a tile lies; one behind the last lies with it.
template <class V>
__device__ __forceinline__ int place_of_key(const DecodeParams &p, const DecodeTile<V> &tile, int key) {
    const int last = tile.cached.length - 1;
    return last < 0 ? 0 : place_of<V::kPaged>(p, tile.index, min(key, last));  // there may be neither table nor cache
}

#endif  // CUPYFLASH_ROWS_CUH
