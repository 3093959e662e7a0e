// Forward attention with mma.sync and cp.async (sm_80 and every later architecture):
//     O = softmax(scale * Q K^T) V,   lse = ln sum exp(scale * Q K^T),   FlashAttention-2 (Dao 2023), algorithm 1.
//
// One block computes kBlockM rows of O for one (batch, head); each warp owns kBlockM / kWarps of them from Q to O, so
// the softmax never crosses warps. Shared memory: Q | a ring of kStages tiles. K_j and V_j alternate through the ring:
// when tile t is about to be used, tile t + kStages - 1 is requested into the slot of tile t - 1, which all warps have
// left.
#ifndef CUPYFLASH_FWD_SM80_CUH
#define CUPYFLASH_FWD_SM80_CUH
#include "tile/epilogue.cuh"
#include "tile/gemm.cuh"
#include "attention/dropout.cuh"
#include "attention/lists.cuh"
#include "attention/repair_output.cuh"
#include "attention/softmax.cuh"

// request(0, Int<kFrom>), ..., request(0, Int<kEnd - 1>).
template <int kFrom, int kEnd, class Request>
__device__ __forceinline__ void request_first(Request request) {
    if constexpr (kFrom < kEnd) {
        request(0, Int<kFrom>{});
        request_first<kFrom + 1, kEnd>(request);
    }
}

template <class V>
__device__ __forceinline__ void fwd(const FwdParams &p) {
    using T = typename V::Element;
    constexpr int M = V::kBlockM, N = V::kBlockN, D = round_up(V::kHeadDim, 16), kStages = V::kStages;
    constexpr int kThreads = 32 * V::kWarps, kRows = M / V::kWarps;
    static_assert(kRows % 16 == 0 && kStages >= 2);

    // Which tile.
    const Problem &problem = p.problem;
    const auto tile = tile_at<V, Queries, M, Mask<V>::kHides>(p, ptx::block_index());
    const auto &sequence = tile.sequence;
    // @head-of-k-fwd-sm80
    const int q0 = tile.block * M, row0 = warp() * kRows, head_k = tile.head / (problem.heads_q / problem.heads_k);
    if (V::kPacked && q0 >= sequence.seqlen_q) return;
    const T *q = static_cast<const T *>(p.q) + sequence.q_offset(p.q_stride, tile.head);
    const T *k = static_cast<const T *>(p.k) + sequence.k_offset(p.k_stride, head_k);
    const T *v = static_cast<const T *>(p.v) + sequence.k_offset(p.v_stride, head_k);  // @v-of-its-head-fwd-sm80

    using TileQ = SmemTile<T, M, D>;
    using TileKV = SmemTile<T, N, D>;
    static_assert(TileQ::kBytes + kStages * TileKV::kBytes == V::kSmemBytes);
    const TileQ sQ{ptx::dynamic_smem()};
    const auto slot = [&](int t) { return TileKV{sQ.base + TileQ::kBytes + t % kStages * TileKV::kBytes}; };

    const Mask<V> mask(with_range<V>(sequence, p), problem);
    const Score<V> score(problem);
    const auto head_places = DroppingPlaces<V, FwdParams>::of(p, sequence, tile.head);
    const KeyVisits<V> visits(p, mask, tile, q0);

    // Tile t = 2 i + kAhead of the sequence K_first, V_first, K_first+1, ...: one group of copies each, empty at the
    // end.
    const auto request = [&](int i, auto ahead) {
        constexpr int kAhead = decltype(ahead)::value;
        const int block = i + kAhead / 2;
        // @rows-of-v-fwd-sm80
        if (block < visits.count)
            slot(2 * i + kAhead)
                .template load_async<kThreads, V::kHeadDim, V::kUnaligned>(kAhead % 2 ? v : k,
                                                                           kAhead % 2 ? p.v_stride.row : p.k_stride.row,
                                                                           visits.block(block) * N, sequence.seqlen_k);
        ptx::cp_async_commit_group();  // @one-group-a-tile
    };
    const auto next_tile_landed = [] {
        ptx::cp_async_wait_group<kStages - 2>();  // @tile-copied
        ptx::bar_sync();                          // @tile-landed
    };

    AccTile<kRows, D> O;
    OnlineSoftmax<kRows, V::kBias> softmax(score.log2_factor);
    FragA<T, kRows, V::kQInRegs ? D : 16> rQ;

    // One key block. kMasked is false for blocks that every row sees in full: the element test is then compiled out.
    const auto step = [&](int i, auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        const int k0 = visits.block(i) * N;

        const auto kept = kept_of<V, kRows, N>(head_places, q0 + row0, k0);
        next_tile_landed();              // K_j is here, and every warp is done with V_{j-1}
        request(i, Int<kStages - 1>{});  // @slot-of-v-free
        AccTile<kRows, N> S;             // S = Q K^T
        S.zero();
        if constexpr (V::kQInRegs) gemm_nt<T>(S, rQ, slot(2 * i));
        else if constexpr (V::kBias) gemm_nt<T>(S, FewSteps<TileQ, kRows>(sQ, row0), slot(2 * i));
        else gemm_nt<T>(S, SmemA<TileQ, kRows>(sQ, row0), slot(2 * i));
        const int lane = fresh_lane();
        const Mask<V> from_here = mask.from(ptx::opaque(tile.block) * M + row0 + lane / 4, k0 + 2 * (lane % 4));
        const auto places = head_places.template from_lane<true>(q0 + row0, k0);
        using Seen = SeenBits<V, kRows, N, true, V::kBlockMask && kMasked>;
        const Seen seen(p, sequence.index, tile.head, q0 + row0, k0);
        S.for_each([&](int row, int col, float &s) {
            s = score.value(s, places(row, col));
            if constexpr (kMasked) s = from_here.row_sees(row, col) ? s : -ptx::infinity();
            if constexpr (V::kBlockMask && kMasked) s = seen(row, col) ? s : -ptx::infinity();
        });
        softmax.step(S, O);  // P = exp(S - m); O follows m
        Dropout<V>::drop(S, kept);
        FragA<T, kRows, N> P;
        P.from(S);

        next_tile_landed();  // V_j is here, and every warp is done with K_j
        request(i, Int<kStages>{});
        gemm_nn<T>(O, P, slot(2 * i + 1));  // O += P V
    };

    sQ.template load_async<kThreads, V::kHeadDim, V::kUnaligned>(q, p.q_stride.row, q0, sequence.seqlen_q);
    request_first<0, kStages - 1>(request);
    if constexpr (V::kQInRegs) {
        next_tile_landed();
        #pragma unroll
        for (int d = 0; d < D / 16; ++d) SmemA<TileQ, kRows>(sQ, row0).get(d, rQ.x[d]);
    }
    O.zero();
    #pragma unroll 1
    for (int i = 0; i < visits.count; ++i)
        if (visits.whole(mask, ptx::opaque(tile.block) * M, i)) step(i, Bool<false>{});
        else step(i, Bool<true>{});

    typename OnlineSoftmax<kRows, V::kBias>::Rows lse, inverse;
    softmax.finish(score.unit, Sink<V>::of(p, sequence, tile.head), lse, inverse, [&](int row, bool without_sum) {
        const int qi = q0 + row0 + row;
        if constexpr (V::kBlockMask)
            return without_sum && !BlockMask<V>::of(aside(p), sequence.index, tile.head)
                                       .sees_any(qi, mask.first_key(qi), mask.end_key(qi));
        else return mask.sees_nothing(qi);
    });
    softmax.multiply_rows(O, inverse);
    Dropout<V>::scale(p, O);
    const long long lse_row = sequence.lse_row(problem, tile.head);
    #pragma unroll
    for (int r = 0; r < OnlineSoftmax<kRows, V::kBias>::kRowsPerLane; ++r) {
        const int qi = q0 + row0 + O.row(r / 2, 2 * (r % 2));
        if (p.lse && lane() % 4 == 0 && qi < sequence.seqlen_q) p.lse[lse_row + qi] = lse[r];
    }
    if (visits.count == 0) {
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();  // Q has arrived, though no key block waited for it: its tile stages the result
    }
    if (!ptx::vote_all(stage_rows<T>(sQ, row0, O))) {  // @o-is-finite-sm80
        // @repair-in-its-sequence-fwd-sm80
        repair_output<V, V::kUnaligned, kRows>(aside(p), sequence.index, tile.head, q0 + row0, sQ, row0);
        ptx::bar_warp_sync();  // @o-repaired-by-the-warp
    }
    write_rows<kRows, D, V::kHeadDim>(sQ, row0, static_cast<T *>(p.o) + sequence.q_offset(p.o_stride, tile.head),
                                      p.o_stride.row, q0 + row0, sequence.seqlen_q);  // @strides-of-o
}

#endif  // CUPYFLASH_FWD_SM80_CUH
