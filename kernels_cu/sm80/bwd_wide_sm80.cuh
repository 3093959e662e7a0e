// Backward attention at head_dims beyond 128 with mma.sync and cp.async (sm_80 and every later architecture):
//     P = exp(scale * Q K^T - lse),  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),
//     dK = scale * dS^T Q,  dQ = scale * dS K,   FlashAttention-2 (Dao 2023), algorithm 2.
//
// One block owns kBlockN keys of one (batch, head_k), keeps K, V, dK and dV, and visits query tiles as bwd_sm80.cuh does.
// Two groups of four warps divide the products, so that each warp multiplies square tiles, which read least of shared
// memory for a product, and while one group forms P or dS, the other multiplies:
//     kOfP:  S^T = K Q^T, P, dV += P^T dO          S^T, dP^T: a warp has half of the keys and half of the queries
//     kOfDS: dP^T = V dO^T, dS, dK += dS^T Q       dV, dK: all keys, a quarter of the columns
// dQ = dS K is formed by all warps, two along its rows, in kDqParts steps: there are no registers for all of its columns
// beside a mask. It leaves by additions to global memory (dq_accum.cuh).
//
// dS takes P as rounded, from the first group. The second one has no scores: what changes their derivative (a softcap,
// mods), dropout, and what is summed up of dS (learned slopes) are bwd_sm80.cuh's, and so are lists of visits.
//
// Shared memory: K | V | kStages x (Q | dO | row_stats) | dS^T | P^T.
//
// With two stages (kStaggered) the second group adds its share of dQ while the first is at the next query tile. Visit i:
//     kOfP                                    kOfDS
//     S of stage i, P -> sP                   dP of stage i
//     block: P is complete, and all of the second group are done with sdS
//     dV                                      sP, dS -> sdS; arrives: dS is written; kDSOfGroup: by the whole group
//                                             dK
//     kDSComplete: waits for dS               kLanded: waits for the first group
//     its share of dQ                         its share of dQ
//     kLanded: stage i + 1 has been copied, all are done with stage i and sP, the first group with sdS
//     requests stage i + 2                    requests stage i + 2
// Otherwise all wait at kLanded before a visit and at kDSComplete before dQ, which then are the whole block's.
#ifndef CUPYFLASH_BWD_WIDE_SM80_CUH
#define CUPYFLASH_BWD_WIDE_SM80_CUH
#include "attention/dq_accum.cuh"
#include "tile/epilogue.cuh"
#include "tile/gemm.cuh"
#include "attention/dropout.cuh"
#include "attention/repair_gradients.cuh"
#include "attention/slopes.cuh"
#include "attention/visits.cuh"
#include "sm80/bwd_load_sm80.cuh"

// The groups of warps.
enum WideGroup { kOfP = 0, kOfDS = 1 };

// Hardware barriers; 0 is the block's.
enum WideBarrier { kDSOfGroup = 1, kDSComplete = 2, kLanded = 3 };

template <class V>
__device__ __forceinline__ void bwd_wide(const BwdParams &p) {
    using T = typename V::Element;
    using Dq = DqTile<V>;
    constexpr int M = V::kBlockM, N = V::kBlockN, D = Dq::kDim, kStages = V::kStages, kThreads = 32 * V::kWarps;
    constexpr int kRows = N / 2, kQueries = M / 2, kCols = D / 4;  // of S^T and dP^T; of dV and dK
    constexpr bool kStaggered = kStages == 2 && !V::kDeterministic;
    static_assert(V::kWarps == 8 && M <= kThreads && kRows % 16 == 0 && kQueries % 16 == 0 && kCols % 16 == 0);
    static_assert(Score<V>::kWeightIsP && !Dropout<V>::kAny && !Emitted<V>::kAny && !V::kBlockMask);

    // Which keys. With a mask, the first key blocks are the longest.
    const Problem &problem = p.problem;
    const auto tile = tile_at<V, KeysOf<V>, N, false>(p, ptx::block_index());  // of a key head
    const auto &sequence = tile.sequence;
    const int group = KeysOf<V>::group(p), k0 = tile.block * N;
    if (V::kPacked && k0 >= sequence.rows_k) return;  // @tiles-of-unused-wide-keys

    using TileKV = SmemTile<T, N, D>;
    using TileP = SmemTile<T, N, M>;
    using TileQ = SmemTile<T, M, D>;
    using Stage = QueryStage<T, M, D>;
    static_assert(2 * TileKV::kBytes + kStages * Stage::kBytes + 2 * TileP::kBytes == V::kSmemBytes);
    const TileKV sK{ptx::dynamic_smem()}, sV{sK.base + TileKV::kBytes};
    // @slot-of-the-step-wide
    const auto stage = [&](int i) { return Stage(sV.base + TileKV::kBytes + i % kStages * Stage::kBytes); };
    const TileP sdS{sV.base + TileKV::kBytes + kStages * Stage::kBytes}, sP{sdS.base + TileP::kBytes};

    const Mask<V> mask(with_range<V>(sequence, p), problem);
    // The same in the main loop, which has no registers left to keep a range of keys: that is read again.
    const auto mask_again = [&]() -> Mask<V> {
        if constexpr (V::kKvRange) return {with_range<V>(sequence, aside(p)), problem};
        else return mask;
    };
    const Score<V> score(problem);
    const QueryTiles<V> visits(p, mask, tile, group);
    const auto request = [&](int i, const Visit &visit) {
        if (i < visits.count) load_queries<V>(p, sequence, visit.head, visit.m_block * M, stage(i));
        ptx::cp_async_commit_group();
    };
    const auto landed = [] {
        ptx::cp_async_wait_group<0>();     // @q-and-do-copied-wide
        ptx::bar_sync(kLanded, kThreads);  // @q-and-do-landed-wide
    };

    AccTile<N, kCols> dKV;  // dV, or dK
    dKV.zero();

    // One query tile.
    const auto step = [&](int i, const Visit &now) {
        const int q0 = now.m_block * M;
        const bool masked = !(mask_again().full(q0, ptx::opaque(tile.block) * N) && q0 + M <= sequence.seqlen_q);
        const Stage s = stage(i);
        if constexpr (!kStaggered) {
            landed();
            if constexpr (kStages == 2) request(i + 1, visits.after(now));
        }

        const int own_warp = fresh_thread() / 32, own_group = own_warp / 4;
        {
            const int key0 = own_warp % 2 * kRows, query0 = own_warp / 2 % 2 * kQueries;
            const int lane = fresh_lane(), first_query = query0 + 2 * (lane % 4);
            AccTile<kRows, kQueries> X;  // S, then P; or dP, then dS. Transposed: rows are keys
            FragA<T, kRows, kQueries> rounded;
            X.zero();
            const TileKV keys{sK.base + own_group * TileKV::kBytes};     // K, or V
            const TileQ queries{s.sQ.base + own_group * TileQ::kBytes};  // Q, or dO
            gemm_nt<T>(X, SmemA<TileKV, kRows>(keys, key0), queries.rows(query0));
            // form(element, its a, j, e, lse, delta) of each.
            const auto for_each = [&](auto form) {
                #pragma unroll
                for (int j = 0; j < X.kColTiles; ++j) {
                    float stats[4];  // of two neighbouring queries: lse, delta, lse, delta
                    ptx::ld_shared_v4_f32(stats, s.stats + 8 * (first_query + 8 * j));
                    #pragma unroll
                    for (int a = 0; a < X.kRowTiles; ++a)
                        #pragma unroll
                        for (int e = 0; e < 4; ++e)
                            form(X.x[a][j][e], a, j, e, stats[2 * (e % 2)], stats[2 * (e % 2) + 1]);
                }
            };
            const auto hide = [&] {
                // @mask-from-the-lane-wide
                const Mask<V> from_here = mask_again().from(q0 + first_query, k0 + key0 + lane / 4);
                X.for_each([&](int key, int query, float &x) {
                    if (query >= from_here.seqlen_q || !from_here.sees(query, key))
                        x = 0.f;  // @queries-that-exist-wide
                });
            };
            if (own_group == kOfP) {
                const auto head_places = Places<V>::of(p, sequence, now.head);
                const auto places = head_places.template from_lane<false>(q0 + query0, k0 + key0);
                for_each([&](float &x, int a, int j, int e, float lse, float) {
                    x = score.P(x, places(8 * j + e % 2, 16 * a + 8 * (e / 2)), lse);
                });
                if (masked) hide();
                rounded.from(X);
                rounded.store(sP, key0, query0);
            }
            ptx::bar_sync();  // P is complete, and the second group done with dS of the visit before @p-complete-wide
            if (own_group == kOfDS) {
                rounded.load(TileP{sP.at(0, query0)}, key0);  // @p-of-the-same-scores
                for_each([&](float &x, int a, int j, int e, float, float delta) {
                    const ptx::u32 pair = rounded.x[j / 2][a][j % 2 * 2 + e / 2];
                    x = (e % 2 ? T::hi(pair) : T::lo(pair)) * (x - delta);
                });
                if (masked) hide();
                rounded.from(X);
                rounded.store(sdS, key0, query0);
                if constexpr (kStaggered) ptx::bar_arrive(kDSComplete, kThreads);
                ptx::bar_sync(kDSOfGroup, kThreads / 2);  // dS is complete, for this group @ds-of-the-group
            }
        }
        // dV += P^T dO, or dK += dS^T Q.
        const TileP weights{sdS.base + (1 - own_group) * TileP::kBytes};
        const TileQ queries{s.sQ.base + (1 - own_group) * TileQ::kBytes};
        gemm_nn<T>(dKV, SmemA<TileP, N>(weights, 0), queries, own_warp % 4 * kCols);
        if (!kStaggered || own_group == kOfP) ptx::bar_sync(kDSComplete, kThreads);  // @ds-complete-wide
        else landed();
        if constexpr (kStages == 1) request(i + 1, visits.after(now));

        const DqTurn<V> turn{p, dq_turn<V>(p, sequence, now.head, now.m_block)};
        const int rank = visits.rank(now, mask_again(), tile.block);
        turn.wait(rank);
        float *const accum = Dq::accum(aside(p), sequence, now.head, now.m_block);
        FragA<T, Dq::kRows, N> dS_rows;
        const SmemATransposed<TileP, Dq::kRows, 0> dS_columns(sdS, Dq::row0());
        #pragma unroll
        for (int k = 0; k < dS_rows.kSteps; ++k) dS_columns.get(k, dS_rows.x[k]);
        constexpr int kPart = Dq::kCols / V::kDqParts;
        #pragma unroll 1
        for (int col = 0; col < Dq::kCols; col += kPart) {
            AccTile<Dq::kRows, kPart> dQ;
            dQ.zero();
            gemm_nn<T>(dQ, dS_rows, sK, Dq::col0() + col);
            Dq::for_each_group(dQ, accum, [](float (&x)[ptx::kRedWidth], float *to) { ptx::red_add(to, x); }, col);
        }
        turn.pass(rank);
        if constexpr (kStaggered) {
            if (own_group == kOfP) landed();
            request(i + 2, visits.after(visits.after(now)));
        }
    };

    load_keys<V>(p, sK, p.k, p.k_stride, tile);
    load_keys<V>(p, sV, p.v, p.v_stride, tile);
    auto now = visits.begin(tile.head * group);
    request(0, now);
    if constexpr (kStaggered) {
        landed();
        request(1, visits.after(now));
    }
    #pragma unroll 1
    for (int i = 0; i < visits.count; ++i, now = visits.after(now)) step(i, now);

    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();  // K and V have arrived, and every warp is done with them: they stage the results
    const auto here = tile_at<V, KeysOf<V>, N, false>(aside(p), ptx::opaque(ptx::block_index()));
    const int own_group = fresh_thread() / 128, col0 = fresh_thread() / 32 % 4 * kCols, first_key = here.block * N;
    if (own_group == kOfDS) dKV.scale(score.scale);
    if constexpr (V::kGrouped) {
        if (KeysOf<V>::are_shared(aside(p))) {
            leave_share<V>(aside(p), own_group == kOfP ? p.dv_shares : p.dk_shares, here.sequence, here.head, first_key,
                           dKV, col0);
            return;
        }
    }
    const auto head_k = [&] { return KeysOf<V>::head_k(aside(p), here.head); };
    const TileKV staging{sV.base - own_group * TileKV::kBytes};
    if (!ptx::vote_all(stage_rows<T>(staging, 0, dKV, col0))) {
        const GradientRepair<V, M, V::kUnaligned> again(aside(p), here.sequence.index);
        #pragma unroll 1
        for (int row = 0; row < N; ++row)
            if (own_group == kOfP) again.template dv<kCols>(head_k(), first_key + row, staging, row, col0);
            else again.template dk<kCols>(head_k(), first_key + row, staging, row, col0);
        ptx::bar_warp_sync();
    }
    const Strides &stride = own_group == kOfP ? p.dv_stride : p.dk_stride;
    write_rows<N, kCols, V::kHeadDim>(
        staging, 0, static_cast<T *>(own_group == kOfP ? p.dv : p.dk) + here.sequence.k_offset(stride, head_k()),
        stride.row, first_key, here.sequence.rows_k, col0);
}

#endif  // CUPYFLASH_BWD_WIDE_SM80_CUH
