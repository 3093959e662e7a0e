// Backward attention on Hopper with wgmma and TMA (sm_90a), by recomputation:
//     P = exp(scale * Q K^T - lse),  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),
//     dK = scale * dS^T Q,  dQ = scale * dS K,   FlashAttention-2 (Dao 2023), algorithm 2.
//
// One block owns kBlockN keys of one (batch, head_k) and visits every query tile that sees them, of all query heads of
// the group. Each consumer warpgroup owns 64 of the keys, with their dK and dV in registers: it computes S and dP
// transposed, so that P^T and dS^T are A operands of dV and dK straight from the accumulators, and leaves dS in shared
// memory. dQ = dS K needs the dS of all: the warpgroups take turns, and whose turn it is computes the dQ of the visit
// before, so that nobody waits for the others' dS of this one. While one warpgroup turns S into dS, the products of the
// others keep the tensor cores busy. In the last warpgroup one thread loads, and two others, in turns, add dQ to its
// accumulator in global memory (dq_accum.cuh). kCopiesBias: a warp asks for its part of the next visit's bias once it has
// formed dS of this one (bias_copies.cuh).
//
// Where head_dim is beyond 128, a visit goes another way (bwd_wide_sm90.cuh), and dQ leaves in parts of 64 columns.
//
// Shared memory: K | V | kStages x Q | kStages x dO | two dS | two dQ, or parts of it |
// kStages x row_stats | a bias of each warp | mbarriers.
#ifndef CUPYFLASH_BWD_SM90_CUH
#define CUPYFLASH_BWD_SM90_CUH
#include "attention/dropout.cuh"
#include "attention/repair_gradients.cuh"
#include "attention/score.cuh"
#include "attention/slopes.cuh"
#include "attention/visible_sm90.cuh"
#include "sm90/bwd_wide_sm90.cuh"
#include "tile/epilogue.cuh"

// One consumer warpgroup: 64 keys.
template <class V>
struct BwdGroup {
    using T = typename V::Element;
    using Smem = BwdSm90Smem<V>;
    static constexpr int M = V::kBlockM, D = V::kHeadDim, kDimV = V::kHeadDimV;
    static constexpr int kDepth = round_up(D, 16), kDepthV = round_up(kDimV, 16);  // of S, of dP @depth-of-dp-bwd-sm90
    static constexpr int kHeld = V::kHeldColumns < kDepthV ? V::kHeldColumns : kDepthV;
    static_assert(M == 64 && V::kBlockN % 64 == 0);
    // Whether dS leaves under the products of dK and dV. Three warpgroups do not gain by it, and have no registers left.
    static constexpr bool kHandsOverLate = kWidest<V> > 64 && !Emitted<V>::kAny;
    // Whether P is formed while dP is still being multiplied, and how many columns of S find their lse loaded when they arrive.
    // Two warpgroups do not gain by it. Where a score is asked for again or for its place, no registers are left.
    static constexpr bool kFormsPEarly =
        kWidest<V> <= 64 && Score<V>::kWeightIsP && !Dropout<V>::kAny && !V::kAlibi && !V::kBias;
    static constexpr int kAhead = kFormsPEarly ? 2 : 0;

    const BwdSm90Params &p;
    const Problem &problem;
    const BwdSm90Smem<V> &smem;
    const Mask<GroupKeys<V>> mask;
    const Score<V> score;
    const int group;  // of the block
    AccTile<16, D> dK;
    AccTile<16, kDimV> dV;
    Emitted<V> emitted;
    FragA<T, 16, kHeld ? kHeld : 16> rV;  // the first kHeld columns of V, which each visit would read again
    int i = 0;                            // number of the visit
    RingPosition<1> bits;                 // of those that a block mask shows in part

    __device__ BwdGroup(const BwdSm90Params &p, const BwdSm90Smem<V> &smem, const SequenceOf<V> &sequence, int group)
        : p(p), problem(p.plain.problem), smem(smem), mask(sequence, problem), score(problem), group(group) {
        dK.zero(), dV.zero();
    }

    __device__ void run(DqVisits<V> visit) {
        const int key0 = uniform(visit.k0 + 64 * group), count = uniform(visit.count);
        const int first = uniform(mask.first_query_block(key0));
        const int end = uniform(mask.some_count(key0) ? mask.end_query_block(key0) : 0);
        if (count > 0) {
            ptx::mbarrier_wait(smem.k_full(), 0);
            ptx::mbarrier_wait(smem.v_full(), 0);
            if (kHeld) rV.load(smem.v(), 64 * group + fresh_thread() / 32 % 4 * 16);  // @rows-of-v-held
        }
        if constexpr (Emitted<V>::kAny && V::kBlockMask) {
            const int heads = KeysOf<V>::group(p.plain);
            for (int n = 0; n < heads; ++n)
                if (visit.tiles.nothing_of(n)) leave_emitted(visit, visit.key_head * heads + n);
        } else if (Emitted<V>::kAny && count == 0) {  // @slopes-without-visits-sm90
            const int heads = KeysOf<V>::group(p.plain);
            for (int n = 0; n < heads; ++n) leave_emitted(visit, visit.key_head * heads + n);
        }
        if (count > 0) ask_for(visit, key0);
        #pragma unroll 1
        for (;; ++i, visit.next()) {
            if (i < count) {
                const int q0 = visit.q0();
                if constexpr (V::kBlockMask) {
                    const int sees = visit.sight(group);
                    if (sees == kHidden) skip(visit, key0);
                    else if (sees == kInPart) step<true>(visit, q0, key0);
                    else step<false>(visit, q0, key0);
                } else if (visit.m_block < first || visit.m_block >= end) skip(visit, key0);
                else if (!mask.full(q0, key0) || q0 + M > visit.sequence.seqlen_q) step<true>(visit, q0, key0);
                else step<false>(visit, q0, key0);
                if (Emitted<V>::kAny && visit.is_last_of_head()) leave_emitted(visit, visit.head);
            }
            take_turn(i - 1);
            if (i >= count) break;
        }
        finish();
    }

    // What was emitted of a head of q. Only tiles with keys have a place for it.
    __device__ void leave_emitted(const DqVisits<V> &visit, int head) {
        const int block = visit.block * Smem::kGroups + group, part = fresh_thread() / 32 % 4;
        if (64 * block < visit.sequence.seqlen_k)  // @slopes-of-keys-that-exist
            emitted.template leave<Keys, 64, 4>(p.plain, visit.sequence, head, block, part);
    }

    // The bias of a visit, if it is copied; and of the one behind it, once it has been taken.
    __device__ void ask_for(const DqVisits<V> &visit, int key0) const {
        if constexpr (V::kCopiesBias)
            copied_bias().request(Places<V>::of(p.plain, visit.sequence, visit.head).bias, visit.q0(),
                                  key0 + fresh_thread() / 32 % 4 * 16);
    }
    __device__ void ask_for_next(const DqVisits<V> &visit, int key0) const {
        if constexpr (V::kCopiesBias) {
            DqVisits<V> next = visit;
            next.next();
            if (i + 1 < visit.count) ask_for(next, key0);  // @bias-of-the-next-visit
        }
    }
    __device__ auto copied_bias() const { return smem.bias(4 * group + fresh_thread() / 32 % 4); }

    // A query tile of which no query sees these keys.
    __device__ void skip(const DqVisits<V> &visit, int key0) const {
        if constexpr (V::kCopiesBias) copied_bias().await(), ask_for_next(visit, key0);  // @skipped-bias
        const auto ring = RingPosition<V::kStages>::of(i);
        ptx::mbarrier_wait(smem.q_full(ring.stage), ring.phase);     // nobody runs ahead of the loads @skipped-q-full
        ptx::mbarrier_wait(smem.dout_full(ring.stage), ring.phase);  // @skipped-do-full
        arrive_warp(smem.empty(ring.stage));
        hand_over(FragA<T, 16, M>{});  // @zeros-handed-over
    }

    // One query tile. kMasked: some elements are to be hidden.
    template <bool kMasked>
    __device__ __forceinline__ void step(const DqVisits<V> &visit, int q0, int key0) {
        if constexpr (kWideVisits<V>) return wide_step<kMasked>(*this, visit, q0, key0);
        const auto head_places = Places<V>::of(p.plain, visit.sequence, visit.head);
        const auto ring = RingPosition<V::kStages>::of(i);
        const int stage = ring.stage;
        const auto sQ = smem.q(stage);
        const auto sdO = smem.dout(stage);

        const auto dropout = Dropout<V>::of(p.plain, visit.sequence.index, visit.head);
        const auto kept = dropout.template kept<false, 16, M>(q0, key0 + dropout.warp_row());
        VisibleQueries<V> by_block_mask;  // read while nothing else needs registers
        if constexpr (kMasked && V::kBlockMask) by_block_mask = take_bits();

        ptx::mbarrier_wait(smem.q_full(stage), ring.phase);         // @visit-q-full
        AccTile<16, M> P, dS;                                       // transposed: rows are keys
        issue_nt<T, kDepth>(P, smem.k().from_row(64 * group), sQ);  // S^T = K Q^T
        ptx::mbarrier_wait(smem.dout_full(stage), ring.phase);      // @visit-do-full
        const auto sV = smem.v().from_row(64 * group);
        if constexpr (kHeld) issue_nt<T, kDepthV>(dS, rV, sV, sdO);  // dP^T = V dO^T
        else issue_nt<T, kDepthV>(dS, sV, sdO);
        const ptx::u32 stats_at = smem.stats(stage) + 16 * (fresh_lane() % 4);
        const auto fetched = [&] {
            if constexpr (V::kCopiesBias) return NotFetched{};
            else return head_places.template fetch_of_warp<false, M>(q0, key0);
        }();
        RowStats ahead[kAhead + 1];
        #pragma unroll
        for (int j = 0; j < kAhead; ++j) ahead[j].load(stats_at, j);
        ptx::wgmma_wait_group<kFormsPEarly>();  // @s-complete-bwd
        arrived(P);
        if constexpr (!kFormsPEarly) arrived(dS);
        VisibleQueries<V> visible;
        if constexpr (kMasked) visible = VisibleQueries<V>(mask, q0, key0);
        if constexpr (kMasked && V::kBlockMask) visible.keep(by_block_mask);
        const auto all_places = head_places.template from_warp<false>(q0, key0, fetched);
        const auto places_of = [&](int first) {  // of 16 queries
            if constexpr (V::kCopiesBias)
                return head_places.template from_warp<false>(q0, key0, copied_bias().take(first));
            else return all_places;
        };
        if constexpr (V::kCopiesBias) copied_bias().await();
        if constexpr (kFormsPEarly) {
            #pragma unroll
            for (int j = 0; j < M / 8; ++j) {
                RowStats stats = ahead[min(j, kAhead)];
                if (j >= kAhead) stats.load(stats_at, j);
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float &x = P.x[0][j][e];
                    x = score.P(x, all_places(8 * j + e % 2, 8 * (e / 2)), stats.lse(e % 2));
                }
            }
            arrived(P);                  // not moved behind the wait
            ptx::wgmma_wait_group<0>();  // @dp-complete-bwd
            arrived(dS);
        }
        FragA<T, 16, M> rP, rdS;
        #pragma unroll
        for (int k = 0; k < M / 16; ++k) {
            const auto places = places_of(16 * k);
            #pragma unroll
            for (int j = 2 * k; j < 2 * k + 2; ++j) {
                RowStats stats;
                stats.load(stats_at, j);
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float lse = stats.lse(e % 2), delta = stats.delta(e % 2);
                    const auto at = places(8 * j + e % 2, 8 * (e / 2));
                    const float s = P.x[0][j][e], p_ij = kFormsPEarly ? s : score.P(s, at, lse);
                    const bool keeps = kept(8 * (e / 2), 8 * j + e % 2);
                    const float dp_ij = dropout.of_kept(keeps, dS.x[0][j][e]);
                    const float ds_ij = score.dS(s, p_ij, dp_ij, delta, at);
                    if constexpr (Emitted<V>::kAny) {
                        const float by_score = p_ij * (dp_ij - delta);
                        emitted.add(!kMasked || visible(j, e) ? by_score : 0.f, at, lse != kLseOfNothing);
                    }
                    const float seen = !kMasked || visible(j, e) ? p_ij : 0.f;
                    P.x[0][j][e] = dropout.of_kept(keeps, seen);
                    dS.x[0][j][e] = !kMasked || visible(j, e) ? ds_ij : 0.f;
                }
            }
            emitted.settle();
            rP.from(P, k), rdS.from(dS, k);
        }
        ask_for_next(visit, key0);
        if constexpr (!kHandsOverLate) hand_over(rdS);
        issue_nn<T, M>(dK, rdS, sQ);  // dK += dS^T Q
        issue_nn<T, M>(dV, rP, sdO);  // dV += P^T dO
        if constexpr (kHandsOverLate) hand_over(rdS);
        ptx::wgmma_wait_group<0>();  // @dk-and-dv-complete
        arrived(dV), arrived(dK);
        arrive_warp(smem.empty(stage));  // @visit-released
    }

    // What a block mask says of this visit.
    __device__ VisibleQueries<V> take_bits() {
        ptx::mbarrier_wait(smem.bits_full(group), bits.phase);  // @bits-full
        const VisibleQueries<V> seen(smem.mask(), group);
        arrive_warp(smem.bits_empty(group));  // @bits-released
        bits.next();
        return seen;
    }

    // This group's dS, transposed back, for dQ.
    __device__ void hand_over(const FragA<T, 16, M> &dS) const {
        const auto ds = RingPosition<2>::of(i);
        ptx::mbarrier_wait(smem.ds_empty(ds.stage), ds.phase ^ 1);  // @ds-empty
        // @columns-of-the-warp
        stage_transposed(smem.ds(ds.stage).from_chunk(group), fresh_thread() / 32 % 4 * 16, dS);
        ptx::fence_proxy_async();  // @ds-shown-to-wgmma
        arrive_warp(smem.ds_full(ds.stage));
    }

    // dQ of visit number `visit`, if it is this group's turn.
    __device__ void take_turn(int visit) const {
        if (visit < 0 || visit % Smem::kGroups != group) return;  // @turn-of-the-group
        const auto at = RingPosition<2>::of(visit);
        ptx::mbarrier_wait(smem.ds_full(at.stage), at.phase);  // @ds-full
        #pragma unroll 1
        for (int c = 0; c < Smem::kDqParts; ++c) {
            AccTile<16, 64 * Smem::kChunks / Smem::kDqParts> dQ;
            issue_nn<T, V::kBlockN>(dQ, smem.ds(at.stage), smem.k().from_chunk(c));  // @columns-of-k-for-dq
            ptx::wgmma_wait_group<0>();                                              // @dq-complete
            arrived(dQ);
            if (c + 1 == Smem::kDqParts) arrive_warp(smem.ds_empty(at.stage));  // @ds-released
            const auto to = Smem::dq_part(visit, c);
            ptx::mbarrier_wait(smem.dq_empty(to.stage), to.phase ^ 1);  // @dq-empty
            const int thread = fresh_thread() % 128;
            #pragma unroll
            for (int j = 0; j < dQ.kColTiles; ++j) {
                // In 16 bytes, as dq_accum.cuh counts: 64 columns, a warp's 16 rows of them, 8 columns, a lane.
                const int place = j / 8 * 1024 + thread / 32 * 256 + j % 8 * 32 + thread % 32;
                ptx::st_shared_v4_b32(smem.dq(to.stage) + 16 * place, bits_of(dQ.x[0][j]));
            }
            ptx::fence_proxy_async();  // @dq-shown-to-tma
            arrive_warp(smem.dq_full(to.stage));
        }
    }

    // dK and dV leave through the shared memory of K and V.
    __device__ void finish() {
        const DqVisits<V> visits(p.plain, ptx::opaque(ptx::block_index()));
        const Sequence<V::kPacked> &sequence = visits.sequence;
        const int key0 = visits.k0 + 64 * group, head_k = KeysOf<V>::head_k(p.plain, visits.key_head);
        const auto sdK = smem.k().from_row(64 * group);
        const auto sdV = smem.v().from_row(64 * group);
        const int row0 = fresh_thread() / 32 % 4 * 16;
        dK.scale(score.scale);  // @dk-scaled-sm90
        if constexpr (V::kGrouped) {
            if (KeysOf<V>::are_shared(p.plain)) {
                leave_share<V, D, D>(p.plain, p.plain.dk_shares, sequence, visits.key_head, key0 + row0, dK);
                leave_share<V, kDimV, kDimV>(p.plain, p.plain.dv_shares, sequence, visits.key_head, key0 + row0, dV);
                return;
            }
        }
        // @repair-in-its-sequence-bwd-sm90
        const GradientRepair<GroupKeys<V>, M, false> again(p.plain, sequence.index);
        // Stages a result; repair(row) computes one of its rows again where that is not finite.
        const auto leave = [&](const auto &tile, const auto &acc, auto repair) {
            if (ptx::vote_all(stage<T>(tile, row0, acc))) return;  // @dk-and-dv-finite-sm90
            ptx::bar_warp_sync();                                  // the other lanes' stage() wrote parts of these rows
            ptx::griddepcontrol_wait();                            // row_stats are read again @row-stats-awaited-again
            #pragma unroll 1
            for (int row = row0; row < row0 + 16; ++row) repair(row);
        };
        leave(sdV, dV, [&](int row) { again.dv(head_k, key0 + row, sdV, row); });
        #pragma unroll
        for (int before = 1; before <= 2; ++before) {  // K has been read for the last two dQ @last-two-dq
            const auto at = RingPosition<2>::of(i - before);
            if (i >= before) ptx::mbarrier_wait(smem.ds_empty(at.stage), at.phase);  // @k-read-for-dq
        }
        leave(sdK, dK, [&](int row) { again.dk(head_k, key0 + row, sdK, row); });
        if (V::kPacked &&
            key0 + 64 > sequence.rows_k) {  // TMA would write the next sequence's too @dkv-beside-its-neighbour
            const auto write = [&](auto columns, const auto &tile, void *dst, const Strides &stride) {
                constexpr int kColumns = decltype(columns)::value;
                write_rows<16, round_up(kColumns, 16), kColumns>(
                    tile, row0, static_cast<T *>(dst) + sequence.k_offset(stride, head_k), stride.row, key0 + row0,
                    sequence.rows_k);
            };
            ptx::bar_warp_sync();
            write(Int<D>{}, sdK, p.plain.dk, p.plain.dk_stride);
            write(Int<kDimV>{}, sdV, p.plain.dv, p.plain.dv_stride);  // @columns-of-dv-bwd-sm90
            return;
        }
        ptx::fence_proxy_async();
        ptx::bar_sync(kGroupBarrier + group, 128);
        if (ptx::thread_index() % 128 == 0 && key0 < sequence.rows_k) {  // @keys-that-exist
            sdK.store(p.map_dk, sequence.row_k + key0, head_k, sequence.batch());
            sdV.store(p.map_dv, sequence.row_k + key0, head_k, sequence.batch());
            ptx::cp_async_bulk_wait_group_read<0>();
        }
    }
};

template <class V>
__device__ __forceinline__ void bwd(const BwdSm90Params &p) {
    ptx::griddepcontrol_launch_dependents();  // bwd_convert waits for the end of all this
    prefetch_if_packed<V>(p.map_q, p.map_k, p.map_v, p.map_dout);
    if constexpr (V::kPacked) ptx::griddepcontrol_wait();  // @tile-list-awaited
    // Packed, they are looked up once, here, which takes a while; else each role works them out.
    const DqVisits<V> visits(p.plain);
    const auto mine = [&] { return V::kPacked ? visits : DqVisits<V>(p.plain); };
    if (V::kPacked && visits.k0 >= visits.sequence.rows_k) return;
    const BwdSm90Smem<V> smem{ptx::dynamic_smem_1024()};
    if (ptx::thread_index() == 0) smem.init();
    ptx::bar_sync();

    const int role = uniform(ptx::thread_index() / 128);
    if (role == BwdSm90Smem<V>::kGroups) {
        ptx::setmaxnreg_dec<V::kProducerRegisters>();
        const int warp_in_group = uniform(warp() % 4);
        if (warp_in_group == 0 && lane() == 0) bwd_load<V>(p, smem, mine());
        if (warp_in_group % 2 == 1 && lane() == 0) bwd_add_dq<V>(p, smem, mine(), warp_in_group / 2);
        if constexpr (V::kBlockMask)
            if (warp_in_group == 2 && lane() < smem.kGroups) bwd_load_bits<V>(p, smem, mine());
    } else {
        ptx::setmaxnreg_inc<V::kConsumerRegisters>();
        const DqVisits<V> visit = mine();
        SequenceOf<V> sequence = visit.sequence;
        if (V::kPacked) sequence.seqlen_q = uniform(sequence.seqlen_q), sequence.seqlen_k = uniform(sequence.seqlen_k);
        BwdGroup<V>(p, smem, sequence, role).run(visit);
    }
}

#endif  // CUPYFLASH_BWD_SM90_CUH
