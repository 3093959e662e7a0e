// Operands of the products of a slice (16 keys of one head), as one warp's mma wants them: Q, K and V from shared memory, and
// the columns of O that follow.
//
// Of 16-bit elements ldmatrix brings a step of 16 columns. Of 8-bit ones it brings two, which are then made 16 bits (stored.cuh):
//   K    a lane has four neighbouring columns 4 t .. 4 t + 3 of a key, where mma has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: any
//        order of the columns will do for a sum over them, if Q's is the same;
//   V    transposed, a lane has columns 2 g and 2 g + 1 of two keys: of 16 columns the even ones go to one tile of O, the odd
//        ones to the next.
#ifndef CUPYFLASH_FRAGMENTS_CUH
#define CUPYFLASH_FRAGMENTS_CUH
#include "decode/slices.cuh"

// Of Q beside 8-bit K: columns [16 k, 16 k + 16) of a warp's rows from row0 on.
template <class Tile>
__device__ __forceinline__ void fragment_of_neighbours(const Tile &sQ, int row0, int k, ptx::u32 (&a)[4]) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        float low, high;
        ptx::ld_shared_v2_f32(low, high, sQ.at(row0 + lane() / 4 + 8 * r, 16 * k + 4 * (lane() % 4)));
        a[r] = ptx::float_as_uint(low), a[2 + r] = ptx::float_as_uint(high);
    }
}

template <class V>
struct SliceFragments {
    using T = typename V::Element;
    using Kv = Stored<V>;
    using Tile = typename DecodeSmem<V>::TileKV;
    // A lane addresses a row and, of every four pieces of 32 bytes, the same half: only bits 5 and 6 of the place change
    // along a chunk.
    ptx::u32 k_at[Tile::kChunks], v_at[Tile::kChunks];
    ptx::u32 raw[4];  // of 8-bit elements, what the last ldmatrix brought

    __device__ SliceFragments(Tile sK, Tile sV) {
        #pragma unroll
        for (int c = 0; c < Tile::kChunks; ++c) {
            k_at[c] = kScaled<V> ? sK.at(lane() % 16, c, lane() / 16)
                                 : sK.at(lane() / 16 * 8 + lane() % 8, c, lane() / 8 % 2);
            v_at[c] = sV.at(lane() % 16, c, lane() / 16);
        }
    }
    // Of K: columns [16 k, 16 k + 16) of keys [0, 8) and [8, 16). To be called in the order of k.
    __device__ void of_k(int k, ptx::u32 (&b)[4]) {
        if constexpr (!kScaled<V>) {
            ptx::ldmatrix_x4(b, place(k_at, k));
        } else {
            if (k % 2 == 0) ptx::ldmatrix_x4(raw, place(k_at, k / 2));
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                const ptx::u32 x = raw[k % 2 * 2 + n];
                b[2 * n] = Kv::template pair<T, 0, 1>(x), b[2 * n + 1] = Kv::template pair<T, 2, 3>(x);
            }
        }
    }
    // Of V: 16 columns from 16 j on, those of one tile of O and those of the next. hide(x) hides keys in what was brought: of
    // a lane's register e % 2 says which eight keys. To be called in the order of j.
    template <class Hide>
    __device__ void of_v(int j, ptx::u32 (&b)[4], Hide hide) {
        if constexpr (!kScaled<V>) {
            ptx::ldmatrix_x4_trans(b, place(v_at, j));
            hide(b);
        } else {
            if (j % 2 == 0) ptx::ldmatrix_x4_trans(raw, place(v_at, j / 2)), hide(raw);
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                const ptx::u32 x = raw[j % 2 * 2 + n];
                b[n] = Kv::template pair<Fp16, 0, 2>(x), b[2 + n] = Kv::template pair<Fp16, 1, 3>(x);
            }
        }
    }

  private:
    __device__ static ptx::u32 place(const ptx::u32 (&at)[Tile::kChunks], int k) { return at[k / 4] ^ (k % 4 * 32); }
};

// The j-th two neighbouring columns of O that a lane has of its r-th row, as V's come: the first of them, and what they hold.
struct TwoColumns {
    int first;
    float x[2];
};
template <class V, int D>
__device__ __forceinline__ TwoColumns columns_of(const AccTile<16, D> &O, int r, int j) {
    if constexpr (!kScaled<V>) return {8 * j + 2 * (lane() % 4), {O.x[0][j][2 * r], O.x[0][j][2 * r + 1]}};
    const int even = j / 2 * 2, e = 2 * r + j % 2;
    return {8 * even + 4 * (lane() % 4) + j % 2 * 2, {O.x[0][even][e], O.x[0][even + 1][e]}};
}

#endif  // CUPYFLASH_FRAGMENTS_CUH
