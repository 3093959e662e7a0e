// What blocks of the sm80 family's backward copy to shared memory: K and V of their keys once, and a query tile of Q and dO
// with its row_stats for each visit. Asynchronous (cp.async; commit and wait outside) unless rows are not aligned.
#ifndef CUPYFLASH_BWD_LOAD_SM80_CUH
#define CUPYFLASH_BWD_LOAD_SM80_CUH
#include "attention/shares.cuh"
#include "tile/tile.cuh"

// One query tile in shared memory.
template <class T, int M, int D, int kDimV>
struct QueryStage {
    using TileQ = SmemTile<T, M, D>;
    using TileDO = SmemTile<T, M, kDimV>;
    static constexpr int kBytes = TileQ::kBytes + TileDO::kBytes + 8 * M;
    TileQ sQ;
    TileDO sdO;
    ptx::u32 stats;  // [M][2] floats: lse in powers of two, delta

    __device__ explicit QueryStage(ptx::u32 base)
        : sQ{base}, sdO{base + TileQ::kBytes}, stats{base + (TileQ::kBytes + TileDO::kBytes)} {}
};

// K or V of the block's keys, kColumns of them.
template <class V, int kColumns, class SmemTileKV>
__device__ __forceinline__ void load_keys(const BwdParams &p, const SmemTileKV &dst, const void *src,
                                          const Strides &stride, const Tile<V::kPacked> &tile) {
    using T = typename V::Element;
    dst.template load_async<32 * V::kWarps, kColumns, V::kUnaligned>(
        static_cast<const T *>(src) + tile.sequence.k_offset(stride, KeysOf<V>::head_k(p, tile.head)), stride.row,
        tile.block * V::kBlockN, tile.sequence.seqlen_k);
}

// Rows [q0, q0 + kBlockM) of a head of q, those that exist.
template <class V, class Stage>
__device__ __forceinline__ void load_queries(const BwdParams &p, const Sequence<V::kPacked> &sequence, int head, int q0,
                                             const Stage &s) {
    using T = typename V::Element;
    constexpr int M = V::kBlockM, kThreads = 32 * V::kWarps;
    s.sQ.template load_async<kThreads, V::kHeadDim, V::kUnaligned>(
        static_cast<const T *>(p.q) + sequence.q_offset(p.q_stride, head), p.q_stride.row, q0, sequence.seqlen_q);
    s.sdO.template load_async<kThreads, V::kHeadDimV, V::kUnaligned>(
        static_cast<const T *>(p.dout) + sequence.q_offset(p.dout_stride, head), p.dout_stride.row, q0,
        sequence.seqlen_q);  // @strides-of-do-bwd-sm80
    const int r = fresh_thread();
    if (r < M)
        ptx::cp_async_8(s.stats + 8 * r, row_stats_at<M>(p, sequence, head, q0 + r),
                        q0 + r < sequence.seqlen_q);  // @statistics-of-the-visit-sm80
}

// The same in two steps, for where there are no asynchronous copies.
template <class V, class Stage>
struct HeldQueries {
    using T = typename V::Element;
    static constexpr int M = V::kBlockM, kThreads = 32 * V::kWarps;
    static constexpr int kPieces = Stage::TileQ::template kPieces<kThreads>;
    static constexpr int kPiecesDO = Stage::TileDO::template kPieces<kThreads>;
    ptx::U128 q[kPieces], dout[kPiecesDO];
    float lse, delta;

    __device__ void fetch(const BwdParams &p, const Sequence<V::kPacked> &sequence, int head, int q0, const Stage &s) {
        s.sQ.template fetch<kThreads, V::kHeadDim>(q, static_cast<const T *>(p.q) + sequence.q_offset(p.q_stride, head),
                                                   p.q_stride.row, q0, sequence.seqlen_q);
        s.sdO.template fetch<kThreads, V::kHeadDimV>(
            dout, static_cast<const T *>(p.dout) + sequence.q_offset(p.dout_stride, head), p.dout_stride.row, q0,
            sequence.seqlen_q);  // @strides-of-do-held
        const int r = fresh_thread();
        const bool exists = r < M && q0 + r < sequence.seqlen_q;
        const float *const stats = row_stats_at<M>(p, sequence, head, q0 + (exists ? r : 0));
        lse = exists ? stats[0] : 0.f, delta = exists ? stats[1] : 0.f;
    }
    __device__ void put(const Stage &s) const {
        s.sQ.template put<kThreads>(q);
        s.sdO.template put<kThreads>(dout);
        const int r = fresh_thread();
        if (r < M) ptx::st_shared_v2_f32(s.stats + 8 * r, lse, delta);  // @statistics-held
    }
};

#endif  // CUPYFLASH_BWD_LOAD_SM80_CUH
