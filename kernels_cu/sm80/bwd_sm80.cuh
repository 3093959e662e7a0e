// Backward attention with mma.sync and cp.async (sm_80 and every later architecture; Turing by loads and stores), by
// recomputation:
//     P = exp(scale * Q K^T - lse),  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),
//     dK = scale * dS^T Q,  dQ = scale * dS K,   FlashAttention-2 (Dao 2023), algorithm 2.
//
// One block owns kBlockN keys of one (batch, head_k), keeps K, V, dK and dV, and visits every query tile that sees
// them, of all query heads of the group. S and dP are computed transposed: a warp owns kBlockN / (kWarps / kSplitD)
// keys, so P^T and dS^T are the A operands of dV and dK straight from the accumulators. With kSplitD > 1, that many
// warps share the same keys: each computes its part of the queries of S^T and dP^T and of the columns of dK and dV,
// and they exchange P^T and dS^T through shared memory. dQ always needs dS from all warps (through shared memory) and
// leaves by additions to global memory (dq_accum.cuh).
// Shared memory: K | V | kStages x (Q | dO | row_stats) | dS^T | P^T if kSplitD > 1 | each warp's bias if kCopiesBias.
// Without cp.async, threads hold their pieces of the next query tile in registers while dQ of this one is formed.
#ifndef CUPYFLASH_BWD_SM80_CUH
#define CUPYFLASH_BWD_SM80_CUH
#include "attention/dq_accum.cuh"
#include "tile/epilogue.cuh"
#include "tile/gemm.cuh"
#include "attention/bias_copies.cuh"
#include "attention/dropout.cuh"
#include "attention/repair_gradients.cuh"
#include "attention/slopes.cuh"
#include "attention/visits.cuh"
#include "sm80/bwd_load_sm80.cuh"

template <class V>
__device__ __forceinline__ void bwd(const BwdParams &p) {
    using T = typename V::Element;
    using Dq = DqTile<V>;
    constexpr int M = V::kBlockM, N = V::kBlockN, D = Dq::kDim, kStages = V::kStages, kThreads = 32 * V::kWarps;
    constexpr int kDimV = round_up(V::kHeadDimV, 16 * V::kSplitD);
    constexpr int kRows = N / (V::kWarps / V::kSplitD), kQueries = M / V::kSplitD;
    constexpr int kCols = D / V::kSplitD, kColsV = kDimV / V::kSplitD;  // of dK, of dV
    static_assert(M <= kThreads && kRows % 16 == 0 && kQueries % 16 == 0 && kStages <= 2);
    static_assert(kCols % 16 == 0 && kColsV % 16 == 0);

    // Which keys. With a mask, the first key blocks are the longest.
    const Problem &problem = p.problem;
    const auto tile = tile_at<V, KeysOf<V>, N, false>(p, ptx::block_index());  // of a key head
    const auto &sequence = tile.sequence;
    const int group = KeysOf<V>::group(p), k0 = tile.block * N;
    if (V::kPacked && k0 >= sequence.rows_k) return;  // @tiles-of-unused-keys
    const int key0 = warp() % (N / kRows) * kRows;    // this warp's keys
    const int part = warp() / (N / kRows);            // and its share of them, if kSplitD > 1
    const int query0 = part * kQueries, col0 = part * kCols, col0_v = part * kColsV;  // @columns-of-dv-bwd-sm80

    using TileK = SmemTile<T, N, D>;
    using TileV = SmemTile<T, N, kDimV>;
    using TileP = SmemTile<T, N, M>;
    using Stage = QueryStage<T, M, D, kDimV>;
    // Else it spills, and what is unrolled of products of fp32 does not fit the instruction cache.
    constexpr bool kFewSteps = ((V::kBias || V::kDqParts > 1) && larger(D, kDimV) > 128) || sizeof(T) == 4;
    using RowsK = typename Either<kFewSteps, FewSteps<TileK, kRows>, SmemA<TileK, kRows>>::Type;
    using RowsV = typename Either<kFewSteps, FewSteps<TileV, kRows>, SmemA<TileV, kRows>>::Type;
    constexpr int kKeysBytes = TileK::kBytes + TileV::kBytes;
    constexpr int kExchanged = V::kSplitD > 1 ? 2 : 1;  // dS, P
    using CopiedBias = BiasCopy<V, kQueries, kRows>;    // of a warp
    constexpr int kCopiedBytes = V::kCopiesBias ? V::kWarps * CopiedBias::kBytes : 0;
    static_assert(kKeysBytes + kStages * Stage::kBytes + kExchanged * TileP::kBytes + kCopiedBytes == V::kSmemBytes);
    const TileK sK{ptx::dynamic_smem()};
    const TileV sV{sK.base + TileK::kBytes};
    // @slot-of-the-step
    const auto stage = [&](int i) { return Stage(sV.base + TileV::kBytes + i % kStages * Stage::kBytes); };
    const TileP sdS{sV.base + TileV::kBytes + kStages * Stage::kBytes}, sP{sdS.base + TileP::kBytes};

    const Mask<V> mask(with_range<V>(sequence, p), problem);
    // The same in the main loop, which has no registers left to keep a range of keys: that is read again.
    const auto mask_again = [&]() -> Mask<V> {
        if constexpr (V::kKvRange) return {with_range<V>(sequence, aside(p)), problem};
        else return mask;
    };
    const Score<V> score(problem);
    const QueryTiles<V> visits(p, mask, tile, group);  // in step i, one is used and the next may be requested
    // Without asynchronous copies, what a thread has loaded of the query tile that comes next, if that is not too much.
    using Held = HeldQueries<V, Stage>;
    constexpr bool kHolds = !ptx::kHasAsyncCopies && !V::kUnaligned && Held::kPieces + Held::kPiecesDO <= 8;
    typename Either<kHolds, Held, Nothing>::Type held;
    const auto request = [&](int i, const auto &visit) {
        if (i < visits.count) {
            if constexpr (kHolds) held.fetch(p, sequence, visit.head, visit.m_block * M, stage(i));
            else load_queries<V>(p, sequence, visit.head, visit.m_block * M, stage(i));
        }
        ptx::cp_async_commit_group();
    };

    // Whether every query of a visited tile sees every key, or all of this warp, so that no element needs a test.
    const auto whole = [&](const auto &visit) {
        if constexpr (V::kBlockMask) return visit.tile.sight(key0 / 64) == kWhole;
        const int q0 = visit.m_block * M;
        return mask_again().full(q0, ptx::opaque(tile.block) * N) && q0 + M <= sequence.seqlen_q;
    };

    // The bias of step i, if it is copied: asked for once that of the step before has been taken.
    // @place-of-the-copied-bias-sm80
    const CopiedBias copied_bias{sdS.base + kExchanged * TileP::kBytes + warp() * CopiedBias::kBytes};
    const auto ask_for_bias = [&](int i, const auto &visit) {
        if constexpr (V::kCopiesBias)
            if (i < visits.count)
                // @queries-of-the-copied-bias-sm80
                copied_bias.request(Places<V>::of(p, sequence, visit.head).bias, visit.m_block * M + query0, k0 + key0);
    };

    AccTile<kRows, kCols> dK;
    AccTile<kRows, kColsV> dV;
    dK.zero(), dV.zero();
    Emitted<V> emitted;
    DqTurn<V> turn;

    // What was emitted of a head of q. Where the block is, is worked out again here, too.
    const auto leave_emitted = [&](int head) {
        const auto here = tile_at<V, KeysOf<V>, N, false>(aside(p), ptx::opaque(ptx::block_index()));
        emitted.template leave<Keys, N, V::kWarps>(aside(p), here.sequence, head, here.block, fresh_thread() / 32);
    };

    // One query tile.
    const auto step = [&](int i, const auto &now) __attribute__((always_inline)) {
        const int q0 = now.m_block * M;
        const bool masked = !whole(now);
        const auto head_places = Places<V>::of(p, sequence, now.head);
        const auto dropout = Dropout<V>::of(p, sequence.index, now.head);
        const auto kept = dropout.template kept<false, kRows, kQueries>(q0 + query0, k0 + key0);
        const Stage s = stage(i);

        if constexpr (kHolds) held.put(s);  // @queries-held
        ptx::cp_async_wait_group<0>();      // @q-and-do-copied
        ptx::bar_sync();  // Q and dO are here, and every warp is done with the step before @q-and-do-landed
        if constexpr (kStages == 2) request(i + 1, visits.after(now));
        const auto place = [&] {
            return DqPlace{dq_turn<V>(p, sequence, now.head, now.m_block), visits.rank(now, mask_again(), tile.block)};
        };
        if constexpr (V::kDeterministic) turn.look(place());

        // What is added to scores, asked for while they are multiplied; of fp32 it would take twice the registers.
        const auto fetched = [&] {
            if constexpr (V::kBiasOfKeys || !(V::kCopiesBias || V::kWideBias))
                return head_places.template fetch<false, kRows, kQueries>(q0 + query0, k0 + key0);
            else return NotFetched{};
        }();
        AccTile<kRows, kQueries> P, dS;  // transposed: rows are keys
        P.zero(), dS.zero();
        gemm_nt<T>(P, RowsK(sK, key0), s.sQ.rows(query0));    // S^T = K Q^T
        gemm_nt<T>(dS, RowsV(sV, key0), s.sdO.rows(query0));  // dP^T = V dO^T
        const int lane = fresh_lane(), first_query = query0 + 2 * (lane % 4);
        const auto all_places = head_places.template from_lane<false>(q0 + query0, k0 + key0, fetched);
        const auto places_of = [&](int query) {
            if constexpr (V::kCopiesBias) {
                const auto taken = copied_bias.take(query / CopiedBias::kTaken * CopiedBias::kTaken);
                return head_places.template from_lane<false>(q0 + query0, k0 + key0, taken);
            } else {
                return all_places;
            }
        };
        // S and dP become P and dS. is_seen(key, query) is asked for what is emitted alone.
        const auto form = [&](auto is_seen) {
            #pragma unroll
            for (int j = 0; j < P.kColTiles; ++j) {
                const auto places = places_of(8 * j);
                float stats[4];  // of two neighbouring queries: lse, delta, lse, delta
                ptx::ld_shared_v4_f32(stats, s.stats + 8 * (first_query + 8 * j));
                #pragma unroll
                for (int a = 0; a < P.kRowTiles; ++a)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float &x = P.x[a][j][e], &y = dS.x[a][j][e];
                        const float lse = stats[2 * (e % 2)], delta = stats[2 * (e % 2) + 1];
                        const float raw = x;
                        const int key = 16 * a + 8 * (e / 2), query = 8 * j + e % 2;
                        const bool keeps = kept(key, query);
                        x = score.P(raw, places(query, key), lse);
                        y = Dropout<V>::of_kept(keeps, y);
                        if constexpr (Emitted<V>::kAny)
                            emitted.add(is_seen(key, query) ? x * (y - delta) : 0.f, places(query, key),
                                        lse != kLseOfNothing);
                        if constexpr (Score<V>::kModded) y = score.dS(raw, x, y, delta, places(query, key));
                        else y = score.dS(raw, x, y, delta);
                        x = Dropout<V>::of_kept(keeps, x);
                    }
                if (V::kSplitD == 1 && j % 2 == 1) emitted.settle();  // else nothing spills
            }
        };
        if (!Emitted<V>::kAny || !masked) form([](int, int) { return true; });
        if (masked) {
            // @mask-from-the-lane-bwd-sm80
            const Mask<V> from_here = mask_again().from(q0 + first_query, k0 + key0 + lane / 4);
            const SeenBits<V, kRows, kQueries, false> seen(p, sequence.index, now.head, q0 + query0, k0 + key0);
            if constexpr (Emitted<V>::kAny)
                form([&](int key, int query) {
                    if constexpr (V::kBlockMask)
                        if (!seen(key, query)) return false;
                    return query < from_here.seqlen_q && from_here.sees(query, key);
                });
            const auto hide = [&](int key, int query, float &x) {
                if (query >= from_here.seqlen_q || !from_here.sees(query, key)) x = 0.f;  // @queries-that-exist
                if constexpr (V::kBlockMask) x = seen(key, query) ? x : 0.f;
            };
            P.for_each(hide);
            dS.for_each(hide);
        }
        if constexpr (V::kCopiesBias) ask_for_bias(i + 1, visits.after(now));  // @bias-of-the-next-step-sm80
        FragA<T, kRows, kQueries> rP, rdS;
        rP.from(P), rdS.from(dS);
        rdS.store(sdS, key0, query0);
        if constexpr (V::kSplitD > 1) rP.store(sP, key0, query0);

        if constexpr (V::kSplitD == 1) {
            gemm_nn<T>(dV, rP, s.sdO, col0_v);  // dV += P^T dO
            gemm_nn<T>(dK, rdS, s.sQ, col0);    // dK += dS^T Q
            turn.meet(p);                       // dS is complete, and every warp is done with Q and dO @ds-complete
        } else {
            turn.meet(p);  // P and dS are complete @p-and-ds-complete
            gemm_nn<T>(dV, SmemA<TileP, kRows>(sP, key0), s.sdO, col0_v);
            gemm_nn<T>(dK, SmemA<TileP, kRows>(sdS, key0), s.sQ, col0);
            if constexpr (kStages == 1) ptx::bar_sync();  // every warp is done with Q and dO
        }
        if constexpr (kStages == 1) request(i + 1, visits.after(now));

        constexpr int kPart = Dq::kCols / V::kDqParts;  // columns of dQ at a time, where registers are few
        #pragma unroll 1
        for (int col = 0; col < Dq::kCols; col += kPart) {
            AccTile<Dq::kRows, kPart> dQ;
            dQ.zero();
            const SmemATransposed<TileP, Dq::kRows, V::kDqUnroll> dS_rows(sdS, Dq::row0());
            gemm_nn<T>(dQ, dS_rows, sK, Dq::col0() + col);  // dQ = dS K @columns-of-k-for-dq-sm80
            if (V::kDeterministic && col == 0) turn.wait(p, place());
            // @dq-added
            Dq::for_each_group(
                dQ, Dq::accum(aside(p), sequence, now.head, now.m_block),
                [](float (&x)[ptx::kRedWidth], float *accum) { ptx::red_add(accum, x); }, col);
        }
    };

    load_keys<V, V::kHeadDim>(p, sK, p.k, p.k_stride, tile);
    load_keys<V, V::kHeadDimV>(p, sV, p.v, p.v_stride, tile);  // @strides-of-v-bwd-sm80
    auto now = visits.begin(tile.head * group);                // @first-head-of-the-group-sm80
    request(0, now);
    ask_for_bias(0, now);
    #pragma unroll 1
    for (int i = 0; i < visits.count; ++i, now = visits.after(now)) {
        step(i, now);
        if (Emitted<V>::kAny && visits.is_last_of_head(now)) leave_emitted(now.head);
    }
    if (Emitted<V>::kAny && (V::kBlockMask || visits.count == 0))  // @slopes-without-visits-sm80
        for (int head = tile.head * group; head < (tile.head + 1) * group; ++head)
            if (visits.nothing_of(head - tile.head * group)) leave_emitted(head);

    ptx::cp_async_wait_group<0>();
    // @keys-read-by-all
    turn.meet(p);           // K and V have arrived, and every warp is done with them: they stage the results
    dK.scale(score.scale);  // @dk-scaled-sm80
    // Stages a result and writes it; repair(again, row) computes one of its rows again where that is not finite. Where the
    // block is, is worked out again: the main loop has no registers left to keep it.
    const auto here = tile_at<V, KeysOf<V>, N, false>(aside(p), ptx::opaque(ptx::block_index()));
    const int thread_warp = fresh_thread() / 32, row0 = thread_warp % (N / kRows) * kRows;
    const int own_part = thread_warp / (N / kRows), first_key = here.block * N;
    const int first_col = own_part * kCols, first_col_v = own_part * kColsV;
    if constexpr (V::kGrouped) {
        if (KeysOf<V>::are_shared(aside(p))) {
            const auto leave_one = [&](auto columns, float *shares, auto &acc, int col) {
                constexpr int kColumns = decltype(columns)::value, kCovered = round_up(kColumns, 16 * V::kSplitD);
                leave_share<V, kColumns, kCovered>(aside(p), shares, here.sequence, here.head, first_key + row0, acc,
                                                   col);
            };
            leave_one(Int<V::kHeadDim>{}, p.dk_shares, dK, first_col);
            leave_one(Int<V::kHeadDimV>{}, p.dv_shares, dV, first_col_v);
            return;
        }
    }
    const auto head_k = [&] { return KeysOf<V>::head_k(aside(p), here.head); };
    const auto leave = [&](auto columns, const auto &staging, const auto &acc, int col, void *dst,
                           const Strides &stride, auto repair) {
        constexpr int kColumns = decltype(columns)::value;
        if (!ptx::vote_all(stage_rows<T>(staging, row0, acc, col))) {  // @dk-and-dv-finite-sm80
            // @repair-in-its-sequence-bwd-sm80
            const GradientRepair<V, M, V::kUnaligned> again(aside(p), here.sequence.index);
            #pragma unroll 1
            for (int row = row0; row < row0 + kRows; ++row) repair(again, row);
            ptx::bar_warp_sync();  // @dk-repaired-by-the-warp
        }
        // @unused-keys-written-sm80
        write_rows<kRows, round_up(kColumns, 16 * V::kSplitD) / V::kSplitD, kColumns>(
            staging, row0, static_cast<T *>(dst) + here.sequence.k_offset(stride, head_k()), stride.row,
            first_key + row0, here.sequence.rows_k, col);
    };
    // @strides-of-dk
    leave(Int<V::kHeadDim>{}, sK, dK, first_col, p.dk, p.dk_stride,
          [&](const auto &again, int row) { again.template dk<kCols>(head_k(), first_key + row, sK, row, first_col); });
    // @strides-of-dv
    leave(Int<V::kHeadDimV>{}, sV, dV, first_col_v, p.dv, p.dv_stride, [&](const auto &again, int row) {
        again.template dv<kColsV>(head_k(), first_key + row, sV, row, first_col_v);
    });
}

#endif  // CUPYFLASH_BWD_SM80_CUH
