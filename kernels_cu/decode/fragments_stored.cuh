// The same of 8-bit elements, whose keys are the rows of the products, S^T = K Q^T and O^T = V^T P^T: what ldmatrix brings is an
// A operand as it comes, but for the conversion.
//   K    a lane has four neighbouring columns 4 t .. 4 t + 3 of a key, where mma has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: any order
//        of the columns will do for a sum over them, if Q's is the same (queries.cuh);
//   V    transposed, a lane has columns 2 g and 2 g + 1 of two keys: rows g and g + 8 of 16 rows of O^T.
#ifndef CUPYFLASH_FRAGMENTS_STORED_CUH
#define CUPYFLASH_FRAGMENTS_STORED_CUH
#include "decode/slices.cuh"

// Where a lane reads in tiles: of a row, the same half of every piece of 32 bytes, so that within a chunk only bits 5 and 6 of the
// place change. One place in both, if rows of V are as wide as those of K.
template <class TileK, class TileV>
struct LaneAt {
    ptx::u32 of_k, of_v;

    __device__ LaneAt()
        : of_k(TileK{0}.at(lane() % 16, 0, lane() / 16)),
          of_v(TileV{0}.at(lane() % 16, 0, lane() / 16)) {}  // @place-in-rows-of-v
    __device__ ptx::u32 k() const { return of_k; }
    __device__ ptx::u32 v() const { return of_v; }
};
template <class Tile>
struct LaneAt<Tile, Tile> {
    ptx::u32 of_both;

    __device__ LaneAt() : of_both(Tile{0}.at(lane() % 16, 0, lane() / 16)) {}
    __device__ ptx::u32 k() const { return of_both; }
    __device__ ptx::u32 v() const { return of_both; }
};

template <class V>
struct StoredFragments {
    using Kv = Stored<V>;
    using TileK = typename DecodeSmem<V>::TileK;
    using TileV = typename DecodeSmem<V>::TileV;
    LaneAt<TileK, TileV> lane_at;

    // Of K: columns [32 i, 32 i + 32), as two operands.
    __device__ void of_k(TileK sK, int i, ptx::u32 (&a)[2][4]) const {
        ptx::u32 x[4];
        ptx::ldmatrix_x4(x, place<false>(sK, i));
        #pragma unroll
        for (int e = 0; e < 4; ++e) Kv::template halves<0, 1, 2, 3>(x[e], a[e / 2][e % 2], a[e / 2][2 + e % 2]);
    }
    // Of V: likewise, rows of O^T. hide(x) hides keys in what was brought: of a lane's register e % 2 says which eight keys.
    template <class Hide>
    __device__ void of_v(TileV sV, int i, ptx::u32 (&a)[2][4], Hide hide) const {
        ptx::u32 x[4];
        ptx::ldmatrix_x4_trans(x, place<true>(sV, i));
        hide(x);
        #pragma unroll
        for (int e = 0; e < 4; ++e) Kv::template halves<0, 2, 1, 3>(x[e], a[e / 2][e % 2 * 2], a[e / 2][e % 2 * 2 + 1]);
    }

  private:
    template <bool kOfV, class Tile>
    __device__ ptx::u32 place(Tile tile, int i) const {
        return ((tile.base + (kOfV ? lane_at.v() : lane_at.k())) ^ (i % 4 * 32)) + i / 4 * Tile::kChunkBytes;
    }
};

#endif  // CUPYFLASH_FRAGMENTS_STORED_CUH
