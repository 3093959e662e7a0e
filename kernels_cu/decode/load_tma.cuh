// A team's keys by TMA, on Hopper: its first warp asks for them, and mbarriers say that they are there ("full") and, where warps
// share a stage, that it may be filled again ("empty").
#ifndef CUPYFLASH_LOAD_TMA_CUH
#define CUPYFLASH_LOAD_TMA_CUH
#include "decode/cursor.cuh"
#include "decode/scales.cuh"
#include "tile/pipeline_sm90.cuh"

template <class V>
struct TmaLoader {
    using T = typename V::Element;
    using Source = DecodeSm90Params;
    using Smem = DecodeSmem<V>;
    using Scales = ScalesOfPlaces<V>;
    static constexpr bool kDependent = true;
    static constexpr int kTeams = Smem::kTeams, kBytes = (2 * kTeams * V::kStages + 1) * 8;
    static constexpr int kBoxes = kSlice / V::kBoxRows;
    static_assert((kBoxes == 1 || V::kPair == 1) && !V::kUnaligned && V::kScaleBytes == 0);
    static_assert(V::kHeadDim % 64 == 0 && V::kHeadDimV % 64 == 0);
    const DecodeSm90Params &source;
    const DecodeShares<V> &shares;
    const Smem smem;
    const int warp_index, team, end;
    const bool leads;
    DecodeCursor<V> at;  // the unit that comes next
    RingPosition<V::kStages> to, from;
    int place = 0;        // its page, or its row of the cache
    bool behind = false;  // whether a stage that has been read is not yet asked for again
    ptx::u32 q_phase = 0;

    __device__ static const DecodeParams &plain(const Source &source) { return source.plain; }
    __device__ static ptx::u32 shared_memory() { return ptx::dynamic_smem_1024(); }

    // Before anything else: the barriers of this warp's team, and the maps brought near.
    __device__ static void prepare(const Source &source, const Smem &smem, int warp) {
        if (ptx::thread_index() == 0) ptx::prefetch_tensormap(source.map_k), ptx::prefetch_tensormap(source.map_v);
        if (lane() == 0 && warp % V::kTeam == 0) {
            #pragma unroll 1
            for (int i = 0; i < V::kStages; ++i) {
                ptx::mbarrier_init(full(smem, warp / V::kTeam, i), 1);
                if (V::kTeam > 1) ptx::mbarrier_init(empty(smem, warp / V::kTeam, i), V::kTeam);
            }
            if (warp == 0) ptx::mbarrier_init(q_full(smem), 1);
            ptx::fence_mbarrier_init();  // @barriers-shown-to-tma
        }
        ptx::bar_warp_sync();
    }
    // The team's units are [unit, end), kTeams apart. Asks for the first of them, and for the tile's Q.
    __device__ TmaLoader(const Source &source, const DecodeShares<V> &shares, const Smem &smem,
                         const DecodeTile<V> &tile, int warp, int unit, int end)
        : source(source),
          shares(shares),
          smem(smem),
          warp_index(warp),
          team(warp / V::kTeam),
          end(end),
          leads(warp % V::kTeam == 0),
          at(shares, tile, unit) {
        at.skip_hidden(shares, team, end);  // @first-seen-unit
        look_up();
        if (leads) {
            #pragma unroll 1
            for (int i = 0; i < V::kStages; ++i) request();
        }
        request_q(tile);
    }

    // Asks for the Q of a tile; no warp reads the one before any more. Rows that do not exist stay as they are: nobody asks
    // for their results.
    __device__ void request_q(const DecodeTile<V> &tile) {
        if (warp_index != 0) return;
        const PackedRows<V> rows(shares, tile);
        const int count = V::kHeads * rows.count;
        if (lane() == 0) ptx::mbarrier_arrive_expect_tx(q_full(smem), count * 2 * V::kHeadDim);
        ptx::bar_warp_sync();
        #pragma unroll 1
        for (int i = lane(); i < count; i += 32) {
            const int head = i / rows.count, row = i % rows.count;
            ptx::cp_async_bulk_load(smem.q(head).at(row, 0),
                                    static_cast<const T *>(rows.p.q) + rows.at(rows.p.q_stride, head, row),
                                    2 * V::kHeadDim, q_full(smem));
        }
    }
    __device__ void wait_q() {
        ptx::mbarrier_wait(q_full(smem), q_phase);  // @q-has-arrived
        q_phase ^= 1;
    }
    // By all threads that have written to Q; a barrier follows.
    __device__ static void show_q_to_copies() { ptx::fence_proxy_async(); }  // @prepared-q-shown-to-tma
    // The stage of the next unit, which is there.
    __device__ ptx::u32 wait() {
        ptx::mbarrier_wait(full(smem, team, from.stage), from.phase);  // @unit-has-arrived
        return smem.stage(team, from.stage);
    }
    // The team has read it.
    __device__ void release() {
        if constexpr (V::kTeam == 1) {
            ptx::bar_warp_sync();  // all lanes have read the stage @stage-read-by-the-warp
            request();
        } else {
            arrive_warp(empty(smem, team, from.stage));  // @stage-read-by-a-warp
            if (leads && behind && at.unit < end) {      // the stage before, which the others have left by now
                ptx::mbarrier_wait(empty(smem, team, to.stage), to.phase ^ 1);  // @stage-is-empty
                request();
            }
            behind = true;
        }
        from.next();
    }

  private:
    __device__ static ptx::u32 full(const Smem &smem, int team, int i) {
        return smem.bars() + (team * V::kStages + i) * 8;
    }
    __device__ static ptx::u32 empty(const Smem &smem, int team, int i) { return full(smem, kTeams + team, i); }
    __device__ static ptx::u32 q_full(const Smem &smem) { return full(smem, 2 * kTeams, 0); }

    // Asks for one more unit, if there is one. By the whole first warp, once the stage is free.
    __device__ void request() {
        if (at.unit >= end) return;
        const int key = at.key(), head = at.head_k(shares, at.tile) + team % Smem::kGroups * V::kPair;
        const ptx::u32 bar = full(smem, team, to.stage), stage = smem.stage(team, to.stage);
        const bool copies = key < at.tile.cached.length;
        if (lane() == 0) ptx::mbarrier_arrive_expect_tx(bar, copies ? Smem::kStageBytes : 0);
        const auto copy = [&](const ptx::TensorMap &map, ptx::u32 dst, int columns, int box) {
            const int row = key + box * V::kBoxRows;
            ptx::tma_load_5d(dst + box * V::kBoxRows * V::kKvBytes * columns, map, bar, 0,
                             row_in_place<V::kPaged>(shares.p, row), 0, head, place, ptx::kEvictFirst);
        };
        if constexpr (kBoxes > 1) ptx::bar_warp_sync();  // a box a lane, which the barrier expects by now
        if (lane() < kBoxes && copies) {
            copy(source.map_k, smem.k(stage, 0).base, V::kHeadDim, lane());
            copy(source.map_v, smem.v(stage, 0).base, V::kHeadDimV, lane());  // @boxes-of-v
        }
        to.next();
        at.unit += kTeams;
        at.catch_up(shares);
        at.skip_hidden(shares, team, end);  // @next-seen-unit
        look_up();
    }
    // Where this lane's box of the unit that comes next lies, one unit ahead of its use.
    __device__ void look_up() {
        if (at.unit < end) place = place_of_key(shares.p, at.tile, at.key() + lane() % kBoxes * V::kBoxRows);
    }
};

#endif  // CUPYFLASH_LOAD_TMA_CUH
