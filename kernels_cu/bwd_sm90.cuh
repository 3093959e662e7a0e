// Backward attention on Hopper with wgmma and TMA (sm_90a), by recomputation:
//     P = exp(scale * Q K^T - lse),  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),
//     dK = scale * dS^T Q,  dQ = scale * dS K,   FlashAttention-2 (Dao 2023), algorithm 2.
//
// One block owns kBlockN = 128 keys of one (batch, head_k), keeps K and V in shared memory and dK and dV in registers,
// and visits every query tile that sees them, of all query heads of the group. Two warpgroups consume, 64 keys each: S and
// dP are computed transposed, so that P^T and dS^T are A operands of dV and dK straight from the accumulators; dS goes
// through shared memory for dQ = dS K, of which each warpgroup computes one half. In the third warpgroup one thread
// produces (Q, dO and row_stats, through a ring of stages), and two warps add dQ to its accumulator in global memory
// (dq_accum.cuh), one bulk copy a half tile.
//
// Shared memory: K | V | kStages x Q | kStages x dO | two dS | dQ | kStages x row_stats | mbarriers.
#ifndef CUPYFLASH_BWD_SM90_CUH
#define CUPYFLASH_BWD_SM90_CUH
#include "dq_accum.cuh"
#include "nonfinite.cuh"
#include "params_sm90.cuh"
#include "pipeline_sm90.cuh"
#include "score.cuh"
#include "tile_sm90.cuh"
#include "visits.cuh"

constexpr int kBwdConsumers = 256;  // threads of the two consumer warpgroups, which are the first two
// Named barriers; 0 is everybody's. The pairs and triples have one for each consumer warpgroup.
enum BwdBarrier { kBarConsumers = 1, kBarVote = 2, kBarDqFree = 3, kBarDqReady = 5, kBarGroup = 7 };
constexpr int kDqThreads = 128 + 32;  // of kBarDqFree and kBarDqReady: a warpgroup and the warp that writes its dQ

// As dq_accum.cuh sees the consumers: eight warps, each with 16 rows by 64 columns of a dQ tile.
template <class V>
struct DqSm90 : V {
    static constexpr int kWarps = 8, kSplitD = 4, kDqWarpsM = V::kBlockM / 16;
};

template <class V>
struct BwdSm90Smem {
    using T = typename V::Element;
    static constexpr int M = V::kBlockM, N = V::kBlockN, D = round_up(V::kHeadDim, 16), kStages = V::kStages;
    using TileKV = SwizzledTile<T, N, D>;
    using TileQ = SwizzledTile<T, M, D>;
    using TileDS = SwizzledTile<T, M, N>;
    static constexpr int kDqBytes = 4 * M * round_up(D, 64);  // two halves
    static constexpr int kV = TileKV::kBytes, kQ = 2 * TileKV::kBytes, kDO = kQ + kStages * TileQ::kBytes;
    static constexpr int kDS = kDO + kStages * TileQ::kBytes, kDQ = kDS + 2 * TileDS::kBytes;
    static constexpr int kStats = kDQ + kDqBytes, kBars = kStats + kStages * 8 * M;
    ptx::u32 base;

    __device__ TileKV k() const { return {base}; }
    __device__ TileKV v() const { return {base + kV}; }
    __device__ TileQ q(int stage) const { return {base + kQ + stage * TileQ::kBytes}; }
    __device__ TileQ dout(int stage) const { return {base + kDO + stage * TileQ::kBytes}; }
    __device__ TileDS ds(int i) const { return {base + kDS + i % 2 * TileDS::kBytes}; }
    __device__ ptx::u32 dq(int half) const { return base + kDQ + half * (kDqBytes / 2); }
    __device__ ptx::u32 stats(int stage) const { return base + kStats + stage * 8 * M; }  // [M][2]: lse, delta
    __device__ ptx::u32 k_full() const { return bar(0); }
    __device__ ptx::u32 v_full() const { return bar(1); }
    __device__ ptx::u32 q_full(int stage) const { return bar(2 + stage); }
    __device__ ptx::u32 q_empty(int stage) const { return bar(2 + kStages + stage); }
    __device__ ptx::u32 dout_full(int stage) const { return bar(2 + 2 * kStages + stage); }
    __device__ ptx::u32 dout_empty(int stage) const { return bar(2 + 3 * kStages + stage); }

    __device__ void init() const {  // by one thread
        ptx::mbarrier_init(k_full(), 1), ptx::mbarrier_init(v_full(), 1);
        #pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(q_full(i), 1), ptx::mbarrier_init(q_empty(i), kBwdConsumers / 32);
            ptx::mbarrier_init(dout_full(i), 1), ptx::mbarrier_init(dout_empty(i), kBwdConsumers / 32);
        }
        ptx::fence_mbarrier_init();
    }

  private:
    __device__ ptx::u32 bar(int i) const { return base + kBars + 8 * i; }
};

// K and V once, then Q, dO and row_stats of every visit; by one thread.
template <class V>
__device__ __forceinline__ void bwd_load(const BwdSm90Params &p, const BwdSm90Smem<V> &smem) {
    constexpr int M = V::kBlockM;
    BwdVisits<V> visit(p.plain.problem);
    RingPosition<V::kStages> ring;
    const long long padded = ceil_div(p.plain.problem.seqlen_q, M) * static_cast<long long>(M);
    #pragma unroll 1
    for (int i = 0; i < visit.count; ++i, ring.next(), visit.next()) {
        const int head = visit.head, batch = visit.tile.batch;
        const ptx::u32 q_full = smem.q_full(ring.stage), dout_full = smem.dout_full(ring.stage);
        ptx::mbarrier_wait(smem.q_empty(ring.stage), ring.phase ^ 1);
        smem.q(ring.stage).load(p.map_q, q_full, visit.q0(), head, batch, ptx::kEvictNormal, 8 * M);
        ptx::cp_async_bulk_load(smem.stats(ring.stage),
                                p.plain.row_stats + 2 * (visit.sequence() * padded + visit.q0()), 8 * M, q_full);
        if (i == 0) smem.k().load(p.map_k, smem.k_full(), visit.k0, visit.tile.head, batch, ptx::kEvictNormal);
        ptx::mbarrier_wait(smem.dout_empty(ring.stage), ring.phase ^ 1);
        smem.dout(ring.stage).load(p.map_dout, dout_full, visit.q0(), head, batch, ptx::kEvictNormal);
        if (i == 0) smem.v().load(p.map_v, smem.v_full(), visit.k0, visit.tile.head, batch, ptx::kEvictNormal);
    }
}

// One half of every dQ tile, from shared memory to the accumulator; by one warp.
template <class V>
__device__ __forceinline__ void bwd_add_dq(const BwdSm90Params &p, const BwdSm90Smem<V> &smem, int half) {
    using Dq = DqTile<DqSm90<V>>;
    constexpr int kHalf = BwdSm90Smem<V>::kDqBytes / 2;
    const Mask<V> mask(p.plain.problem);
    BwdVisits<V> visit(p.plain.problem);
    #pragma unroll 1
    for (int i = 0; i < visit.count; ++i, visit.next()) {
        ptx::bar_arrive(kBarDqFree + half, kDqThreads);  // dQ of the visit before has been read
        ptx::bar_sync(kBarDqReady + half, kDqThreads);
        if (lane() == 0) {
            // Deterministic: both halves of all key blocks before this one have been added.
            int *const turn =
                p.plain.dq_turn +
                static_cast<long long>(visit.sequence()) * ceil_div(p.plain.problem.seqlen_q, V::kBlockM) +
                visit.m_block;
            if constexpr (V::kDeterministic) {
                const int rank = visit.tile.block - mask.first_key_block(visit.q0());
                while (ptx::ld_acquire(turn) < 2 * rank) ptx::nanosleep();
                ptx::fence_proxy_async_global();
            }
            ptx::cp_reduce_async_bulk_add_f32(Dq::accum(p.plain, visit.sequence(), visit.m_block) + half * (kHalf / 4),
                                              smem.dq(half), kHalf);
            ptx::cp_async_bulk_commit_group();
            if constexpr (V::kDeterministic) {
                ptx::cp_async_bulk_wait_group<0>();
                ptx::fence_proxy_async_global();
                ptx::atomic_add_acq_rel(turn, 1);
            } else {
                ptx::cp_async_bulk_wait_group_read<0>();
            }
        }
        ptx::bar_warp_sync();
    }
    if (lane() == 0) ptx::cp_async_bulk_wait_group<0>();  // shared memory must outlive the copies
}

// One consumer warpgroup: 64 keys.
template <class V>
struct BwdGroup {
    using T = typename V::Element;
    using Dq = DqTile<DqSm90<V>>;
    static constexpr int M = V::kBlockM, N = V::kBlockN, D = V::kHeadDim, kDepth = round_up(D, 16);
    static_assert(N == 128 && (M == 64 || (M == 128 && D <= 64)));
    // row_stats are read before the products, and dP starts at -delta, where registers allow.
    static constexpr bool kStatsEarly = M == 64;

    const BwdSm90Params &p;
    const Problem &problem;
    const BwdSm90Smem<V> &smem;
    const Mask<V> mask;
    const Score<V> score;
    const int group, key0;  // of the block; this warp's first key
    AccTile<16, D> dK, dV;
    RingPosition<V::kStages> ring;
    bool was_careful = false;  // whether some step was

    __device__ BwdGroup(const BwdSm90Params &p, const BwdSm90Smem<V> &smem, int group)
        : p(p),
          problem(p.plain.problem),
          smem(smem),
          mask(problem),
          score(problem),
          group(group),
          key0(64 * group + warp() % 4 * 16) {
        dK.zero(), dV.zero();
    }

    // One query tile.
    __device__ void step(int i, const BwdVisits<V> &visit) {
        const int q0 = visit.q0(), stage = ring.stage;
        const auto sQ = smem.q(stage), sdO = smem.dout(stage);
        const auto sK = smem.k(), sV = smem.v();
        const auto sdS = smem.ds(i);

        ptx::mbarrier_wait(smem.q_full(stage), ring.phase);
        ptx::mbarrier_wait(smem.dout_full(stage), ring.phase);
        AccTile<16, M> P, dS;  // transposed: rows are keys
        const ptx::u32 stats_at = smem.stats(stage) + 16 * (fresh_lane() % 4);
        float stats[kStatsEarly ? M / 8 : 1][4];  // of two neighbouring queries: lse, delta, lse, delta
        const auto load_stats = [&](int j) { ptx::ld_shared_v4_f32(stats[kStatsEarly ? j : 0], stats_at + 64 * j); };
        if constexpr (kStatsEarly) {
            #pragma unroll
            for (int j = 0; j < M / 8; ++j) {
                load_stats(j);
                #pragma unroll
                for (int e = 0; e < 4; ++e) dS.x[0][j][e] = -stats[j][2 * (e % 2) + 1];
            }
            arrived(dS);
        }
        issue_nt<T, kDepth>(P, sK.from_row(64 * group), sQ);                 // S^T = K Q^T
        issue_nt<T, kDepth, kStatsEarly>(dS, sV.from_row(64 * group), sdO);  // dP^T = V dO^T, or with - delta
        ptx::wgmma_wait_group<1>();
        arrived(P);
        // With a mask that hides something here, NaN or inf in an operand calls for care (nonfinite.cuh).
        const bool masked = !mask.full(q0, visit.k0) || q0 + M > problem.seqlen_q;
        bool finite = true;
        if constexpr (Mask<V>::kHides) {
            if (masked) finite = P.finite();
        }
        #pragma unroll
        for (int j = 0; j < M / 8; ++j) {
            if constexpr (!kStatsEarly) load_stats(j);
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                P.x[0][j][e] =
                    ptx::ex2(fmaf(score(P.x[0][j][e]), score.log2_factor, -stats[kStatsEarly ? j : 0][2 * (e % 2)]));
        }
        ptx::wgmma_wait_group<0>();
        arrived(dS);
        bool careful = false;
        if (masked) {
            if constexpr (Mask<V>::kHides)
                careful = ptx::vote_any(ptx::bar_red_or(kBarVote, kBwdConsumers, !finite || !dS.finite()));
            hide(P, q0, visit.k0);
            if constexpr (kStatsEarly) hide(dS, q0, visit.k0);
        }
        FragA<T, 16, M> rP, rdS;
        rP.from(P);
        #pragma unroll
        for (int j = 0; j < M / 8; ++j) {
            if constexpr (!kStatsEarly) load_stats(j);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const ptx::u32 pair = rP.x[j / 2][0][2 * (j % 2) + e / 2];
                const float p_ = V::kPackedP ? (e % 2 ? T::hi(pair) : T::lo(pair)) : P.x[0][j][e];
                const float delta = kStatsEarly ? 0.f : stats[0][2 * (e % 2) + 1];
                dS.x[0][j][e] = score.grad(p_ * (dS.x[0][j][e] - delta));  // dS = P * (dP - delta)
            }
        }
        if (!kStatsEarly && masked) hide(dS, q0, visit.k0);
        rdS.from(dS);
        stage_transposed(sdS, key0, rdS);
        if (careful) {
            clear_non_finite<T, kBwdConsumers>(sdO);
            clear_non_finite<T, kBwdConsumers>(sQ);
            clear_non_finite<T, kBwdConsumers>(sK);
        }
        ptx::fence_proxy_async();
        if (careful) ptx::bar_sync(kBarConsumers, kBwdConsumers);
        issue_nn<T, M>(dV, rP, sdO);                  // dV += P^T dO
        ptx::bar_sync(kBarConsumers, kBwdConsumers);  // dS is complete
        AccTile<16, 64> dQ;
        // dQ = dS K, this group's half of it
        if constexpr (M == 64) issue_nn<T, N>(dQ, sdS, sK.from_chunk(group));
        else issue_nn<T, N>(dQ, sdS.from_row(64 * group), sK);
        issue_nn<T, M>(dK, rdS, sQ);  // dK += dS^T Q
        ptx::wgmma_wait_group<2>();
        arrived(dV);
        arrive_warp(smem.dout_empty(stage));
        ptx::wgmma_wait_group<1>();
        arrived(dQ);
        ptx::bar_sync(kBarDqFree + group, kDqThreads);  // the writer has read the dQ before
        const int thread = fresh_thread();
        #pragma unroll
        for (int j = 0; j < 8; ++j)
            ptx::st_shared_v4_b32(smem.dq(0) + (thread / 32 * 256 + j * 32 + thread % 32) * 16, bits_of(dQ.x[0][j]));
        ptx::fence_proxy_async();
        ptx::bar_arrive(kBarDqReady + group, kDqThreads);
        ptx::wgmma_wait_group<0>();
        arrived(dK);
        if (careful) after_care(visit);
        arrive_warp(smem.q_empty(stage));
        ring.next();
    }

    __device__ static ptx::U128 bits_of(const float (&x)[4]) {
        return {ptx::float_as_uint(x[0]), ptx::float_as_uint(x[1]), ptx::float_as_uint(x[2]), ptx::float_as_uint(x[3])};
    }

    __device__ void hide(AccTile<16, M> &x, int q0, int k0) const {
        const int thread = fresh_thread(), lane = thread % 32;
        const auto from_here = mask.from(q0 + 2 * (lane % 4), k0 + thread / 32 * 16 + lane / 4);
        x.for_each([&](int key, int query, float &e) { e = from_here.sees(query, key) ? e : 0.f; });
        const int queries = problem.seqlen_q - q0 - 2 * (lane % 4);
        if (queries < M) x.for_each([&](int, int query, float &e) { e = query < queries ? e : 0.f; });
    }

    // The rest of a careful step: dQ is NaN where a query sees a non-finite element of K, be it from dS = NaN or, for a
    // score of -inf, from 0 * inf; and K is brought back as it was.
    __device__ void after_care(const BwdVisits<V> &visit) {
        const BwdParams &plain = p.plain;
        const T *k = static_cast<const T *>(plain.k) + head_offset(plain.k_stride, visit.tile.batch, visit.tile.head) +
                     visit.k0 * plain.k_stride.row;
        const int keys = min(N, problem.seqlen_k - visit.k0), q0 = visit.q0();
        float *accum = Dq::accum(plain, visit.sequence(), visit.m_block);
        #pragma unroll 1
        for (int e = ptx::thread_index(); e < M * D; e += kBwdConsumers) {
            const int query = e / D, col = e % D;
            const float sum = sum_non_finite<T>(k, plain.k_stride.row, keys, col, [&](int key) {
                return q0 + query < problem.seqlen_q && mask.sees(q0 + query, visit.k0 + key);
            });
            if (sum != 0.f) ptx::red_add_f32(accum + Dq::index(query, col), ptx::nan());
        }
        ptx::bar_sync(kBarConsumers, kBwdConsumers);  // both groups have used K
        const auto sK = smem.k();
        #pragma unroll 1
        for (int i = ptx::thread_index(); i < keys * D / 8; i += kBwdConsumers) {
            const int row = i / (D / 8), col = i % (D / 8) * 8;
            ptx::st_shared_v4_b32(sK.at(row, col),
                                  *reinterpret_cast<const ptx::U128 *>(k + row * plain.k_stride.row + col));
        }
        ptx::fence_proxy_async();
        ptx::bar_sync(kBarConsumers, kBwdConsumers);  // K is whole
        was_careful = true;
    }

    // dK and dV leave through the shared memory of K and V.
    __device__ void finish(const BwdVisits<V> &visits) {
        ptx::bar_sync(kBarConsumers, kBwdConsumers);  // both groups are done with K and V
        dK.scale(score.scale);
        const auto sdK = smem.k().from_row(64 * group), sdV = smem.v().from_row(64 * group);
        stage<T>(sdK, key0 % 64, dK);
        stage<T>(sdV, key0 % 64, dV);
        ptx::fence_proxy_async();
        ptx::bar_sync(kBarGroup + group, 128);
        const int row = visits.k0 + 64 * group;
        if (ptx::thread_index() % 128 == 0) {
            if (row < problem.seqlen_k) {
                sdK.store(p.map_dk, row, visits.tile.head, visits.tile.batch);
                sdV.store(p.map_dv, row, visits.tile.head, visits.tile.batch);
            }
            ptx::cp_async_bulk_wait_group<0>();
        }
        if (was_careful) add_non_finite_queries();
    }

    // dV where a key is seen by a query with a non-finite element of dO.
    __device__ void add_non_finite_queries() const {
        const BwdParams &plain = p.plain;
        BwdVisits<V> visit(problem);
        ptx::fence_proxy_async_global();
        ptx::bar_sync(kBarConsumers, kBwdConsumers);  // dV is written
        T *dv = static_cast<T *>(plain.dv) + head_offset(plain.dv_stride, visit.tile.batch, visit.tile.head) +
                visit.k0 * plain.dv_stride.row;
        #pragma unroll 1
        for (int i = 0; i < visit.count; ++i, visit.next()) {
            const int q0 = visit.q0();
            if (mask.full(q0, visit.k0)) continue;
            const T *dout = static_cast<const T *>(plain.dout) +
                            head_offset(plain.dout_stride, visit.tile.batch, visit.head) + q0 * plain.dout_stride.row;
            add_non_finite<T, kBwdConsumers, D>(
                dv, plain.dv_stride.row, min(N, problem.seqlen_k - visit.k0), dout, plain.dout_stride.row,
                min(M, problem.seqlen_q - q0),
                [&](int key, int query) { return mask.sees(q0 + query, visit.k0 + key); });
        }
    }
};

template <class V>
__device__ __forceinline__ void bwd(const BwdSm90Params &p) {
    const BwdSm90Smem<V> smem{ptx::dynamic_smem_1024()};
    if (ptx::thread_index() == 0) smem.init();
    ptx::bar_sync();

    const int role = uniform(ptx::thread_index() / 128);
    if (role == kBwdConsumers / 128) {
        ptx::setmaxnreg_dec<V::kProducerRegisters>();
        const int warp_in_group = uniform(warp() % 4);
        if (warp_in_group == 0 && lane() == 0) bwd_load<V>(p, smem);
        if (warp_in_group == 1 || warp_in_group == 2) bwd_add_dq<V>(p, smem, warp_in_group - 1);
    } else {
        ptx::setmaxnreg_inc<V::kConsumerRegisters>();
        BwdGroup<V> consumer(p, smem, role);
        BwdVisits<V> visit(p.plain.problem);
        if (visit.count > 0) {
            ptx::mbarrier_wait(smem.k_full(), 0);
            ptx::mbarrier_wait(smem.v_full(), 0);
        }
        #pragma unroll 1
        for (int i = 0; i < visit.count; ++i, visit.next()) consumer.step(i, visit);
        consumer.finish(visit);
    }
}

#endif  // CUPYFLASH_BWD_SM90_CUH
