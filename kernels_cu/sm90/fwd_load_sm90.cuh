// The producer of fwd_sm90.cuh, and what it shares with the consumers: the layout of shared memory and the tiles of work.
#ifndef CUPYFLASH_FWD_LOAD_SM90_CUH
#define CUPYFLASH_FWD_LOAD_SM90_CUH
#include "attention/mask_copies.cuh"
#include "attention/pages.cuh"
#include "attention/params_sm90.cuh"
#include "attention/prefill_sm90.cuh"
#include "attention/work_sm90.cuh"
#include "tile/pipeline_sm90.cuh"
#include "tile/tile_sm90.cuh"

// How many keys one copy brings: those of a block, or as many as lie in one page whatever its size, a multiple of 16.
template <class V>
constexpr int kKeyRows = V::kPaged && !V::kWholePages ? 16 : V::kBlockN;

template <class V>
struct FwdSm90Smem {
    using T = typename V::Element;
    using TileQ = SwizzledTile<T, 64, round_up(V::kHeadDim, 16)>;
    using TileO = SwizzledTile<T, 64, round_up(V::kHeadDimV, 16)>;
    using TileK = SwizzledTile<T, V::kBlockN, round_up(V::kHeadDim, 16)>;
    using TileV = SwizzledTile<T, V::kBlockN, round_up(V::kHeadDimV, 16)>;
    static constexpr int kSlotBytes = larger(TileQ::kBytes, TileO::kBytes);
    static constexpr int kGroups = V::kBlockM / 64, kSlots = V::kQSlots, kStages = V::kStages;
    // Where there are stages to spare, K and V of a stage have their barriers in common: one wait and one arrival a step
    // less, but K stays until V is done with (docs/performance.md).
    static constexpr bool kJoint = kStages > 4;
    // The copies of a block of K or V, each of them by a thread that arrives by itself.
    static constexpr int kKeyCopies = V::kBlockN / kKeyRows<V>, kKeyThreads = V::kPaged ? 2 * kKeyCopies : 1;
    // Whether every group has its next Q beside the one in use: then it begins its next tile before it ends this one.
    static constexpr bool kPipelined = kSlots >= 2 * kGroups;
    static_assert(kSlots % kGroups == 0 || kGroups == 2);  // see FwdGroup::wait_q
    using Copies = ForwardMask<V>;
    static constexpr int kK = kSlots * kSlotBytes, kV = kK + kStages * TileK::kBytes;
    static constexpr int kBits = kV + kStages * TileV::kBytes, kBars = kBits + kStages * Copies::kBytes;
    static constexpr int kQueue = kBars + 8 * (2 * kSlots + 4 * kStages + TileQueue<V::kPacked>::kBarriers);
    static_assert(kQueue + TileQueue<V::kPacked>::kBytes == V::kSmemBytes);
    // A group holds V of its last block while it passes blocks that others need: of this tile and, with a window, of the
    // next. Copies of all of them must find a stage, or the number of the next tile would never come.
    static constexpr int kPassed = ceil_div(64 * (kGroups - 1), V::kBlockN) + (V::kWindow && V::kBlockN < 64);
    static_assert(V::kBlockMask || !Mask<V>::kHides || kStages > kPassed);
    static_assert(!V::kPaged || 64 % V::kBlockN == 0);  // whole pages hold 64, and multiples
    // With a block mask it passes no more than these in a row, since K of the block after them must find a stage, too.
    static constexpr int kPassedInARow = kStages - (kJoint ? 2 : 1);
    ptx::u32 base;

    __device__ TileQ q(int slot) const { return {base + slot * kSlotBytes}; }
    // In the place of Q: a row of it lies where that row of Q did, so that warps need not wait for each other.
    __device__ TileO o(int slot) const { return {base + slot * kSlotBytes}; }
    __device__ TileK k(int stage) const { return {base + kK + stage * TileK::kBytes}; }
    __device__ TileV v(int stage) const { return {base + kV + stage * TileV::kBytes}; }
    __device__ Copies mask(int stage) const { return {{base + kBits + stage * Copies::kBytes}}; }
    __device__ ptx::u32 q_full(int slot) const { return bar(slot); }
    __device__ ptx::u32 q_empty(int slot) const { return bar(kSlots + slot); }
    __device__ ptx::u32 k_full(int stage) const { return bar(2 * kSlots + stage); }
    __device__ ptx::u32 k_empty(int stage) const { return bar(2 * kSlots + kStages + stage); }
    __device__ ptx::u32 v_full(int stage) const { return bar(2 * kSlots + (kJoint ? 0 : 2) * kStages + stage); }
    __device__ ptx::u32 v_empty(int stage) const { return bar(2 * kSlots + (kJoint ? 1 : 3) * kStages + stage); }
    __device__ TileQueue<V::kPacked> queue() const { return {bar(2 * kSlots + 4 * kStages), base + kQueue}; }

    __device__ void init() const {  // by one thread
        #pragma unroll 1
        for (int i = 0; i < 2 * kSlots; ++i) ptx::mbarrier_init(bar(i), 1);
        #pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(k_full(i), (kJoint ? 2 : 1) * kKeyCopies + Copies::kTiles);
            ptx::mbarrier_init(k_empty(i), 4 * kGroups);  // @k-released-by-all-warps
            if (!kJoint) ptx::mbarrier_init(v_full(i), kKeyCopies), ptx::mbarrier_init(v_empty(i), 4 * kGroups);
        }
        // @followers-fwd-sm90
        TileQueue<V::kPacked>::init(bar(2 * kSlots + 4 * kStages),
                                    4 * kGroups + 1 + Copies::kTiles + (V::kPacked ? kKeyThreads : 0));
        ptx::fence_mbarrier_init();
    }

  private:
    __device__ ptx::u32 bar(int i) const { return base + kBars + 8 * i; }
};

// A tile of K or V, its rows in the order that columns of S have.
template <class V, class Tile>
__device__ __forceinline__ void load_keys(const Tile &tile, const ptx::TensorMap &map, ptx::u32 full, int row, int head,
                                          int batch) {
    if constexpr (V::kInterleavesKeys) tile.load_interleaved(map, full, row, head, batch, ptx::kEvictLast);
    else tile.load(map, full, row, head, batch, ptx::kEvictLast);
}

// K and V, by one thread, which also decides what is computed; if packed, a warp tells it that.
template <class V>
__device__ __forceinline__ void fwd_load_kv(const FwdSm90Params &p, const FwdSm90Smem<V> &smem) {
    RingPosition<V::kStages> ring;
    auto tiles = producer_tiles<V, Queries, V::kBlockM, Mask<V>::kHides>(p.plain, p.counter, smem.queue());
    for (;;) {
        const QueryWork<V> tile(tiles.next(), p.plain);
        if (!tile.exists()) break;
        const int head = tile.head_k(p.plain.problem), batch = tile.sequence.batch();
        #pragma unroll 1
        for (int j = tile.first; j < tile.end; ++j, ring.next()) {
            if (j == tile.end - 1) tiles.draw();                                   // the answer takes as long as a load
            const int row = tile.sequence.row_k + tile.key_block(j) * V::kBlockN;  // @keys-of-its-sequence
            ptx::mbarrier_wait(smem.k_empty(ring.stage), ring.phase ^ 1);          // @k-empty
            load_keys<V>(smem.k(ring.stage), p.map_k, smem.k_full(ring.stage), row, head, batch);
            if (!smem.kJoint) ptx::mbarrier_wait(smem.v_empty(ring.stage), ring.phase ^ 1);
            // @v-of-its-head-fwd-sm90
            load_keys<V>(smem.v(ring.stage), p.map_v, smem.v_full(ring.stage), row, head, batch);
        }
    }
}

// K or V in pages, by a thread for each of a block's copies; zeros where there is no page of that number. The first of K also
// asks for the next tile.
template <class V, bool kIsV>
__device__ __forceinline__ void fwd_load_pages(const FwdSm90Params &p, const FwdSm90Smem<V> &smem) {
    using Smem = FwdSm90Smem<V>;
    using TileKV = typename Either<kIsV, typename Smem::TileV, typename Smem::TileK>::Type;
    constexpr int kBytes = TileKV::kBytes / Smem::kKeyCopies;  // @bytes-of-a-page
    const int row0 = kKeyRows<V> * lane();
    RingPosition<V::kStages> ring;
    TileFollower<FwdParams> tiles{p.plain, smem.queue()};
    for (;;) {
        const QueryWork<V> tile(tiles.next(), p.plain);
        if (!tile.exists()) break;
        const int head = tile.head_k(p.plain.problem);
        const auto look = [&](int j) {
            int block = j;
            if constexpr (V::kBlockMask) {
                if (j == tile.end) return PageRow{p.plain.pages, 0};  // @end-of-the-list
                block = tile.key_block(j);                            // @keys-of-the-listed-block
            }
            const int key = block * V::kBlockN + row0;
            // @keys-that-count-paged
            return key < tile.sequence.seqlen_k ? page_row(p.plain, tile.sequence.row_k + key)
                                                : PageRow{p.plain.pages, 0};
        };
        PageRow next = look(tile.first);
        #pragma unroll 1
        for (int j = tile.first; j < tile.end; ++j, ring.next()) {
            const PageRow from = next;
            next = look(j + 1);
            if (!kIsV && row0 == 0 && j == tile.end - 1) tiles.draw();
            const ptx::u32 full = kIsV ? smem.v_full(ring.stage) : smem.k_full(ring.stage);
            // @stage-empty-paged
            ptx::mbarrier_wait(kIsV ? smem.v_empty(ring.stage) : smem.k_empty(ring.stage), ring.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, kBytes);
            const auto rows = TileKV{kIsV ? smem.v(ring.stage).base : smem.k(ring.stage).base}.from_row(row0);
            #pragma unroll
            for (int c = 0; c < rows.kChunks; ++c)  // @chunks-of-a-page
                ptx::tma_load_4d(rows.from_chunk(c).base, kIsV ? p.map_v : p.map_k, full, 64 * c, from.row, head,
                                 from.page, ptx::kEvictLast);
        }
    }
}

// The bits of a block mask, by a thread for each of its tiles that a block of keys has.
template <class V>
__device__ __forceinline__ void fwd_load_bits(const FwdSm90Params &p, const FwdSm90Smem<V> &smem) {
    const int mine = lane();
    auto queue = smem.queue();
    for (RingPosition<V::kStages> ring;;) {
        const QueryWork<V> tile(unpack_tile<V::kPacked>(p.plain, queue.next_alone()), p.plain);
        if (!tile.exists()) break;
        const auto mask = BlockMask<V>::of(p.plain, tile.sequence.index, tile.head);
        const auto look = [&](int j) { return smem.mask(0).kind_of(mask, tile.at(j), tile.q0, mine); };
        int next = look(tile.first);
        #pragma unroll 1
        for (int j = tile.first; j < tile.end; ++j, ring.next()) {
            const int kind = next;
            if (j + 1 < tile.end) next = look(j + 1);
            ptx::mbarrier_wait(smem.k_empty(ring.stage), ring.phase ^ 1);  // @bits-empty
            smem.mask(ring.stage).template bring<true>(mask, kind, mine, smem.k_full(ring.stage));
        }
    }
}

// Q, by one warp.
template <class V>
__device__ __forceinline__ void fwd_load_q(const FwdSm90Params &p, const FwdSm90Smem<V> &smem) {
    auto queue = smem.queue();
    for (RingPosition<V::kQSlots> ring;;) {
        const QueryWork<V> tile(unpack_tile<V::kPacked>(p.plain, queue.next()), p.plain);
        if (!tile.exists()) break;
        #pragma unroll 1
        for (int i = 0; i < smem.kGroups; ++i, ring.next()) {
            ptx::mbarrier_wait(smem.q_empty(ring.stage), ring.phase ^ 1);  // @q-empty
            ptx::bar_warp_sync();                                          // @all-lanes-waited-fwd-sm90
            if (lane() == 0)
                smem.q(ring.stage)
                    .load(p.map_q, smem.q_full(ring.stage), tile.sequence.row_q + tile.q0 + 64 * i, tile.head,
                          tile.sequence.batch(), ptx::kEvictFirst);
        }
    }
}

#endif  // CUPYFLASH_FWD_LOAD_SM90_CUH
