// A sequence's keys, divided among blocks. Where queries leave the GPU too few tiles, and each has many keys, the plan divides these
// into `key_splits` parts (kSplitKeys): tiles are then counted once for each part, the parts of a tile one behind the other. Its
// blocks leave O, divided by the part's own sums, in fp32, and lse; fwd_parts.cuh puts them together, always in the same order
// (FlashDecoding, Dao et al. 2023). Lengths are on the device, and so is where parts begin.
#ifndef CUPYFLASH_KEY_PARTS_CUH
#define CUPYFLASH_KEY_PARTS_CUH
#include "attention/sequence.cuh"
#include "tile/float_rows.cuh"

// Of the numbers of tiles and parts, that of the tile, and which part it is.
template <class V, class Params>
__device__ __forceinline__ int tile_number(const Params &p, int number) {
    if constexpr (V::kSplitKeys) return number / p.key_splits;
    else return number;
}
template <class V, class Params>
__device__ __forceinline__ int part_number(const Params &p, int number) {
    if constexpr (V::kSplitKeys) return number % p.key_splits;
    else return 0;
}
// That of a block with a tile of its own, worked out again.
template <class V, class Params>
__device__ __forceinline__ int part_again(const Params &p) {
    if constexpr (V::kSplitKeys) return part_number<V>(aside(p), ptx::opaque(ptx::block_index()));
    else return 0;
}

// A sequence with the keys that a tile of it visits: those of its part. Parts begin at whole blocks of keys.
template <class V, class Params>
__device__ __forceinline__ SequenceOf<V> with_part(const Sequence<V::kPacked> &s, const Params &p, int part) {
    if constexpr (V::kSplitKeys && V::kBlockMask) return {s, 0, 0};  // none: lists say which (visited_keys)
    else if constexpr (V::kSplitKeys) {
        const int keys = ceil_div(ceil_div(s.seqlen_k, p.key_splits), V::kBlockN) * V::kBlockN;
        return {s, part * keys, (part + 1) * keys};  // @keys-of-the-part
    } else return with_range<V>(s, p);
}

// The row of a part's first query in lse_parts and, in rows of head_dim numbers, in o_parts: [heads_q, key_splits, total_q].
template <class V>
__device__ __forceinline__ long long part_row(const FwdParams &p, const Sequence<V::kPacked> &s, int head, int part) {
    static_assert(V::kPacked);
    return (static_cast<long long>(head) * p.key_splits + part) * p.problem.seqlen_q + s.row_q;  // @rows-of-the-part
}

// A warp's rows of O leave as a part's.
template <class V, int kRows, int kCols>
__device__ __forceinline__ void leave_part(const FwdParams &p, const Sequence<V::kPacked> &s, int head, int part,
                                           int first_query, AccTile<kRows, kCols> &O, int col0 = 0) {
    float *const rows = p.o_parts + part_row<V>(p, s, head, part) * V::kHeadDimV;
    for_each_pair<V::kHeadDimV, round_up(V::kHeadDimV, kCols)>(
        O, rows, first_query, col0, s.seqlen_q, [](float x, float y, FloatPair *at) { *at = {x, y}; });  // @part-left
}
// Where lse of a tile goes, and the row of its sequence's first query there.
template <class V>
__device__ __forceinline__ float *lse_of(const FwdParams &p) {
    if constexpr (V::kSplitKeys) return p.lse_parts;
    else return p.lse;
}
template <class V>
__device__ __forceinline__ long long lse_row_of(const FwdParams &p, const Sequence<V::kPacked> &s, int head, int part) {
    if constexpr (V::kSplitKeys) return part_row<V>(p, s, head, part);
    else return s.lse_row(p.problem, head);
}

#endif  // CUPYFLASH_KEY_PARTS_CUH
