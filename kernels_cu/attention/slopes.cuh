// The gradient of ALiBi's slopes: -sum of dS_ij * |i + seqlen_k - seqlen_q - j| over all that a head's queries see, where dS is
// the gradient of the score itself. Every warp of the main kernel sums up what it forms, and leaves one number for each tile of
// keys, or of queries, and head of q; bwd_slopes.cuh adds these up, in a fixed order.
#ifndef CUPYFLASH_SLOPES_CUH
#define CUPYFLASH_SLOPES_CUH
#include "attention/places.cuh"
#include "attention/schedule.cuh"

// Where tile `block` of kRows rows of a sequence and head of q has its parts: those of a head lie one behind the other.
template <class Rows, int kRows, bool kPacked>
__device__ __forceinline__ float *slope_parts_at(const BwdParams &p, const Sequence<kPacked> &s, int head_q, int block,
                                                 int parts) {
    const Problem &problem = p.problem;
    const int blocks = Sequence<kPacked>::template blocks<kRows>(problem, Rows::seqlen(problem));
    const int head = kPacked ? head_q : s.index * problem.heads_q + head_q;
    const int first = kPacked ? Rows::first_row(s) / kRows + s.index : 0;
    return p.dalibi_parts + (static_cast<long long>(head) * blocks + first + block) * parts;
}

// What becomes of dS besides dQ and dK: here nothing.
template <class V, bool kDalibi = V::kDalibi>
struct Emitted {
    static constexpr bool kAny = false;
    using At = typename Places<V>::At;

    __device__ void add(float, At, bool) {}
    __device__ void settle() {}
    template <class Rows, int kRows, int kParts>
    __device__ void leave(const BwdParams &, const Sequence<V::kPacked> &, int, int, int) {}
};

template <class V>
struct Emitted<V, true> {
    static constexpr bool kAny = true;
    using At = typename Places<V>::At;
    float sum = 0.f;  // of this lane

    // dS: P * (dP - delta), and 0 where a mask hides. sees: whether a bias leaves the query any key.
    __device__ void add(float dS, At at, bool sees) {
        if constexpr (V::kBias) dS = sees && !at.hides() ? dS : 0.f;  // @slopes-of-what-a-bias-shows
        sum = fmaf(dS, fabsf(at.alibi.distance), sum);
    }
    // What was added is in the sum from here on. Without a branch that asks for it, ptxas keeps many terms in registers that
    // wait to be added, and spills; this one changes nothing: a NaN of one lane is one of the warp.
    __device__ void settle() {
        if (ptx::vote_any(sum != sum)) sum = ptx::nan();
    }
    // The tile is done with a head: the warp leaves its part, the part-th of kParts.
    template <class Rows, int kRows, int kParts>
    __device__ void leave(const BwdParams &p, const Sequence<V::kPacked> &s, int head_q, int block, int part) {
        #pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);  // @slopes-of-all-lanes
        if (fresh_lane() == 0) slope_parts_at<Rows, kRows>(p, s, head_q, block, kParts)[part] = sum;
        sum = 0.f;  // @slope-of-the-next-head
    }
};

#endif  // CUPYFLASH_SLOPES_CUH
