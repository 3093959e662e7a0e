// A block mask (blocks.cuh) asked for one key at a time, as attention of few queries over a cache does (V::kTileMask), without lists.
// Its queries count as its keys do, by the rows of a sequence: query i stands at row i + seqlen_k - seqlen_q, and above row 0 no key
// is seen.
#ifndef CUPYFLASH_TILE_MASK_CUH
#define CUPYFLASH_TILE_MASK_CUH
#include "attention/bias.cuh"
#include "attention/blocks.cuh"

// That of a head: of() it; from() a query and a key on; seen() 32 keys of a query at once.
template <class V>
struct TileMask {
    struct From {
        BlockMask<V, true, false> mask;
        int row, key;

        __device__ bool operator()(int queries, int keys) const {
            const int at = row + queries;
            return at >= 0 && mask.sees(at, key + keys);  // @rows-above-the-first
        }
    };
    // Of a query, a bit for each of the keys from one on, up to the next multiple of 32.
    struct Seen {
        ptx::u32 bits;

        __device__ bool operator()(int /* queries */, int keys) const { return (bits >> keys & 1) != 0; }
    };
    BlockMask<V, true, false> mask;
    int row0;  // of query 0

    template <class Params>
    __device__ static TileMask of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        const int n = p.mask_tiles;
        const long long number = MaskOwners::of(p).number(p.problem, s.index, head);
        // @tile-mask-of-its-rows
        return {{{}, p.block_tiles + number * n * n, p.block_bits, n, n}, s.seqlen_k - s.seqlen_q};
    }
    __device__ From from(int query, int key) const { return {mask, row0 + query, key}; }
    __device__ Seen seen(int query, int key) const {
        const int row = row0 + query;
        if (row < 0) return {0u};  // @bits-above-the-first-row
        const int kind = mask.kind(row, key);
        if (kind < kFirstBits) return {kind == kFullTile ? ~0u : 0u};
        return {mask.word(kind, true, row % kMaskTile, key % kMaskTile / 32) >> key % 32};  // @bits-from-the-key
    }
};

// What is added to scores, where such a mask shows them: in place of Bias.
template <class V>
struct TiledBias {
    struct At {
        typename Bias<V>::At added;
        bool shown;

        __device__ bool hides() const { return !shown || added.hides(); }
        // @hidden-by-tiles
        __device__ float biased(float s) const { return shown ? added.biased(s) : -ptx::infinity(); }
    };
    template <class FromAdded, class FromTiles>
    struct From {
        FromAdded added;
        FromTiles tiles;

        __device__ At operator()(int queries, int keys) const { return {added(queries, keys), tiles(queries, keys)}; }
    };
    Bias<V> added;
    TileMask<V> tiles;

    template <class Params>
    __device__ static TiledBias of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        return {Bias<V>::of(p, s, head), TileMask<V>::of(p, s, head)};
    }
    template <bool kAlongKeys>
    __device__ auto from(int query, int key) const {
        const auto from_added = added.template from<kAlongKeys>(query, key);
        return From<decltype(added.template from<kAlongKeys>(0, 0)), typename TileMask<V>::From>{
            from_added, tiles.from(query, key)};
    }
};

#endif  // CUPYFLASH_TILE_MASK_CUH
