// Block masks: which keys each query sees, beside what intervals hide (mask.cuh). A mask consists of tiles of 64 queries by 64
// keys, whatever the tiles of the kernel are: empty, full, or in part, with one bit an element. Batch and heads may broadcast.
// Packed, it has tiles for max_seqlen_q queries and max_seqlen_k keys of each sequence. Over a cache it is of the whole sequence:
// queries count by the rows at which they stand (kOfWhole), unless it is made of a mask, whose rows are the call's.
//
// Kernels do not look for what is not there: key_lists.cuh and query_lists.cuh have listed for each of their tiles the blocks
// that it visits, with what each group of its rows sees of them. Without a block mask (V::kBlockMask) nothing of this is left.
#ifndef CUPYFLASH_BLOCKS_CUH
#define CUPYFLASH_BLOCKS_CUH
#include "attention/mask.cuh"
#include "tile/key_order.cuh"
#include "tile/tile.cuh"

constexpr int kMaskTile = 64;
enum MaskTileKind {
    kEmptyTile = 0,
    kFullTile = 1,
    kFirstBits = 2
};  // from there on: its bits are those of number kind - 2
constexpr int kMaskTileWords =
    2 * 2 * kMaskTile;  // of bits: a row of keys for each query, then one of queries for each key

// Who has a mask, and lists, of its own: Params' block_mask.
struct MaskOwners {
    bool batch, heads;

    template <class Params>
    __device__ static MaskOwners of(const Params &p) {
        return {(p.block_mask - 1) % 2 != 0, (p.block_mask - 1) / 2 != 0};
    }
    // Lists follow the range of keys, too; of packed sequences each has its own anyway (lists.cuh).
    template <class V, class Params>
    __device__ static MaskOwners of_lists(const Params &p) {
        const MaskOwners of_mask = of(p);
        return {of_mask.batch || V::kKvRange, of_mask.heads};
    }
    __device__ long long number(const Problem &p, int sequence, int head) const {
        return (batch ? sequence : 0) * (heads ? p.heads_q : 1) + (heads ? head : 0);  // @mask-of-its-head
    }
};

// How many queries and keys a block mask is for; packed, of each sequence, however long it says it is.
template <class V>
struct MaskLengths {
    template <class Params>
    __device__ static int queries(const Params &p) {
        return V::kPacked ? p.max_seqlen_q : p.problem.seqlen_q;
    }
    template <class Params>
    __device__ static int keys(const Params &p) {
        return V::kPacked ? p.max_seqlen_k : p.problem.seqlen_k;
    }
};

// The row of a mask that has a query: the query's number; or, of a forward over a cache, whose queries are the last rows of a
// sequence, where it stands among these. Above row 0 no key is seen.
template <bool kOfWhole>
struct RowsOfMask {
    static constexpr int row0 = 0;
};
template <>
struct RowsOfMask<true> {
    int row0;
};

// What a block mask says of single elements.
template <class V, bool kBlockMask = V::kBlockMask, bool kOfWhole = V::kOfWhole>
struct BlockMask {
    template <class Params, class Sequence>
    __device__ static BlockMask of(const Params &, const Sequence &, int /* head */) {
        return {};
    }
};

template <class V, bool kOfWhole>
struct BlockMask<V, true, kOfWhole> : RowsOfMask<kOfWhole> {
    const int *tiles, *bits;  // [q_tiles, k_tiles]; [., kMaskTileWords]
    int q_tiles, k_tiles;

    template <class Params, bool kPacked>
    __device__ static BlockMask of(const Params &p, const Sequence<kPacked> &s, int head) {
        BlockMask found = of(p, s.index, head);
        if constexpr (kOfWhole) found.row0 = s.seqlen_k - s.seqlen_q;  // @mask-rows-of-the-queries
        return found;
    }
    template <class Params>
    __device__ static BlockMask of(const Params &p, int sequence, int head) {
        const Problem &problem = p.problem;
        const int q_tiles = ceil_div(MaskLengths<V>::queries(p), kMaskTile);
        const int k_tiles = ceil_div(MaskLengths<V>::keys(p), kMaskTile);
        const int owner = V::kPacked ? min(sequence, problem.batch - 1) : sequence;  // @mask-of-rows-outside
        const long long number = MaskOwners::of(p).number(problem, owner, head);
        return {{}, p.block_tiles + number * q_tiles * k_tiles, p.block_bits, q_tiles, k_tiles};
    }
    // The kind of the tile that has a query and a key; rows behind the last one have that of the last one's.
    __device__ int kind(int query, int key) const {
        if constexpr (kOfWhole)
            if (this->row0 + query < 0) return kEmptyTile;  // @kind-above-the-first-row
        const int q = min((this->row0 + query) / kMaskTile, q_tiles - 1), k = min(key / kMaskTile, k_tiles - 1);
        return tiles[static_cast<long long>(q) * k_tiles + k];  // @kind-of-the-tile
    }
    // Whether there is none: of a packed sequence that is longer than the mask. Over a cache masks have room for all keys, and queries
    // that share a row have one tile.
    __device__ bool is_beyond(int query, int key) const {
        return V::kPacked && !V::kPaged && (query / kMaskTile >= q_tiles || key / kMaskTile >= k_tiles);
    }
    __device__ bool sees(int query, int key) const {
        const int of = kind(query, key);
        if (of < kFirstBits) return of == kFullTile;
        return word(of, true, (this->row0 + query) % kMaskTile, key % kMaskTile / 32) >> key % 32 & 1;
    }
    // Whether a query sees any of its keys [first, end).
    __device__ bool sees_any(int query, int first, int end) const {
        #pragma unroll 1
        for (int key = first; key < end; ++key) {
            if (sees(query, key)) return true;
            if (kind(query, key) == kEmptyTile) key |= kMaskTile - 1;
        }
        return false;
    }
    // 32 of a row's elements: of keys from 32 i on that query `row` of the tile sees, or of queries that see key `row`.
    __device__ ptx::u32 word(int kind, bool of_query, int row, int i) const {
        const int at = (of_query ? 0 : 2 * kMaskTile) + 2 * row + i;  // @bits-of-the-row
        return static_cast<ptx::u32>(bits[static_cast<long long>(kind - kFirstBits) * kMaskTileWords + at]);
    }
};

// Which elements of a warp's accumulator are seen, as far as a block mask says: rows are queries, or keys. It lies within one
// tile of the mask, but for rows of a whole sequence. (row, col) counts from the lane's first element, as
// AccTile::for_each does; where rows are queries, keys may lie in another order (key_order.cuh).
template <class V, int kRows, int kCols, bool kRowsAreQueries, bool kBlockMask = V::kBlockMask,
          class Keys = KeysInOrder>
struct SeenBits {
    template <class Params, class Sequence>
    __device__ SeenBits(const Params &, const Sequence &, int /* head */, int /* query */, int /* key */) {}
};

template <class V, int kRows, int kCols, bool kRowsAreQueries, class Keys>
struct SeenBits<V, kRows, kCols, kRowsAreQueries, true, Keys> {
    static_assert(kRows <= kMaskTile && kCols <= kMaskTile);
    static constexpr int kWords = ceil_div(kCols, 32);
    ptx::u32 word[kRows / 8][kWords];

    // Where the mask lies is worked out again each time: main loops have no registers left to keep it.
    template <class Params, class Sequence>
    __device__ SeenBits(const Params &p, const Sequence &sequence, int head, int query, int key) {
        const auto mask = BlockMask<V>::of(aside(p), sequence, head);
        const int kind = mask.kind(query, key), lane = fresh_lane();
        const int row0 = (kRowsAreQueries ? query : key) % kMaskTile + lane / 4;
        const int col0 = (kRowsAreQueries ? key : query) % kMaskTile;
        #pragma unroll
        for (int r = 0; r < kRows / 8; ++r)
            if constexpr (V::kOfWhole) {
                const int own = query + lane / 4 + 8 * r;  // @query-of-the-row
                read(mask, mask.kind(own, key), r, (mask.row0 + own) % kMaskTile, col0, lane);
            } else read(mask, kind, r, row0 + 8 * r, col0, lane);
    }
    __device__ bool operator()(int row, int col) const { return word[row / 8][col / 32] & 1u << col % 32; }

  private:
    __device__ void read(const BlockMask<V> &mask, int kind, int r, int row, int col0, int lane) {
        #pragma unroll
        for (int w = 0; w < kWords; ++w) {
            ptx::u32 &bits = word[r][w];
            bits = kind == kFullTile ? ~0u : 0u;
            if (kind >= kFirstBits)  // @bits-from-the-lane
                bits = mask.word(kind, kRowsAreQueries, row, col0 / 32 + w) >> (col0 % 32 + Keys::of_lane(lane));
        }
    }
};

#endif  // CUPYFLASH_BLOCKS_CUH
