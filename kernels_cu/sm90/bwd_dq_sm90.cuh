// dQ on Hopper for wide heads (sm_90a), by recomputation; dK and dV are those of bwd_dkv_sm90.cuh:
//     P = exp(scale * Q K^T - lse),  dS = P * (dO V^T - delta),  dQ = scale * dS K.
//
// A persistent block draws tiles of kBlockM = 128 rows of one (batch, head), keeps their Q and dO in shared memory, and
// visits the key blocks that they see, from the last to the first. Two warpgroups consume: each owns 64 rows, with S, dP
// and dQ in registers, and for each key block issues dQ += dS_{j+1} K_{j+1}, dP_j = dO V_j^T and S_j = Q K_j^T in a row,
// then turns S_j and dP_j into dS_j while the products of the other warpgroup keep the tensor cores busy. In the third
// warpgroup one thread draws the tiles and produces V and K by turns, through one ring: of three stages V_j takes that of
// K_{j+2}, and K_j that of V_{j+1}; a warp for each consumer brings its Q and dO.
//
// Shared memory: two Q | two dO | ring of V and K | mbarriers | queue of work. dQ leaves through its Q tile.
// Its blocks start as those of bwd_dkv end, of which they need nothing.
#ifndef CUPYFLASH_BWD_DQ_SM90_CUH
#define CUPYFLASH_BWD_DQ_SM90_CUH
#include "attention/dropout.cuh"
#include "attention/params_sm90.cuh"
#include "attention/work_sm90.cuh"
#include "tile/pipeline_sm90.cuh"
#include "attention/repair_gradients.cuh"
#include "attention/score.cuh"
#include "attention/slopes.cuh"
#include "tile/epilogue.cuh"
#include "tile/tile_sm90.cuh"

template <class V>
struct BwdDqSmem {
    using T = typename V::Element;
    static constexpr int N = V::kBlockN, kStages = V::kStages, kGroups = V::kBlockM / 64;
    static constexpr int D = round_up(V::kHeadDim, 16), kDimV = round_up(V::kHeadDimV, 16);
    using TileQ = SwizzledTile<T, 64, D>;
    using TileDO = SwizzledTile<T, 64, kDimV>;
    using TileK = SwizzledTile<T, N, D>;
    using TileV = SwizzledTile<T, N, kDimV>;
    static constexpr int kStageBytes = larger(TileK::kBytes, TileV::kBytes);
    static constexpr int kDO = kGroups * TileQ::kBytes, kRing = kDO + kGroups * TileDO::kBytes,
                         kBars = kRing + kStages * kStageBytes;
    static constexpr int kBarriers = 2 * kStages + 4 * kGroups,
                         kQueue = kBars + 8 * (kBarriers + TileQueue<V::kPacked>::kBarriers);
    static_assert(kQueue + TileQueue<V::kPacked>::kBytes == V::kSmemBytes);
    ptx::u32 base;

    __device__ TileQ q(int group) const { return {base + group * TileQ::kBytes}; }
    __device__ TileDO dout(int group) const { return {base + kDO + group * TileDO::kBytes}; }
    __device__ ptx::u32 kv(int stage) const { return base + kRing + stage * kStageBytes; }
    __device__ TileK k(int stage) const { return {kv(stage)}; }
    __device__ TileV v(int stage) const { return {kv(stage)}; }
    __device__ ptx::u32 full(int stage) const { return bar(stage); }
    __device__ ptx::u32 empty(int stage) const { return bar(kStages + stage); }
    __device__ ptx::u32 q_full(int group) const { return bar(2 * kStages + group); }
    __device__ ptx::u32 q_empty(int group) const { return bar(2 * kStages + kGroups + group); }
    __device__ ptx::u32 dout_full(int group) const { return bar(2 * kStages + 2 * kGroups + group); }
    __device__ ptx::u32 dout_empty(int group) const { return bar(2 * kStages + 3 * kGroups + group); }
    __device__ TileQueue<V::kPacked> queue() const { return {bar(kBarriers), base + kQueue}; }

    __device__ void init() const {  // by one thread
        #pragma unroll 1
        for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(full(i), 1), ptx::mbarrier_init(empty(i), 4 * kGroups);
        #pragma unroll 1
        for (int i = 0; i < kGroups; ++i) {
            ptx::mbarrier_init(q_full(i), 1), ptx::mbarrier_init(q_empty(i), 1);
            ptx::mbarrier_init(dout_full(i), 1), ptx::mbarrier_init(dout_empty(i), 4);
        }
        TileQueue<V::kPacked>::init(bar(kBarriers), 4 * kGroups + kGroups + V::kPacked);  // @followers-dq
        ptx::fence_mbarrier_init();
    }

  private:
    __device__ ptx::u32 bar(int i) const { return base + kBars + 8 * i; }
};

// bwd_dkv, which starts before, and may still draw, has the first pair of the counter.
__device__ __forceinline__ int *dq_counter(const BwdSm90Params &p) { return p.counter ? p.counter + 2 : nullptr; }

// V and K of every key block, by one thread, which also decides what is computed; if packed, a warp tells it that.
template <class V>
__device__ __forceinline__ void bwd_dq_load_kv(const BwdSm90Params &p, const BwdDqSmem<V> &smem) {
    using Smem = BwdDqSmem<V>;
    RingPosition<V::kStages> ring;
    auto source = producer_tiles<V, Queries, V::kBlockM, Mask<V>::kHides>(p.plain, dq_counter(p), smem.queue());
    for (;; source.draw()) {
        const QueryWork<V> tile(source.next(), p.plain);
        if (!tile.exists()) break;
        const int head_k = tile.head_k(p.plain.problem), row0 = tile.sequence.row_k, batch = tile.sequence.batch();
        const auto load = [&](auto is_v, const ptx::TensorMap &map, int j) {
            ptx::mbarrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
            const typename Either<decltype(is_v)::value, typename Smem::TileV, typename Smem::TileK>::Type to{
                smem.kv(ring.stage)};
            to.load(map, smem.full(ring.stage), row0 + tile.key_block(j) * V::kBlockN, head_k, batch, ptx::kEvictLast);
            ring.next();
        };
        #pragma unroll 1
        for (int j = tile.end - 1; j >= tile.first; --j)
            load(Bool<true>{}, p.map_v, j), load(Bool<false>{}, p.map_k, j);
    }
}

// Q and dO of one group, by one warp.
template <class V>
__device__ __forceinline__ void bwd_dq_load_rows(const BwdSm90Params &p, const BwdDqSmem<V> &smem, int group) {
    auto queue = smem.queue();
    for (RingPosition<1> tiles;; tiles.next()) {
        const QueryWork<V> tile(unpack_tile<V::kPacked>(p.plain, queue.next()), p.plain);
        if (!tile.exists()) break;
        const auto load = [&](const auto &to, const ptx::TensorMap &map, ptx::u32 full, ptx::u32 empty) {
            ptx::mbarrier_wait(empty, tiles.phase ^ 1);
            ptx::bar_warp_sync();  // @all-lanes-waited-dq
            if (lane() == 0)
                to.load(map, full, tile.sequence.row_q + tile.q0 + 64 * group, tile.head, tile.sequence.batch(),
                        ptx::kEvictFirst);
        };
        load(smem.dout(group), p.map_dout, smem.dout_full(group), smem.dout_empty(group));
        load(smem.q(group), p.map_q, smem.q_full(group), smem.q_empty(group));
    }
}

// One consumer warpgroup.
template <class V>
struct BwdDqGroup {
    using T = typename V::Element;
    static constexpr int N = V::kBlockN, D = V::kHeadDim, kDepth = round_up(D, 16);
    static constexpr int kDepthV = round_up(V::kHeadDimV, 16);  // of dP @depth-of-dp-dq

    const BwdSm90Params &p;
    const Problem &problem;
    const BwdDqSmem<V> &smem;
    const Score<V> score;
    const int group, warp_row;  // of the block; this warp's first row of the 64
    RingPosition<V::kStages> ring;
    float stats[2][2];  // of this lane's two rows: lse, delta

    __device__ BwdDqGroup(const BwdSm90Params &p, const BwdDqSmem<V> &smem, int group)
        : p(p), problem(p.plain.problem), smem(smem), score(problem), group(group), warp_row(warp() % 4 * 16) {}

    __device__ bool leads() const { return ptx::thread_index() % 128 == 0; }
    // All four warps of the group.
    __device__ void sync() const { ptx::bar_sync(kGroupBarrier + group, 128); }

    // Key blocks that the block has and these rows do not need. To be released only once they are full: an earlier
    // arrival would count for the phase before.
    __device__ void pass(int blocks) {
        #pragma unroll 1
        for (int i = 0; i < 2 * blocks; ++i, ring.next()) release_stage();
    }
    __device__ void release_stage() const {
        ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
        arrive_warp(smem.empty(ring.stage));
    }
    // With a block mask a group passes no more than so many blocks in a row while it holds K of the block before, since V of the
    // block after them must find a stage, too.
    static constexpr int kPassedInARow = (V::kStages - 2) / 2;

    __device__ void run() {
        auto queue = smem.queue();
        for (RingPosition<1> tiles;; tiles.next()) {
            const QueryWork<V> tile(unpack_tile<V::kPacked>(p.plain, queue.next()), p.plain);
            if (!tile.exists()) break;
            compute(tile, tiles.phase);
        }
    }

    __device__ void compute(const QueryWork<V> &tile, ptx::u32 tile_phase) {
        const int q0 = tile.q0 + 64 * group;
        const Mask<OneGroup<V>> mask(tile.sequence, problem);
        const auto places = Places<V>::of(p.plain, tile.sequence, tile.head);
        if (q0 >= mask.seqlen_q) {
            pass(tile.end - tile.first);
            ptx::mbarrier_wait(smem.dout_full(group), tile_phase);
            ptx::mbarrier_wait(smem.q_full(group), tile_phase);
            arrive_warp(smem.dout_empty(group));  // all four, and dO is brought before Q: none misses a phase of q_full
            if (leads()) ptx::mbarrier_arrive(smem.q_empty(group));
            return;
        }
        // [first, end): this group's blocks.
        const int end = V::kBlockMask ? tile.end : min(max(mask.end_key_block(q0), tile.first + 1), tile.end);
        const int first = V::kWindow && !V::kBlockMask ? min(max(mask.first_key_block(q0), tile.first), end - 1) : 0;
        // @statistics-of-the-rows-dq
        const float *const stats_at = row_stats_at<64>(p.plain, tile.sequence, tile.head, q0 + warp_row + lane() / 4);
        #pragma unroll
        for (int r = 0; r < 2; ++r) stats[r][0] = stats_at[16 * r], stats[r][1] = stats_at[16 * r + 1];
        pass(tile.end - end);

        AccTile<16, D> dQ;
        FragA<T, 16, N> dS;
        Emitted<V> emitted;
        ptx::mbarrier_wait(smem.dout_full(group), tile_phase);
        ptx::mbarrier_wait(smem.q_full(group), tile_phase);
        {
            AccTile<16, N> S, dP;
            issue_dp(dP);
            issue_s(S);
            const auto added = added_to(tile, places, q0, end - 1);
            ptx::wgmma_wait_group<0>();
            arrived(dP), arrived(S);
            arrive_warp(smem.empty(v_stage()));
            weigh(tile, mask, places, S, dP, q0, end - 1, dS, emitted, added);
        }
        dQ.zero();
        RingPosition<V::kStages> last = ring;  // of K of the block before, with a block mask
        int passed = 0;
        #pragma unroll 1
        for (int j = end - 2; j >= first; --j) {  // @down-to-the-first-block
            if constexpr (V::kBlockMask) {
                if (tile.at(j).sight(group) == kHidden && passed < kPassedInARow) {  // @hidden-block-passed-dq
                    ++passed;
                    ring.next(), release_stage();
                    ring.next(), release_stage();
                    continue;
                }
            }
            RingPosition<V::kStages> before = ring;  // of K
            if constexpr (V::kBlockMask) before = last;
            ring.next();
            AccTile<16, N> S, dP;
            issue_nn<T, N>(dQ, dS, smem.k(before.stage));  // dQ += dS K, of the block before
            issue_dp(dP);
            ptx::wgmma_wait_group<1>();  // @product-complete-dq
            arrived(dQ);
            arrive_warp(smem.empty(before.stage));  // @k-released-dq
            issue_s(S);                             // in the registers that dS leaves
            const auto added = added_to(tile, places, q0, j);
            ptx::wgmma_wait_group<1>();
            arrived(dP);
            arrive_warp(smem.empty(v_stage()));
            ptx::wgmma_wait_group<0>();
            arrived(S);
            weigh(tile, mask, places, S, dP, q0, j, dS, emitted, added);
            if constexpr (V::kBlockMask) last = ring, passed = 0;
        }
        arrive_warp(smem.dout_empty(group));
        if constexpr (Emitted<V>::kAny)
            emitted.template leave<Queries, 64, 4>(p.plain, tile.sequence, tile.head, q0 / 64, warp_row / 16);
        const RingPosition<V::kStages> behind = ring;
        if constexpr (V::kBlockMask) ring = last;
        issue_nn<T, N>(dQ, dS, smem.k(ring.stage));
        ptx::wgmma_wait_group<0>();
        arrived(dQ);
        arrive_warp(smem.empty(ring.stage));
        if constexpr (V::kBlockMask) ring = behind;
        ring.next();
        if constexpr (V::kWindow && !V::kBlockMask) pass(first - tile.first);  // @blocks-before-window-passed-dq
        finish(tile, q0, dQ);
    }

    // dP = dO V^T and S = Q K^T, in this order; leave `ring` at K.
    __device__ void issue_dp(AccTile<16, N> &dP) {
        ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
        issue_nt<T, kDepthV>(dP, smem.dout(group).fresh(), smem.v(ring.stage));
        ring.next();
    }
    __device__ void issue_s(AccTile<16, N> &S) {
        ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
        issue_nt<T, kDepth>(S, smem.q(group).fresh(), smem.k(ring.stage));
    }
    // The stage before the ring's.
    __device__ int v_stage() const { return (ring.stage ? ring.stage : V::kStages) - 1; }  // @stage-of-v

    // What is added to the scores of a block, asked for while they are multiplied.
    __device__ auto added_to(const QueryWork<V> &tile, const Places<V> &head_places, int q0, int number) const {
        // @added-of-the-block
        return head_places.template fetch<true, 16, N>(q0 + warp_row, tile.key_block(number) * N);
    }

    // dS = P * (dP - delta), P = exp(S - lse).
    template <class Added>
    __device__ void weigh(const QueryWork<V> &tile, const Mask<OneGroup<V>> &mask, const Places<V> &head_places,
                          const AccTile<16, N> &S, AccTile<16, N> &dP, int q0, int number, FragA<T, 16, N> &dS,
                          Emitted<V> &emitted, const Added &added) const {
        const int j = tile.key_block(number);
        const auto dropout = Dropout<V>::of(p.plain, tile.sequence.index, tile.head);
        Dropout<V>::drop(dP, dropout.template kept<true, 16, N>(q0 + warp_row, j * N));
        const auto places = head_places.template from_lane<true>(q0 + warp_row, j * N, added);
        if constexpr (Emitted<V>::kAny) {
            const int lane = fresh_lane();
            const auto from_here = mask.from(q0 + warp_row + lane / 4, j * N + 2 * (lane % 4));
            const SeenBits<V, 16, N, true> seen(p.plain, tile.sequence.index, tile.head, q0 + warp_row, j * N);
            dP.for_each([&](int row, int col, float &dp) {
                const float s = S.x[0][col / 8][row / 8 * 2 + col % 2];
                const float by_score = score.P(s, places(row, col), stats[row / 8][0]) * (dp - stats[row / 8][1]);
                // @queries-that-exist-dq
                float seen_of = row < from_here.seqlen_q && from_here.sees(row, col) ? by_score : 0.f;
                if constexpr (V::kBlockMask) seen_of = seen(row, col) ? seen_of : 0.f;
                emitted.add(seen_of, places(row, col), stats[row / 8][0] != kLseOfNothing);
            });
        }
        dP.for_each([&](int row, int col, float &dp) {
            const float s = S.x[0][col / 8][row / 8 * 2 + col % 2];
            const auto at = places(row, col);
            dp = score.dS(s, score.P(s, at, stats[row / 8][0]), dp, stats[row / 8][1], at);
        });
        bool masked;
        if constexpr (V::kBlockMask) masked = tile.at(number).sight(group) != kWhole;
        else masked = !mask.full(q0, j * N);  // @hidden-keys-masked-dq
        if (masked) {
            const int lane = fresh_lane();
            const auto from_here = mask.from(q0 + warp_row + lane / 4, j * N + 2 * (lane % 4));
            const SeenBits<V, 16, N, true> seen(p.plain, tile.sequence.index, tile.head, q0 + warp_row, j * N);
            dP.for_each([&](int row, int col, float &ds) {
                ds = from_here.sees(row, col) ? ds : 0.f;
                if constexpr (V::kBlockMask) ds = seen(row, col) ? ds : 0.f;
            });
        }
        dS.from(dP);
    }

    __device__ void finish(const QueryWork<V> &tile, int q0, AccTile<16, D> &dQ) const {
        const auto sQ = smem.q(group);
        dQ.scale(score.scale);  // @dq-scaled-sm90
        if (!ptx::vote_all(stage<T>(sQ, warp_row, dQ))) {
            ptx::bar_warp_sync();  // the other lanes' stage() wrote parts of these rows
            // @repair-in-its-sequence-dq
            const GradientRepair<OneGroup<V>, 64, false> again(p.plain, tile.sequence.index);
            #pragma unroll 1
            for (int row = warp_row; row < warp_row + 16; ++row) again.dq(tile.head, q0 + row, sQ, row);
        }
        const Sequence<V::kPacked> &sequence = tile.sequence;
        // Behind the last query TMA would write those of the next sequence. @wide-dq-beside-its-neighbour
        const bool shared = V::kPacked && q0 + 64 > sequence.seqlen_q;
        if (shared) {
            ptx::bar_warp_sync();
            write_rows<16, kDepth, D>(sQ, warp_row,
                                      static_cast<T *>(p.plain.dq) + sequence.q_offset(p.plain.dq_stride, tile.head),
                                      p.plain.dq_stride.row, q0 + warp_row, sequence.seqlen_q);
        }
        ptx::fence_proxy_async();
        sync();
        if (leads()) {
            if (!shared) sQ.store(p.map_dq, sequence.row_q + q0, tile.head, sequence.batch());
            ptx::cp_async_bulk_wait_group_read<0>();
            ptx::mbarrier_arrive(smem.q_empty(group));
        }
    }
};

template <class V>
__device__ __forceinline__ void bwd_dq(const BwdSm90Params &p) {
    // bwd_dkv has waited for row_stats, before it let this kernel start: nothing older is to come from the L1.
    ptx::fence_gpu();
    prefetch_if_packed<V>(p.map_q, p.map_k, p.map_v, p.map_dout);
    const BwdDqSmem<V> smem{ptx::dynamic_smem_1024()};
    if (ptx::thread_index() == 0) smem.init();
    ptx::bar_sync();

    const int role = uniform(ptx::thread_index() / 128);
    if (role == smem.kGroups) {
        ptx::setmaxnreg_dec<V::kProducerRegisters>();
        const int warp_in_group = uniform(warp() % 4);
        if (warp_in_group == 0 && lane() == 0) bwd_dq_load_kv<V>(p, smem);
        if (warp_in_group > 0 && warp_in_group <= smem.kGroups) bwd_dq_load_rows<V>(p, smem, warp_in_group - 1);
        if constexpr (V::kPacked)
            if (warp_in_group == 3)
                schedule_tiles<V, Queries, V::kBlockM, Mask<V>::kHides>(p.plain, dq_counter(p), smem.queue());
    } else {
        ptx::setmaxnreg_inc<V::kConsumerRegisters>();
        BwdDqGroup<V>(p, smem, role).run();
    }
    ptx::griddepcontrol_wait();  // what follows on the stream must find dK and dV
}

#endif  // CUPYFLASH_BWD_DQ_SM90_CUH
