// dQ = scale * (the sum of all key blocks' shares), from the fp32 accumulator in fragment order to rows of the element
// type. One block a query tile of the main kernel, with the same warps. Shared memory: the tile.
#ifndef CUPYFLASH_BWD_CONVERT_CUH
#define CUPYFLASH_BWD_CONVERT_CUH
#include "dq_accum.cuh"
#include "epilogue.cuh"
#include "recompute.cuh"

// For Recompute: whatever the mask; one that is not there has no bounds.
template <class V>
struct AnyMask : V {
    static constexpr bool kCausal = false, kWindow = true, kScaleFirst = false;
    static constexpr int kBlockN = 64;
};

template <class V>
__device__ __forceinline__ void bwd_convert(const BwdParams &p) {
    using T = typename V::Element;
    using Dq = DqTile<V>;
    const Problem &problem = p.problem;
    const TileIndex tile = TileIndex::of<false>(problem, ceil_div(problem.seqlen_q, V::kBlockM), problem.heads_q);
    const int sequence = tile.batch * problem.heads_q + tile.head;
    float *accum = Dq::accum(p, sequence, tile.block);

    typename Dq::Acc dQ;
    Dq::for_each_group(dQ, accum, [](float (&x)[ptx::kRedWidth], const float *from) {
        if constexpr (ptx::kRedWidth == 4) {
            const ptx::U128 four = *reinterpret_cast<const ptx::U128 *>(from);
            #pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = ptx::uint_as_float(four.x[i]);
        } else {
            x[0] = from[0];
        }
    });
    if (problem.first_stores && *dq_turn<V>(p, sequence, tile.block) == 0) dQ.zero();  // no query of it sees a key
    dQ.scale(problem.scale);

    const SmemTile<T, V::kBlockM, Dq::kDim> stage{ptx::dynamic_smem()};
    T *dq = static_cast<T *>(p.dq) + head_offset(p.dq_stride, tile.batch, tile.head);
    store_tile<T, V::kHeadDim>(stage, Dq::row0(), dQ, dq, p.dq_stride.row, tile.block * V::kBlockM + Dq::row0(),
                               problem.seqlen_q, Dq::col0());

    // Rows that are not finite, perhaps only because 0 * NaN of a hidden key leaked into them, anew; a warp each.
    if constexpr (V::kRepairs) {
        const bool masked = problem.window_left != kUnbounded || problem.window_right != kUnbounded;
        if (!masked || !ptx::bar_red_or(!dQ.finite())) return;
        const Recompute<AnyMask<V>> again(p, tile.batch);
        #pragma unroll 1
        for (int row = warp(); row < V::kBlockM; row += V::kWarps) {
            const int query = tile.block * V::kBlockM + row;
            if (query >= problem.seqlen_q) break;
            T *const to = dq + query * p.dq_stride.row;
            bool finite = true;
            for (int col = lane(); col < V::kHeadDim; col += 32) finite &= !is_non_finite<T>(to[col].raw);
            if (!ptx::vote_any(!finite) || again.dq_is_nan(tile.head, query)) continue;
            ptx::bar_warp_sync();  // all lanes have read the row
            again.dq(tile.head, query).write(to);
        }
    }
}

#endif  // CUPYFLASH_BWD_CONVERT_CUH
