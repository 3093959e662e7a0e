// Backward attention of wide heads with mma.sync and cp.async (sm_80 and every later architecture), by recomputation, as
// bwd_sm80.cuh computes it, and with its shared memory. Two groups of four warps divide the products: the first computes
// S^T = K Q^T, P and dV += P^T dO, the second dP^T = V dO^T, dS and dK += dS^T Q. So each warp multiplies square tiles,
// which read the least shared memory for a product, and while one group forms P or dS, the other multiplies. The second
// group takes P as rounded. dQ = dS K is formed by all warps.
//
// Shared memory: K | V | kStages x (Q | dO | row_stats) | dS^T | P^T.
#ifndef CUPYFLASH_BWD_WIDE_SM80_CUH
#define CUPYFLASH_BWD_WIDE_SM80_CUH
#include "sm80/bwd_sm80.cuh"

// The two groups, and what is theirs: K, Q, S, P and dV; V, dO, dP, dS and dK.
enum WideRole { kOfP = 0, kOfDS = 1 };

// Hardware barriers.
enum WideBarrier { kPComplete = 1, kDSWritten = 2, kDSComplete = 3, kLanded = 4 };

template <class V>
__device__ __forceinline__ void bwd_wide(const BwdParams &p) {
    using T = typename V::Element;
    using Dq = DqTile<V>;
    constexpr int M = V::kBlockM, N = V::kBlockN, D = Dq::kDim, kStages = V::kStages, kThreads = 32 * V::kWarps;
    constexpr int kRows = N / 2, kQueries = M / 2, kCols = D / 4;
    static_assert(V::kWarps == 8 && M <= kThreads && kRows % 16 == 0 && kQueries % 16 == 0 && kCols % 16 == 0);
    // The second group forms its share of dQ once the first is at the next query tile: while one forms P, the other multiplies.
    constexpr bool kLate = kStages == 2 && !V::kDeterministic;
    static_assert(!V::kBias && !V::kBlockMask && !Emitted<V>::kAny && !Dropout<V>::kAny && Score<V>::kWeightIsP);

    // Which keys. With a mask, the first key blocks are the longest.
    const Problem &problem = p.problem;
    const auto tile = tile_at<V, KeysOf<V>, N, false>(p, ptx::block_index());  // of a key head
    const auto &sequence = tile.sequence;
    const int group = KeysOf<V>::group(p), k0 = tile.block * N;
    if (V::kPacked && k0 >= sequence.rows_k) return;

    using TileKV = SmemTile<T, N, D>;
    using TileP = SmemTile<T, N, M>;
    using TileQ = SmemTile<T, M, D>;
    using Stage = QueryStage<T, M, D>;
    static_assert(2 * TileKV::kBytes + kStages * Stage::kBytes + 2 * TileP::kBytes == V::kSmemBytes);
    const TileKV sK{ptx::dynamic_smem()}, sV{sK.base + TileKV::kBytes};
    const auto stage = [&](int i) { return Stage(sV.base + TileKV::kBytes + i % kStages * Stage::kBytes); };
    const TileP sdS{sV.base + TileKV::kBytes + kStages * Stage::kBytes}, sP{sdS.base + TileP::kBytes};

    const Mask<V> mask(with_range<V>(sequence, p), problem);
    const auto mask_again = [&]() -> Mask<V> {
        if constexpr (V::kKvRange) return {with_range<V>(sequence, aside(p)), problem};
        else return mask;
    };
    const Score<V> score(problem);
    const QueryTiles<V> visits(p, mask, tile, group);
    const auto request = [&](int i, const Visit &visit) {
        if (i < visits.count) {
            const int head = visit.head, q0 = visit.m_block * M;
            const Stage s = stage(i);
            s.sQ.template load_async<kThreads, V::kHeadDim, V::kUnaligned>(
                static_cast<const T *>(p.q) + sequence.q_offset(p.q_stride, head), p.q_stride.row, q0,
                sequence.seqlen_q);
            s.sdO.template load_async<kThreads, V::kHeadDim, V::kUnaligned>(
                static_cast<const T *>(p.dout) + sequence.q_offset(p.dout_stride, head), p.dout_stride.row, q0,
                sequence.seqlen_q);
            const int r = fresh_thread();
            if (r < M)
                ptx::cp_async_8(s.stats + 8 * r, row_stats_at<M>(p, sequence, head, q0 + r),
                                q0 + r < sequence.seqlen_q);
        }
        ptx::cp_async_commit_group();
    };

    AccTile<N, kCols> dKV;  // dV, or dK
    dKV.zero();

    // Q and dO of the next query tile are here, and every warp is done with those of the one before.
    const auto landed = [] {
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync(kLanded, kThreads);
    };

    // One query tile.
    const auto step = [&](int i, const Visit &now) {
        const int q0 = now.m_block * M;
        const bool masked = !(mask_again().full(q0, ptx::opaque(tile.block) * N) && q0 + M <= sequence.seqlen_q);
        const Stage s = stage(i);

        if constexpr (!kLate) {
            landed();
            if constexpr (kStages == 2) request(i + 1, visits.after(now));
        }

        const int warp_again = fresh_thread() / 32, role = warp_again / 4;
        const int key0 = warp_again % 2 * kRows, query0 = warp_again / 2 % 2 * kQueries;
        {
            AccTile<kRows, kQueries> X;  // S or dP, then P or dS; transposed: rows are keys
            X.zero();
            const TileKV resident{sK.base + role * TileKV::kBytes};
            const TileQ streamed{s.sQ.base + role * TileQ::kBytes};
            gemm_nt<T>(X, SmemA<TileKV, kRows>(resident, key0), streamed.rows(query0));
            const int lane = fresh_lane(), first_query = query0 + 2 * (lane % 4);
            const auto hide = [&] {
                const Mask<V> from_here = mask_again().from(q0 + first_query, k0 + key0 + lane / 4);
                X.for_each([&](int key, int query, float &x) {
                    if (query >= from_here.seqlen_q || !from_here.sees(query, key)) x = 0.f;
                });
            };
            FragA<T, kRows, kQueries> W;
            if (role == kOfP) {
                const auto head_places = Places<V>::of(p, sequence, now.head);
                const auto places = head_places.template from_lane<false>(q0 + query0, k0 + key0);
                #pragma unroll
                for (int j = 0; j < X.kColTiles; ++j) {
                    float stats[4];  // of two neighbouring queries: lse, delta, lse, delta
                    ptx::ld_shared_v4_f32(stats, s.stats + 8 * (first_query + 8 * j));
                    #pragma unroll
                    for (int a = 0; a < X.kRowTiles; ++a)
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            float &x = X.x[a][j][e];
                            x = score.P(x, places(8 * j + e % 2, 16 * a + 8 * (e / 2)), stats[2 * (e % 2)]);
                        }
                }
                if (masked) hide();
                W.from(X);
                W.store(sP, key0, query0);
                ptx::bar_sync(kPComplete, kThreads);
            } else {
                ptx::bar_sync(kPComplete, kThreads);
                W.load(TileP{sP.at(0, query0)}, key0);
                #pragma unroll
                for (int j = 0; j < X.kColTiles; ++j) {
                    float stats[4];
                    ptx::ld_shared_v4_f32(stats, s.stats + 8 * (first_query + 8 * j));
                    #pragma unroll
                    for (int a = 0; a < X.kRowTiles; ++a)
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            float &x = X.x[a][j][e];
                            const ptx::u32 pair = W.x[j / 2][a][j % 2 * 2 + e / 2];
                            x = (e % 2 ? T::hi(pair) : T::lo(pair)) * (x - stats[2 * (e % 2) + 1]);
                        }
                }
                if (masked) hide();
                W.from(X);
                W.store(sdS, key0, query0);
                if constexpr (kLate) ptx::bar_arrive(kDSComplete, kThreads);
                ptx::bar_sync(kDSWritten, kThreads / 2);
            }
        }
        {
            const TileP weights{sdS.base + (1 - role) * TileP::kBytes};
            const TileQ streamed{s.sQ.base + (1 - role) * TileQ::kBytes};
            gemm_nn<T>(dKV, SmemA<TileP, N>(weights, 0), streamed, warp_again % 4 * kCols);
        }
        if (!kLate || role == kOfP) ptx::bar_sync(kDSComplete, kThreads);
        else landed();
        if constexpr (kStages == 1) request(i + 1, visits.after(now));

        const DqTurn<V> turn{p, dq_turn<V>(p, sequence, now.head, now.m_block)};
        const int rank = visits.rank(now, mask_again(), tile.block);
        turn.wait(rank);
        float *const accum = Dq::accum(aside(p), sequence, now.head, now.m_block);
        FragA<T, Dq::kRows, N> rows;
        const SmemATransposed<TileP, Dq::kRows, 0> dS_rows(sdS, Dq::row0());
        #pragma unroll
        for (int k = 0; k < N / 16; ++k) dS_rows.get(k, rows.x[k]);
        constexpr int kPart = Dq::kCols / V::kDqParts;
        #pragma unroll
        for (int part = 0; part < V::kDqParts; ++part) {
            AccTile<Dq::kRows, kPart> dQ;
            dQ.zero();
            gemm_nn<T>(dQ, rows, sK, Dq::col0() + part * kPart);  // dQ = dS K
            Dq::for_each_group(
                dQ, accum, [](float (&x)[ptx::kRedWidth], float *to) { ptx::red_add(to, x); }, part * kPart);
        }
        turn.pass(rank);
        if constexpr (kLate) {
            if (role == kOfP) landed();
            request(i + 2, visits.after(visits.after(now)));
        }
    };

    load_keys<V>(p, sK, p.k, p.k_stride, tile);
    load_keys<V>(p, sV, p.v, p.v_stride, tile);
    auto now = visits.begin(tile.head * group);
    request(0, now);
    if constexpr (kLate) {
        landed();
        request(1, visits.after(now));
    }
    #pragma unroll 1
    for (int i = 0; i < visits.count; ++i, now = visits.after(now)) step(i, now);

    ptx::cp_async_wait_group<0>();
    ptx::bar_sync();  // K and V have arrived, and every warp is done with them: they stage the results
    const auto here = tile_at<V, KeysOf<V>, N, false>(aside(p), ptx::opaque(ptx::block_index()));
    const int role = fresh_thread() / 128, col0 = fresh_thread() / 32 % 4 * kCols, first_key = here.block * N;
    if (role == kOfDS) dKV.scale(score.scale);
    if constexpr (V::kGrouped) {
        if (KeysOf<V>::are_shared(aside(p))) {
            leave_share<V>(aside(p), role == kOfP ? p.dv_shares : p.dk_shares, here.sequence, here.head, first_key, dKV,
                           col0);
            return;
        }
    }
    const auto head_k = [&] { return KeysOf<V>::head_k(aside(p), here.head); };
    const TileKV staging{sV.base - role * TileKV::kBytes};
    if (!ptx::vote_all(stage_rows<T>(staging, 0, dKV, col0))) {
        const GradientRepair<V, M, V::kUnaligned> again(aside(p), here.sequence.index);
        #pragma unroll 1
        for (int row = 0; row < N; ++row)
            if (role == kOfP) again.template dv<kCols>(head_k(), first_key + row, staging, row, col0);
            else again.template dk<kCols>(head_k(), first_key + row, staging, row, col0);
        ptx::bar_warp_sync();
    }
    const Strides &stride = role == kOfP ? p.dv_stride : p.dk_stride;
    write_rows<N, kCols, V::kHeadDim>(
        staging, 0, static_cast<T *>(role == kOfP ? p.dv : p.dk) + here.sequence.k_offset(stride, head_k()), stride.row,
        first_key, here.sequence.rows_k, col0);
}

#endif  // CUPYFLASH_BWD_WIDE_SM80_CUH
