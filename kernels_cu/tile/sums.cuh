// Sums of an accumulator's rows and columns.
#ifndef CUPYFLASH_SUMS_CUH
#define CUPYFLASH_SUMS_CUH
#include "tile/tile.cuh"

// The sum of each row, into its first column.
template <int kRows, int kCols>
__device__ __forceinline__ void sum_columns(AccTile<kRows, kCols> &acc) {
    #pragma unroll
    for (int a = 0; a < acc.kRowTiles; ++a)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = 0.f;
            #pragma unroll
            for (int j = 0; j < acc.kColTiles; ++j) total += acc.x[a][j][2 * h] + acc.x[a][j][2 * h + 1];
            acc.x[a][0][2 * h] = quad_reduce(total, [](float x, float y) { return x + y; });  // @sum-of-a-row
        }
}

// The sum of each column over kWarps warps, the first ones of the block, into the first row of each. Takes kCols floats of shared
// memory a warp, from `sums` on; `sync` brings these warps together.
template <int kWarps, int kRows, int kCols, class Sync>
__device__ __forceinline__ void sum_rows(AccTile<kRows, kCols> &acc, ptx::u32 sums, Sync sync) {
    const int lane = fresh_lane();
    const ptx::u32 mine = sums + 8 * (lane % 4);
    #pragma unroll
    for (int j = 0; j < acc.kColTiles; ++j)
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            float total = 0.f;
            #pragma unroll
            for (int a = 0; a < acc.kRowTiles; ++a) total += acc.x[a][j][e] + acc.x[a][j][2 + e];
            #pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) total += ptx::shfl_xor(total, mask);  // @sum-of-a-column
            if (lane < 4) ptx::st_shared_b32(mine + 4 * (kCols * warp() + 8 * j + e), ptx::float_as_uint(total));
        }
    sync();  // all warps' sums are there @column-sums-of-all-warps
    #pragma unroll
    for (int j = 0; j < acc.kColTiles; ++j)
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            float total = 0.f;
            #pragma unroll
            for (int w = 0; w < kWarps; ++w)
                total += ptx::uint_as_float(ptx::ld_shared_b32(mine + 4 * (kCols * w + 8 * j + e)));
            acc.x[0][j][e] = total;
        }
}

#endif  // CUPYFLASH_SUMS_CUH
