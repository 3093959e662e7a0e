// Which units of a tile are taken: all, or, beside a block mask (tile_mask.cuh), those in whose keys a row of the tile sees
// something by the kinds of the mask's tiles. What loads units and what computes them find the same ones, each for itself.
#ifndef CUPYFLASH_SEEN_UNITS_CUH
#define CUPYFLASH_SEEN_UNITS_CUH
#include "decode/rows.cuh"
#include "attention/tile_mask.cuh"

// The first key of a unit of a tile.
template <class V>
__device__ __forceinline__ int key_of_unit(const DecodeTile<V> &tile, int unit) {
    return ((unit - tile.begin) / DecodeShares<V>::kGroups + tile.cached.first_slice) * kSlice;
}

template <class V, bool kAny = has_tile_mask<V>(0)>
struct SeenUnits {
    // The first of a team's units of a tile from `unit` on, which is one; behind the tile's last one if there is none.
    __device__ static int seen_from(const DecodeShares<V> &, const DecodeTile<V> &, int /* team */, int unit) {
        return unit;
    }
    // Whether the mask shows all keys of the unit that was found last to all rows of its heads.
    __device__ static bool is_shown() { return true; }
};

// By whole warps, of which each lane looks at one of the team's next 32 units. A team asks for the one behind that which it got last,
// or for its first one of another tile.
template <class V>
struct SeenUnits<V, true> {
    static constexpr int kTeams = DecodeSmem<V>::kTeams;
    int end = 0;                  // of the units that were looked at
    ptx::u32 seen = 0, full = 0;  // of those that are left of them, from the one on that is asked for next
    bool shown = false;

    __device__ int seen_from(const DecodeShares<V> &shares, const DecodeTile<V> &tile, int team, int unit) {
        #pragma unroll 1
        while (unit < tile.end) {
            if (unit >= end) look(shares, tile, team, unit);
            if (seen != 0) {
                const int passed = ptx::popc((seen & (0 - seen)) - 1);
                shown = full >> passed & 1;
                seen = seen >> passed >> 1, full = full >> passed >> 1;  // @behind-the-unit-got
                return unit + passed * kTeams;                           // @next-unit-seen
            }
            unit += ceil_div(end - unit, kTeams) * kTeams;
        }
        return unit;
    }
    __device__ bool is_shown() const { return shown; }

  private:
    __device__ void look(const DecodeShares<V> &shares, const DecodeTile<V> &tile, int team, int unit) {
        const PackedRows<V> rows(shares, tile);
        const int own = unit + lane() * kTeams;
        end = min(unit + 32 * kTeams, tile.end);  // @units-of-one-tile
        Kinds kinds;
        if (own < tile.end && tile.cached.length > 0)
            kinds = of_unit(rows, team % DecodeSmem<V>::kGroups * V::kPair, key_of_unit(tile, own));
        seen = ptx::vote_ballot(kinds.some_seen), full = ptx::vote_ballot(kinds.all_full);
    }
    struct Kinds { bool some_seen = false, all_full = true; };
    // Of the mask's tiles that have a unit's keys and a row of its heads; `head`: the first of them.
    __device__ static Kinds of_unit(const PackedRows<V> &rows, int head, int key) {
        const bool own_heads = MaskOwners::of(rows.p).heads;
        const int heads = own_heads ? V::kPair : 1, each = own_heads ? min(rows.p.shares.group, rows.count) : 1;
        Kinds found;
        #pragma unroll 1
        for (int i = 0; i < heads * each; ++i) {  // @heads-of-a-unit
            const auto of_head = TileMask<V>::of(rows.p, rows.sequence, rows.head_q(head + i / each, i % each));
            const int first = of_head.row0 + rows.query0, last = of_head.row0 + rows.query(rows.count - 1);
            if (first < 0) found.all_full = false;  // @no-keys-above-the-first-row
            #pragma unroll 1
            for (int row = max(0, first); row <= last; row = (row / kMaskTile + 1) * kMaskTile) {
                const int kind = of_head.mask.kind(row, key);
                found.some_seen = found.some_seen || kind != kEmptyTile;  // @seen-by-a-row
                found.all_full = found.all_full && kind == kFullTile;     // @shown-to-all-rows
            }
        }
        return found;
    }
};

#endif  // CUPYFLASH_SEEN_UNITS_CUH
