// The gradient of a bias: dS = P * (dO V^T - delta), P = exp(S - lse), summed over the dimensions along which the bias is
// broadcast. A block owns a tile of kBlockM queries and kBlockN keys of the result, forms dS of it by mma.sync for all that the
// tile is broadcast to, one after the other, and writes the sum once: nothing is added in memory, in whatever order blocks run,
// and no more exists of dS than a tile. Each warp has kBlockM / kWarps rows. Where queries or keys are broadcast, a tile stands
// for all of them, and its rows or columns are added up at the end.
//
// Shared memory: Q | dO | K | V; at the end a row of fp32 sums a warp.
#ifndef CUPYFLASH_BWD_DBIAS_CUH
#define CUPYFLASH_BWD_DBIAS_CUH
#include "attention/blocks.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/repair.cuh"
#include "attention/score.cuh"
#include "tile/gemm.cuh"
#include "tile/sums.cuh"

template <class V>
struct DBias {
    using T = typename V::Element;
    static constexpr int M = V::kBlockM, N = V::kBlockN, D = round_up(V::kHeadDim, 16), kThreads = 32 * V::kWarps;
    static constexpr int kRows = M / V::kWarps;
    static_assert(kRows % 16 == 0 && N % 16 == 0);
    using TileQ = SmemTile<T, M, D>;
    using TileK = SmemTile<T, N, D>;
    using Acc = AccTile<kRows, N>;
    static_assert(2 * TileQ::kBytes + 2 * TileK::kBytes == V::kSmemBytes && 4 * N * V::kWarps <= TileQ::kBytes);

    // What the tile belongs to along one dimension: the index-th of those of the result, or all there are if broadcast.
    struct Range {
        int first, end;
        __device__ Range(bool is_broadcast, int index, int count)
            : first(is_broadcast ? 0 : index), end(is_broadcast ? count : index + 1) {}
    };

    const BwdParams &p;
    const Problem &problem;
    const ScoreStrides &to;
    const Score<V> score;
    const int row0;
    Acc sum;

    __device__ explicit DBias(const BwdParams &p)
        : p(p), problem(p.problem), to(p.dbias_stride), score(problem), row0(warp() * kRows) {
        sum.zero();
    }

    __device__ static TileQ q() { return {ptx::dynamic_smem()}; }
    __device__ static TileQ dout() { return {q().base + TileQ::kBytes}; }
    __device__ static TileK k() { return {q().base + 2 * TileQ::kBytes}; }
    __device__ static TileK v() { return {k().base + TileK::kBytes}; }

    __device__ void run() {
        int index = ptx::block_index();
        const auto next = [&](bool is_broadcast,
                              int count) {  // this block's index along a dimension, the last one first
            const int size = is_broadcast ? 1 : count, found = index % size;
            index /= size;
            return Range(is_broadcast, found, count);
        };
        const Range keys = next(to.key == 0, ceil_div(problem.seqlen_k, N));
        const Range queries = next(to.row == 0, ceil_div(problem.seqlen_q, M));
        const Range heads = next(to.head == 0, problem.heads_q), batches = next(to.batch == 0, problem.batch);
        #pragma unroll 1
        for (int b = batches.first; b < batches.end; ++b) {  // @dbias-of-all-sequences
            const auto sequence = with_range<V>(Sequence<V::kPacked>::of(p, b), p);
            const Mask<V> mask(sequence, problem);
            #pragma unroll 1
            for (int h = heads.first; h < heads.end; ++h)  // @dbias-of-all-heads
                #pragma unroll 1
                for (int m = queries.first; m < queries.end; ++m) {
                    const int first = max(keys.first, mask.first_key_block(m * M));
                    const int end = min(keys.end, mask.end_key_block(m * M));  // @dbias-of-blocks-that-are-seen
                    #pragma unroll 1
                    for (int n = first; n < end; ++n)
                        if (!is_empty(b, h, m * M, n * N)) add(sequence, mask, h, m * M, n * N);
                }
        }
        leave(batches.first, heads.first, queries.first * M, keys.first * N);
    }

    // Whether a block mask leaves nothing of a tile, which lies within one of its own.
    __device__ bool is_empty(int sequence, int head, int q0, int k0) const {
        if constexpr (V::kBlockMask) return BlockMask<V>::of(p, sequence, head).kind(q0, k0) == kEmptyTile;
        else return false;
    }

    // dS of queries [q0, q0 + M) and keys [k0, k0 + N) of a head of q.
    __device__ __forceinline__ void add(const SequenceOf<V> &s, const Mask<V> &mask, int head, int q0, int k0) {
        const int head_k = head / (problem.heads_q / problem.heads_k);  // @head-of-k-dbias
        ptx::bar_sync();  // every warp is done with the tiles before @dbias-tiles-free
        const auto load = [&](const auto &tile, const void *src, const Strides &stride, long long offset, int first,
                              int rows) {
            tile.template load_async<kThreads, V::kHeadDim, V::kUnaligned>(static_cast<const T *>(src) + offset,
                                                                           stride.row, first, rows);
        };
        load(q(), p.q, p.q_stride, s.q_offset(p.q_stride, head), q0, s.seqlen_q);
        load(k(), p.k, p.k_stride, s.k_offset(p.k_stride, head_k), k0, s.seqlen_k);
        ptx::cp_async_commit_group();
        load(dout(), p.dout, p.dout_stride, s.q_offset(p.dout_stride, head), q0, s.seqlen_q);
        load(v(), p.v, p.v_stride, s.k_offset(p.v_stride, head_k), k0, s.seqlen_k);
        ptx::cp_async_commit_group();

        Acc S, dP;
        S.zero(), dP.zero();
        ptx::cp_async_wait_group<1>();                              // @dbias-q-and-k-copied
        ptx::bar_sync();                                            // Q and K are here @dbias-q-and-k-landed
        gemm_nt<T>(S, FewSteps<TileQ, kRows>(q(), row0), k());      // S = Q K^T
        ptx::cp_async_wait_group<0>();                              // @dbias-do-and-v-copied
        ptx::bar_sync();                                            // dO and V are here @dbias-do-and-v-landed
        gemm_nt<T>(dP, FewSteps<TileQ, kRows>(dout(), row0), v());  // dP = dO V^T

        const int lane = fresh_lane(), query = q0 + row0 + lane / 4;
        const Mask<V> from_here = mask.from(query, k0 + 2 * (lane % 4));
        const auto places = Places<V>::of(p, s, head).template from_lane<true>(q0 + row0, k0);
        const auto kept = Dropout<V>::of(p, s.index, head).template kept<true, kRows, N>(q0 + row0, k0);
        float stats[kRows / 8][2];  // of this lane's rows: lse, delta
        #pragma unroll
        for (int r = 0; r < kRows / 8; ++r) {
            const bool exists = query + 8 * r < s.seqlen_q;
            // @statistics-of-the-rows-dbias
            const float *const at = row_stats_at<V::kStatsRows>(p, s, head, exists ? query + 8 * r : 0);
            stats[r][0] = at[0], stats[r][1] = at[1];
        }
        const SeenBits<V, kRows, N, true> seen(p, s.index, head, q0 + row0, k0);
        sum.for_each([&](int row, int col, float &total) {
            const float s_ij = S.x[row / 16][col / 8][row / 8 % 2 * 2 + col % 2];
            const float raw = dP.x[row / 16][col / 8][row / 8 % 2 * 2 + col % 2];
            const float dP_ij = Dropout<V>::of_kept(kept(row, col), raw);  // @dbias-of-what-is-kept
            const auto at = places(row, col);
            const float dS = weight_ex2(score.exponent(s_ij, at, stats[row / 8][0])) * (dP_ij - stats[row / 8][1]);
            bool counts = row < from_here.seqlen_q && from_here.sees(row, col) && !at.hides() &&
                          stats[row / 8][0] != kLseOfNothing;
            if constexpr (V::kBlockMask) counts = counts && seen(row, col);  // @dbias-by-the-block-mask
            total += counts ? dS : 0.f;                                      // @dbias-of-what-is-seen
        });
    }

    // What was summed up leaves: as it is, or its rows' sums in the first column, its columns' in the first row, or both.
    __device__ void leave(int batch, int head, int q0, int k0) {
        if (to.key == 0) sum_columns(sum);
        // In the place of Q, with which every warp was done when dO and V landed.
        if (to.row == 0) sum_rows<V::kWarps>(sum, ptx::dynamic_smem());
        const int rows = to.row == 0 ? (row0 == 0 ? 1 : 0) : problem.seqlen_q - q0 - row0;
        const int columns = to.key == 0 ? 1 : problem.seqlen_k - k0;
        const long long at = batch * to.batch + head * to.head + (q0 + row0) * to.row + k0 * to.key;
        const int first_row = fresh_lane() / 4, first_col = 2 * (fresh_lane() % 4);
        using Element = typename Bias<V>::Element;
        Element *const mine = static_cast<Element *>(p.dbias) + at + first_row * to.row + first_col * to.key;
        sum.for_each([&](int row, int col, float &x) {
            if (first_row + row >= rows || first_col + col >= columns) return;
            store(mine + row * to.row + col * to.key, x);  // @dbias-stored
        });
    }
    __device__ static void store(T *to, float x) { to->raw = static_cast<ptx::u16>(T::pack(x, 0.f)); }
    __device__ static void store(float *to, float x) { *to = x; }
};

template <class V>
__device__ __forceinline__ void bwd_dbias(const BwdParams &p) {
    DBias<V>(p).run();
}

#endif  // CUPYFLASH_BWD_DBIAS_CUH
