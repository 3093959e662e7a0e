// Forward attention with mma.sync and cp.async (sm_80 and every later architecture; Turing by loads and stores):
//     O = softmax(scale * Q K^T) V,   lse = ln sum exp(scale * Q K^T),   FlashAttention-2 (Dao 2023), algorithm 1.
//
// One block computes kBlockM rows of O for one (batch, head); each warp owns kBlockM / (kWarps / kSplitD) of them from Q to
// O. With kSplitD == 1 the softmax never crosses warps. With kSplitD == 2, two warps share their rows: each forms the
// scores of half of the keys and keeps half of the columns of O, so that a fragment of K or V serves twice as many rows;
// they exchange the maxima of rows, and P, through shared memory.
// Shared memory: Q, later O | a ring of kStages tiles | P and row maxima if kSplitD > 1. K_j and V_j alternate through the ring:
// when tile t is about to be used, tile t + kStages - 1 is requested into the slot of tile t - 1, which all warps have
// left.
// Without cp.async, threads hold their pieces of the tile that is requested in registers, and store them when it is due.
#ifndef CUPYFLASH_FWD_SM80_CUH
#define CUPYFLASH_FWD_SM80_CUH
#include "tile/epilogue.cuh"
#include "tile/gemm.cuh"
#include "attention/dropout.cuh"
#include "attention/lists.cuh"
#include "attention/key_parts.cuh"
#include "attention/repair_output.cuh"
#include "attention/softmax.cuh"

// A warp's rows of a block. Of two that share them: which it is, and its first key of a key block, and column of O.
struct Share { int row0, part, key0, col0; };

template <class V>
__device__ __forceinline__ void fwd(const FwdParams &p) {
    using T = typename V::Element;
    constexpr int M = V::kBlockM, N = V::kBlockN, kStages = V::kStages;
    constexpr int D = round_up(V::kHeadDim, 16), kDimV = round_up(V::kHeadDimV, 16);
    constexpr int kThreads = 32 * V::kWarps, kSplitD = V::kSplitD;
    constexpr int kRows = M / (V::kWarps / kSplitD), kKeys = N / kSplitD, kCols = kDimV / kSplitD;
    static_assert(kRows % 16 == 0 && kKeys % 16 == 0 && kCols % 8 == 0 && kStages >= 2);

    using Keys = typename Either<V::kInterleavesKeys, InterleavedKeys<N>, KeysInOrder>::Type;  // of S's columns
    static_assert(!V::kInterleavesKeys || (kSplitD == 1 && ptx::kHasAsyncCopies && !V::kDropout));

    // Which tile.
    const Problem &problem = p.problem;
    const int part = part_number<V>(p, ptx::block_index());
    const auto tile =
        tile_at<V, Queries, M, Mask<V>::kHides>(sequences_of<V>(p), tile_number<V>(p, ptx::block_index()));
    const auto &sequence = tile.sequence;
    // @head-of-k-fwd-sm80
    const int q0 = tile.block * M, row0 = warp() / kSplitD * kRows,
              head_k = tile.head / (problem.heads_q / problem.heads_k);
    if (V::kPacked && q0 >= sequence.seqlen_q) return;
    if (is_left_out<V>(p, sequence)) return;
    // Warps that share rows have no registers left to keep what can be worked out again: their share, the mask, the tile.
    const auto share = [&]() -> Share {
        if constexpr (kSplitD == 1) return {row0, 0, 0, 0};
        const int warp_here = fresh_thread() / 32, part = warp_here % kSplitD;
        return {warp_here / kSplitD * kRows, part, part * kKeys, part * kCols};
    };
    const T *q = static_cast<const T *>(p.q) + sequence.q_offset(p.q_stride, tile.head);
    const T *k = static_cast<const T *>(p.k) + sequence.k_offset(p.k_stride, head_k);
    const T *v = static_cast<const T *>(p.v) + sequence.k_offset(p.v_stride, head_k);  // @v-of-its-head-fwd-sm80

    using TileQ = SmemTile<T, M, D>;
    using TileO = SmemTile<T, M, kDimV>;
    using TileK = SmemTile<T, N, D>;
    using TileV = SmemTile<T, N, kDimV>;
    constexpr int kQBytes = larger(TileQ::kBytes, TileO::kBytes), kSlotBytes = larger(TileK::kBytes, TileV::kBytes);
    using TileP = SmemTile<T, M, kKeys>;  // of one part
    using Shared = SharedRows<kRows, kSplitD>;
    constexpr int kExchanged = kSplitD > 1 ? kSplitD * TileP::kBytes + V::kWarps * Shared::kBytes : 0;
    static_assert(kQBytes + kStages * kSlotBytes + kExchanged == V::kSmemBytes);
    const TileQ sQ{ptx::dynamic_smem()};
    const auto slot = [&](int t) { return sQ.base + kQBytes + t % kStages * kSlotBytes; };
    const auto sK = [&](int i) { return TileK{slot(2 * i)}; };
    const auto sV = [&](int i) { return TileV{slot(2 * i + 1)}; };
    const auto sP = [&](int of_part) {
        return TileP{sQ.base + kQBytes + kStages * kSlotBytes + of_part * TileP::kBytes};
    };
    const Shared shared(sP(kSplitD).base);

    static_assert(kSplitD == 1 || !(V::kBlockMask && V::kSplitKeys));
    const Mask<V> mask(visited_keys<V>(p, tile, part), problem);
    const auto mask_of = [&](const auto &its) -> decltype(auto) {
        if constexpr (kSplitD > 1) return Mask<V>(with_part<V>(its, aside(p), part_again<V>(p)), aside(p).problem);
        else return (mask);
    };
    const Score<V> score(problem);
    const auto head_places = DroppingPlaces<V, FwdParams>::of(p, sequence, tile.head);
    const KeyVisits<V> visits(p, mask, tile, q0, part);

    // Without asynchronous copies, what a thread has loaded of the tile that comes next.
    constexpr bool kHolds = !ptx::kHasAsyncCopies && !V::kUnaligned && !V::kPaged;
    static_assert(!kHolds || kStages == 2);
    constexpr int kPieces = larger(TileK::template kPieces<kThreads>, TileV::template kPieces<kThreads>);
    ptx::U128 held[kHolds ? kPieces : 1];

    // Tile t = 2 i + kAhead of the sequence K_first, V_first, K_first+1, ...: one group of copies each, empty at the
    // end.
    const auto request = [&](int i, auto ahead) {
        constexpr int kAhead = decltype(ahead)::value;
        const int block = i + kAhead / 2;
        if (block < visits.count) {
            using To = typename Either<kAhead % 2 != 0, TileV, TileK>::Type;
            constexpr int kColumns = kAhead % 2 ? V::kHeadDimV : V::kHeadDim;  // @columns-of-v-fwd-sm80
            const To to{slot(2 * i + kAhead)};
            const Strides &stride = kAhead % 2 ? p.v_stride : p.k_stride;  // @rows-of-v-fwd-sm80
            const int row = visits.block(block) * N;
            if constexpr (kHolds)
                to.template fetch<kThreads, kColumns>(held, kAhead % 2 ? v : k, stride.row, row, sequence.seqlen_k);
            else if constexpr (V::kPaged)
                load_pages_async<kThreads, kColumns, V>(to, p, kAhead % 2 ? p.v : p.k, stride, sequence, head_k, row,
                                                        sequence.seqlen_k);
            else
                to.template load_async<kThreads, kColumns, V::kUnaligned, Keys>(kAhead % 2 ? v : k, stride.row, row,
                                                                                sequence.seqlen_k);
        }
        ptx::cp_async_commit_group();  // @one-group-a-tile
    };
    const auto next_tile_landed = [] {
        ptx::cp_async_wait_group<kStages - 2>();  // @tile-copied
        ptx::bar_sync();                          // @tile-landed
    };

    AccTile<kRows, kCols> O;
    using Softmax = OnlineSoftmax<kRows, V::kBias, Shared>;
    Softmax softmax(score.log2_factor, shared);
    FragA<T, kRows, V::kQInRegs ? D : 16> rQ;

    // What is added to scores, read while they are computed: of interleaved keys, or of one row.
    const auto fetch = [&](int query, int key) {
        if constexpr (V::kInterleavesKeys || V::kBiasOfKeys)
            return head_places.template fetch<true, kRows, kKeys, Keys>(query, key);
        else return NotFetched{};
    };

    // One key block. kMasked is false for blocks that every row sees in full: the element test is then compiled out.
    const auto step = [&](int i, auto masked) __attribute__((always_inline)) {
        constexpr bool kMasked = decltype(masked)::value;
        const Share mine = share();
        const int k0 = visits.block(i) * N + mine.key0;

        const auto kept = kept_of<V, kRows, kKeys, KeptBits>(head_places, q0 + mine.row0, k0);
        if constexpr (kHolds) sK(i).template put<kThreads>(held);  // @k-held
        next_tile_landed();              // K_j is here, and every warp is done with V_{j-1} @k-landed-held
        request(i, Int<kStages - 1>{});  // @slot-of-v-free
        const auto fetched = fetch(q0 + mine.row0, k0);
        AccTile<kRows, kKeys> S;  // S = Q K^T
        S.zero();
        if constexpr (V::kQInRegs) gemm_nt<T>(S, rQ, sK(i).rows(mine.key0));
        else if constexpr (V::kBias || sizeof(T) == 4)
            gemm_nt<T>(S, FewSteps<TileQ, kRows>(sQ, mine.row0), sK(i).rows(mine.key0));
        else gemm_nt<T>(S, SmemA<TileQ, kRows>(sQ, mine.row0), sK(i).rows(mine.key0));
        const int lane = fresh_lane();
        const Mask<V> from_here =
            mask_of(sequence).from(ptx::opaque(tile.block) * M + mine.row0 + lane / 4, k0 + Keys::of_lane(lane));
        const auto places = head_places.template from_lane<true, Keys>(q0 + mine.row0, k0, fetched);
        using Seen = SeenBits<V, kRows, kKeys, true, V::kBlockMask && kMasked, Keys>;
        const Seen seen(p, sequence, tile.head, q0 + mine.row0, k0);
        S.for_each([&](int row, int col, float &s) {
            s = score.value_or_nan(s, places(row, Keys::of_column(col)));
            if constexpr (kMasked) s = from_here.row_sees(row, Keys::of_column(col)) ? s : -ptx::infinity();
            // @bits-of-columns-sm80
            if constexpr (V::kBlockMask && kMasked) s = seen(row, Keys::of_column(col)) ? s : -ptx::infinity();
        });
        // P = exp(S - m); O follows m, which may lag, but not where rows may have seen few keys.
        softmax.template step<!kMasked>(S, O);
        FragA<T, kRows, kKeys> P;
        P.from(S);
        Dropout<V>::drop(P, kept);
        const Share still = share();
        if constexpr (kSplitD > 1) P.store(sP(still.part), still.row0, 0);

        if constexpr (kHolds) sV(i).template put<kThreads>(held);  // @v-held
        next_tile_landed();  // V_j and the other warp's P are here, and every warp is done with K_j @v-landed-held
        request(i, Int<kStages>{});
        gemm_nn<T>(O, P, sV(i).rows(still.key0), still.col0);  // O += P V
        if constexpr (kSplitD > 1) {
            const SmemA<TileP, kRows> other(sP(1 - still.part), still.row0);  // @p-of-the-other-warp
            gemm_nn<T>(O, other, sV(i).rows(kKeys - still.key0), still.col0);
        }
    };

    sQ.template load_async<kThreads, V::kHeadDim, V::kUnaligned>(q, p.q_stride.row, q0, sequence.seqlen_q);
    for_each_constant<kStages - 1>([&](auto ahead) { request(0, ahead); });
    if constexpr (V::kQInRegs) {
        next_tile_landed();
        #pragma unroll
        for (int d = 0; d < D / 16; ++d) SmemA<TileQ, kRows>(sQ, share().row0).get(d, rQ.x[d]);
    }
    O.zero();
    #pragma unroll 1
    for (int i = 0; i < visits.count; ++i)
        if (visits.whole(mask, ptx::opaque(tile.block) * M, i)) step(i, Bool<false>{});
        else step(i, Bool<true>{});

    const auto &here = [&]() -> decltype(auto) {
        if constexpr (kSplitD > 1)
            return tile_at<V, Queries, M, Mask<V>::kHides>(sequences_of<V>(aside(p)),
                                                           tile_number<V>(aside(p), ptx::opaque(ptx::block_index())));
        else return (tile);
    }();
    const Share mine = share();
    typename Softmax::Rows lse, inverse;
    softmax.finish(score.unit, Sink<V>::of(p, here.sequence, here.head), lse, inverse, [&](int row, bool without_sum) {
        const int qi = here.block * M + mine.row0 + row;
        if constexpr (V::kBlockMask)
            return without_sum && !BlockMask<V>::of(aside(p), here.sequence, here.head)
                                       .sees_any(qi, mask.first_key(qi), mask.end_key(qi));
        else return mask_of(here.sequence).sees_nothing(qi);
    });
    softmax.multiply_rows(O, inverse);
    Dropout<V>::scale(p, O);
    const int of_part = part_again<V>(p);
    const long long lse_row = lse_row_of<V>(p, here.sequence, here.head, of_part);
    #pragma unroll
    for (int r = 0; r < Softmax::kRowsPerLane; ++r) {
        const int qi = here.block * M + mine.row0 + O.row(r / 2, 2 * (r % 2));
        if (lse_of<V>(p) && mine.part == 0 && lane() % 4 == 0 && qi < here.sequence.seqlen_q)
            lse_of<V>(p)[lse_row + qi] = lse[r];
    }
    if (visits.count == 0) {
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();  // Q has arrived, though no key block waited for it: its tile stages the result
    }
    if constexpr (V::kSplitKeys) {
        leave_part<V>(p, here.sequence, here.head, of_part, here.block * M + mine.row0, O, mine.col0);
        return;
    }
    const TileO sO{sQ.base};  // every warp was done with Q when the last V landed
    if (!ptx::vote_all(stage_rows<T>(sO, mine.row0, O, mine.col0))) {  // @o-is-finite-sm80
        // @repair-in-its-sequence-fwd-sm80
        repair_output<V, V::kUnaligned, kRows, kCols>(aside(p), here.sequence.index, here.head,
                                                      here.block * M + mine.row0, sO, mine.row0, mine.col0);
        ptx::bar_warp_sync();  // @o-repaired-by-the-warp
    }
    // @columns-of-o-fwd-sm80
    write_rows<kRows, kCols, V::kHeadDimV>(
        sO, mine.row0, static_cast<T *>(p.o) + here.sequence.q_offset(p.o_stride, here.head), p.o_stride.row,
        here.block * M + mine.row0, here.sequence.seqlen_q, mine.col0);  // @strides-of-o
}

#endif  // CUPYFLASH_FWD_SM80_CUH
