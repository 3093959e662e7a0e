// Online softmax over the key blocks of one query tile (Milakov & Gimelshein 2018; FlashAttention-2, algorithm 1).
#ifndef CUPYFLASH_SOFTMAX_CUH
#define CUPYFLASH_SOFTMAX_CUH
#include "attention/sink.cuh"
#include "tile/shared_rows.cuh"

// kNatural: of scores that the factor may carry beyond fp32, and that may all be -inf (score.cuh). Shared: with whom the
// warp shares its rows (shared_rows.cuh).
template <int kRows, bool kNatural = false, class Shared = SharedRows<kRows, 1>>
struct OnlineSoftmax : Shared {
    static constexpr int kRowsPerLane = kRows / 8;
    using Rows = float[kRowsPerLane];
    float factor;  // scores times this are powers of two
    Rows m;        // maximum of each row's scores so far, or a score not far below it
    Rows l;        // this lane's part of the row sum of P

    __device__ explicit OnlineSoftmax(float log2_factor, Shared shared = Shared())
        : Shared(shared), factor(log2_factor) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) m[r] = -ptx::infinity(), l[r] = 0.f;
    }

    // Scores S become P = 2^(factor (S - m)); O and l follow when m grows. m, whatever it is, cancels out of O / l; but the
    // largest P of a row, if it is 1, 16 bits hold without rounding, and that matters where one key outweighs all others.
    // kLags: m stays as long as no P exceeds 2^kMaxLag (docs/performance.md).
    static constexpr float kMaxLag = 4.f;  // @m-not-far-behind
    template <bool kLags = false, int kN, int kD>
    __device__ void step(AccTile<kRows, kN> &S, AccTile<kRows, kD> &O) {
        Rows rescale;
        if (kLags ? raise_lagging_maximum(S, rescale) : raise_maximum(S, rescale)) multiply_rows(O, rescale);
        exponentiate(S);
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
    // The same, but only where some score lies more than kMaxLag above its row's m, or is the first. Each lane looks at its own:
    // no maximum is exchanged until one has to grow.
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

    // exp(s - m), from what base_of makes of m.
    __device__ float base_of(float m) const { return kNatural ? m : m * factor; }
    __device__ float power(float s, float base) const {
        return kNatural ? ptx::ex2((s - base) * factor) : power_in_one_step(s, base);
    }
    __device__ float power_in_one_step(float s, float base) const { return ptx::ex2(fmaf(s, factor, -base)); }
    // Scores S become P, and are added to l.
    template <int kN>
    __device__ void exponentiate(AccTile<kRows, kN> &S) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            const float base = base_of(finite_or_zero(m[r]));
            #pragma unroll
            for (int j = 0; j < S.kColTiles; ++j)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float &s = S.x[r / 2][j][2 * (r % 2) + c];
                    s = power(s, base);
                    l[r] += s;
                }
        }
    }

    // The same in the hope that m, whatever it is, will do: it cancels out of O / l, and P may exceed 1. False, with l as
    // it was, if some lane's part of a row sums up to kMaxP or more, has no m yet or holds a NaN; S must then be formed
    // again. kMaxP bounds how far one key can outweigh all others while its P is not exactly 1: see docs/performance.md.
    // kNatural: or if m lies beyond kMaxM, where one step is not exact enough.
    static constexpr float kMaxP = 64.f, kMaxM = 2048.f;  // @p-not-far-above-one
    template <int kN>
    __device__ bool exponentiate_optimistically(AccTile<kRows, kN> &S) {
        Rows sum;
        float largest = 0.f, all = 0.f;
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            const float base = m[r] * factor;
            if (kNatural && !(fabsf(m[r]) <= kMaxM)) all = ptx::infinity();  // @scores-of-one-step
            float part[2] = {0.f, 0.f};
            #pragma unroll
            for (int j = 0; j < S.kColTiles; ++j)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float &s = S.x[r / 2][j][2 * (r % 2) + c];
                    s = power_in_one_step(s, base);
                    part[c] += s;
                }
            sum[r] = part[0] + part[1];
            largest = fmaxf(largest, sum[r]), all += sum[r];
        }
        const bool good = ptx::vote_all(largest < kMaxP && all < ptx::infinity());  // NaN passes only the first test
        if (good) {                                                                 // @sums-of-good-blocks
            #pragma unroll
            for (int r = 0; r < kRowsPerLane; ++r) l[r] += sum[r];
        }
        return good;
    }

    // The end: lse[r] = ln sum exp of row r, with `unit` times S the scores, and inverse[r], by which O is multiplied.
    // sees_nothing(row, whether its sum is 0) marks rows without any key: O = 0, lse = -inf there, or the sink.
    template <class Sink, class SeesNothing>
    __device__ void finish(float unit, const Sink &sink, Rows &lse, Rows &inverse, SeesNothing sees_nothing) {
        if constexpr (Shared::kAny) row_sums();
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            if (!Shared::kAny)
                l[r] = quad_reduce(l[r], [](float a, float b) { return a + b; });  // @row-sum-of-four-lanes
            bool nothing = sees_nothing(AccTile<kRows, 8>::row(r / 2, 2 * (r % 2)), l[r] == 0.f);
            if constexpr (kNatural) nothing = nothing || l[r] == 0.f;  // all scores are -inf
            if constexpr (Sink::kAny) {
                sink.join(m[r] * unit, l[r], lse[r], inverse[r]);
                if (nothing) lse[r] = sink.logit, inverse[r] = 0.f;
            } else {
                inverse[r] = nothing ? 0.f : 1.f / l[r];  // @o-divided-by-its-sum
                lse[r] = nothing ? -ptx::infinity() : fmaf(m[r], unit, ptx::lg2(l[r]) * kLn2);
            }
        }
    }

    template <int kD>
    __device__ static void multiply_rows(AccTile<kRows, kD> &O, const Rows &by) {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r)
            #pragma unroll
            for (int j = 0; j < O.kColTiles; ++j)
                O.x[r / 2][j][2 * (r % 2)] *= by[r], O.x[r / 2][j][2 * (r % 2) + 1] *= by[r];
    }

  private:
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
    __device__ void row_sums() {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) l[r] = quad_reduce(l[r], [](float a, float b) { return a + b; });
        this->reduce(l, [](float a, float b) { return a + b; });  // @row-sum-of-both-warps
    }
};

#endif  // CUPYFLASH_SOFTMAX_CUH
