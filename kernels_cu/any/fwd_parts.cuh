// O and lse from what parts of the keys gave (key_parts.cuh), rounded to the element type: one block 16 queries of a head, a warp 64
// columns. lse = ln sum_i exp(lse_i), O = sum_i exp(lse_i - lse) O_i. Shared memory: the rows.
#ifndef CUPYFLASH_FWD_PARTS_CUH
#define CUPYFLASH_FWD_PARTS_CUH
#include "attention/key_parts.cuh"
#include "attention/repair_output.cuh"
#include "tile/epilogue.cuh"

template <class V>
__device__ __forceinline__ void fwd_parts(const FwdParams &p) {
    using T = typename V::Element;
    constexpr int M = V::kBlockM, D = V::kHeadDimV, kCols = 64, kChunks = ceil_div(D, kCols);
    static_assert(M == 16 && V::kWarps == kChunks);
    static_assert(V::kWindow && !V::kCausal && !V::kKvRange);  // a repair takes any mask, over all keys
    const auto tile = tile_at<V, Queries, M, false>(sequences_of<V>(p), ptx::block_index());
    const auto &sequence = tile.sequence;
    const int q0 = tile.block * M, col0 = warp() * kCols;
    if (q0 >= sequence.seqlen_q || is_left_out<V>(p, sequence)) return;

    AccTile<M, kCols> O, part;
    float weight[2], lse[2];
    const float *const lses = p.lse_parts + part_row<V>(p, sequence, tile.head, 0) + q0;
    const auto lse_of = [&](int r, int i) {  // -inf of a part that shows the query no key, and where there is no query
        const int row = O.row(0, 2 * r);
        return q0 + row < sequence.seqlen_q ? lses[static_cast<long long>(i) * p.problem.seqlen_q + row]
                                            : -ptx::infinity();
    };
    // 0 only where no key is seen, or float64 has 0 too (repair.cuh).
    const auto weight_of = [&](int r, int i, float base) {
        const float x = lse_of(r, i);
        return x == -ptx::infinity() ? 0.f : weight_ex2((x - base) * kLog2e);  // @part-without-keys
    };
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = -ptx::infinity(), sum = 0.f;
        #pragma unroll 1
        for (int i = 0; i < p.key_splits; ++i) top = fmaxf(top, lse_of(r, i));
        #pragma unroll 1
        for (int i = 0; i < p.key_splits; ++i) sum += weight_of(r, i, top);
        lse[r] = sum == 0.f ? -ptx::infinity() : fmaf(ptx::lg2(sum), kLn2, top);
    }
    O.zero();
    #pragma unroll 1
    for (int i = 0; i < p.key_splits; ++i) {  // @all-parts
        #pragma unroll
        for (int r = 0; r < 2; ++r) weight[r] = weight_of(r, i, lse[r]);  // @weight-of-the-part
        part.zero();
        float *const rows = p.o_parts + part_row<V>(p, sequence, tile.head, i) * D;
        for_each_pair<D, kCols * kChunks>(part, rows, q0, col0, sequence.seqlen_q,
                                          [](float &x, float &y, const FloatPair *at) {
                                              const FloatPair two = *at;
                                              x = two.x, y = two.y;
                                          });
        #pragma unroll
        for (int j = 0; j < O.kColTiles; ++j)
            #pragma unroll
            for (int c = 0; c < 4; ++c)
                // Not finite where anything there is, whatever it weighs, seen or hidden: then O is computed again.
                // @nothing-is-dropped
                O.x[0][j][c] = fmaf(weight[c / 2], part.x[0][j][c], O.x[0][j][c]);
    }
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = q0 + O.row(0, 2 * r);
        if (p.lse && warp() == 0 && lane() % 4 == 0 && row < sequence.seqlen_q)
            p.lse[sequence.lse_row(p.problem, tile.head) + row] = lse[r];
    }

    const SmemTile<T, M, kCols * kChunks> rows{ptx::dynamic_smem()};
    static_assert(rows.kBytes == V::kSmemBytes);
    if (!ptx::vote_all(stage_rows<T>(rows, 0, O, col0))) {  // @o-is-finite-parts
        repair_output<V, false, M, kCols>(p, sequence.index, tile.head, q0, rows, 0, col0);
        ptx::bar_warp_sync();  // @o-repaired-by-the-warp-parts
    }
    write_rows<M, kCols, D>(rows, 0, static_cast<T *>(p.o) + sequence.q_offset(p.o_stride, tile.head), p.o_stride.row,
                            q0, sequence.seqlen_q, col0);
}

#endif  // CUPYFLASH_FWD_PARTS_CUH
