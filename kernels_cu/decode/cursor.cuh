// A block's units, and going through them.
#ifndef CUPYFLASH_CURSOR_CUH
#define CUPYFLASH_CURSOR_CUH
#include "decode/seen_units.cuh"

// What of the units a block has: those of its first tile on.
template <class V>
struct OwnUnits {
    DecodeTile<V> start;
    int begin, end;
    bool whole;       // splits: the tile is this block's alone
    long long place;  // splits: where its partial result goes, in rows

    __device__ explicit OwnUnits(const DecodeShares<V> &shares) : whole(false), place(0) {
        const Shares &s = shares.p.shares;
        const int block = ptx::block_index();
        if constexpr (V::kCluster > 0) {
            static_assert(V::kHeads == 1);
            if (shares.in_clusters) {
                const int rank = ptx::cluster_ctarank();
                start = shares.tile_at(block / V::kCluster);
                begin = start.end * rank / V::kCluster, end = start.end * (rank + 1) / V::kCluster;
                return;
            }
        }
        if (s.splits) {
            int rank;
            start = shares.tile_of_part(block / s.gang, rank);
            const int own = shares.split_units(start.cached);
            begin = min(rank * own, start.end), end = min(begin + own, start.end);
            whole = own >= start.end, place = static_cast<long long>(block) * (V::kHeads * V::kBlockM);
        } else {
            const int range = quick_divide(block, s.by_gang);
            begin = end = 0;
            if (range >= shares.ranges) return;
            begin = shares.begin(range), end = shares.begin(range + 1);
            if (begin < end) start = shares.find(begin);
        }
    }
};

// The first head of a tile: kept over an 8-bit cache, whose units are short.
template <class V, bool kKeeps>
struct FirstHead {
    __device__ void keep_head(const DecodeShares<V> &, const DecodeTile<V> &) {}
    __device__ int head_k(const DecodeShares<V> &shares, const DecodeTile<V> &tile) const {
        return shares.head_k(tile);
    }
};
template <class V>
struct FirstHead<V, true> {
    int head;

    __device__ void keep_head(const DecodeShares<V> &shares, const DecodeTile<V> &tile) { head = shares.head_k(tile); }
    __device__ int head_k(const DecodeShares<V> &, const DecodeTile<V> &) const { return head; }
};

// Goes through units and, with them, through tiles.
template <class V>
struct DecodeCursor : FirstHead<V, kScaled<V>>, SeenUnits<V> {
    DecodeTile<V> tile;
    int unit;
    CachedSequence<V::kPacked> next;  // of the next sequence, asked for in time

    __device__ DecodeCursor(const DecodeShares<V> &shares, const DecodeTile<V> &tile, int unit)
        : tile(tile), unit(unit), next(tile.cached) {
        ask(shares);
        this->keep_head(shares, tile);
        catch_up(shares);
    }
    // After `unit` has grown: the tile that holds it, if there is one.
    __device__ void catch_up(const DecodeShares<V> &shares) {
        #pragma unroll 1
        while (unit >= tile.end && follows(shares)) {
            tile.begin = tile.end;
            ++tile.turn;
            #pragma unroll 1
            while (tile.turn == shares.turns(tile.cached) && ++tile.index < shares.sequences()) {
                tile.turn = 0, tile.cached = next;
                ask(shares);
            }
            if (tile.index >= shares.sequences()) continue;
            tile.end += shares.units(tile.cached);
            this->keep_head(shares, tile);
        }
    }
    // Moves on to the first of a team's units from `unit` on, of those before `end`, that is taken.
    __device__ void skip_hidden(const DecodeShares<V> &shares, int team, int end) {
        if constexpr (has_tile_mask<V>(0)) {
            #pragma unroll 1
            while (unit < end) {
                unit = this->seen_from(shares, tile, team, unit);
                if (unit < tile.end) return;
                catch_up(shares);
            }
        }
    }
    __device__ int key() const { return key_of_unit(tile, unit); }

  private:
    // Whether another tile may follow: not in splits.
    __device__ bool follows(const DecodeShares<V> &shares) const {
        return !shares.are_split() && tile.index < shares.sequences();
    }
    __device__ void ask(const DecodeShares<V> &shares) {
        if (!shares.are_split()) next = shares.cached(min(tile.index + 1, shares.sequences() - 1));
    }
};

#endif  // CUPYFLASH_CURSOR_CUH
