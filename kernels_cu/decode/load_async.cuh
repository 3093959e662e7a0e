// A team's keys by cp.async, row by row, on any GPU and for pages of any size: its warps bring a stage together and wait for each
// other, one group of copies a unit. Keys behind the length become zero. Rows that do not start at multiples of 16 bytes
// (kUnaligned) are read in time, one after the other.
#ifndef CUPYFLASH_LOAD_ASYNC_CUH
#define CUPYFLASH_LOAD_ASYNC_CUH
#include "decode/copies_stored.cuh"
#include "decode/cursor.cuh"
#include "decode/scales.cuh"

struct NoCopies { const DecodeParams &p; };

template <class V>
struct AsyncLoader {
    using T = typename V::Element;
    using Source = DecodeParams;
    using Smem = DecodeSmem<V>;
    using Scales = ScalesInRing<V>;
    static constexpr bool kDependent = false;
    static constexpr int kTeams = Smem::kTeams, kBytes = 0, kTeamThreads = 32 * V::kTeam, kThreads = 32 * V::kWarps;
    static constexpr int kPer = kPerChunk<T>, kPieces = Smem::D / kPer;  // of a row of q, 16 bytes each
    static_assert(V::kBoxRows == kSlice && kTeams < 16);
    const DecodeParams &p;
    const DecodeShares<V> &shares;
    const Smem smem;
    const int team, end;
    DecodeCursor<V> at;                                                   // the unit that comes next
    int to = 0, from = 0;                                                 // stages
    typename Either<kScaled<V>, StoredCopies<V>, NoCopies>::Type stored;  // instead, of 8 bits
    int place = 0,
        row = 0;  // where the key of this lane (of 16) of that unit lies: page or row of the cache, row therein

    __device__ static const DecodeParams &plain(const Source &source) { return source; }
    __device__ static ptx::u32 shared_memory() { return ptx::dynamic_smem(); }
    __device__ static void prepare(const Source &, const Smem &, int) {}

    // The team's units are [unit, end), kTeams apart. Asks for the first of them, and for the tile's Q.
    __device__ AsyncLoader(const Source &p, const DecodeShares<V> &shares, const Smem &smem, const DecodeTile<V> &tile,
                           int warp, int unit, int end)
        : p(p), shares(shares), smem(smem), team(warp / V::kTeam), end(end), at(shares, tile, unit), stored{p} {
        at.skip_hidden(shares, team, end);  // @first-seen-unit-copied
        look_up();
        #pragma unroll 1
        for (int i = 0; i < V::kStages; ++i) request();
        request_q(tile);
    }

    // Brings the Q of a tile, by all threads; a barrier follows.
    __device__ void request_q(const DecodeTile<V> &tile) {
        const PackedRows<V> rows(shares, tile);
        #pragma unroll 1
        for (int i = ptx::thread_index(); i < V::kHeads * rows.count * kPieces; i += kThreads) {
            const int col = i % kPieces * kPer, row = i / kPieces % rows.count, head = i / kPieces / rows.count;
            const T *const q = static_cast<const T *>(p.q) + rows.at(p.q_stride, head, row) + col;
            const bool exists = col < V::kHeadDim;
            ptx::st_shared_v4_b32(smem.q(head).at(row, col), exists ? load_chunk<V::kUnaligned>(q) : ptx::U128{});
        }
    }
    __device__ void wait_q() {}
    __device__ static void show_q_to_copies() {}
    // The stage of the next unit, which is there.
    __device__ ptx::u32 wait() {
        ptx::cp_async_wait_group<V::kStages - 1>();  // @unit-has-been-copied
        sync_team();                                 // @unit-seen-by-the-team
        return smem.stage(team, from);
    }
    // The team has read it.
    __device__ void release() {
        sync_team();  // @stage-read-by-the-team
        request();
        from = from + 1 == V::kStages ? 0 : from + 1;
    }

  private:
    __device__ void sync_team() const {
        if constexpr (V::kTeam == 1) ptx::bar_warp_sync();
        else ptx::bar_sync(1 + team, kTeamThreads);
    }
    // Asks for one more unit, if there is one; by the whole team, once the stage is free. A group of copies either way.
    __device__ void request() {
        if (at.unit < end) {
            const int key = at.key(), head = at.head_k(shares, at.tile) + team % Smem::kGroups * V::kPair;
            const ptx::u32 stage = smem.stage(team, to);
            if (key < at.tile.cached.length) {
                if constexpr (kScaled<V>) {
                    stored.copy(smem, stage, head, at.tile.cached.length - key);
                } else {
                    #pragma unroll
                    for (int i = 0; i < V::kPair; ++i)
                        copy(smem.k(stage, i), smem.v(stage, i), head + i, at.tile.cached.length - key);
                }
            }
            to = to + 1 == V::kStages ? 0 : to + 1;
            at.unit += kTeams;
            at.catch_up(shares);
            at.skip_hidden(shares, team, end);  // @next-seen-unit-copied
            look_up();
        }
        ptx::cp_async_commit_group();
    }
    // K and V of 16 keys of one head, of which the first `keys` exist.
    __device__ void copy(typename Smem::TileK sK, typename Smem::TileV sV, int head, int keys) const {
        constexpr int kWidestPieces = round_up(kWidest<V>, 16) / kPer;  // of a row of K or of V
        constexpr int kLanes = next_power_of_two(kWidestPieces);        // of a row, in one pass or several
        constexpr int kLanesPerRow = kLanes < kTeamThreads ? kLanes : kTeamThreads;
        constexpr int kRowsPerPass = kTeamThreads / kLanesPerRow, kPassesPerRow = kLanes / kLanesPerRow;
        constexpr int kPasses = ceil_div(kSlice, kRowsPerPass) * kPassesPerRow;
        const int thread = ptx::thread_index() % kTeamThreads;
        #pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int key = thread / kLanesPerRow + pass / kPassesPerRow * kRowsPerPass;
            const int piece = thread % kLanesPerRow + pass % kPassesPerRow * kLanesPerRow;  // @pieces-of-wide-rows
            const int its_place = ptx::shfl_index(place, key % kSlice), its_row = ptx::shfl_index(row, key % kSlice);
            if (key >= kSlice || piece >= kWidestPieces) continue;
            const bool k_exists = key < keys && kPer * piece < V::kHeadDim;
            const bool v_exists = key < keys && kPer * piece < V::kHeadDimV;
            const auto bring = [&](const void *x, const Strides &s, const auto &tile, auto columns, bool exists) {
                if (piece >= round_up(columns.value, 16) / kPer) return;  // @pieces-of-the-narrower-row
                const T *const src = static_cast<const T *>(x) + its_place * s.batch + its_row * s.row + head * s.head +
                                     (exists ? kPer * piece : 0);
                const ptx::u32 dst = tile.at(key, piece / 8, piece % 8);
                if constexpr (V::kUnaligned) ptx::st_shared_v4_b32(dst, exists ? load_chunk<true>(src) : ptx::U128{});
                else ptx::cp_async_16(dst, src, exists);
            };
            bring(p.k, p.k_stride, sK, Int<V::kHeadDim>(), k_exists);
            bring(p.v, p.v_stride, sV, Int<V::kHeadDimV>(), v_exists);
        }
    }
    // One unit ahead of its use.
    __device__ void look_up() {
        if (at.unit >= end) return;
        if constexpr (kScaled<V>)
            return stored.look_up(at.tile, at.key(), at.head_k(shares, at.tile) + team % Smem::kGroups);
        const int key = min(at.key() + lane() % kSlice, max(at.tile.cached.length - 1, 0));
        place = place_of_key(p, at.tile, key), row = row_in_place<V::kPaged>(p, key);
    }
};

#endif  // CUPYFLASH_LOAD_ASYNC_CUH
