// Who reads which keys. A tile is all keys that the query rows of one sequence see, for kHeads neighbouring K/V heads and up to
// kBlockM of the rows packed together. The units of work of all tiles stand in one row, and
//     ranges    every block takes an equal, contiguous part of it, found from the lengths on the device ("stream-K"): blocks
//               end together however ragged the batch is, and leave at most two partial results each;
//     splits    every tile has as many blocks, or as many as it has parts of split_slices: what a block computes then does not
//               depend on other sequences. Packed, blocks find their parts among those of all tiles, as in ranges;
//     clusters  likewise, kCluster blocks that combine through distributed shared memory; only if all sequences have the same
//               units: else ranges.
// Lengths, and which rows of the cache are whose, are read here only; what is out of range is clamped.
#ifndef CUPYFLASH_SHARES_CUH
#define CUPYFLASH_SHARES_CUH
#include "decode/tiles.cuh"
#include "decode/cached.cuh"
#include "decode/slices.cuh"
#include "attention/mask.cuh"

// Which units there are, and which are a block's.
template <class V>
struct DecodeShares {
    using Cached = CachedSequence<V::kPacked>;
    using Tile = DecodeTile<V>;
    static constexpr int kGroups = V::kHeads / V::kPair;
    const DecodeParams &p;
    const int member;  // which of its gang the block is
    int ranges, each, rest;
    int of_each = 0;  // the units of a sequence, if all have the same
    bool in_clusters = false;

    // By whole warps.
    __device__ DecodeShares(const DecodeParams &p, int member)
        : p(p), member(member), ranges(p.shares.ranges), each(0), rest(0) {
        if (p.shares.splits) return;
        if (V::kCluster && p.problem.batch == 1) {
            in_clusters = true;
            return;
        }
        int total = 0, least = 1 << 30, most = 0;
        #pragma unroll 8
        for (int b = lane(); b < sequences(); b += 32) {
            const int own = all_units(cached(b));
            total += own, least = min(least, own), most = max(most, own);
        }
        #pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            total += ptx::shfl_index(total, lane() ^ i);
            least = min(least, ptx::shfl_index(least, lane() ^ i)), most = max(most, ptx::shfl_index(most, lane() ^ i));
        }
        if (least == most && p.shares.even_ranges) ranges = p.shares.even_ranges;
        if (least == most) of_each = most, in_clusters = p.shares.clusters > 0;
        each = total / ranges, rest = total % ranges;
    }
    // Whether every tile has blocks of its own.
    __device__ bool are_split() const { return p.shares.splits || (V::kCluster && in_clusters); }
    // Units of range r: [begin(r), begin(r + 1)); the first `rest` have one more.
    __device__ int begin(int r) const { return r * each + min(r, rest); }
    __device__ int range_of(int unit) const {
        const int larger = rest * (each + 1);
        return unit < larger ? unit / (each + 1) : rest + (unit - larger) / each;
    }

    // Packed, rows behind the last sequence are one more, in which no query sees a key.
    __device__ int sequences() const { return p.problem.batch + V::kPacked; }
    __device__ Cached cached(int b) const {
        const Problem &problem = p.problem;
        Cached c;
        int more = p.appended;
        if constexpr (V::kPacked) {
            c.first = Sequence<true>::start_q(p, b), c.count = max(0, Sequence<true>::start_q(p, b + 1) - c.first);
            more = more && b < problem.batch ? c.count : 0;
            if (b < problem.batch && c.count > p.most_queries) c.count = 0;  // @many-queries-left-out
        }
        c.length = min(used_rows(p, b) + more, problem.seqlen_k);  // @keys-with-the-new-ones
        const int seqlen_q = c.seqlen_q(problem);
        const Sequence<V::kPacked> s{b, seqlen_q, c.length, c.row_q(), 0, c.length};
        const Mask<V> mask(with_range<V>(s, p), problem);
        c.first_slice = max(0, mask.first_key(0)) / kSlice;  // @first-slice-of-the-window
        // A sequence of which no key is seen has a slice too, in which its zeros are written. @slice-of-an-empty-sequence
        c.slices = max(1, ceil_div(mask.end_key(seqlen_q - 1), kSlice) - c.first_slice);
        return c;
    }
    __device__ int units(const Cached &c) const { return c.slices * kGroups; }
    // A sequence's tiles: those of the same heads follow each other.
    __device__ int row_tiles(const Cached &c) const {
        return V::kPacked ? ceil_div(c.seqlen_q(p.problem) * p.shares.group, V::kBlockM) : p.shares.row_tiles;
    }
    __device__ int turns(const Cached &c) const { return row_tiles(c) * p.shares.head_turns; }
    // What of a tile stands in the row of all: its units; packed splits, whose number of tiles nobody but the device knows, have
    // one of their parts, and one of the tiles themselves.
    template <bool kTiles = false>
    __device__ int counted(const Cached &c) const {
        if constexpr (V::kPacked)
            if (p.shares.splits) return kTiles ? 1 : parts(c);  // @parts-or-tiles
        return units(c);
    }
    template <bool kTiles = false>
    __device__ int all_units(const Cached &c) const {
        return counted<kTiles>(c) * turns(c);
    }

    // The tile that holds a unit; packed splits, behind the last one that is of no sequence. By whole warps.
    template <bool kTiles = false>
    __device__ Tile find(int unit) const {
        int before = 0, b = V::kPacked ? sequences() : 0;
        if (of_each) b = unit / of_each, before = b * of_each;  // @sequence-of-a-unit
        #pragma unroll 1
        for (int b0 = 0; !of_each && (!V::kPacked || b0 < sequences()); b0 += 32) {
            const int mine = b0 + lane(), own = mine < sequences() ? all_units<kTiles>(cached(mine)) : 0;
            const int upto = prefix_sum(own);
            const int all = ptx::shfl_index(upto, 31);
            if (unit < before + all) {
                const int i = ptx::popc(ptx::vote_ballot(before + upto <= unit));
                b = b0 + i, before += ptx::shfl_index(upto, i) - ptx::shfl_index(own, i);
                break;
            }
            before += all;
        }
        const Cached c = cached(b);
        const int n = counted<kTiles>(c), turn = (unit - before) / n;
        return {b, turn, before + turn * n, before + (turn + 1) * n, c};
    }
    // Splits: tile number i, whose units are counted by themselves; packed, without any behind the last.
    __device__ Tile tile_at(int i) const {
        if constexpr (V::kPacked) return by_itself(find<true>(i));
        const int most = p.shares.row_tiles * p.shares.head_turns;
        const int b = V::kCluster ? quick_divide(i, p.shares.by_turns) : i / most;
        const Cached c = cached(b);
        return {b, i - b * most, 0, units(c), c};
    }
    __device__ Tile by_itself(const Tile &tile) const {
        const bool exists = 0 <= tile.turn && tile.turn < turns(tile.cached);
        return {tile.index, tile.turn, 0, exists ? units(tile.cached) : 0, tile.cached};
    }
    // Units of a split of such a tile. Packed, a sequence of many rows has larger ones: those of all its tiles are not many
    // more than a tile's.
    __device__ int split_units(const Cached &c) const {
        int own = p.shares.split_slices;
        if constexpr (V::kPacked) own *= row_tiles(c);
        return (own ? own : ceil_div(c.slices, p.shares.splits)) * kGroups;
    }
    __device__ int parts(const Cached &c) const { return ceil_div(units(c), split_units(c)); }
    // The tile of which a block has a part, and which of its parts that is.
    __device__ Tile tile_of_part(int number, int &rank) const {
        if constexpr (V::kPacked) {
            const Tile tile = find(number);
            rank = number - tile.begin;  // @part-of-its-tile
            return by_itself(tile);
        }
        rank = number % p.shares.splits;
        return tile_at(number / p.shares.splits);
    }
    // Packed: the number of the first part of a tile. By whole warps.
    __device__ int first_part(const Tile &tile) const {
        int before = 0;
        #pragma unroll 1
        for (int b = lane(); b < tile.index; b += 32) before += all_units(cached(b));
        #pragma unroll
        for (int i = 1; i < 32; i *= 2) before += ptx::shfl_index(before, lane() ^ i);
        return before + tile.turn * parts(tile.cached);
    }

    __device__ int row_tile(const Tile &tile) const {
        const int n = row_tiles(tile.cached);
        return n == 1 ? 0 : tile.turn % n;
    }
    // The first of its heads.
    __device__ int head_k(const Tile &tile) const {
        const int n = row_tiles(tile.cached), turn = n == 1 ? tile.turn : tile.turn / n;
        return (turn * p.shares.gang + member) * V::kHeads;
    }
    // Where range r leaves its partial result of a tile, in rows: it has a place for the tile in which it begins, and one
    // for the tile in which it ends.
    __device__ long long place(const Tile &tile, int r) const {
        const int end = begin(r) < tile.begin;
        return static_cast<long long>(2 * (r * p.shares.gang + member) + end) * (V::kHeads * V::kBlockM);
    }
};

#endif  // CUPYFLASH_SHARES_CUH
