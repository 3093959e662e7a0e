// Where rows of a cache lie. Lengths, tables and numbers of rows come from the device; whatever they say, nothing outside of the
// cache is named: what is out of range is clamped.
#ifndef CUPYFLASH_CACHED_CUH
#define CUPYFLASH_CACHED_CUH
#include "decode/params_decode.cuh"
#include "attention/sequence.cuh"

// Rows of sequence b that were in use before the append; none of rows of q behind the last sequence.
template <class Params>
__device__ __forceinline__ int used_rows(const Params &p, int b) {
    const bool exists = b < p.problem.batch;
    int used = exists ? p.one_length : 0;                      // @one-length-for-all
    if (exists && p.cache_seqlens) used = p.cache_seqlens[b];  // a predicate: no branch among loads of many lengths
    return max(0, min(used, p.problem.seqlen_k));              // @length-within-the-cache
}
// Where a row of sequence b lies: in which page, or in which of the cache's sequences.
template <bool kPaged, class Params>
__device__ __forceinline__ int place_of(const Params &p, int b, int row) {
    int place = b;
    if constexpr (kPaged) {
        place = p.block_table[b * p.table_stride + row / p.page_size];  // @page-of-its-sequence
    } else {
        if (!p.cache_batch_idx) return place;
        place = p.cache_batch_idx[b];
    }
    return max(0, min(place, p.places - 1));  // @place-within-the-cache
}
// And which row of that it is.
template <bool kPaged, class Params>
__device__ __forceinline__ int row_in_place(const Params &p, int row) {
    return kPaged ? row % p.page_size : row;
}

#endif  // CUPYFLASH_CACHED_CUH
