// The maxima of an online softmax's rows, and when they grow.
#ifndef CUPYFLASH_ROW_MAXIMA_CUH
#define CUPYFLASH_ROW_MAXIMA_CUH
#include "attention/score.cuh"
#include "tile/shared_rows.cuh"

// Shared: with whom the warp shares its rows (shared_rows.cuh).
template <int kRows, class Shared>
struct RowMaxima : Shared {
    static constexpr int kRowsPerLane = kRows / 8;
    using Rows = float[kRowsPerLane];
    float factor;  // scores times this are powers of two
    Rows m;        // maximum of each row's scores so far, or a score not far below it
    Rows l;        // this lane's part of the row sum of P

    __device__ RowMaxima(float log2_factor, Shared shared) : Shared(shared), factor(log2_factor) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) m[r] = -ptx::infinity(), l[r] = 0.f;
    }

    // The maxima of the first S that a row sees: nothing follows them yet.
    template <int kN>
    __device__ void first_maximum(const AccTile<kRows, kN> &S) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) m[r] = row_maximum(S, r);
    }
    // m follows the maxima of S, and l follows m. True if one of the warp's grew: O has to follow too, times `rescale`.
    template <int kN>
    __device__ bool raise_maximum(const AccTile<kRows, kN> &S, Rows &rescale) {
        Rows top;
        bool grows = false;
        if constexpr (Shared::kAny) {
            #pragma unroll
            for (int r = 0; r < kRowsPerLane; ++r) top[r] = lane_maximum(S, r);
            join_maxima(top);
        }
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            top[r] = fmaxf(m[r], Shared::kAny ? top[r] : row_maximum(S, r));
            grows = grows || top[r] > m[r];
        }
        grows = ptx::vote_any(grows);
        if (grows) follow(top, rescale);  // after the first blocks, mostly not
        return grows;
    }
    // The same, but only where some score lies more than kMaxLag above its row's m, in powers of two, or is the first: a P may
    // be as large as 16 (docs/performance.md). Each lane looks at its own: no maximum is exchanged until one has to grow.
    static constexpr float kMaxLag = 4.f;  // @m-not-far-behind
    template <int kN>
    __device__ bool raise_lagging_maximum(const AccTile<kRows, kN> &S, Rows &rescale) {
        Rows top;
        bool far = false;
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            top[r] = lane_maximum(S, r);
            far = far || (top[r] - m[r]) * factor > kMaxLag;
        }
        if (!this->any(far)) return false;
        join_maxima(top);
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) top[r] = fmaxf(m[r], top[r]);
        follow(top, rescale);
        return true;
    }

    // Whether each of the warp's rows has seen a key.
    __device__ bool has_maxima() const {
        float least = m[0];
        #pragma unroll
        for (int r = 1; r < kRowsPerLane; ++r) least = fminf(least, m[r]);
        return ptx::vote_all(least > -ptx::infinity());
    }

  protected:
    template <int kN>
    __device__ static float lane_maximum(const AccTile<kRows, kN> &S, int r) {
        float top = -ptx::infinity();  // NaN counts for nothing
        #pragma unroll
        for (int j = 0; j < S.kColTiles; ++j)
            top = fmaxf(top, fmaxf(S.x[r / 2][j][2 * (r % 2)], S.x[r / 2][j][2 * (r % 2) + 1]));
        return top;
    }
    template <int kN>
    __device__ static float row_maximum(const AccTile<kRows, kN> &S, int r) {
        return maximum_of_lanes(lane_maximum(S, r));
    }

  private:
    __device__ static float maximum_of_lanes(float top) {
        return quad_reduce(top, [](float a, float b) { return fmaxf(a, b); });
    }
    // Of what each lane has found: the same for all who have a row.
    __device__ void join_maxima(Rows &top) const {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) top[r] = maximum_of_lanes(top[r]);
        if constexpr (Shared::kAny)
            this->reduce(top, [](float a, float b) { return fmaxf(a, b); });  // @maximum-of-both-warps
    }
    // m becomes `top`, and l follows it.
    __device__ void follow(const Rows &top, Rows &rescale) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            rescale[r] = ptx::ex2((m[r] - finite_or_zero(top[r])) * factor);
            m[r] = top[r];
            l[r] *= rescale[r];
        }
    }
};

#endif  // CUPYFLASH_ROW_MAXIMA_CUH
