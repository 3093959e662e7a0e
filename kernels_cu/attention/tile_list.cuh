// A list of all tiles of packed keys, each with its sequence, one behind the other without a gap. A kernel that runs before
// makes it (bwd_delta.cuh). Blocks that compute one tile each then read theirs, where a search would take as long as some of
// a short tile's work, and no block is without rows but those behind the last one.
#ifndef CUPYFLASH_TILE_LIST_CUH
#define CUPYFLASH_TILE_LIST_CUH
#include "attention/schedule.cuh"
#include "tile/tile.cuh"

template <int kRows>
struct TileList {
    using S = Sequence<true>;
    static constexpr int kWords = 8;

    // As many as TileIndex counts of a head.
    __device__ static int size(const BwdParams &p) { return S::blocks<kRows>(p.problem, p.problem.seqlen_k); }

    // The tiles of sequences [first, first + 32), by one warp; with the last ones, which are the rows outside, all that is left.
    __device__ static void write(const BwdParams &p, int first) {
        const int lane = ptx::thread_index() % 32, sequences = p.problem.batch + 1;
        int before = 0;  // tiles of the sequences before
        #pragma unroll 4
        for (int b = lane; b < first; b += 32) before += tiles_of(S::of(p, b));
        #pragma unroll
        for (int i = 1; i < 32; i *= 2) before += ptx::shfl_xor(before, i);
        const S mine = S::of(p, min(first + lane, sequences - 1));
        const int own = first + lane < sequences ? tiles_of(mine) : 0;
        const int end = prefix_sum(own, before);  // @tiles-of-the-lanes-before
        #pragma unroll 1
        for (int block = 0; block < own; ++block) put(p, end - own + block, {block, 0, mine});
        const int all = ptx::shfl_index(end, 31);
        const bool is_last = first + 32 >= sequences;  // @no-rows-behind-the-last-tile
        #pragma unroll 1
        for (int i = all + lane; is_last && i < size(p); i += 32) put(p, i, {0, 0, {}});
    }

    // Tile `index`, by all lanes of a warp.
    __device__ static Tile<true> at(const BwdParams &p, const TileIndex &index) {
        const auto *const from = reinterpret_cast<const ptx::U128 *>(p.key_tiles + index.block * kWords);
        const ptx::U128 x = from[0], y = from[1];
        const auto same = [](ptx::u32 word) { return ptx::shfl_index(static_cast<int>(word), 0); };
        return {same(x.x[0]),
                index.head,
                {same(x.x[1]), same(x.x[2]), same(x.x[3]), same(y.x[0]), same(y.x[1]), same(y.x[2])}};
    }

  private:
    __device__ static int tiles_of(const S &s) { return ceil_div(s.rows_k, kRows); }
    // Lengths that contradict may make more tiles than there is room for.
    __device__ static void put(const BwdParams &p, int i, const Tile<true> &tile) {
        const auto u = [](int x) { return static_cast<ptx::u32>(x); };
        if (u(i) >= u(size(p))) return;  // @room-in-the-list
        const S &s = tile.sequence;
        auto *const to = reinterpret_cast<ptx::U128 *>(p.key_tiles + i * kWords);
        to[0] = {u(tile.block), u(s.index), u(s.seqlen_q), u(s.seqlen_k)};
        to[1] = {u(s.row_q), u(s.row_k), u(s.rows_k), 0};
    }
};

#endif  // CUPYFLASH_TILE_LIST_CUH
