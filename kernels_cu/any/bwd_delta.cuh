// What the backward needs of each query row, before its main kernel:
//     delta = rowsum(dO * O) - dLSE,   row_stats = (lse * log2(e), delta),
// since dS = P * (dP - rowsum(dP * P)) + P * dLSE and rowsum(dP * P) = rowsum(dO * O). One block takes the rows of one
// query tile of the main kernel, a few lanes a row, and clears that tile's accumulator of dQ, unless it is to be stored
// first, and the count of what is in it (dq_accum.cuh). kListedRows: the first blocks also list the main kernel's tiles of
// packed keys (tile_list.cuh). kOverlaps: the kernel behind may start while this one ends, for which it waits itself.
#ifndef CUPYFLASH_BWD_DELTA_CUH
#define CUPYFLASH_BWD_DELTA_CUH
#include "attention/dq_accum.cuh"
#include "hw/ptx_sm90.cuh"
#include "attention/score.cuh"
#include "attention/tile_list.cuh"

// Packed: whether lengths decrease somewhere, by one block.
template <class V>
__device__ __forceinline__ void look_at_lengths(const BwdParams &p) {
    using S = Sequence<V::kPacked>;
    if (ptx::thread_index() == 0) *p.lengths_contradict = 0;
    ptx::bar_sync();
    for (int b = ptx::thread_index(); b < p.problem.batch; b += 32 * V::kWarps)
        if (S::start_q(p, b) > S::start_q(p, b + 1) || S::start_k(p, b) > S::start_k(p, b + 1))
            ptx::atomic_add(p.lengths_contradict, 1);
}

template <class V>
__device__ __forceinline__ void bwd_delta(const BwdParams &p) {
    using T = typename V::Element;
    static_assert(V::kSmemBytes == 0);
    constexpr int M = V::kBlockM, kThreads = 32 * V::kWarps;
    // @columns-of-o-delta
    constexpr int kPer = kPerChunk<T>, kChunks = V::kHeadDimV / kPer, kPieces = ceil_div(kChunks, 32);  // of a lane
    constexpr int kLanesPerRow = next_power_of_two(ceil_div(kChunks, kPieces)), kRowsPerPass = kThreads / kLanesPerRow;
    constexpr int kPasses = ceil_div(M, kRowsPerPass), kBatch = kPasses < 4 ? kPasses : 4;  // loaded together
    const Problem &problem = p.problem;
    if constexpr (V::kOverlaps) ptx::griddepcontrol_launch_dependents();
    if constexpr (V::kPacked)
        if (p.lengths_contradict && ptx::block_index() == 0) look_at_lengths<V>(p);
    if constexpr (V::kListedRows > 0) {
        const int first = 32 * ptx::block_index();  // @sequences-of-the-block
        if (first <= problem.batch && ptx::thread_index() < 32) TileList<V::kListedRows>::write(p, first);
    }
    const auto tile = tile_at<V, Queries, M, false>(p, ptx::block_index());
    const auto &sequence = tile.sequence;
    if (V::kPacked && tile.block * M >= sequence.seqlen_q) return;
    const T *o = static_cast<const T *>(p.o) + sequence.q_offset(p.o_stride, tile.head);
    const T *dout = static_cast<const T *>(p.dout) + sequence.q_offset(p.dout_stride, tile.head);  // @heads-of-do-delta

    if (p.dq_accum && !first_share_is_stored(p, sequence)) {
        auto *accum = reinterpret_cast<ptx::U128 *>(DqTile<V>::accum(p, sequence, tile.head, tile.block));
        #pragma unroll
        for (int i = ptx::thread_index(); i < M * DqTile<V>::kDim / 4; i += kThreads) accum[i] = ptx::U128{};
    }

    const int chunk = ptx::thread_index() % kLanesPerRow;
    #pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kBatch) {
        const int row0 = pass * kRowsPerPass + ptx::thread_index() / kLanesPerRow;
        ptx::U128 x[kBatch][kPieces], y[kBatch][kPieces];
        float lse[kBatch], dlse[kBatch];
        #pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int qi = tile.block * M + row0 + i * kRowsPerPass;
            const bool valid = qi < sequence.seqlen_q;
            lse[i] = ptx::infinity(), dlse[i] = 0.f;
            #pragma unroll
            for (int n = 0; n < kPieces; ++n) {
                const int piece = chunk + n * kLanesPerRow;
                x[i][n] = y[i][n] = ptx::U128{};
                if (valid && piece < kChunks) {
                    x[i][n] = load_chunk<V::kUnaligned>(o + qi * p.o_stride.row + kPer * piece);  // @rows-of-o-delta
                    y[i][n] =
                        load_chunk<V::kUnaligned>(dout + qi * p.dout_stride.row + kPer * piece);  // @rows-of-do-delta
                }
            }
            if (valid && chunk == 0) {
                const long long at = sequence.lse_row(problem, tile.head) + qi;
                lse[i] = p.lse[at];
                if (p.dlse) dlse[i] = p.dlse[at];  // @dlse-of-every-sequence
            }
        }
        // Exactly the factor that the main kernel applies to the scores, over their unit (Score): large scores then cancel
        // large lse.
        const float unit = V::kSoftcap ? problem.softcap : problem.scale;
        // @lse-in-units-of-scores
        const double log2_per_unit = unit > 0.f ? static_cast<double>(unit * kLog2e) / unit : kLog2e;
        #pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = row0 + i * kRowsPerPass;
            float sum = dot_chunk<T>(x[i][0], y[i][0]);
            #pragma unroll
            for (int n = 1; n < kPieces; ++n) sum += dot_chunk<T>(x[i][n], y[i][n]);  // @pieces-of-o-delta
            #pragma unroll
            for (int offset = kLanesPerRow / 2; offset > 0; offset /= 2) sum += ptx::shfl_xor(sum, offset);
            if (chunk == 0 && row < M) {
                float *const stats = row_stats_at<M>(p, sequence, tile.head, tile.block * M + row);
                if constexpr (V::kBias)  // @lse-of-nothing
                    stats[0] = lse[i] == -ptx::infinity() ? kLseOfNothing : lse[i];
                else stats[0] = static_cast<float>(lse[i] * log2_per_unit);
                stats[1] = sum - dlse[i];     // @delta-less-dlse
                if constexpr (V::kDropout) {  // as dropout.cuh asks for
                    // @lse-of-what-is-kept
                    stats[0] -= ptx::lg2(p.dropout_inverse) * (V::kBias ? kLn2 : 1.f);
                    stats[1] *= 1.f / p.dropout_inverse;  // @delta-of-what-is-kept
                }
            }
        }
    }
    if (p.dq_turn && ptx::thread_index() == 0) *dq_turn<V>(p, sequence, tile.head, tile.block) = 0;
}

#endif  // CUPYFLASH_BWD_DELTA_CUH
