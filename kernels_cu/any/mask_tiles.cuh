// The block mask (blocks.cuh) of a mask of booleans, or of a mask_mod (mods.cuh): what each of its tiles of 64 queries by 64 keys
// is, and the bits of those that are seen in part. Queries and keys behind the last one see, and are seen, as that one; but a
// mask_mod is asked for such queries, too. It comes before key_lists.cuh.
//
// A block takes one tile that the mask has: of each sequence, head, 64 queries and 64 keys along which it has elements of its own.
// Where it is broadcast along queries or keys, all tiles along them are that one. A tile's bits have the number of its block, so
// that nobody counts. Two warps have 32 queries each, a lane the 64 bits of one.
#ifndef CUPYFLASH_MASK_TILES_CUH
#define CUPYFLASH_MASK_TILES_CUH
#include "attention/addends.cuh"
#include "attention/blocks.cuh"
#include "attention/mods.cuh"

// What the other kernels only read, and who calls gives them unless it is made here.
__device__ __forceinline__ int *made(const int *x) { return const_cast<int *>(x); }

// The 64 keys of a query of a tile, a bit each.
struct KeyBits { ptx::u32 word[2]; };

// The queries of a warp in a tile of which so many queries and keys exist.
struct MaskRows {
    const Shown *mask;  // of the tile's first query and key
    long long row, key;
    int first, queries, keys;

    __device__ KeyBits bits() const {
        const bool is_aligned = ((reinterpret_cast<ptx::u64>(mask) | row) & 15) == 0;
        return is_aligned && key == 1 && keys == kMaskTile ? bits_of_chunks() : bits_by_votes();
    }

  private:
    // @last-query-behind-it
    __device__ long long offset_of(int i) const { return min(first + i, queries - 1) * row; }
    // Each lane reads its query's keys, 16 at a time.
    __device__ KeyBits bits_of_chunks() const {
        const auto *const chunks = reinterpret_cast<const ptx::U128 *>(mask + offset_of(lane()));  // @query-of-the-lane
        KeyBits found{};
        #pragma unroll
        for (int i = 0; i < kMaskTile / 16; ++i) {
            const ptx::U128 chunk = chunks[i];
            #pragma unroll
            for (int j = 0; j < 4; ++j) found.word[i / 2] |= of_four(chunk.x[j]) << (16 * (i % 2) + 4 * j);
        }
        return found;
    }
    // The warp reads 32 keys of a query at a time; kAhead queries are on their way.
    __device__ KeyBits bits_by_votes() const {
        constexpr int kAhead = 8;
        KeyBits found{};
        #pragma unroll 1
        for (int i = 0; i < 32; i += kAhead) {
            Shown element[kAhead][2];
            #pragma unroll
            for (int n = 0; n < 2 * kAhead; ++n) {
                const int j = min(32 * (n % 2) + lane(), keys - 1);  // @last-key-behind-it
                element[n / 2][n % 2] = mask[offset_of(i + n / 2) + j * key];
            }
            #pragma unroll
            for (int n = 0; n < 2 * kAhead; ++n) {
                const ptx::u32 voted = ptx::vote_ballot(element[n / 2][n % 2].raw != 0);
                if (lane() == i + n / 2) found.word[n % 2] = voted;
            }
        }
        return found;
    }
    // Of four bytes, which are not 0 where a key is shown: their highest bits, moved together.
    __device__ static ptx::u32 of_four(ptx::u32 x) {
        const ptx::u32 shown = (x | ((x & 0x7f7f7f7fu) + 0x7f7f7f7fu)) & 0x80808080u;  // @any-byte-but-0
        return shown * 0x00204081u >> 28;
    }
};

// Which tile a block takes, of those that a mask has of its own.
template <class V>
struct OwnTile {
    int q_tiles, k_tiles;  // of the problem
    int own_q, own_k;      // of the mask
    int sequence, head, q, k;

    template <class Params>
    __device__ OwnTile(const Params &p, int number)
        : q_tiles(ceil_div(MaskLengths<V>::queries(p), kMaskTile)),
          k_tiles(ceil_div(MaskLengths<V>::keys(p), kMaskTile)),
          own_q((V::kMods ? V::kByQuery : p.mask_stride.row != 0) ? q_tiles : 1),
          own_k((V::kMods ? V::kByKey : p.mask_stride.key != 0) ? k_tiles : 1) {
        const int heads = MaskOwners::of(p).heads ? p.problem.heads_q : 1;
        k = number % own_k, q = number / own_k % own_q;
        head = number / own_k / own_q % heads, sequence = number / own_k / own_q / heads;
    }
    // Of each of 32 of its queries, from one on, by a lane.
    template <class Params>
    __device__ KeyBits bits(const Params &p, int first) const {
        if constexpr (V::kMods) return bits_of_mod(p, typename V::Mods(p), first);
        else return rows(p, first).bits();
    }
    template <class Params>
    __device__ MaskRows rows(const Params &p, int first) const {
        const ScoreStrides &to = p.mask_stride;
        const int q0 = q * kMaskTile, k0 = k * kMaskTile;
        const long long start = sequence * to.batch + head * to.head + q0 * to.row + k0 * to.key;  // @mask-of-its-tile
        return {static_cast<const Shown *>(p.mask) + start,
                to.row,
                to.key,
                first,
                min(kMaskTile, MaskLengths<V>::queries(p) - q0),
                min(kMaskTile, MaskLengths<V>::keys(p) - k0)};
    }
    // The warp asks for 64 keys of a query at a time: what a mod makes of a key is made once.
    template <class Params, class Mods>
    __device__ KeyBits bits_of_mod(const Params &p, const Mods &mods, int first) const {
        const int last = p.problem.seqlen_k - 1, key = k * kMaskTile + lane();
        const int keys[2] = {min(key, last), min(key + 32, last)}, query = q * kMaskTile + first;
        constexpr int kAhead = 16;  // queries: no load passes a vote
        KeyBits found{};
        #pragma unroll 1
        for (int i = 0; i < 32; i += kAhead) {
            bool shown[kAhead][2];
            #pragma unroll
            for (int n = 0; n < 2 * kAhead; ++n)
                shown[n / 2][n % 2] =
                    mods.mask_mod(sequence, head, {query + i, n / 2}, keys[n % 2]);  // @tile-by-mask-mod
            #pragma unroll
            for (int n = 0; n < 2 * kAhead; ++n) {
                const ptx::u32 voted = ptx::vote_ballot(shown[n / 2][n % 2]);
                if (lane() == i + n / 2) found.word[n % 2] = voted;
            }
        }
        return found;
    }
    // All tiles of the problem that are this one have a kind.
    template <class Params>
    __device__ void store(const Params &p, int kind) const {
        const int along_k = k_tiles / own_k, count = q_tiles / own_q * along_k;
        const long long of_owner = MaskOwners::of(p).number(p.problem, sequence, head);
        int *const tiles = made(p.block_tiles) + of_owner * q_tiles * k_tiles;
        #pragma unroll 1
        for (int i = ptx::thread_index(); i < count; i += kMaskTile)  // @all-tiles-that-are-one
            tiles[static_cast<long long>(q + i / along_k) * k_tiles + k + i % along_k] = kind;
    }
};

// Lane i has a row of 32 bits, and gets column i: halves are exchanged, then quarters, and so on.
__device__ __forceinline__ ptx::u32 transposed(ptx::u32 bits) {
    ptx::u32 low = 0x0000ffffu;
    #pragma unroll
    for (int n = 16; n > 0; n /= 2, low ^= low << n) {
        const ptx::u32 other = ptx::shfl_index(static_cast<int>(bits), lane() ^ n);
        bits =
            lane() & n ? (bits & ~low) | (other & ~low) >> n : (bits & low) | (other & low) << n;  // @bits-transposed
    }
    return bits;
}

template <class V, class Params>
__device__ __forceinline__ void mask_tiles(const Params &p) {
    static_assert(V::kSmemBytes == 0 && 32 * V::kWarps == kMaskTile);
    const int number = ptx::block_index(), row0 = 32 * warp();
    const OwnTile<V> tile(p, number);
    const KeyBits seen = tile.bits(p, row0);
    bool some = (seen.word[0] | seen.word[1]) != 0, hidden = (seen.word[0] & seen.word[1]) != ~0u;
    some = ptx::bar_red_or(0, kMaskTile, some);      // @seen-by-either-warp
    hidden = ptx::bar_red_or(0, kMaskTile, hidden);  // @hidden-from-either-warp
    // @kind-of-a-tile
    tile.store(p, !some ? kEmptyTile : !hidden ? kFullTile : kFirstBits + number);
    if (!some || !hidden) return;
    int *const bits = made(p.block_bits) + static_cast<long long>(number) * kMaskTileWords;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        bits[2 * (row0 + lane()) + i] = seen.word[i];
        if constexpr (V::kBackward)  // the forward asks for keys of queries alone
            bits[2 * kMaskTile + 2 * (32 * i + lane()) + warp()] = transposed(seen.word[i]);
    }
}

#endif  // CUPYFLASH_MASK_TILES_CUH
