// dK and dV from the shares of a group's query heads (shares.cuh), rounded to the element type: one block 16 keys of a head of
// k, a warp 64 columns of dK or of dV. Shared memory: the rows of both, equally wide.
#ifndef CUPYFLASH_BWD_SHARES_CUH
#define CUPYFLASH_BWD_SHARES_CUH
#include "attention/repair_gradients.cuh"
#include "attention/shares.cuh"
#include "tile/epilogue.cuh"

// dV or dK, of kColumns.
template <class V, int kColumns>
__device__ __forceinline__ void add_shares(const BwdParams &p, bool is_dv) {
    using T = typename V::Element;
    using S = Sequence<V::kPacked>;
    constexpr int M = V::kBlockM, kCols = 64, kChunks = ceil_div(kWidest<V>, kCols);
    static_assert(M == 16 && V::kWarps == 2 * kChunks);
    const Problem &problem = p.problem;
    // The plan's sections are those of key heads, of which there are more.
    const int blocks = S::template blocks<M>(problem, problem.seqlen_k);
    const auto index = TileIndex::at<false>(ptx::block_index(), {1, 1, 0}, blocks, problem.heads_k, S::count(problem));
    const auto tile = tile_of<V, Keys, M>(p, index);
    const auto &sequence = tile.sequence;
    const int k0 = tile.block * M, col0 = warp() % kChunks * kCols;
    if (k0 >= sequence.rows_k) return;

    float *const shares = is_dv ? p.dv_shares : p.dk_shares;
    AccTile<M, kCols> sum;
    sum.zero();
    #pragma unroll 4
    for (int i = 0; i < p.shares; ++i)  // @all-shares
        for_each_pair<kColumns, kCols * kChunks>(
            sum, share_at<V, kColumns>(p, shares, sequence, tile.head * p.shares + i), k0, col0, sequence.rows_k,
            [](float &x, float &y, const FloatPair *at) {
                const FloatPair two = *at;
                x += two.x, y += two.y;
            });

    using Rows = SmemTile<T, M, kCols * kChunks>;
    static_assert(2 * Rows::kBytes == V::kSmemBytes);
    const Rows rows{ptx::dynamic_smem() + is_dv * Rows::kBytes};
    if (!ptx::vote_all(stage_rows<T>(rows, 0, sum, col0))) {  // @dk-and-dv-finite-shares
        const GradientRepair<AnyMask<V>, V::kStatsRows, V::kUnaligned> again(p, sequence.index);
        #pragma unroll 1
        for (int row = 0; row < M; ++row)
            if (is_dv) again.template dv<kCols>(tile.head, k0 + row, rows, row, col0);
            else again.template dk<kCols>(tile.head, k0 + row, rows, row, col0);
        ptx::bar_warp_sync();  // @shares-repaired-by-the-warp
    }
    const Strides &stride = is_dv ? p.dv_stride : p.dk_stride;
    T *const dst = static_cast<T *>(is_dv ? p.dv : p.dk) + sequence.k_offset(stride, tile.head);
    write_rows<M, kCols, kColumns>(rows, 0, dst, stride.row, k0, sequence.rows_k, col0);
}

template <class V>
__device__ __forceinline__ void bwd_shares(const BwdParams &p) {
    const bool is_dv = warp() >= V::kWarps / 2;
    if constexpr (V::kHeadDimV == V::kHeadDim) add_shares<V, V::kHeadDim>(p, is_dv);
    else if (is_dv) add_shares<V, V::kHeadDimV>(p, true);
    else add_shares<V, V::kHeadDim>(p, false);
}

#endif  // CUPYFLASH_BWD_SHARES_CUH
