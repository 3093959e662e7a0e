// Online softmax over the key blocks of one query tile (Milakov & Gimelshein 2018; FlashAttention-2, algorithm 1).
#ifndef CUPYFLASH_SOFTMAX_CUH
#define CUPYFLASH_SOFTMAX_CUH
#include "score.cuh"
#include "tile.cuh"

template <int kRows>
struct OnlineSoftmax {
    static constexpr int kRowsPerLane = kRows / 8;
    float factor;           // scores times this are powers of two
    float m[kRowsPerLane];  // maximum of each row's scores so far
    float l[kRowsPerLane];  // this lane's part of the row sum of P

    __device__ explicit OnlineSoftmax(float log2_factor) : factor(log2_factor) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) m[r] = -ptx::infinity(), l[r] = 0.f;
    }

    // Scores S become P = 2^(factor (S - m)); O and l follow when m grows. m never lags behind: the largest P of a row
    // is exactly 1, which 16 bits hold without rounding, and that matters where one key outweighs all others.
    template <int kN, int kD>
    __device__ void step(AccTile<kRows, kN> &S, AccTile<kRows, kD> &O) {
        float m_new[kRowsPerLane];
        bool grows = false;
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            m_new[r] = m[r];
            #pragma unroll
            for (int j = 0; j < S.kColTiles; ++j)
                m_new[r] = fmaxf(m_new[r], fmaxf(S.x[r / 2][j][2 * (r % 2)], S.x[r / 2][j][2 * (r % 2) + 1]));
            m_new[r] = quad_reduce(m_new[r], [](float a, float b) { return fmaxf(a, b); });
            grows = grows || m_new[r] > m[r];
        }
        if (ptx::vote_any(grows)) {  // after the first blocks, mostly not
            #pragma unroll
            for (int r = 0; r < kRowsPerLane; ++r) {
                const float rescale = ptx::ex2((m[r] - finite_or_zero(m_new[r])) * factor);
                m[r] = m_new[r];
                l[r] *= rescale;
                #pragma unroll
                for (int j = 0; j < O.kColTiles; ++j)
                    O.x[r / 2][j][2 * (r % 2)] *= rescale, O.x[r / 2][j][2 * (r % 2) + 1] *= rescale;
            }
        }
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            const float base = finite_or_zero(m[r]) * factor;
            #pragma unroll
            for (int j = 0; j < S.kColTiles; ++j)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float &s = S.x[r / 2][j][2 * (r % 2) + c];
                    s = ptx::ex2(fmaf(s, factor, -base));
                    l[r] += s;
                }
        }
    }

    // O /= l; lse[r] = ln sum exp of row r, with `unit` times S the scores. sees_nothing(row) marks rows without any
    // key: O = 0, lse = -inf there.
    template <int kD, class SeesNothing>
    __device__ void finish(AccTile<kRows, kD> &O, float unit, float (&lse)[kRowsPerLane], SeesNothing sees_nothing) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            l[r] = quad_reduce(l[r], [](float a, float b) { return a + b; });
            const bool nothing = sees_nothing(O.row(r / 2, 2 * (r % 2)));
            const float inverse = nothing ? 0.f : 1.f / l[r];
            lse[r] = nothing ? -ptx::infinity() : fmaf(m[r], unit, ptx::lg2(l[r]) * kLn2);
            #pragma unroll
            for (int j = 0; j < O.kColTiles; ++j)
                O.x[r / 2][j][2 * (r % 2)] *= inverse, O.x[r / 2][j][2 * (r % 2) + 1] *= inverse;
        }
    }

  private:
    // A row that has seen nothing but -inf keeps P = 0 instead of the NaN of -inf - -inf.
    __device__ static float finite_or_zero(float x) { return x == -ptx::infinity() ? 0.f : x; }
};

#endif  // CUPYFLASH_SOFTMAX_CUH
