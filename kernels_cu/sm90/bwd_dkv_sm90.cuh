// dK and dV on Hopper for wide heads (sm_90a), by recomputation:
//     P = exp(scale * Q K^T - lse),  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),  dK = scale * dS^T Q,
// FlashAttention-2 (Dao 2023), algorithm 2 without dQ, which bwd_dq_sm90.cuh computes as a whole: with dK and dV of 64
// keys the registers are full, and adding up dQ in global memory from blocks of 64 keys would cost more than computing
// P and dS twice.
//
// A persistent block draws tiles of kBlockN = 64 keys of one (batch, head_k), keeps their K and V in shared memory, and
// visits every query tile that sees them, of all query heads of the group. Two warpgroups consume, with S and dP
// transposed, so that P^T and dS^T are A operands straight from the accumulators: the first computes S^T = K Q^T, P and
// dV += P^T dO, and hands P on, as rounded, through shared memory; the second computes dP^T = V dO^T, dS and
// dK += dS^T Q. In the third warpgroup one thread draws the tiles and produces Q, dO and row_stats through rings of
// stages, ahead of the consumers. dV leaves through the shared memory of K, and dK through that of V: each has one
// reader, and both have room for the wider.
//
// Shared memory: K | V | kStages x Q | kStages x dO | two P | kStages x row_stats | mbarriers | queue of work.
#ifndef CUPYFLASH_BWD_DKV_SM90_CUH
#define CUPYFLASH_BWD_DKV_SM90_CUH
#include "attention/dropout.cuh"
#include "attention/params_sm90.cuh"
#include "attention/work_sm90.cuh"
#include "tile/pipeline_sm90.cuh"
#include "attention/repair_gradients.cuh"
#include "attention/score.cuh"
#include "tile/tile_sm90.cuh"
#include "attention/visits.cuh"
#include "tile/epilogue.cuh"

// The two consumer warpgroups, and what is theirs: K, Q and S; V, dO and dP.
enum DkvRole { kRoleP = 0, kRoleDS = 1 };

template <class V>
struct BwdDkvSmem {
    using T = typename V::Element;
    static constexpr int M = V::kBlockM, N = V::kBlockN, kStages = V::kStages;
    // Columns of K, Q and dK (kOfV: of V, dO and dV).
    template <bool kOfV, int kRows>
    using TileOf = SwizzledTile<T, kRows, round_up(kOfV ? V::kHeadDimV : V::kHeadDim, 16)>;
    static constexpr int kResidentBytes = larger(TileOf<false, N>::kBytes, TileOf<true, N>::kBytes);
    static constexpr int kQBytes = TileOf<false, M>::kBytes, kDOBytes = TileOf<true, M>::kBytes;
    static constexpr int kQ = 2 * kResidentBytes, kDO = kQ + kStages * kQBytes, kP = kDO + kStages * kDOBytes;
    static constexpr int kStats = kP + 2 * 2 * M * N, kBars = kStats + kStages * 8 * M;
    static constexpr int kBarriers = 8 + 4 * kStages,
                         kQueue = kBars + 8 * (kBarriers + TileQueue<V::kPacked>::kBarriers);
    static_assert(kQueue + TileQueue<V::kPacked>::kBytes == V::kSmemBytes);
    ptx::u32 base;

    // K, V; and what leaves through them: dV, dK.
    template <int kRole>
    __device__ TileOf<kRole == kRoleDS, N> resident() const {
        return {base + kRole * kResidentBytes};
    }
    template <int kRole>
    __device__ TileOf<kRole == kRoleP, N> result() const {
        return {base + kRole * kResidentBytes};
    }
    // Q, dO.
    template <int kRole>
    __device__ TileOf<kRole == kRoleDS, M> streamed(int stage) const {
        return {base + (kRole == kRoleP ? kQ + stage * kQBytes : kDO + stage * kDOBytes)};
    }
    __device__ ptx::u32 p(int i) const { return base + kP + i * (2 * M * N); }
    __device__ ptx::u32 stats(int stage) const { return base + kStats + stage * 8 * M; }  // [M][2]: lse, delta
    __device__ ptx::u32 resident_full(int role) const { return bar(role); }
    __device__ ptx::u32 full(int role, int stage) const { return bar(2 + role * kStages + stage); }
    __device__ ptx::u32 empty(int role, int stage) const { return bar(2 + (2 + role) * kStages + stage); }
    __device__ ptx::u32 p_full(int i) const { return bar(2 + 4 * kStages + i); }
    __device__ ptx::u32 p_empty(int i) const { return bar(4 + 4 * kStages + i); }
    __device__ ptx::u32 resident_empty(int role) const { return bar(6 + 4 * kStages + role); }
    __device__ TileQueue<V::kPacked> queue() const { return {bar(kBarriers), base + kQueue}; }

    __device__ void init() const {  // by one thread
        #pragma unroll 1
        for (int i = 0; i < 2 + 2 * kStages; ++i) ptx::mbarrier_init(bar(i), 1);
        #pragma unroll 1
        for (int i = 0; i < 2 * kStages; ++i) ptx::mbarrier_init(empty(0, i), 8);  // warps of both groups
        #pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(p_full(i), 4), ptx::mbarrier_init(p_empty(i), 4);
            ptx::mbarrier_init(resident_empty(i), 1);
        }
        TileQueue<V::kPacked>::init(bar(kBarriers), 8 + V::kPacked);  // @followers-dkv
        ptx::fence_mbarrier_init();
    }

  private:
    __device__ ptx::u32 bar(int i) const { return base + kBars + 8 * i; }
};

// K and V once a tile, Q, dO and row_stats of every visit; by one thread, which also decides what is computed; if packed, a
// warp tells it that.
template <class V>
__device__ __forceinline__ void bwd_dkv_load(const BwdSm90Params &p, const BwdDkvSmem<V> &smem) {
    constexpr int M = V::kBlockM;
    RingPosition<V::kStages> ring;
    RingPosition<1> tiles;
    auto source = producer_tiles<V, KeysOf<V>, V::kBlockN, false>(p.plain, p.counter, smem.queue());
    // bwd_delta makes row_stats, which bwd_dq reads at once.
    const auto delta_has_ended = [] {
        ptx::griddepcontrol_wait();               // @delta-awaited-dkv
        ptx::griddepcontrol_launch_dependents();  // @dq-behind-delta
    };
    for (;; source.draw(), tiles.next()) {
        const auto tile = source.next();
        if (tile.block < 0) break;
        BwdVisits<V> visit(p.plain, tile);
        const Sequence<V::kPacked> &sequence = visit.sequence;
        const int head_k = KeysOf<V>::head_k(p.plain, visit.key_head);
        const auto load_resident = [&](auto of_role, const ptx::TensorMap &map) {
            constexpr int kRole = decltype(of_role)::value;
            ptx::mbarrier_wait(smem.resident_empty(kRole), tiles.phase ^ 1);
            smem.template resident<kRole>().load(map, smem.resident_full(kRole), sequence.row_k + visit.k0, head_k,
                                                 sequence.batch(), ptx::kEvictFirst);
        };
        const auto load = [&](auto of_role, const ptx::TensorMap &map, int more_bytes) {
            constexpr int kRole = decltype(of_role)::value;
            ptx::mbarrier_wait(smem.empty(kRole, ring.stage), ring.phase ^ 1);
            smem.template streamed<kRole>(ring.stage)
                .load(map, smem.full(kRole, ring.stage), sequence.row_q + visit.q0(), visit.head, sequence.batch(),
                      ptx::kEvictNormal, more_bytes);
        };
        const Int<kRoleP> of_p;
        const Int<kRoleDS> of_ds;
        #pragma unroll 1
        for (int i = 0; i < visit.count; ++i, ring.next(), visit.next()) {
            const auto load_stats = [&] {
                ptx::cp_async_bulk_load(smem.stats(ring.stage),
                                        row_stats_at<M>(p.plain, sequence, visit.head, visit.q0()), 8 * M,
                                        smem.full(kRoleP, ring.stage));  // @statistics-of-the-visit-dkv
            };
            load(of_p, p.map_q, 8 * M);
            if (i > 0) load_stats();
            else load_resident(of_p, p.map_k);
            load(of_ds, p.map_dout, 0);
            if (i == 0) load_resident(of_ds, p.map_v), delta_has_ended(), load_stats();
        }
        if (visit.count == 0) load_resident(of_p, p.map_k), load_resident(of_ds, p.map_v);  // keeps the phases even
    }
    delta_has_ended();  // also for a block without visits
}

// One consumer warpgroup. X is S or dP, W is P or dS, dKV is dV or dK.
template <class V, int kRole>
struct BwdDkvGroup {
    using T = typename V::Element;
    static constexpr int M = V::kBlockM, N = V::kBlockN, kOther = 1 - kRole;
    static constexpr int kDepth =
        round_up(kRole == kRoleP ? V::kHeadDim : V::kHeadDimV, 16);                // of X @depth-of-the-role-dkv
    static constexpr int kColumns = kRole == kRoleP ? V::kHeadDimV : V::kHeadDim;  // of dKV
    static constexpr bool kHandsP = Score<V>::kWeightIsP && !Dropout<V>::kAny;     // what is handed on is the P of dV
    static_assert(M == 64 && N == 64);

    const BwdSm90Params &p;
    const Problem &problem;
    const BwdDkvSmem<V> &smem;
    const Score<V> score;
    const int key0;                 // this warp's first key of the block
    RingPosition<V::kStages> ring;  // of Q and dO
    RingPosition<2> handed;         // of P

    __device__ BwdDkvGroup(const BwdSm90Params &p, const BwdDkvSmem<V> &smem)
        : p(p), problem(p.plain.problem), smem(smem), score(problem), key0(warp() % 4 * 16) {}

    __device__ void run() {
        auto queue = smem.queue();
        for (RingPosition<1> tiles;; tiles.next()) {
            const auto tile = unpack_tile<V::kPacked>(p.plain, queue.next());
            if (tile.block < 0) break;
            compute(BwdVisits<V>(p.plain, tile), tiles.phase);
        }
    }

    __device__ void compute(BwdVisits<V> visit, ptx::u32 tile_phase) {
        AccTile<16, kColumns> dKV;
        dKV.zero();
        const auto resident = smem.template resident<kRole>();
        ptx::mbarrier_wait(smem.resident_full(kRole), tile_phase);
        if (visit.count > 0) {
            FragA<T, 16, M> W;
            {
                AccTile<16, M> X;  // transposed: rows are keys
                ptx::mbarrier_wait(smem.full(kRole, ring.stage), ring.phase);
                issue_nt<T, kDepth>(X, resident, smem.template streamed<kRole>(ring.stage));
                const auto added = added_to(visit);
                ptx::wgmma_wait_group<0>();
                arrived(X);
                weigh(visit, X, W, added);
            }
            #pragma unroll 1
            for (int i = 1; i < visit.count; ++i) {
                const RingPosition<V::kStages> before = ring;
                ring.next(), visit.next();
                AccTile<16, M> X;
                ptx::mbarrier_wait(smem.full(kOther, before.stage), before.phase);  // @operand-of-the-other-full
                // dV += P^T dO, dK += dS^T Q: tile before
                issue_nn<T, M>(dKV, W, smem.template streamed<kOther>(before.stage));
                ptx::mbarrier_wait(smem.full(kRole, ring.stage), ring.phase);
                // S^T = K Q^T, dP^T = V dO^T
                issue_nt<T, kDepth>(X, resident.fresh(), smem.template streamed<kRole>(ring.stage));
                const auto added = added_to(visit);
                ptx::wgmma_wait_group<1>();  // @product-complete-dkv
                arrived(dKV);
                arrive_warp(smem.empty(kOther, before.stage));  // @operand-of-the-other-released
                ptx::wgmma_wait_group<0>();
                arrived(X);
                weigh(visit, X, W, added);
            }
            ptx::mbarrier_wait(smem.full(kOther, ring.stage), ring.phase);
            issue_nn<T, M>(dKV, W, smem.template streamed<kOther>(ring.stage));
            ptx::wgmma_wait_group<0>();
            arrived(dKV);
            arrive_warp(smem.empty(kOther, ring.stage));
            ring.next();
        }
        finish(visit, dKV);
    }

    // A range of keys is read again: the main loop has no registers left to keep it.
    __device__ Mask<V> mask_of(const BwdVisits<V> &visit) const {
        return {with_range<V>(Sequence<V::kPacked>(visit.sequence), p.plain), problem};
    }

    // What is added to the scores of a visit, asked for while they are multiplied.
    __device__ auto added_to(const BwdVisits<V> &visit) const {
        if constexpr (kRole == kRoleP)
            return Places<V>::of(p.plain, visit.sequence, visit.head)
                .template fetch<false, 16, M>(visit.q0(), visit.k0 + key0);  // @added-of-the-visit
        else return NotFetched{};
    }

    // P from S, or dS from dP and P; then Q, or dO, is no longer needed by this group.
    template <class Added>
    __device__ void weigh(const BwdVisits<V> &visit, AccTile<16, M> &X, FragA<T, 16, M> &W, const Added &added) {
        const ptx::u32 thread = fresh_thread() % 128;
        const ptx::u32 stats_at = smem.stats(ring.stage) + 16 * (thread % 4), p_at = smem.p(handed.stage) + 16 * thread;
        bool masked;
        if constexpr (V::kBlockMask) masked = visit.sight(0) != kWhole;
        else masked = !mask_of(visit).full(visit.q0(), visit.k0) || visit.q0() + M > visit.sequence.seqlen_q;
        float stats[M / 8][4];  // of two neighbouring queries: lse, delta, lse, delta
        if constexpr (kRole == kRoleDS) ptx::mbarrier_wait(smem.full(kRoleP, ring.stage), ring.phase);
        #pragma unroll
        for (int j = 0; j < M / 8; ++j) ptx::ld_shared_v4_f32(stats[j], stats_at + 64 * j);
        const auto dropout = Dropout<V>::of(p.plain, visit.sequence.index, visit.head);
        const auto kept = dropout.template kept<false, 16, M>(visit.q0(), visit.k0 + key0);
        if constexpr (kRole == kRoleP) {
            const auto places = Places<V>::of(p.plain, visit.sequence, visit.head)
                                    .template from_lane<false>(visit.q0(), visit.k0 + key0, added);
            FragA<T, 16, 16> weights[M / 16];  // by which the other group multiplies dP - delta
            #pragma unroll
            for (int k = 0; k < M / 16; ++k) {
                AccTile<16, 16> weight;
                #pragma unroll
                for (int j = 0; j < 2; ++j)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float &x = X.x[0][2 * k + j][e];
                        const float s = x;
                        x = score.P(s, places(16 * k + 8 * j + e % 2, 8 * (e / 2)), stats[2 * k + j][2 * (e % 2)]);
                        weight.x[0][j][e] = score.weight(s, x);  // @weight-of-the-score
                        if constexpr (Score<V>::kModded)
                            weight.x[0][j][e] = score.weight(s, x, places(16 * k + 8 * j + e % 2, 8 * (e / 2)));
                        x = Dropout<V>::of_kept(kept(8 * (e / 2), 16 * k + 8 * j + e % 2), x);
                    }
                if constexpr (!kHandsP) weights[k].from(weight);
            }
            if (masked) hide(visit, X);
            W.from(X);
            ptx::mbarrier_wait(smem.p_empty(handed.stage), handed.phase ^ 1);  // @p-empty
            #pragma unroll
            for (int k = 0; k < M / 16; ++k) {
                const ptx::u32(&r)[4] = kHandsP ? W.x[k][0] : weights[k].x[0][0];  // @weights-handed-over
                ptx::st_shared_v4_b32(p_at + 2048 * k, {r[0], r[1], r[2], r[3]});
            }
            arrive_warp(smem.p_full(handed.stage));
        } else {
            ptx::mbarrier_wait(smem.p_full(handed.stage), handed.phase);  // @p-full
            ptx::U128 P[M / 16];
            #pragma unroll
            for (int k = 0; k < M / 16; ++k) P[k] = ptx::ld_shared_v4_b32(p_at + 2048 * k);
            arrive_warp(smem.p_empty(handed.stage));
            X.for_each([&](int key, int query, float &dp) {
                dp = Dropout<V>::of_kept(kept(key, query), dp);
                const ptx::u32 pair = P[query / 16].x[query / 8 % 2 * 2 + key / 8];
                dp = (query % 2 ? T::hi(pair) : T::lo(pair)) * (dp - stats[query / 8][2 * (query % 2) + 1]);
            });
            if (masked) hide(visit, X);
            W.from(X);
        }
        handed.next();
        arrive_warp(smem.empty(kRole, ring.stage));
    }

    // Beyond seqlen_q rows of Q are zeros, but 0 times an inf of K is not.
    __device__ void hide(const BwdVisits<V> &visit, AccTile<16, M> &x) const {
        const int lane = fresh_lane();
        const auto from_here = mask_of(visit).from(visit.q0() + 2 * (lane % 4), visit.k0 + key0 + lane / 4);
        const SeenBits<V, 16, M, false> seen(p.plain, visit.sequence.index, visit.head, visit.q0(), visit.k0 + key0);
        x.for_each([&](int key, int query, float &e) {
            e = from_here.sees(query, key) && query < from_here.seqlen_q ? e : 0.f;
            if constexpr (V::kBlockMask) e = seen(key, query) ? e : 0.f;
        });
    }

    // The result leaves through K or V, which then go back to the producer.
    __device__ void finish(const BwdVisits<V> &visit, AccTile<16, kColumns> &dKV) const {
        const auto tile = smem.template result<kRole>();
        if constexpr (kRole == kRoleDS) dKV.scale(score.scale);  // @dk-scaled-dkv
        if constexpr (V::kGrouped) {
            if (KeysOf<V>::are_shared(p.plain)) {
                float *const shares = kRole == kRoleP ? p.plain.dv_shares : p.plain.dk_shares;
                leave_share<V, kColumns, kColumns>(p.plain, shares, visit.sequence, visit.key_head, visit.k0 + key0,
                                                   dKV);
                ptx::bar_sync(kGroupBarrier + kRole, 128);  // K or V has been read by all warps @shared-operand-read
                if (ptx::thread_index() % 128 == 0) ptx::mbarrier_arrive(smem.resident_empty(kRole));
                return;
            }
        }
        const int head_k = KeysOf<V>::head_k(p.plain, visit.key_head);
        if (!ptx::vote_all(stage<T>(tile, key0, dKV))) {
            ptx::bar_warp_sync();        // the other lanes' stage() wrote parts of these rows
            ptx::griddepcontrol_wait();  // row_stats are read again @row-stats-awaited-again-dkv
            const GradientRepair<V, M, false> again(p.plain, visit.sequence.index);  // @repair-in-its-sequence-dkv
            #pragma unroll 1
            for (int row = key0; row < key0 + 16; ++row)
                if constexpr (kRole == kRoleDS) again.dk(head_k, visit.k0 + row, tile, row);
                else again.dv(head_k, visit.k0 + row, tile, row);  // @repair-of-its-head-dkv
        }
        const Sequence<V::kPacked> &sequence = visit.sequence;
        // Behind the last key TMA would write those of the next sequence. @wide-dkv-beside-its-neighbour
        const bool shared = V::kPacked && visit.k0 + N > sequence.rows_k;
        if (shared) {
            const BwdParams &plain = aside(p.plain);
            const Strides &stride = kRole == kRoleP ? plain.dv_stride : plain.dk_stride;
            T *const dst = static_cast<T *>(kRole == kRoleP ? plain.dv : plain.dk);
            ptx::bar_warp_sync();
            // @unused-keys-written-dkv
            write_rows<16, round_up(kColumns, 16), kColumns>(tile, key0, dst + sequence.k_offset(stride, head_k),
                                                             stride.row, visit.k0 + key0, sequence.rows_k);
        }
        ptx::fence_proxy_async();  // @dkv-shown-to-tma
        ptx::bar_sync(kGroupBarrier + kRole, 128);
        if (ptx::thread_index() % 128 == 0) {
            // @dv-and-dk-in-place
            if (!shared)
                tile.store(kRole == kRoleP ? p.map_dv : p.map_dk, sequence.row_k + visit.k0, head_k, sequence.batch());
            ptx::cp_async_bulk_wait_group_read<0>();
            ptx::mbarrier_arrive(smem.resident_empty(kRole));
        }
    }
};

template <class V>
__device__ __forceinline__ void bwd_dkv(const BwdSm90Params &p) {
    prefetch_if_packed<V>(p.map_q, p.map_k, p.map_v, p.map_dout);
    const BwdDkvSmem<V> smem{ptx::dynamic_smem_1024()};
    if (ptx::thread_index() == 0) smem.init();
    ptx::bar_sync();

    const int role = uniform(ptx::thread_index() / 128);
    if (role == 2) {
        ptx::setmaxnreg_dec<V::kProducerRegisters>();
        const int warp_in_group = uniform(warp() % 4);
        if (warp_in_group == 0 && lane() == 0) bwd_dkv_load<V>(p, smem);
        if constexpr (V::kPacked)
            if (warp_in_group == 3) schedule_tiles<V, KeysOf<V>, V::kBlockN, false>(p.plain, p.counter, smem.queue());
    } else {
        ptx::setmaxnreg_inc<V::kConsumerRegisters>();
        if (role == kRoleP) BwdDkvGroup<V, kRoleP>(p, smem).run();
        else BwdDkvGroup<V, kRoleDS>(p, smem).run();
    }
}

#endif  // CUPYFLASH_BWD_DKV_SM90_CUH
