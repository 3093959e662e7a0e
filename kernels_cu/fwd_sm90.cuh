// Forward attention on Hopper with wgmma and TMA (sm_90a):
//     O = softmax(scale * Q K^T) V,   lse = ln sum exp(scale * Q K^T),   FlashAttention-2 (Dao 2023), algorithm 1, split
// into a producer and consumers as in FlashAttention-3 (Shah et al. 2024).
//
// A persistent block draws tiles of kBlockM = 64 * kGroups rows of one (batch, head). One warpgroup produces: a thread
// brings K_j and V_j into two rings of stages and draws tile numbers, a warp brings Q into a ring of its own, so that the
// next tile's operands arrive while this one is computed. Every other warpgroup consumes: it owns 64 rows, with S, P and
// O in registers, and for each key block, from the last to the first, issues S_j = Q K_j^T and O += P_{j+1} V_{j+1}
// together, then turns S_j into P_j while the products of the other warpgroups keep the tensor cores busy. A warpgroup
// visits only the key blocks that its own rows see, and merely releases the others.
//
// Shared memory: Q tiles (stage, group) | K ring | V ring | mbarriers | queue of work. O leaves through its Q tile.
#ifndef CUPYFLASH_FWD_SM90_CUH
#define CUPYFLASH_FWD_SM90_CUH
#include "mask.cuh"
#include "nonfinite.cuh"
#include "params_sm90.cuh"
#include "pipeline_sm90.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

template <class V>
struct FwdSm90Smem {
    using T = typename V::Element;
    using TileQ = SwizzledTile<T, 64, round_up(V::kHeadDim, 16)>;
    using TileKV = SwizzledTile<T, V::kBlockN, round_up(V::kHeadDim, 16)>;
    static constexpr int kGroups = V::kBlockM / 64, kSlots = kGroups * V::kQStages, kStages = V::kStages;
    static constexpr int kK = kSlots * TileQ::kBytes, kV = kK + kStages * TileKV::kBytes;
    static constexpr int kBars = kV + kStages * TileKV::kBytes;
    static constexpr int kQueue = kBars + 8 * (2 * kSlots + 4 * kStages + WorkQueue::kBarriers);
    ptx::u32 base;

    __device__ TileQ q(int slot) const { return {base + slot * TileQ::kBytes}; }
    __device__ TileKV k(int stage) const { return {base + kK + stage * TileKV::kBytes}; }
    __device__ TileKV v(int stage) const { return {base + kV + stage * TileKV::kBytes}; }
    __device__ ptx::u32 q_full(int slot) const { return bar(slot); }
    __device__ ptx::u32 q_empty(int slot) const { return bar(kSlots + slot); }
    __device__ ptx::u32 k_full(int stage) const { return bar(2 * kSlots + stage); }
    __device__ ptx::u32 k_empty(int stage) const { return bar(2 * kSlots + kStages + stage); }
    __device__ ptx::u32 v_full(int stage) const { return bar(2 * kSlots + 2 * kStages + stage); }
    __device__ ptx::u32 v_empty(int stage) const { return bar(2 * kSlots + 3 * kStages + stage); }
    __device__ WorkQueue queue() const { return {bar(2 * kSlots + 4 * kStages), base + kQueue}; }

    __device__ void init() const {  // by one thread
        #pragma unroll 1
        for (int i = 0; i < 2 * kSlots; ++i) ptx::mbarrier_init(bar(i), 1);
        #pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(k_full(i), 1), ptx::mbarrier_init(k_empty(i), 4 * kGroups);
            ptx::mbarrier_init(v_full(i), 1), ptx::mbarrier_init(v_empty(i), 4 * kGroups);
        }
        WorkQueue::init(bar(2 * kSlots + 4 * kStages), 4 * kGroups + 1);
        ptx::fence_mbarrier_init();
    }

  private:
    __device__ ptx::u32 bar(int i) const { return base + kBars + 8 * i; }
};

// The 64 rows of one warpgroup, for the mask.
template <class V>
struct OneGroup : V {
    static constexpr int kBlockM = 64;
};

// A tile of work, as the roles hand it on, and which key blocks [first, end) its rows see. An empty range is widened to
// one block, in which the mask then hides everything.
template <class V>
struct FwdTile {
    int block, head, batch;  // block: along the sequence; -1: there are no more tiles
    int q0, first, end;

    __device__ static int count(const Problem &p) { return ceil_div(p.seqlen_q, V::kBlockM) * p.heads_q * p.batch; }
    __device__ static ptx::U128 pack(int number, const Problem &p) {
        if (number >= count(p)) return {~0u};
        const auto index = TileIndex::at<Mask<V>::kHides>(number, p, ceil_div(p.seqlen_q, V::kBlockM), p.heads_q);
        return {static_cast<ptx::u32>(index.block), static_cast<ptx::u32>(index.head),
                static_cast<ptx::u32>(index.batch)};
    }
    __device__ FwdTile(const ptx::U128 &packed, const Problem &p)
        : block(packed.x[0]), head(packed.x[1]), batch(packed.x[2]), q0(block * V::kBlockM) {
        const Mask<V> mask(p);
        first = mask.first_key_block(q0), end = max(first + 1, mask.end_key_block(q0));
    }
    __device__ bool exists() const { return block >= 0; }
    __device__ int head_k(const Problem &p) const { return head / (p.heads_q / p.heads_k); }
};

// K and V, by one thread, which also decides what is computed.
template <class V>
__device__ __forceinline__ void fwd_load_kv(const FwdSm90Params &p, const FwdSm90Smem<V> &smem) {
    const Problem &problem = p.plain.problem;
    WorkQueue queue = smem.queue();
    RingPosition<V::kStages> ring;
    for (TileNumbers numbers(p.counter);; numbers.draw()) {
        const ptx::U128 work = FwdTile<V>::pack(numbers.number, problem);
        queue.publish(work);
        const FwdTile<V> tile(work, problem);
        if (!tile.exists()) {
            numbers.finish();
            break;
        }
        const int head = tile.head_k(problem);
        #pragma unroll 1
        for (int j = tile.end - 1; j >= tile.first; --j, ring.next()) {
            ptx::mbarrier_wait(smem.k_empty(ring.stage), ring.phase ^ 1);
            smem.k(ring.stage).load(p.map_k, smem.k_full(ring.stage), j * V::kBlockN, head, tile.batch,
                                    ptx::kEvictLast);
            ptx::mbarrier_wait(smem.v_empty(ring.stage), ring.phase ^ 1);
            smem.v(ring.stage).load(p.map_v, smem.v_full(ring.stage), j * V::kBlockN, head, tile.batch,
                                    ptx::kEvictLast);
        }
    }
}

// Q, by one warp.
template <class V>
__device__ __forceinline__ void fwd_load_q(const FwdSm90Params &p, const FwdSm90Smem<V> &smem) {
    WorkQueue queue = smem.queue();
    for (RingPosition<V::kQStages> ring;; ring.next()) {
        const FwdTile<V> tile(queue.next(), p.plain.problem);
        if (!tile.exists()) break;
        #pragma unroll 1
        for (int i = 0; i < smem.kGroups; ++i) {
            const int slot = ring.stage * smem.kGroups + i;
            ptx::mbarrier_wait(smem.q_empty(slot), ring.phase ^ 1);
            ptx::bar_warp_sync();
            if (lane() == 0)
                smem.q(slot).load(p.map_q, smem.q_full(slot), tile.q0 + 64 * i, tile.head, tile.batch, ptx::kEvictFirst);
        }
    }
}

// One consumer warpgroup.
template <class V>
struct FwdGroup {
    using T = typename V::Element;
    static constexpr int N = V::kBlockN, D = V::kHeadDim, kDepth = round_up(D, 16);
    using Softmax = OnlineSoftmax<16>;

    const FwdSm90Params &p;
    const Problem &problem;
    const FwdSm90Smem<V> &smem;
    const Mask<OneGroup<V>> mask;
    const Score<V> score;
    const int group, warp_row;  // of the block; this warp's first row of the 64
    RingPosition<V::kStages> ring;
    int leaving = -1;  // the Q tile through which the O of the tile before is leaving

    __device__ FwdGroup(const FwdSm90Params &p, const FwdSm90Smem<V> &smem, int group)
        : p(p), problem(p.plain.problem), smem(smem), mask(problem), score(problem), group(group),
          warp_row(warp() % 4 * 16) {}

    __device__ bool leads() const { return ptx::thread_index() % 128 == 0; }
    // All four warps of the group.
    __device__ void sync() const { ptx::bar_sync(1 + group, 128); }

    // Key blocks that the tile has and these rows do not need. To be released only once they are full: an earlier
    // arrival would count for the phase before.
    __device__ void pass(int blocks) {
        #pragma unroll 1
        for (int i = 0; i < blocks; ++i, ring.next()) {
            ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);
            arrive_warp(smem.k_empty(ring.stage));
            ptx::mbarrier_wait(smem.v_full(ring.stage), ring.phase);
            arrive_warp(smem.v_empty(ring.stage));
        }
    }
    // Hands the Q tile that O leaves through back to the producer, once the copy has read it.
    __device__ void release_leaving() {
        if (leads() && leaving >= 0) {
            ptx::cp_async_bulk_wait_group_read<0>();
            ptx::mbarrier_arrive(smem.q_empty(leaving));
        }
        leaving = -1;
    }

    __device__ void apply_mask(AccTile<16, N> &S, int q0, int j) const {
        const int lane = fresh_lane();
        const auto from_here = mask.from(q0 + warp_row + lane / 4, j * N + 2 * (lane % 4));
        S.for_each([&](int row, int col, float &s) { s = from_here.sees(row, col) ? s : -ptx::infinity(); });
    }
    __device__ void apply_score(AccTile<16, N> &S) const {
        S.for_each([&](int, int, float &s) { s = score(s); });
    }

    __device__ void compute(const FwdTile<V> &tile, int slot, ptx::u32 q_phase) {
        const int q0 = tile.q0 + 64 * group;
        const auto sQ = smem.q(slot);
        if (q0 >= problem.seqlen_q) {
            pass(tile.end - tile.first);
            ptx::mbarrier_wait(smem.q_full(slot), q_phase);
            release_leaving();
            sync();  // all warps have seen this phase of q_full before it can end
            if (leads()) ptx::mbarrier_arrive(smem.q_empty(slot));
            return;
        }
        // [first, end): this group's blocks. From `cut` on, a block may hide keys, or is the first or the second that a
        // row sees: its maximum counts. Below `whole`, the window's left side may hide some.
        const int end = min(max(mask.end_key_block(q0), tile.first + 1), tile.end);
        const int first = V::kWindow ? min(max(mask.first_key_block(q0), tile.first), end - 1) : 0;
        const int cut = max(0, mask.end_key(q0) - 1) / N - 1;
        const int whole = V::kWindow ? ceil_div(mask.first_key(q0 + 63), N) : 0;

        pass(tile.end - end);
        ptx::mbarrier_wait(smem.q_full(slot), q_phase);

        AccTile<16, D> O;
        FragA<T, 16, N> P;
        Softmax softmax(score.log2_factor);
        typename Softmax::Rows rescale;
        {
            AccTile<16, N> S;
            ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);
            issue_nt<T, kDepth>(S, sQ, smem.k(ring.stage));  // S = Q K^T
            ptx::wgmma_wait_group<0>();
            arrived(S);
            arrive_warp(smem.k_empty(ring.stage));
            apply_score(S);
            apply_mask(S, q0, end - 1);
            softmax.raise_maximum(S, rescale);
            softmax.exponentiate(S);
            P.from(S);
            release_leaving();
        }
        O.zero();

        // One key block. kCareful: it may hide keys, and its maximum counts.
        const auto step = [&](int j, auto careful) {
            constexpr bool kCareful = decltype(careful)::value;
            const RingPosition<V::kStages> before = ring;
            ring.next();
            AccTile<16, N> S;
            ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);
            issue_nt<T, kDepth>(S, sQ, smem.k(ring.stage));  // S = Q K^T
            ptx::mbarrier_wait(smem.v_full(before.stage), before.phase);
            issue_nn<T, N>(O, P, smem.v(before.stage));  // O += P V, of the block before
            ptx::wgmma_wait_group<1>();
            arrived(S);
            bool grows = false, good = true;
            if constexpr (kCareful) {
                apply_score(S);
                apply_mask(S, q0, j);
                grows = softmax.raise_maximum(S, rescale);
                softmax.exponentiate(S);  // P = exp(S - m)
            }
            ptx::wgmma_wait_group<0>();
            arrived(O);
            arrive_warp(smem.v_empty(before.stage));
            if constexpr (!kCareful) {
                apply_score(S);
                good = softmax.exponentiate_optimistically(S);
            }
            P.from(S);
            if (!good) {
                multiply_nt<T, kDepth>(S, sQ, warp_row, smem.k(ring.stage));
                apply_score(S);
                grows = softmax.raise_maximum(S, rescale);
                softmax.exponentiate(S);
                P.from(S);
            }
            arrive_warp(smem.k_empty(ring.stage));
            if (grows) softmax.multiply_rows(O, rescale);  // O follows m
        };
        // Careful blocks, ordinary ones, and with a window careful ones again.
        int j = end - 2;
        for (int until = max(first, cut);; until = first) {
            if constexpr (Mask<V>::kHides) {
                #pragma unroll 1
                for (; j >= until; --j) step(j, Bool<true>{});
            }
            #pragma unroll 1
            for (; j >= max(first, whole); --j) step(j, Bool<false>{});
            if (!V::kWindow || j < first) break;
        }

        ptx::mbarrier_wait(smem.v_full(ring.stage), ring.phase);
        issue_nn<T, N>(O, P, smem.v(ring.stage));
        typename Softmax::Rows lse, inverse;
        softmax.finish(score.unit, lse, inverse, [&](int row) { return mask.sees_nothing(q0 + warp_row + row); });
        const long long lse_row = static_cast<long long>(tile.batch * problem.heads_q + tile.head) *
                                  problem.seqlen_q;
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int qi = q0 + warp_row + O.row(0, 2 * r);
            if (p.plain.lse && lane() % 4 == 0 && qi < problem.seqlen_q) p.plain.lse[lse_row + qi] = lse[r];
        }
        ptx::wgmma_wait_group<0>();
        arrived(O);
        arrive_warp(smem.v_empty(ring.stage));
        ring.next();
        if constexpr (V::kWindow) pass(first - tile.first);

        softmax.multiply_rows(O, inverse);
        stage<T>(sQ, warp_row, O);
        if constexpr (Mask<V>::kHides) {
            if (ptx::vote_any(!O.finite())) repair(tile, q0, sQ, O, softmax, inverse);
        }
        ptx::fence_proxy_async();
        sync();
        if (leads()) sQ.store(p.map_o, q0, tile.head, tile.batch);
        leaving = slot;
        if (V::kQStages == 1) release_leaving();  // the next tile's Q is waiting for it
    }

    // Rows of O that are not finite, perhaps only because 0 * NaN of a hidden key leaked into them, are computed anew.
    template <class Tile>
    __device__ void repair(const FwdTile<V> &tile, int q0, const Tile &sQ, const AccTile<16, D> &O,
                           const Softmax &softmax, const float (&inverse)[2]) const {
        const FwdParams &plain = p.plain;
        const T *q = static_cast<const T *>(plain.q) + head_offset(plain.q_stride, tile.batch, tile.head);
        const T *k = static_cast<const T *>(plain.k) + head_offset(plain.k_stride, tile.batch, tile.head_k(problem));
        const T *v = static_cast<const T *>(plain.v) + head_offset(plain.v_stride, tile.batch, tile.head_k(problem));
        float sum[2] = {};  // 0 if all elements are finite, else NaN
        #pragma unroll
        for (int i = 0; i < D / 2; ++i) sum[i / 2 % 2] = fmaf(O.x[0][i / 4][i % 4], 0.f, sum[i / 2 % 2]);
        ptx::bar_warp_sync();  // the other lanes' stage() wrote parts of these rows
        #pragma unroll 1
        for (int row = 0; row < 16; ++row) {
            const int qi = q0 + warp_row + row, owner = row % 8 * 4;
            const bool lower = row < 8;
            const float row_sum = quad_reduce(lower ? sum[0] : sum[1], [](float a, float b) { return a + b; });
            const float m = ptx::shfl_index(lower ? softmax.m[0] : softmax.m[1], owner);
            const float by = ptx::shfl_index(lower ? inverse[0] : inverse[1], owner);
            if (ptx::shfl_index(row_sum, owner) == 0.f || by != by || qi >= problem.seqlen_q) continue;
            recompute_row<T, D>(sQ, warp_row + row, q + qi * plain.q_stride.row, k, plain.k_stride.row, v,
                                plain.v_stride.row, mask.first_key(qi), mask.end_key(qi), by,
                                [&](float s) { return ptx::ex2((score(s) - m) * softmax.factor); });
        }
    }
};

template <class V>
__device__ __forceinline__ void fwd(const FwdSm90Params &p) {
    const FwdSm90Smem<V> smem{ptx::dynamic_smem_1024()};
    if (ptx::thread_index() == 0) smem.init();
    ptx::bar_sync();
    const ptx::i64 cycles = V::kClocks ? ptx::clock64() : 0, nanoseconds = V::kClocks ? ptx::globaltimer() : 0;

    const int role = ptx::shfl_index(ptx::thread_index() / 128, 0);  // uniform across the warp, and known to be
    if (role == smem.kGroups) {
        ptx::setmaxnreg_dec<V::kProducerRegisters>();
        const int warp_in_group = ptx::shfl_index(warp() % 4, 0);
        if (warp_in_group == 0 && lane() == 0) fwd_load_kv<V>(p, smem);
        if (warp_in_group == 1) fwd_load_q<V>(p, smem);
    } else {
        ptx::setmaxnreg_inc<V::kConsumerRegisters>();
        FwdGroup<V> consumer(p, smem, role);
        WorkQueue queue = smem.queue();
        for (RingPosition<V::kQStages> q_ring;; q_ring.next()) {
            const FwdTile<V> tile(queue.next(), p.plain.problem);
            if (!tile.exists()) break;
            consumer.compute(tile, q_ring.stage * smem.kGroups + role, q_ring.phase);
        }
        consumer.release_leaving();  // shared memory must outlive the store
        if (V::kClocks && ptx::thread_index() == 0) {
            p.clocks[2 * ptx::block_index()] = ptx::clock64() - cycles;
            p.clocks[2 * ptx::block_index() + 1] = ptx::globaltimer() - nanoseconds;
        }
    }
}

#endif  // CUPYFLASH_FWD_SM90_CUH
