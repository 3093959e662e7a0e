// dQ = scale * (the sum of all key blocks' shares), from the fp32 accumulator in fragment order to rows of the element
// type. One block a query tile of the main kernel, with the same warps. Shared memory: the tile. kOverlaps: it starts while the
// main kernel ends.
#ifndef CUPYFLASH_BWD_CONVERT_CUH
#define CUPYFLASH_BWD_CONVERT_CUH
#include "attention/dq_accum.cuh"
#include "hw/ptx_sm90.cuh"
#include "tile/epilogue.cuh"
#include "attention/repair_gradients.cuh"

template <class V>
__device__ __forceinline__ void bwd_convert(const BwdParams &p) {
    using T = typename V::Element;
    using Dq = DqTile<V>;
    const Problem &problem = p.problem;
    if constexpr (V::kOverlaps) ptx::griddepcontrol_wait();  // @main-awaited
    const auto tile = tile_at<V, Queries, V::kBlockM, false>(p, ptx::block_index());
    const auto &sequence = tile.sequence;
    if (V::kPacked && tile.block * V::kBlockM >= sequence.seqlen_q) return;
    float *accum = Dq::accum(p, sequence, tile.head, tile.block);

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
    if (first_share_is_stored(p, sequence) && *dq_turn<V>(p, sequence, tile.head, tile.block) == 0)
        dQ.zero();            // no query of it sees a key @unseen-queries-zero
    dQ.scale(problem.scale);  // @dq-scaled-convert

    const SmemTile<T, V::kBlockM, Dq::kDim> sdQ{ptx::dynamic_smem()};
    static_assert(sdQ.kBytes == V::kSmemBytes);
    const int row0 = Dq::row0(), col0 = Dq::col0(), q0 = tile.block * V::kBlockM;
    if (!ptx::vote_all(stage_rows<T>(sdQ, row0, dQ, col0))) {  // @dq-finite-convert
        // @repair-in-its-sequence-convert
        const GradientRepair<AnyMask<V>, V::kBlockM, V::kUnaligned> again(p, sequence.index);
        #pragma unroll 1
        for (int row = row0; row < row0 + Dq::kRows; ++row)
            again.template dq<Dq::kCols>(tile.head, q0 + row, sdQ, row, col0);
        ptx::bar_warp_sync();  // @dq-repaired-by-the-warp
    }
    // @strides-of-dq
    write_rows<Dq::kRows, Dq::kCols, V::kHeadDim>(sdQ, row0,
                                                  static_cast<T *>(p.dq) + sequence.q_offset(p.dq_stride, tile.head),
                                                  p.dq_stride.row, q0 + row0, sequence.seqlen_q, col0);
}

#endif  // CUPYFLASH_BWD_CONVERT_CUH
