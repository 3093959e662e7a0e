// From accumulators to global memory: rounded to the element type, staged through shared memory, 16 bytes a lane.
#ifndef CUPYFLASH_EPILOGUE_CUH
#define CUPYFLASH_EPILOGUE_CUH
#include "tile/tile.cuh"

// Rounds one warp's accumulator into rows [row0, row0 + kRows) of a tile, columns [col0, col0 + kCols), which no other lane
// may still read or write. True if all of this lane's elements are finite.
template <class T, int kRows, int kCols, class Tile>
__device__ __forceinline__ bool stage_rows(const Tile &tile, int row0, const AccTile<kRows, kCols> &acc, int col0 = 0) {
    ptx::u32 trace = 0;
    #pragma unroll
    for (int a = 0; a < acc.kRowTiles; ++a)
        #pragma unroll
        for (int j = 0; j < acc.kColTiles; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const typename T::Pair pair = T::pack(acc.x[a][j][2 * h], acc.x[a][j][2 * h + 1]);
                trace = T::trace(pair, trace);
                st_shared_pair(tile.at(row0 + acc.row(a, 2 * h), col0 + acc.col(j, 0)), pair);
            }
    ptx::bar_warp_sync();  // @rows-staged-by-the-warp
    return is_clean(trace);
}

// Writes them to rows [dst_row, ...) of dst, [n_rows, kValidCols].
template <int kRows, int kCols, int kValidCols, class T, class Tile>
__device__ __forceinline__ void write_rows(const Tile &tile, int row0, T *dst, long long stride, int dst_row,
                                           int n_rows, int col0 = 0) {
    constexpr int kChunks = kCols / kPerChunk<T>;
    #pragma unroll
    for (int i = fresh_lane(); i < kRows * kChunks; i += 32) {
        const int row = i / kChunks, col = col0 + i % kChunks * kPerChunk<T>;
        if (dst_row + row < n_rows && col < kValidCols)  // @inside-the-array
            *reinterpret_cast<ptx::U128 *>(dst + (dst_row + row) * stride + col) =
                ptx::ld_shared_v4_b32(tile.at(row0 + row, col));
    }
}

#endif  // CUPYFLASH_EPILOGUE_CUH
