// The gradient of scores for what is learned of them: dS = P * (dO V^T - delta), P = exp(S - lse), of a tile of kBlockM queries
// and kBlockN keys. Each warp has kBlockM / kWarps rows. No more exists of dS than a tile.
//
// `request` and `multiply` are for products by mma.sync, with Q | dO | K | V in shared memory; whoever has S and dP already calls
// `fetch` and `form` alone.
#ifndef CUPYFLASH_SCORE_GRADIENT_CUH
#define CUPYFLASH_SCORE_GRADIENT_CUH
#include "attention/blocks.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/repair.cuh"
#include "attention/score.cuh"
#include "tile/gemm.cuh"

template <class V>
struct ScoreGradient {
    using T = typename V::Element;
    static constexpr int M = V::kBlockM, N = V::kBlockN, kThreads = 32 * V::kWarps;
    static constexpr int D = round_up(V::kHeadDim, 16), kDimV = round_up(V::kHeadDimV, 16);
    static constexpr int kRows = M / V::kWarps;
    static_assert(kRows % 16 == 0 && N % 16 == 0);
    using TileQ = SmemTile<T, M, D>;
    using TileDO = SmemTile<T, M, kDimV>;
    using TileK = SmemTile<T, N, D>;
    using TileV = SmemTile<T, N, kDimV>;
    using Acc = AccTile<kRows, N>;

    const BwdParams &p;
    const Problem &problem;
    const Score<V> score;
    const int row0;

    __device__ explicit ScoreGradient(const BwdParams &p) : ScoreGradient(p, warp() * kRows) {}
    // row0: this warp's first row.
    __device__ ScoreGradient(const BwdParams &p, int row0) : p(p), problem(p.problem), score(problem), row0(row0) {}

    __device__ static TileQ q() { return {ptx::dynamic_smem()}; }
    __device__ static TileDO dout() { return {q().base + TileQ::kBytes}; }
    __device__ static TileK k() { return {q().base + (TileQ::kBytes + TileDO::kBytes)}; }
    __device__ static TileV v() { return {k().base + TileK::kBytes}; }

    // Whether a block mask leaves nothing of a tile, which lies within one of its own.
    __device__ bool is_empty(int sequence, int head, int q0, int k0) const {
        if constexpr (V::kBlockMask) return BlockMask<V>::of(p, sequence, head).kind(q0, k0) == kEmptyTile;
        else return false;
    }

    // Asks for what queries [q0, q0 + M) and keys [k0, k0 + N) of a head of q need, once every warp is done with the tiles
    // before. loads_queries: Q and dO are not here from then.
    __device__ __forceinline__ void request(const SequenceOf<V> &s, int head, int q0, int k0,
                                            bool loads_queries) const {
        const int head_k = head / (problem.heads_q / problem.heads_k);  // @head-of-k-dbias
        ptx::bar_sync();                                                // @dbias-tiles-free
        const auto load = [&](auto columns, const auto &tile, const void *src, const Strides &stride, long long offset,
                              int first, int rows) {
            constexpr int kColumns = decltype(columns)::value;
            tile.template load_async<kThreads, kColumns, V::kUnaligned>(static_cast<const T *>(src) + offset,
                                                                        stride.row, first, rows);
        };
        const Int<V::kHeadDim> all;
        const Int<V::kHeadDimV> all_of_v;  // @columns-of-do-and-v-dbias
        if (loads_queries) load(all, q(), p.q, p.q_stride, s.q_offset(p.q_stride, head), q0, s.seqlen_q);
        load(all, k(), p.k, p.k_stride, s.k_offset(p.k_stride, head_k), k0, s.seqlen_k);
        ptx::cp_async_commit_group();
        if (loads_queries)
            load(all_of_v, dout(), p.dout, p.dout_stride, s.q_offset(p.dout_stride, head), q0, s.seqlen_q);
        load(all_of_v, v(), p.v, p.v_stride, s.k_offset(p.v_stride, head_k), k0, s.seqlen_k);
        ptx::cp_async_commit_group();
    }
    // S = Q K^T and dP = dO V^T of what was asked for.
    __device__ __forceinline__ void multiply(Acc &S, Acc &dP) const {
        S.zero(), dP.zero();
        ptx::cp_async_wait_group<1>();                               // @dbias-q-and-k-copied
        ptx::bar_sync();                                             // Q and K are here @dbias-q-and-k-landed
        gemm_nt<T>(S, FewSteps<TileQ, kRows>(q(), row0), k());       // S = Q K^T
        ptx::cp_async_wait_group<0>();                               // @dbias-do-and-v-copied
        ptx::bar_sync();                                             // dO and V are here @dbias-do-and-v-landed
        gemm_nt<T>(dP, FewSteps<TileDO, kRows>(dout(), row0), v());  // dP = dO V^T
    }

    // What scores add and read ahead, while they are computed.
    __device__ auto fetch(const SequenceOf<V> &s, int head, int q0, int k0) const {
        return Places<V>::of(p, s, head).template fetch<true, kRows, N>(q0 + row0, k0);
    }
    // f(row, column, q . k, dS) of each element that this lane holds, counted from its first one; dS is 0 where nothing is seen.
    template <class Fetched, class F>
    __device__ __forceinline__ void form(const SequenceOf<V> &s, const Mask<V> &mask, int head, int q0, int k0,
                                         const Fetched &fetched, Acc &S, const Acc &dP, F f) const {
        if constexpr (!V::kBlockMask)
            if (mask.full(q0, k0) && q0 + M <= s.seqlen_q) return form<false>(s, mask, head, q0, k0, fetched, S, dP, f);
        form<true>(s, mask, head, q0, k0, fetched, S, dP, f);
    }

  private:
    template <bool kMasked, class Fetched, class F>
    __device__ __forceinline__ void form(const SequenceOf<V> &s, const Mask<V> &mask, int head, int q0, int k0,
                                         const Fetched &fetched, Acc &S, const Acc &dP, F f) const {
        const int lane = fresh_lane(), query = q0 + row0 + lane / 4;
        const Mask<V> from_here = mask.from(query, k0 + 2 * (lane % 4));
        const auto places = Places<V>::of(p, s, head).template from_lane<true>(q0 + row0, k0, fetched);
        const auto kept = Dropout<V>::of(p, s.index, head).template kept<true, kRows, N>(q0 + row0, k0);
        float stats[kRows / 8][2];  // of this lane's rows: lse, delta
        #pragma unroll
        for (int r = 0; r < kRows / 8; ++r) {
            const bool exists = query + 8 * r < s.seqlen_q;
            // @statistics-of-the-rows-dbias
            const float *const at = row_stats_at<V::kStatsRows>(p, s, head, exists ? query + 8 * r : 0);
            stats[r][0] = at[0], stats[r][1] = at[1];
        }
        const SeenBits<V, kRows, N, true, V::kBlockMask && kMasked> seen(p, s.index, head, q0 + row0, k0);
        S.for_each([&](int row, int col, float &s_ij) {
            const float raw = dP.x[row / 16][col / 8][row / 8 % 2 * 2 + col % 2];
            const float dP_ij = Dropout<V>::of_kept(kept(row, col), raw);  // @dbias-of-what-is-kept
            const auto at = places(row, col);
            const float dS = weight_ex2(score.exponent(s_ij, at, stats[row / 8][0])) * (dP_ij - stats[row / 8][1]);
            bool counts = !at.hides() && stats[row / 8][0] != kLseOfNothing;
            if constexpr (kMasked) counts = counts && row < from_here.seqlen_q && from_here.sees(row, col);
            if constexpr (V::kBlockMask && kMasked) counts = counts && seen(row, col);  // @dbias-by-the-block-mask
            f(row, col, s_ij, counts ? dS : 0.f);                                       // @dbias-of-what-is-seen
        });
    }
};

#endif  // CUPYFLASH_SCORE_GRADIENT_CUH
