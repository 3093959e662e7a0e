// dsink = -sum of P * delta over all queries of a head of q, P = exp(sink - lse) (sink.cuh), from their row_stats. One block a
// head, one warp a tile of queries at a time: a fixed order. Shared memory: one float a warp.
#ifndef CUPYFLASH_BWD_SINK_CUH
#define CUPYFLASH_BWD_SINK_CUH
#include "attention/repair.cuh"
#include "attention/schedule.cuh"
#include "attention/score.cuh"

template <class V>
__device__ __forceinline__ void bwd_sink(const BwdParams &p) {
    using S = Sequence<V::kPacked>;
    constexpr int M = V::kBlockM;
    static_assert(V::kSmemBytes == 4 * V::kWarps);
    const Problem &problem = p.problem;
    const int head = ptx::block_index(), blocks = S::template blocks<M>(problem, problem.seqlen_q);
    const float logit = p.sink[head];
    float sum = 0.f;
    #pragma unroll 1
    for (int i = warp(); i < blocks * S::count(problem); i += V::kWarps) {  // @sinks-of-all-queries
        const auto tile = tile_of<V, Queries, M>(p, {i % blocks, head, i / blocks});
        if (tile.sequence.index >= problem.batch) continue;  // rows of no sequence @sinks-of-sequences-alone
        const int q0 = tile.block * M;
        #pragma unroll
        for (int row = lane(); row < M; row += 32) {
            if (q0 + row >= tile.sequence.seqlen_q) continue;
            const float *const stats = row_stats_at<M>(p, tile.sequence, head, q0 + row);
            const float x = V::kBias ? (logit - stats[0]) * kLog2e : fmaf(logit, kLog2e, -stats[0]);
            float P;
            if constexpr (sizeof(typename V::Element) == 2) {
                P = weight_ex2(x);
            } else {  // dsink holds subnormal numbers, which ex2 never gives, and less than the smallest one is 0
                const float root = ptx::ex2(0.5f * x);
                P = fabsf(stats[1]) < ptx::infinity() ? root * root : weight_ex2(x);  // @subnormal-sinks
            }
            sum = fmaf(P, stats[1], sum);
        }
    }
    leave_sum_of_warp(sum);
    if (ptx::thread_index() > 0) return;
    // A sink of -inf is none, also where a query sees no key. @sink-that-is-none
    p.dsink[head] = logit == -ptx::infinity() ? 0.f : 0.f - sum_of_warps<V::kWarps>();
}

#endif  // CUPYFLASH_BWD_SINK_CUH
