// The products of a slice of an 8-bit cache for one warp, and their operands and sums in registers: S^T = K Q^T, O^T += V^T P^T,
// of which queries are the columns, kTiles times 8 of them.
#ifndef CUPYFLASH_PRODUCTS_STORED_CUH
#define CUPYFLASH_PRODUCTS_STORED_CUH
#include "decode/column_softmax.cuh"
#include "decode/fragments_stored.cuh"
#include "decode/queries.cuh"

template <class V, int kTiles>
struct StoredProducts {
    using Smem = DecodeSmem<V>;
    using Queries = StoredQueries<V>;
    using Scores = typename ColumnSoftmax<kTiles>::Scores;
    using Columns = typename ColumnSoftmax<kTiles>::Columns;
    static constexpr int kSteps = Smem::D / 16, kPairs = ceil_div(kSteps, 2);
    static constexpr int kStepsV = Smem::kDimV / 16, kPairsV = ceil_div(kStepsV, 2);
    static constexpr bool kQInRegisters = kTiles * larger(Smem::D, Smem::kDimV) <= 128;
    const typename Smem::TileQ sQ;
    const int row0;  // the first of its rows of Q
    const StoredFragments<V> fragments;
    ptx::u32 Q[kTiles][kQInRegisters ? kPairs : 1][4];
    float O[kTiles][kStepsV][4];  // element e: row 2 g + e / 2 of 16, query 2 t + e % 2 of 8

    // Q has been prepared.
    __device__ StoredProducts(typename Smem::TileQ sQ, int row0) : sQ(sQ), row0(row0) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int i = 0; kQInRegisters && i < kPairs; ++i) Queries::fragments(sQ, row0 + 8 * n, i, Q[n][i]);
            #pragma unroll
            for (int j = 0; j < kStepsV; ++j)
                #pragma unroll
                for (int e = 0; e < 4; ++e) O[n][j][e] = 0.f;
        }
    }
    __device__ void multiply_k(typename Smem::TileK sK, Scores &S) {
        Scores odd = {};  // of few columns two sums: half as many products wait for each other
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) S[n][e] = 0.f;
        #pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            ptx::u32 a[2][4];
            fragments.of_k(sK, i, a);
            #pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                ptx::u32(&b)[4] = Q[n][kQInRegisters ? i : 0];
                if constexpr (!kQInRegisters) Queries::fragments(sQ, row0 + 8 * n, i, b);
                Fp16::mma(S[n], a[0], b[0], b[1]);
                if (2 * i + 1 < kSteps) Fp16::mma(kTiles == 1 ? odd[n] : S[n], a[1], b[2], b[3]);
            }
        }
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int e = 0; kTiles == 1 && e < 4; ++e) S[n][e] += odd[n][e];
    }
    // hide(x): as of_v's.
    template <class Hide>
    __device__ void multiply_v(typename Smem::TileV sV, const ptx::u32 (&P)[kTiles][2], Hide hide) {
        #pragma unroll
        for (int i = 0; i < kPairsV; ++i) {
            ptx::u32 a[2][4];
            fragments.of_v(sV, i, a, hide);
            #pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                Fp16::mma(O[n][2 * i], a[0], P[n][0], P[n][1]);
                if (2 * i + 1 < kStepsV) Fp16::mma(O[n][2 * i + 1], a[1], P[n][0], P[n][1]);
            }
        }
    }
    // O times a number a query.
    __device__ void scale(const Columns &by) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int j = 0; j < kStepsV; ++j)
                #pragma unroll
                for (int e = 0; e < 4; ++e) O[n][j][e] *= by[n][e % 2];
    }
    // f(column of O, two neighbours from there on) for all of a query that this lane has.
    template <class F>
    __device__ void for_each_two(int n, int c, F f) const {
        #pragma unroll
        for (int j = 0; j < kStepsV; ++j) f(16 * j + 2 * (lane() / 4), O[n][j][c], O[n][j][2 + c]);
    }
};

#endif  // CUPYFLASH_PRODUCTS_STORED_CUH
