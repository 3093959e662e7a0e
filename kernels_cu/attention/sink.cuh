// The sink: a learned logit of each head of q that stands in the softmax's denominator, as the score of one more key whose v
// is 0 would (Xiao et al. 2023, as gpt-oss has it):
//     lse = ln(exp(sink) + sum_j exp(s_j)),   O = sum_j exp(s_j - lse) v_j,
//     dsink = sum_i P_i (0 - delta_i),   P_i = exp(sink - lse_i),   of all queries i of the head.
// The main loops know nothing of it: the forward adds it to the sums of a row at its end, and in the backward lse has it.
#ifndef CUPYFLASH_SINK_CUH
#define CUPYFLASH_SINK_CUH
#include "attention/score.cuh"

// Of a head of q; here there is none.
template <class V, bool kSink = V::kSink>
struct Sink {
    static constexpr bool kAny = false;

    template <class Params>
    __device__ static Sink of(const Params &, const Sequence<V::kPacked> &, int /* head */) {
        return {};
    }
};

template <class V>
struct Sink<V, true> {
    static constexpr bool kAny = true;
    float logit;

    template <class Params>
    __device__ static Sink of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        // Rows behind the last sequence of packed ones have none. @sink-that-exists
        return {s.index < p.problem.batch ? p.sink[head] : -ptx::infinity()};
    }
    __device__ float log2() const { return logit * kLog2e; }
    // Joins the keys of a row, whose sum of exp(s_j - m) is l: its lse, and by what a sum of exp(s_j - m) v_j is multiplied.
    __device__ void join(float m, float l, float &lse, float &inverse) const {
        const float base = finite_or_zero(fmaxf(m, logit)), of_keys = ptx::ex2((m - base) * kLog2e);
        const float sum = fmaf(l, of_keys, ptx::ex2((logit - base) * kLog2e));  // @sink-in-the-sum
        inverse = of_keys / sum;
        lse = fmaf(ptx::lg2(sum), kLn2, base);
    }
};

#endif  // CUPYFLASH_SINK_CUH
