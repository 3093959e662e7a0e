// dQ = scale * (the sum of all key blocks' shares), from the fp32 accumulator in fragment order to rows of the element
// type. One block a query tile of the main kernel, with the same warps. Shared memory: the tile.
#ifndef CUPYFLASH_BWD_CONVERT_CUH
#define CUPYFLASH_BWD_CONVERT_CUH
#include "dq_accum.cuh"
#include "epilogue.cuh"

template <class V>
__device__ __forceinline__ void bwd_convert(const BwdParams &p) {
    using T = typename V::Element;
    using Dq = DqTile<V>;
    const Problem &problem = p.problem;
    const TileIndex tile = TileIndex::of<false>(problem, ceil_div(problem.seqlen_q, V::kBlockM), problem.heads_q);
    float *accum = Dq::accum(p, tile.batch * problem.heads_q + tile.head, tile.block);

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
    dQ.scale(problem.scale);

    const SmemTile<T, V::kBlockM, Dq::kDim> stage{ptx::dynamic_smem()};
    T *dq = static_cast<T *>(p.dq) + head_offset(p.dq_stride, tile.batch, tile.head);
    store_tile<T, V::kHeadDim>(stage, Dq::row0(), dQ, dq, p.dq_stride.row, tile.block * V::kBlockM + Dq::row0(),
                               problem.seqlen_q, Dq::col0());
}

#endif  // CUPYFLASH_BWD_CONVERT_CUH
