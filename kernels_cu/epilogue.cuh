// From accumulators to global memory: rounded to the element type, staged through shared memory, 16 bytes a lane.
#ifndef CUPYFLASH_EPILOGUE_CUH
#define CUPYFLASH_EPILOGUE_CUH
#include "tile.cuh"

// Writes one warp's accumulator to rows [row0, ...) of dst, [n_rows, kValidCols], columns [col0, ...). The warp's own
// kRows rows of the stage, from stage_row on, must be free: no other lane may still
// read or write them.
template <class T, int kValidCols, int kRows, int kCols, class Tile>
__device__ __forceinline__ void store_tile(const Tile &stage, int stage_row, AccTile<kRows, kCols> &acc, T *dst,
                                           long long stride, int row0, int n_rows, int col0 = 0) {
    #pragma unroll
    for (int a = 0; a < acc.kRowTiles; ++a)
        #pragma unroll
        for (int j = 0; j < acc.kColTiles; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
                ptx::st_shared_b32(stage.at(stage_row + acc.row(a, 2 * h), col0 + acc.col(j, 0)),
                                   T::pack(acc.x[a][j][2 * h], acc.x[a][j][2 * h + 1]));
    ptx::bar_warp_sync();
    constexpr int kChunks = kCols / 8;
    #pragma unroll
    for (int i = lane(); i < kRows * kChunks; i += 32) {
        const int row = i / kChunks, col = col0 + i % kChunks * 8;
        if (row0 + row < n_rows && col < kValidCols)
            *reinterpret_cast<ptx::U128 *>(dst + (row0 + row) * stride + col) =
                ptx::ld_shared_v4_b32(stage.at(stage_row + row, col));
    }
}

#endif  // CUPYFLASH_EPILOGUE_CUH
