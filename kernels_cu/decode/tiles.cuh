// A tile of attention over a cache, as blocks share them out (shares.cuh): of which sequence, and which units of work.
#ifndef CUPYFLASH_TILES_CUH
#define CUPYFLASH_TILES_CUH
#include "decode/params_decode.cuh"
#include "attention/sequence.cuh"

// n / d for small n and d (n * d < 2^20), with by = 2^20 / d rounded up.
__device__ __forceinline__ int quick_divide(int n, unsigned by) { return static_cast<unsigned>(n) * by >> 20; }

// What is read of a sequence: its keys, and the slices that hold those that some query sees; packed, its query rows.
struct CachedKeys { int length, first_slice, slices; };
template <bool kPacked>
struct CachedSequence : CachedKeys {
    __device__ int row_q() const { return 0; }
    __device__ int seqlen_q(const Problem &p) const { return p.seqlen_q; }
};
template <>
struct CachedSequence<true> : CachedKeys {
    int first, count;
    __device__ int row_q() const { return first; }
    __device__ int seqlen_q(const Problem &) const { return count; }
};

template <class V>
struct DecodeTile {
    int index;       // of the sequence
    int turn;        // which of its tiles
    int begin, end;  // its units
    CachedSequence<V::kPacked> cached;

    __device__ Sequence<V::kPacked> sequence(const Problem &p) const {
        return {index, cached.seqlen_q(p), cached.length, cached.row_q(), 0, cached.length};
    }
};

#endif  // CUPYFLASH_TILES_CUH
