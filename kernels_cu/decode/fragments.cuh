// Operands of the products of a slice (16 keys of one head) of 16-bit elements, as one warp's mma wants them from shared memory.
#ifndef CUPYFLASH_FRAGMENTS_CUH
#define CUPYFLASH_FRAGMENTS_CUH
#include "decode/slices.cuh"

template <class V>
struct SliceFragments {
    using TileK = typename DecodeSmem<V>::TileK;
    using TileV = typename DecodeSmem<V>::TileV;
    // A lane addresses a row and, of every four pieces of 32 bytes, the same half: only bits 5 and 6 of the place change
    // along a chunk.
    ptx::u32 k_at[TileK::kChunks], v_at[TileV::kChunks];

    __device__ SliceFragments(TileK sK, TileV sV) {
        constexpr int kBoth = TileK::kChunks + TileV::kChunks - larger(TileK::kChunks, TileV::kChunks);
        #pragma unroll
        for (int c = 0; c < kBoth; ++c) {
            k_at[c] = sK.at(lane() / 16 * 8 + lane() % 8, c, lane() / 8 % 2);
            v_at[c] = sV.at(lane() % 16, c, lane() / 16);
        }
        #pragma unroll
        for (int c = kBoth; c < TileK::kChunks; ++c) k_at[c] = sK.at(lane() / 16 * 8 + lane() % 8, c, lane() / 8 % 2);
        #pragma unroll
        for (int c = kBoth; c < TileV::kChunks; ++c) v_at[c] = sV.at(lane() % 16, c, lane() / 16);
    }
    // Of K: columns [16 k, 16 k + 16) of keys [0, 8) and [8, 16).
    __device__ void of_k(int k, ptx::u32 (&b)[4]) const { ptx::ldmatrix_x4(b, place(k_at, k)); }
    // Of V: columns [16 j, 16 j + 8) and the eight behind; of a lane's register e % 2 says which eight keys.
    __device__ void of_v(int j, ptx::u32 (&b)[4]) const { ptx::ldmatrix_x4_trans(b, place(v_at, j)); }

  private:
    template <int kChunks>
    __device__ static ptx::u32 place(const ptx::u32 (&at)[kChunks], int k) {
        return at[k / 4] ^ (k % 4 * 32);
    }
};

#endif  // CUPYFLASH_FRAGMENTS_CUH
