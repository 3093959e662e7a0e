// Online softmax (attention/softmax.cuh) where queries are the columns of S^T, 8 a tile: a lane has two of them, of two keys each,
// and the 8 lanes with the same remainder by 4 share a query.
#ifndef CUPYFLASH_COLUMN_SOFTMAX_CUH
#define CUPYFLASH_COLUMN_SOFTMAX_CUH
#include "tile/tile.cuh"

// Reduces a value over the lanes that share a query.
template <class Op>
__device__ __forceinline__ float column_reduce(float v, Op op) {
    #pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) v = op(v, ptx::shfl_xor(v, mask));
    return v;
}
// The lanes' parts of sums become whole sums, in each lane that shares the query.
template <int kTiles>
__device__ __forceinline__ void column_sums(float (&l)[kTiles][2]) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n)
        #pragma unroll
        for (int c = 0; c < 2; ++c) l[n][c] = column_reduce(l[n][c], [](float a, float b) { return a + b; });
}

// kNatural: of scores that the factor may carry beyond fp32, and that may all be -inf (attention/score.cuh).
template <int kTiles, bool kNatural = false>
struct ColumnSoftmax {
    using Scores = float[kTiles][4];  // element e: key e / 2 of the lane's, query e % 2
    using Columns = float[kTiles][2];
    static constexpr float kNothingSeen = 3.402823466e38f;
    Columns base;  // less the maximum of a query's scores times its factor: scores times factors are powers of two
    Columns l;     // this lane's part of the sum of P

    __device__ ColumnSoftmax() {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) base[n][c] = kNothingSeen, l[n][c] = 0.f;
    }
    // Whether one of this lane's scores is larger than its query's maximum. NaN is not.
    __device__ bool exceeded_by(const Scores &S, const Columns &factor) const {
        float largest = -ptx::infinity();
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c)
                largest = fmaxf(largest, fmaf(fmaxf(S[n][c], S[n][2 + c]), factor[n][c], base[n][c]));
        return largest > 0.f;
    }
    // The maxima follow S, and l follows them; O has to, times `rescale`. By whole warps.
    __device__ void raise(const Scores &S, const Columns &factor, Columns &rescale) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                float top = fmaxf(S[n][c], S[n][2 + c]);
                top = column_reduce(top, [](float a, float b) { return fmaxf(a, b); });  // @maximum-of-a-column
                const float before = base[n][c];
                base[n][c] = fminf(before, -top * factor[n][c]);
                rescale[n][c] = ptx::ex2(base[n][c] - before);
                l[n][c] *= rescale[n][c];
            }
    }
    // Scores become P, and are added to l. No maximum is behind: the largest P of a query is 1.
    __device__ void exponentiate(Scores &S, const Columns &factor) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                S[n][e] = ptx::ex2(fmaf(S[n][e], factor[n][e % 2], base[n][e % 2]));
                l[n][e % 2] += S[n][e];
            }
    }
    // The end: all of a query's sum in each of its lanes.
    __device__ void finish() { column_sums(l); }
    // The maximum of scores that times log2_factor are powers of two.
    __device__ float maximum(int n, int c, float log2_factor) const {
        return base[n][c] == kNothingSeen ? -ptx::infinity() : -base[n][c] / log2_factor;
    }
};

template <int kTiles>
struct ColumnSoftmax<kTiles, true> {
    using Scores = typename ColumnSoftmax<kTiles>::Scores;
    using Columns = typename ColumnSoftmax<kTiles>::Columns;
    Columns m;  // maximum of a query's scores
    Columns l;  // this lane's part of the sum of P

    __device__ ColumnSoftmax() {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) m[n][c] = -ptx::infinity(), l[n][c] = 0.f;
    }
    __device__ bool exceeded_by(const Scores &S, const Columns & /* factor */) const {
        bool exceeded = false;
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) exceeded = exceeded || fmaxf(S[n][c], S[n][2 + c]) > m[n][c];
        return exceeded;
    }
    __device__ void raise(const Scores &S, const Columns &factor, Columns &rescale) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float top = fmaxf(S[n][c], S[n][2 + c]), before = m[n][c];
                m[n][c] = fmaxf(before, column_reduce(top, [](float a, float b) { return fmaxf(a, b); }));
                rescale[n][c] = ptx::ex2((before - finite_or_zero(m[n][c])) * factor[n][c]);
                l[n][c] *= rescale[n][c];
            }
    }
    __device__ void exponentiate(Scores &S, const Columns &factor) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                // @difference-before-its-factor
                S[n][e] = ptx::ex2((S[n][e] - finite_or_zero(m[n][e % 2])) * factor[n][e % 2]);
                l[n][e % 2] += S[n][e];
            }
    }
    __device__ void finish() { column_sums(l); }
    __device__ float maximum(int n, int c, float /* log2_factor */) const { return m[n][c]; }
};

#endif  // CUPYFLASH_COLUMN_SOFTMAX_CUH
