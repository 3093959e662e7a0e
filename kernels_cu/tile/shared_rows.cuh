// Rows of an accumulator that one warp has, or that two share: each then holds other columns, and what is said of a row, its
// maximum or its sum, is said of both.
#ifndef CUPYFLASH_SHARED_ROWS_CUH
#define CUPYFLASH_SHARED_ROWS_CUH
#include "tile/tile.cuh"

template <int kRows, int kWarps>
struct SharedRows {
    static_assert(kWarps == 1, "one warp, or two");
    static constexpr bool kAny = false;
    static constexpr int kBytes = 0;

    __device__ explicit SharedRows(ptx::u32 = 0) {}
    // Whether x holds for any of those who have the rows.
    __device__ bool any(bool x) const { return ptx::vote_any(x); }
};

// Warps 2 i and 2 i + 1 share rows. They run on different schedulers, each of which so has warps that need not wait for each
// other.
template <int kRows>
struct SharedRows<kRows, 2> {
    static_assert(kRows == 32, "four rows a lane are one access");
    static constexpr bool kAny = true;
    static constexpr int kBytes = 8 * 16;  // of each warp
    ptx::u32 base;                         // of the block's first warp

    __device__ explicit SharedRows(ptx::u32 base) : base(base) {}
    __device__ int barrier() const { return 1 + fresh_thread() / 64; }
    __device__ void sync() const { ptx::bar_sync(barrier(), 64); }
    __device__ bool any(bool x) const { return ptx::bar_red_or(barrier(), 64, x); }  // @any-of-both-warps
    // x, one number a row, alike in the four lanes that hold it, becomes op of both warps'. Between two calls the warps meet
    // once more: then both have read.
    template <class Op>
    __device__ void reduce(float (&x)[kRows / 8], Op op) const {
        const ptx::u32 thread = fresh_thread(), other_warps = thread ^ 32;
        if (thread % 4 == 0) ptx::st_shared_v4_b32(base + thread / 4 * 16, bits_of(x));
        sync();  // both have written @rows-of-both-there
        float other[4];
        ptx::ld_shared_v4_f32(other, base + other_warps / 4 * 16);
        #pragma unroll
        for (int r = 0; r < 4; ++r) x[r] = op(x[r], other[r]);
    }
};

#endif  // CUPYFLASH_SHARED_ROWS_CUH
