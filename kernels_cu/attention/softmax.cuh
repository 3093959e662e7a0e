// Online softmax over the key blocks of one query tile (Milakov & Gimelshein 2018; FlashAttention-2, algorithm 1).
#ifndef CUPYFLASH_SOFTMAX_CUH
#define CUPYFLASH_SOFTMAX_CUH
#include "attention/row_maxima.cuh"
#include "attention/sink.cuh"

// kNatural: of scores that the factor may carry beyond fp32, and that may all be -inf (score.cuh). Shared: with whom the
// warp shares its rows (shared_rows.cuh).
template <int kRows, bool kNatural = false, class Shared = SharedRows<kRows, 1>>
struct OnlineSoftmax : RowMaxima<kRows, Shared> {
    using Base = RowMaxima<kRows, Shared>;
    using Rows = typename Base::Rows;
    using Base::factor, Base::m, Base::l, Base::kRowsPerLane, Base::raise_maximum, Base::raise_lagging_maximum;
    using Base::row_maximum;

    __device__ explicit OnlineSoftmax(float log2_factor, Shared shared = Shared()) : Base(log2_factor, shared) {}

    // Scores S become P = 2^(factor (S - m)); O and l follow when m grows. m, whatever it is, cancels out of O / l; but the
    // largest P of a row, if it is 1, 16 bits hold without rounding, and that matters where one key outweighs all others.
    // kLags: m may stay behind by kMaxLag.
    template <bool kLags = false, int kN, int kD>
    __device__ void step(AccTile<kRows, kN> &S, AccTile<kRows, kD> &O) {
        Rows rescale;
        if (kLags ? raise_lagging_maximum(S, rescale) : raise_maximum(S, rescale)) multiply_rows(O, rescale);
        exponentiate(S);
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
    // it was and the lane's sum of P in `all`, if some lane's part of a row sums up to kMaxP or more, has no m yet or holds a
    // NaN; P must then be lowered, or S formed again. kMaxP bounds how far one key can outweigh all others while its P is not
    // exactly 1: see docs/performance.md.
    // kNatural: or if m lies beyond kMaxM, where one step is not exact enough.
    static constexpr float kMaxP = 64.f, kMaxM = 2048.f;  // @p-not-far-above-one
    template <int kN>
    __device__ bool exponentiate_optimistically(AccTile<kRows, kN> &S, float &all) {
        Rows sum;
        float largest = 0.f;
        all = 0.f;
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            const float base = m[r] * factor;
            const bool far = kNatural && !(fabsf(m[r]) <= kMaxM);  // @scores-of-one-step
            float part[2] = {far ? ptx::infinity() : 0.f, 0.f};
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

    // Where that hope failed, with what it left in `all`: P becomes what true maxima make of it, by a product; m and l follow, and
    // O has to, times `rescale`. False, with all as it was, if some P is no number or so large that its rounded exponent would
    // show in lse, or if 1 / factor is no number: S must then be formed again. m takes a rounded step, or none where a row hardly
    // grows; `rescale` is what that step makes, so that rows which stay while others climb lose nothing.
    static constexpr float kMaxLowered = 4294967296.f;  // @p-that-is-lowered
    template <int kN>
    __device__ bool lower(AccTile<kRows, kN> &P, float all, Rows &rescale) {
        static_assert(!Shared::kAny);
        const float unit = ptx::rcp(factor);
        if (!ptx::vote_all(all < kMaxLowered && unit < 1e37f)) return false;
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
            const float before = m[r];
            m[r] += ptx::lg2(fmaxf(1.f, row_maximum(P, r))) * unit;  // @m-follows-lowered
            rescale[r] = ptx::ex2((before - m[r]) * factor);         // @what-follows-from-m
            l[r] *= rescale[r];
        }
        multiply_rows(P, rescale);
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r)
            #pragma unroll
            for (int j = 0; j < P.kColTiles; ++j)
                l[r] += P.x[r / 2][j][2 * (r % 2)] + P.x[r / 2][j][2 * (r % 2) + 1];  // @sums-of-lowered
        return true;
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
    __device__ void row_sums() {
        #pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) l[r] = quad_reduce(l[r], [](float a, float b) { return a + b; });
        this->reduce(l, [](float a, float b) { return a + b; });  // @row-sum-of-both-warps
    }
};

#endif  // CUPYFLASH_SOFTMAX_CUH
