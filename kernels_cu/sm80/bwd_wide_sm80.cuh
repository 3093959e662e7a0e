// Backward attention at head_dims beyond 64 with mma.sync and cp.async (sm_80 and every later architecture):
//     P = exp(scale * Q K^T - lse),  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),
//     dK = scale * dS^T Q,  dQ = scale * dS K,   FlashAttention-2 (Dao 2023), algorithm 2.
//
// One block owns kBlockN keys of one (batch, head_k), keeps K, V, dK and dV, and visits query tiles as bwd_sm80.cuh does.
// Two groups of four warps divide the products:
//     kOfP:   S^T = K Q^T, P, dV += P^T dO        S^T and dP^T: a warp has half of the keys and half of the queries
//     kOfDS:  dP^T = V dO^T, dS, dK += dS^T Q     dV and dK: all keys and a quarter of the columns (kSplitD 4), or half of
//                                                 each (2)
// So a warp multiplies square tiles, which read least of shared memory for a product, and while one group forms P or dS, the
// other multiplies. dQ = dS K is formed by all warps, each in kDqParts steps: a mask, say, leaves no registers for all of its
// columns. It leaves by additions to global memory (dq_accum.cuh).
//
// The second group has no scores. It takes P as rounded from the first one, or where the derivative of a score is not 1 (a
// softcap, mods), or P is not all that dV is made of (dropout), the weights W of dS = W * (dP - delta) beside it. What is
// summed up of dS (learned slopes) is left to bwd_sm80.cuh, and so are lists of visits.
//
// Shared memory: K | V | kStages x (Q | dO | row_stats) | dS^T | P^T | W^T, if kWeights.
//
// With two stages (kStaggered) the second group adds its share of dQ while the first forms P of the next visit:
//     kOfP                            kOfDS
//     S; P to sP                      dP
//     ---------------------- the block's barrier: P is complete; the second group is done with dS of the visit before
//     dV                              dS to sdS; kDSOfGroup: dS is complete for dK; dK
//     kDSComplete: so it is for dQ    (arrives there once it has written dS)
//     its share of dQ
//     ---------------------- kLanded: the next stage is here; all are done with this one and with P, the first group with dS
//     requests the stage after next   its share of dQ; requests the stage after next
// With one stage, the next visit's is requested behind kDSComplete, while all add to dQ; in deterministic mode all do so in the
// block's turn. In both, all wait at kDSComplete, and at kLanded before a visit.
#ifndef CUPYFLASH_BWD_WIDE_SM80_CUH
#define CUPYFLASH_BWD_WIDE_SM80_CUH
#include "attention/dq_accum.cuh"
#include "tile/epilogue.cuh"
#include "tile/gemm.cuh"
#include "attention/repair_gradients.cuh"
#include "attention/visits.cuh"
#include "sm80/bwd_load_sm80.cuh"

// The groups of warps.
enum WideGroup { kOfP = 0, kOfDS = 1 };

// Hardware barriers besides the block's.
enum WideBarrier { kDSOfGroup = 1, kDSComplete = 2, kLanded = 3 };

template <class V>
__device__ __forceinline__ void bwd_wide(const BwdParams &p) {
    using T = typename V::Element;
    using Dq = DqTile<V>;
    constexpr int M = V::kBlockM, N = V::kBlockN, D = Dq::kDim, kStages = V::kStages, kThreads = 32 * V::kWarps;
    constexpr int kRows = N / 2, kQueries = M / 2, kCols = D / V::kSplitD;  // of S^T and dP^T; of dV and dK
    constexpr int kKeys = N * V::kSplitD / 4;                               // of dV and dK
    constexpr bool kStaggered = kStages == 2 && !V::kDeterministic;
    static_assert(V::kWarps == 8 && M <= kThreads && kRows % 16 == 0 && kQueries % 16 == 0 && kCols % 16 == 0);
    static_assert(V::kWeights || (Score<V>::kWeightIsP && !V::kDropout));
    static_assert(!V::kDalibi && !V::kBlockMask && V::kHeadDimV == V::kHeadDim);

    // Which keys. With a mask, the first key blocks are the longest.
    const Problem &problem = p.problem;
    const auto tile = tile_at<V, KeysOf<V>, N, false>(p, ptx::block_index());  // of a key head
    const auto &sequence = tile.sequence;
    const int group = KeysOf<V>::group(p), k0 = tile.block * N;
    if (V::kPacked && k0 >= sequence.rows_k) return;  // @tiles-of-unused-keys-wide

    using TileKV = SmemTile<T, N, D>;
    using TileP = SmemTile<T, N, M>;
    using TileQ = SmemTile<T, M, D>;
    using Stage = QueryStage<T, M, D, D>;
    static_assert(2 * TileKV::kBytes + kStages * Stage::kBytes + (V::kWeights ? 3 : 2) * TileP::kBytes ==
                  V::kSmemBytes);
    const TileKV sK{ptx::dynamic_smem()}, sV{sK.base + TileKV::kBytes};
    // @slot-of-the-step-wide
    const auto stage = [&](int i) { return Stage(sV.base + TileKV::kBytes + i % kStages * Stage::kBytes); };
    const TileP sdS{sV.base + TileKV::kBytes + kStages * Stage::kBytes}, sP{sdS.base + TileP::kBytes};
    const TileP sW{V::kWeights ? sP.base + TileP::kBytes : sP.base};  // @place-of-the-weights

    const Mask<V> mask(with_range<V>(sequence, p), problem);
    // The same in the main loop, which has no registers left to keep a range of keys: that is read again.
    const auto mask_again = [&]() -> Mask<V> {
        if constexpr (V::kKvRange) return {with_range<V>(sequence, aside(p)), problem};
        else return mask;
    };
    const Score<V> score(problem);
    const QueryTiles<V> visits(p, mask, tile, group);  // in step i, one is used and the next two may be requested
    const auto request = [&](int i, const Visit &visit) {
        if (i < visits.count) load_queries<V>(p, sequence, visit.head, visit.m_block * M, stage(i));
        ptx::cp_async_commit_group();
    };
    const auto landed = [] {
        ptx::cp_async_wait_group<0>();     // @q-and-do-copied-wide
        ptx::bar_sync(kLanded, kThreads);  // @q-and-do-landed-wide
    };

    AccTile<kKeys, kCols> dKV;  // dV, or dK
    dKV.zero();
    DqTurn<V> turn;

    // One query tile.
    const auto step = [&](int i, const Visit &now) {
        const int q0 = now.m_block * M;
        const bool masked = !(mask_again().full(q0, ptx::opaque(tile.block) * N) && q0 + M <= sequence.seqlen_q);
        const Stage s = stage(i);
        if constexpr (!kStaggered) {
            landed();  // and every warp is done with the step before
            if constexpr (kStages == 2) request(i + 1, visits.after(now));
        }
        const auto place = [&] {
            return DqPlace{dq_turn<V>(p, sequence, now.head, now.m_block), visits.rank(now, mask_again(), tile.block)};
        };
        if constexpr (V::kDeterministic) turn.look(place());

        const int own_warp = fresh_thread() / 32, own_group = own_warp / 4, other_group = 1 - own_group;
        {
            const int key0 = own_warp % 2 * kRows, query0 = own_warp / 2 % 2 * kQueries;
            const int lane = fresh_lane(), first_query = query0 + 2 * (lane % 4);
            const auto added =
                Places<V>::of(p, sequence, now.head).template fetch<false, kRows, kQueries>(q0 + query0, k0 + key0);
            AccTile<kRows, kQueries> X;  // S, then P; or dP, then dS. Transposed: rows are keys
            X.zero();
            const TileKV keys{sK.base + own_group * TileKV::kBytes};     // K, or V
            const TileQ queries{s.sQ.base + own_group * TileQ::kBytes};  // Q, or dO
            gemm_nt<T>(X, SmemA<TileKV, kRows>(keys, key0), queries.rows(query0));
            FragA<T, kRows, kQueries> rX;
            const auto kept = Dropout<V>::of(p, sequence.index, now.head)
                                  .template kept<false, kRows, kQueries>(q0 + query0, k0 + key0);
            // Each element becomes form(element, where it is in X, its query's lse and delta); then it is rounded and stored.
            const auto form_all = [&](const TileP &dst, auto form) {
                #pragma unroll
                for (int j = 0; j < X.kColTiles; ++j) {
                    float stats[4];  // of two neighbouring queries: lse, delta, lse, delta
                    ptx::ld_shared_v4_f32(stats, s.stats + 8 * (first_query + 8 * j));
                    #pragma unroll
                    for (int a = 0; a < X.kRowTiles; ++a)
                        #pragma unroll
                        for (int e = 0; e < 4; ++e)
                            X.x[a][j][e] = form(X.x[a][j][e], a, j, e, stats[2 * (e % 2)], stats[2 * (e % 2) + 1]);
                }
                if (masked) {
                    // @mask-from-the-lane-wide
                    const Mask<V> from_here = mask_again().from(q0 + first_query, k0 + key0 + lane / 4);
                    X.for_each([&](int key, int query, float &x) {
                        if (query >= from_here.seqlen_q || !from_here.sees(query, key)) x = 0.f;
                    });
                }
                rX.from(X);
                rX.store(dst, key0, query0);
            };
            if (own_group == kOfP) {
                const auto head_places = Places<V>::of(p, sequence, now.head);
                const auto places = head_places.template from_lane<false>(q0 + query0, k0 + key0, added);
                FragA<T, kRows, kQueries> rW;
                float even = 0.f;  // the first weight of a pair
                form_all(sP, [&](float S, int a, int j, int e, float lse, float) {
                    const int key = 16 * a + 8 * (e / 2), query = 8 * j + e % 2;
                    const float P = score.P(S, places(query, key), lse);
                    if constexpr (V::kWeights) {  // of what is hidden, nobody looks at them
                        const float W = score.weight(S, P, places(query, key));           // @weights-of-the-derivative
                        if (e % 2) rW.x[j / 2][a][j % 2 * 2 + e / 2] = T::pack(even, W);  // @pairs-of-weights
                        else even = W;
                    }
                    return Dropout<V>::of_kept(kept(key, query), P);  // @dropped-p-wide
                });
                if constexpr (V::kWeights) rW.store(sW, key0, query0);
            }
            turn.meet(p);  // P is complete, and the other group is done with dS of the step before @p-complete-wide
            if (own_group == kOfDS) {
                rX.load(sW, key0, query0);  // @p-of-the-same-scores
                form_all(sdS, [&](float dP, int a, int j, int e, float, float delta) {
                    const ptx::u32 pair = rX.x[j / 2][a][j % 2 * 2 + e / 2];
                    const int key = 16 * a + 8 * (e / 2), query = 8 * j + e % 2;
                    const float kept_dP = Dropout<V>::of_kept(kept(key, query), dP);  // @dropped-dp-wide
                    return (e % 2 ? T::hi(pair) : T::lo(pair)) * (kept_dP - delta);
                });
                if constexpr (kStaggered) ptx::bar_arrive(kDSComplete, kThreads);  // @ds-handed-over
                ptx::bar_sync(kDSOfGroup, kThreads / 2);                           // @ds-of-the-group
            }
        }
        // dV += P^T dO, or dK += dS^T Q.
        const TileP weights{sdS.base + other_group * TileP::kBytes};   // @weights-of-the-group
        const TileQ queries{s.sQ.base + other_group * TileQ::kBytes};  // @rows-of-the-group
        // @keys-of-the-sum-wide
        gemm_nn<T>(dKV, SmemA<TileP, kKeys>(weights, own_warp % 4 / V::kSplitD * kKeys), queries,
                   own_warp % V::kSplitD * kCols);
        if (!kStaggered || own_group == kOfP) ptx::bar_sync(kDSComplete, kThreads);  // @ds-complete-wide
        else landed();
        if constexpr (kStages == 1) request(i + 1, visits.after(now));

        if constexpr (V::kDeterministic) turn.wait(p, place());
        float *const accum = Dq::accum(aside(p), sequence, now.head, now.m_block);  // @dq-of-the-visit-wide
        FragA<T, Dq::kRows, N> rdS;
        const SmemATransposed<TileP, Dq::kRows, 0> dS_rows(sdS, Dq::row0());
        #pragma unroll
        for (int k = 0; k < rdS.kSteps; ++k) dS_rows.get(k, rdS.x[k]);
        constexpr int kPart = Dq::kCols / V::kDqParts;
        #pragma unroll 1  // else fragments of the next step are fetched early, and spilled
        for (int col = 0; col < Dq::kCols; col += kPart) {  // @all-columns-of-dq
            AccTile<Dq::kRows, kPart> dQ;
            dQ.zero();
            // dQ = dS K
            gemm_nn<T>(dQ, rdS, sK, Dq::col0() + col);
            const auto add = [](float (&x)[ptx::kRedWidth], float *to) { ptx::red_add(to, x); };  // @dq-added-wide
            Dq::for_each_group(dQ, accum, add, col);  // @columns-of-dq-in-their-place
        }
        if constexpr (kStaggered) {
            if (own_group == kOfP) landed();                  // @stage-released-wide
            request(i + 2, visits.after(visits.after(now)));  // @stage-requested-wide
        }
    };

    load_keys<V, V::kHeadDim>(p, sK, p.k, p.k_stride, tile);
    load_keys<V, V::kHeadDim>(p, sV, p.v, p.v_stride, tile);  // @strides-of-v-wide
    auto now = visits.begin(tile.head * group);               // @first-head-of-the-group-wide
    request(0, now);
    if constexpr (kStaggered) {
        landed();
        request(1, visits.after(now));
    }
    #pragma unroll 1
    for (int i = 0; i < visits.count; ++i, now = visits.after(now)) step(i, now);

    ptx::cp_async_wait_group<0>();  // @keys-copied-wide
    // K and V have arrived, and every warp is done with them: V stages dV, K dK. @keys-read-by-all-wide
    turn.meet(p);
    // Where the block is, is worked out again: the main loop has no registers left to keep it.
    const auto here = tile_at<V, KeysOf<V>, N, false>(aside(p), ptx::opaque(ptx::block_index()));
    const bool has_dV = fresh_thread() / 32 < 4;
    const int col0 = fresh_thread() / 32 % V::kSplitD * kCols, row0 = fresh_thread() / 32 % 4 / V::kSplitD * kKeys;
    const int first_key = here.block * N + row0;  // @keys-of-the-warp-wide
    if (!has_dV) dKV.scale(score.scale);          // @dk-scaled-wide
    if constexpr (V::kGrouped) {
        if (KeysOf<V>::are_shared(aside(p))) {
            float *const shares = has_dV ? p.dv_shares : p.dk_shares;
            leave_share<V, V::kHeadDim, D>(aside(p), shares, here.sequence, here.head, first_key, dKV, col0);
            return;
        }
    }
    const auto head_k = [&] { return KeysOf<V>::head_k(aside(p), here.head); };
    const TileKV staging{has_dV ? sV.base : sK.base};
    if (!ptx::vote_all(stage_rows<T>(staging, row0, dKV, col0))) {  // @dk-and-dv-finite-wide
        // @repair-in-its-sequence-wide
        const GradientRepair<V, M, V::kUnaligned> again(aside(p), here.sequence.index);
        #pragma unroll 1
        for (int row = 0; row < kKeys; ++row)  // @rows-of-the-repair-wide
            if (has_dV) again.template dv<kCols>(head_k(), first_key + row, staging, row0 + row, col0);
            else again.template dk<kCols>(head_k(), first_key + row, staging, row0 + row, col0);
        ptx::bar_warp_sync();  // @dk-repaired-by-the-warp-wide
    }
    const Strides &stride = has_dV ? p.dv_stride : p.dk_stride;  // @strides-of-dk-and-dv-wide
    T *const dst = static_cast<T *>(has_dV ? p.dv : p.dk) + here.sequence.k_offset(stride, head_k());
    // @unused-keys-written-wide
    write_rows<kKeys, kCols, V::kHeadDim>(staging, row0, dst, stride.row, first_key, here.sequence.rows_k, col0);
}

#endif  // CUPYFLASH_BWD_WIDE_SM80_CUH
