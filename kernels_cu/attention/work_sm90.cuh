// A tile of work as an item of the queue (pipeline_sm90.cuh).
#ifndef CUPYFLASH_WORK_SM90_CUH
#define CUPYFLASH_WORK_SM90_CUH
#include "attention/schedule.cuh"

// Tile `number` of blocks * heads * batch as an item of the queue, and back: block is -1 where there is no such tile.
template <bool kDescending, class Params>
__device__ __forceinline__ ptx::U128 pack_tile(int number, const Params &p, int blocks, int heads) {
    if (number >= blocks * heads * p.problem.batch) return {~0u};
    const auto index = TileIndex::at<kDescending>(number, p, blocks, heads);
    return {static_cast<ptx::u32>(index.block), static_cast<ptx::u32>(index.head), static_cast<ptx::u32>(index.batch)};
}
__device__ __forceinline__ TileIndex unpack_tile(const ptx::U128 &item) {
    return {static_cast<int>(item.x[0]), static_cast<int>(item.x[1]), static_cast<int>(item.x[2])};
}

#endif  // CUPYFLASH_WORK_SM90_CUH
