// Those warps of bwd_sm90.cuh that move data, by one thread each, and what they share with the consumers: the layout of shared
// memory.
#ifndef CUPYFLASH_BWD_LOAD_SM90_CUH
#define CUPYFLASH_BWD_LOAD_SM90_CUH
#include "attention/bias_copies.cuh"
#include "attention/dq_visits.cuh"
#include "attention/mask_copies.cuh"
#include "attention/params_sm90.cuh"
#include "attention/work_sm90.cuh"
#include "tile/pipeline_sm90.cuh"
#include "tile/tile_sm90.cuh"

// As dq_accum.cuh sees the warpgroup that computes dQ: as if it had four warps for every 64 columns of the tile.
template <class V>
struct DqSm90 : V {
    static constexpr int kDqWarpsM = V::kBlockM / 16, kWarps = ceil_div(V::kHeadDim, 64) * kDqWarpsM, kSplitD = 4;
};

// Of two neighbouring queries.
struct RowStats {
    float x[4];  // lse, delta, lse, delta

    // Those of a lane in columns [8 j, 8 j + 8) of an accumulator; from: where its first ones lie.
    __device__ void load(ptx::u32 from, int j) { ptx::ld_shared_v4_f32(x, from + 64 * j); }
    __device__ float lse(int query) const { return x[2 * query]; }
    __device__ float delta(int query) const { return x[2 * query + 1]; }
};

template <class V>
struct BwdSm90Smem {
    using T = typename V::Element;
    static constexpr int M = V::kBlockM, N = V::kBlockN, kStages = V::kStages;
    static constexpr int D = round_up(V::kHeadDim, 16), kDimV = round_up(V::kHeadDimV, 16);
    static constexpr int kGroups = N / 64, kChunks = ceil_div(D, 64);
    using TileK = SwizzledTile<T, N, D>;
    using TileV = SwizzledTile<T, N, kDimV>;
    using TileQ = SwizzledTile<T, M, D>;
    using TileDO = SwizzledTile<T, M, kDimV>;
    using TileDS = SwizzledTile<T, M, N>;
    // A visit's dQ leaves in so many parts: of many columns one does not fit.
    static constexpr int kDqParts = kChunks > 2 ? kChunks : 1, kDqBytes = 4 * M * 64 * kChunks / kDqParts;
    static constexpr int kV = TileK::kBytes, kQ = kV + TileV::kBytes, kDO = kQ + kStages * TileQ::kBytes;
    static constexpr int kDS = kDO + kStages * TileDO::kBytes, kDQ = kDS + 2 * TileDS::kBytes;
    using CopiedBias = BiasCopy<V, M>;  // of a warp of the consumers
    static constexpr int kStats = kDQ + 2 * kDqBytes, kBias = kStats + kStages * 8 * M;
    // The bits of a block mask for one visit, each group's as soon as it has taken those of the visit before.
    using Copies = MaskCopies<V::kBlockMask ? kGroups : 0>;
    static constexpr int kBits = kBias + (V::kCopiesBias ? 4 * kGroups * CopiedBias::kBytes : 0);
    static constexpr int kBars = kBits + Copies::kBytes, kBarriers = 10 + 3 * kStages + 2 * Copies::kTiles;
    static_assert(Copies::kTiles == 0 || M == kMaskTile);
    static_assert(kBars + 8 * kBarriers == V::kSmemBytes);
    ptx::u32 base;

    __device__ TileK k() const { return {base}; }
    __device__ TileV v() const { return {base + kV}; }
    __device__ TileQ q(int stage) const { return {base + kQ + stage * TileQ::kBytes}; }
    __device__ TileDO dout(int stage) const { return {base + kDO + stage * TileDO::kBytes}; }
    __device__ TileDS ds(int stage) const { return {base + kDS + stage * TileDS::kBytes}; }
    __device__ ptx::u32 dq(int stage) const { return base + kDQ + stage * kDqBytes; }
    __device__ ptx::u32 stats(int stage) const { return base + kStats + stage * 8 * M; }  // [M][2]: lse, delta
    __device__ CopiedBias bias(int warp) const { return {base + kBias + warp * CopiedBias::kBytes}; }
    __device__ Copies mask() const { return {base + kBits}; }
    __device__ ptx::u32 k_full() const { return bar(0); }
    __device__ ptx::u32 v_full() const { return bar(1); }
    __device__ ptx::u32 ds_full(int stage) const { return bar(2 + stage); }
    __device__ ptx::u32 ds_empty(int stage) const { return bar(4 + stage); }
    __device__ ptx::u32 dq_full(int stage) const { return bar(6 + stage); }
    __device__ ptx::u32 dq_empty(int stage) const { return bar(8 + stage); }
    __device__ ptx::u32 q_full(int stage) const { return bar(10 + stage); }
    __device__ ptx::u32 dout_full(int stage) const { return bar(10 + kStages + stage); }
    __device__ ptx::u32 empty(int stage) const { return bar(10 + 2 * kStages + stage); }  // of Q, dO and row_stats
    __device__ ptx::u32 bits_full(int group) const { return bar(10 + 3 * kStages + group); }
    __device__ ptx::u32 bits_empty(int group) const { return bar(10 + 3 * kStages + Copies::kTiles + group); }

    // Where part `c` of the dQ of visit number `visit` goes: whoever computes it has a place of its own.
    __device__ static RingPosition<2> dq_part(int visit, int c) {
        if constexpr (kDqParts == 1) return RingPosition<2>::of(visit);
        static_assert(kDqParts == 1 || kGroups == 2);
        return RingPosition<2>::of(2 * (visit / 2 * kDqParts + c) + visit % 2);  // @place-of-the-part
    }
    __device__ void init() const {  // by one thread
        ptx::mbarrier_init(k_full(), 1), ptx::mbarrier_init(v_full(), 1);
        #pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(ds_full(i), 4 * kGroups), ptx::mbarrier_init(ds_empty(i), 4);
            ptx::mbarrier_init(dq_full(i), 4), ptx::mbarrier_init(dq_empty(i), 1);
        }
        #pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(q_full(i), 1), ptx::mbarrier_init(dout_full(i), 1);
            ptx::mbarrier_init(empty(i), 4 * kGroups);
        }
        #pragma unroll 1
        for (int i = 0; i < Copies::kTiles; ++i)
            ptx::mbarrier_init(bits_full(i), 1), ptx::mbarrier_init(bits_empty(i), 4);
        ptx::fence_mbarrier_init();
    }

  private:
    __device__ ptx::u32 bar(int i) const { return base + kBars + 8 * i; }
};

// K and V once, then Q, dO and row_stats of every visit; by one thread.
template <class V>
__device__ __forceinline__ void bwd_load(const BwdSm90Params &p, const BwdSm90Smem<V> &smem, DqVisits<V> visit) {
    constexpr int M = V::kBlockM;
    const Sequence<V::kPacked> &sequence = visit.sequence;
    const int batch = sequence.batch(), head_k = KeysOf<V>::head_k(p.plain, visit.key_head);
    #pragma unroll 1
    for (int i = 0; i < visit.count; ++i, visit.next()) {
        const auto ring = RingPosition<V::kStages>::of(i);
        const int stage = ring.stage, q0 = visit.q0();
        ptx::mbarrier_wait(smem.empty(stage), ring.phase ^ 1);
        smem.q(stage).load(p.map_q, smem.q_full(stage), sequence.row_q + q0, visit.head, batch, ptx::kEvictNormal,
                           8 * M);
        if (i == 0) smem.k().load(p.map_k, smem.k_full(), sequence.row_k + visit.k0, head_k, batch, ptx::kEvictNormal);
        smem.dout(stage).load(p.map_dout, smem.dout_full(stage), sequence.row_q + q0, visit.head, batch,
                              ptx::kEvictNormal);
        // @v-of-its-head-bwd-sm90
        if (i == 0) smem.v().load(p.map_v, smem.v_full(), sequence.row_k + visit.k0, head_k, batch, ptx::kEvictNormal);
        if (i == 0) ptx::griddepcontrol_wait();  // what bwd_delta makes comes last @row-stats-awaited
        ptx::cp_async_bulk_load(smem.stats(stage), row_stats_at<M>(p.plain, sequence, visit.head, q0), 8 * M,
                                smem.q_full(stage));  // @statistics-of-the-visit-sm90
    }
}

// The bits of a block mask, of every visit that the group of keys sees in part; by a thread for each group.
template <class V>
__device__ __forceinline__ void bwd_load_bits(const BwdSm90Params &p, const BwdSm90Smem<V> &smem, DqVisits<V> visit) {
    const int group = lane();
    RingPosition<1> slot;
    #pragma unroll 1
    for (int i = 0; i < visit.count; ++i, visit.next()) {
        if (visit.sight(group) != kInPart) continue;
        const auto mask = BlockMask<V>::of(p.plain, visit.sequence.index, visit.head);
        const int kind = mask.kind(visit.q0(), visit.k0 + group * kMaskTile);  // @kind-of-the-visit
        ptx::mbarrier_wait(smem.bits_empty(group), slot.phase ^ 1);            // @bits-taken
        smem.mask().template bring<false>(mask, kind, group, smem.bits_full(group));
        slot.next();
    }
}

// Every other dQ, from shared memory to the accumulator; by one thread of two: a share is visible to others, who may wait for
// it, only after about a visit's time, and the next one does not wait for that. dq_turn counts the shares that others wait
// for: that of the tile's first key block, where it stores and they add; in deterministic order every one. Key blocks before
// this one are running: they have a lower block index, or the plan sees to it (dq_visits.cuh).
template <class V>
__device__ __forceinline__ void bwd_add_dq(const BwdSm90Params &p, const BwdSm90Smem<V> &smem, DqVisits<V> visit,
                                           int odd) {
    constexpr int kBytes = BwdSm90Smem<V>::kDqBytes, kParts = BwdSm90Smem<V>::kDqParts;
    ptx::griddepcontrol_wait();  // for bwd_delta, which clears dQ @cleared-dq-awaited
    if (odd) visit.next();
    #pragma unroll 1
    for (int i = odd; i < visit.count; i += 2, visit.next(), visit.next()) {  // @visits-of-the-thread
        auto at = BwdSm90Smem<V>::dq_part(i, 0);
        float *to = DqTile<DqSm90<V>>::accum(p.plain, visit.sequence, visit.head, visit.m_block);
        int *const turn = dq_turn<V>(p.plain, visit.sequence, visit.head, visit.m_block);
        const int rank = visit.rank(p.plain);
        const bool first_stores = first_share_is_stored(p.plain, visit.sequence), stores = first_stores && rank == 0;
        if (V::kDeterministic || first_stores) {
            // @turn-awaited-sm90
            while (ptx::ld_acquire(turn) < (V::kDeterministic ? rank : min(rank, 1)) && !lengths_contradict<V>(p.plain))
                ptx::nanosleep();
            ptx::fence_proxy_async_global();  // @earlier-shares-shown-to-tma
        }
        #pragma unroll 1
        for (int c = 0; c < kParts; ++c, to += kBytes / 4) {  // @part-of-dq-in-its-place
            if constexpr (kParts > 1) at = BwdSm90Smem<V>::dq_part(i, c);
            ptx::mbarrier_wait(smem.dq_full(at.stage), at.phase);                 // @dq-full
            if (stores) ptx::cp_async_bulk_store(to, smem.dq(at.stage), kBytes);  // @first-share-stored
            else ptx::cp_reduce_async_bulk_add_f32(to, smem.dq(at.stage), kBytes);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read<0>();  // @dq-has-left
            ptx::mbarrier_arrive(smem.dq_empty(at.stage));
        }
        if (V::kDeterministic || stores) {
            ptx::cp_async_bulk_wait_group<0>();  // @share-is-written
            ptx::fence_proxy_async_global();     // @share-shown-to-others
            ptx::st_release(turn, rank + 1);     // @turn-passed-on-sm90
        }
    }
}

#endif  // CUPYFLASH_BWD_LOAD_SM90_CUH
