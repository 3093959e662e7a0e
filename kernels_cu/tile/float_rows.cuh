// Rows of fp32 in global memory, as an accumulator holds them: what blocks leave for a later kernel to add up.
#ifndef CUPYFLASH_FLOAT_ROWS_CUH
#define CUPYFLASH_FLOAT_ROWS_CUH
#include "tile/tile.cuh"

// f(element (row, column) of an accumulator and its neighbour, where they lie in memory) for each pair of a warp's rows that there
// is: row `first_row` of `rows`, which begin at `rows_at` with kColumns each, is row 0 of the accumulator, as is column col0.
// kCovered: columns that the accumulators of all warps cover.
template <int kColumns, int kCovered, int kRows, int kCols, class F>
__device__ __forceinline__ void for_each_pair(AccTile<kRows, kCols> &acc, float *rows_at, int first_row, int col0,
                                              int rows, F f) {
    #pragma unroll
    for (int a = 0; a < acc.kRowTiles; ++a)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = first_row + acc.row(a, 2 * h);
            if (i >= rows) continue;  // @float-rows-that-exist
            float *const row = rows_at + i * static_cast<long long>(kColumns) + col0 + acc.col(0, 0);
            #pragma unroll
            for (int j = 0; j < acc.kColTiles; ++j)
                if (kColumns == kCovered || col0 + 8 * j < kColumns)  // @float-columns-that-exist
                    f(acc.x[a][j][2 * h], acc.x[a][j][2 * h + 1], reinterpret_cast<FloatPair *>(row + 8 * j));
        }
}

#endif  // CUPYFLASH_FLOAT_ROWS_CUH
