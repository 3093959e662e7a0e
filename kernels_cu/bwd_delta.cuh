// What the backward needs of each query row, before its main kernel:
//     delta = rowsum(dO * O) - dLSE,   row_stats = (lse * log2(e), delta),
// since dS = P * (dP - rowsum(dP * P)) + P * dLSE and rowsum(dP * P) = rowsum(dO * O). One block takes the rows of one
// query tile of the main kernel, a few lanes a row, and clears that tile's accumulator of dQ.
#ifndef CUPYFLASH_BWD_DELTA_CUH
#define CUPYFLASH_BWD_DELTA_CUH
#include "dq_accum.cuh"
#include "score.cuh"

// sum(a * b) over 8 neighbouring elements.
template <class T, bool kUnaligned>
__device__ __forceinline__ float dot8(const T *a, const T *b) {
    ptx::U128 x, y;
    if constexpr (kUnaligned) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            x.x[i] = a[2 * i].raw | static_cast<ptx::u32>(a[2 * i + 1].raw) << 16;
            y.x[i] = b[2 * i].raw | static_cast<ptx::u32>(b[2 * i + 1].raw) << 16;
        }
    } else {
        x = *reinterpret_cast<const ptx::U128 *>(a), y = *reinterpret_cast<const ptx::U128 *>(b);
    }
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        sum = fmaf(T::lo(x.x[i]), T::lo(y.x[i]), sum), sum = fmaf(T::hi(x.x[i]), T::hi(y.x[i]), sum);
    return sum;
}

template <class V>
__device__ __forceinline__ void bwd_delta(const BwdParams &p) {
    using T = typename V::Element;
    constexpr int M = V::kBlockM, kThreads = 32 * V::kWarps;
    constexpr int kChunks = V::kHeadDim / 8, kLanesPerRow = next_power_of_two(kChunks),
                  kRowsPerPass = kThreads / kLanesPerRow;
    const Problem &problem = p.problem;
    const TileIndex tile = TileIndex::of<false>(problem, ceil_div(problem.seqlen_q, M), problem.heads_q);
    const int sequence = tile.batch * problem.heads_q + tile.head;
    const T *o = static_cast<const T *>(p.o) + head_offset(p.o_stride, tile.batch, tile.head);
    const T *dout = static_cast<const T *>(p.dout) + head_offset(p.dout_stride, tile.batch, tile.head);

    // Exactly the factor that the main kernel applies to the scores, over `scale`: large scores then cancel large lse.
    const double log2_per_unit =
        problem.scale > 0.f ? static_cast<double>(problem.scale * kLog2e) / problem.scale : kLog2e;
    const int chunk = ptx::thread_index() % kLanesPerRow;
    for (int row = ptx::thread_index() / kLanesPerRow; row < M; row += kRowsPerPass) {
        const int qi = tile.block * M + row;
        const bool valid = qi < problem.seqlen_q;
        float sum = 0.f;
        if (valid && chunk < kChunks)
            sum =
                dot8<T, V::kUnaligned>(o + qi * p.o_stride.row + 8 * chunk, dout + qi * p.dout_stride.row + 8 * chunk);
        #pragma unroll
        for (int offset = kLanesPerRow / 2; offset > 0; offset /= 2) sum += ptx::shfl_xor(sum, offset);
        if (chunk == 0) {
            const long long i = static_cast<long long>(sequence) * problem.seqlen_q + qi;
            float *stats = p.row_stats + 2 * (static_cast<long long>(sequence) * round_up(problem.seqlen_q, M) + qi);
            stats[0] = valid ? static_cast<float>(p.lse[i] * log2_per_unit) : ptx::infinity();
            stats[1] = valid ? sum - (p.dlse ? p.dlse[i] : 0.f) : 0.f;
        }
    }

    auto *accum = reinterpret_cast<ptx::U128 *>(DqTile<V>::accum(p, sequence, tile.block));
    for (int i = ptx::thread_index(); i < M * DqTile<V>::kDim / 4; i += kThreads) accum[i] = ptx::U128{};
    if (V::kDeterministic && ptx::thread_index() == 0)
        p.dq_turn[static_cast<long long>(sequence) * ceil_div(problem.seqlen_q, M) + tile.block] = 0;
}

#endif  // CUPYFLASH_BWD_DELTA_CUH
