// dslopes = -sum of what the main kernel's warps left (slopes.cuh), over all tiles of a head, and of all sequences if they share
// their slopes. One block a slope, one warp a sequence at a time. Shared memory: one float a warp.
#ifndef CUPYFLASH_BWD_SLOPES_CUH
#define CUPYFLASH_BWD_SLOPES_CUH
#include "attention/slopes.cuh"

template <class V>
__device__ __forceinline__ void bwd_slopes(const BwdParams &p) {
    using Rows = typename Either<V::kOverKeys, Keys, Queries>::Type;
    static_assert(V::kSmemBytes == 4 * V::kWarps);
    const Problem &problem = p.problem;
    const int slope = ptx::block_index(), head = slope % problem.heads_q;
    const int first = p.alibi == 2 ? slope / problem.heads_q : 0, end = p.alibi == 2 ? first + 1 : problem.batch;
    float sum = 0.f;
    #pragma unroll 1
    for (int b = first + warp(); b < end; b += V::kWarps) {  // @slopes-of-all-sequences
        const auto s = Sequence<V::kPacked>::of(p, b);
        const int tiles = ceil_div(V::kOverKeys ? s.seqlen_k : s.seqlen_q, V::kBlockM);  // @tiles-with-slopes
        const float *const parts = slope_parts_at<Rows, V::kBlockM>(p, s, head, 0, V::kParts);
        for (int i = lane(); i < tiles * V::kParts; i += 32) sum += parts[i];
    }
    leave_sum_of_warp(sum);
    if (ptx::thread_index() > 0) return;
    p.dalibi_slopes[slope] = 0.f - sum_of_warps<V::kWarps>();
}

#endif  // CUPYFLASH_BWD_SLOPES_CUH
