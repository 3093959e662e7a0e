// Which blocks the tiles of a kernel visit, where a block mask says so (blocks.cuh): lists, made by key_lists.cuh and
// query_lists.cuh. A list says how many blocks there are, then these, each with what the groups of rows of the other side see.
#ifndef CUPYFLASH_LISTS_CUH
#define CUPYFLASH_LISTS_CUH
#include "attention/blocks.cuh"
#include "attention/key_parts.cuh"

enum Sight { kHidden = 0, kInPart = 1, kWhole = 2 };

// A block of keys, or of queries, as a list has it: its number, and two bits for each group of rows that visits it.
struct ListedBlock {
    int entry;

    __device__ static ListedBlock of(int block, int sights) { return {block << 8 | sights}; }
    __device__ int block() const { return entry >> 8; }
    __device__ int sight(int group) const { return entry >> 2 * group & 3; }  // @sight-of-the-group
    // Whether all of kGroups groups see all of it.
    template <int kGroups>
    __device__ bool whole() const {
        constexpr int kAll = (1 << 2 * kGroups) - 1;
        return (entry & kAll) == (kAll / 3 * kWhole);
    }
};

// How many tiles of queries and blocks of keys a list of a sequence may have.
template <class V, class Params>
__device__ __forceinline__ int listed_queries(const Params &p) {
    return ceil_div(MaskLengths<V>::queries(p), V::kBlockM);
}
template <class V, class Params>
__device__ __forceinline__ int listed_keys(const Params &p) {
    return ceil_div(MaskLengths<V>::keys(p), V::kBlockN);
}
// The number among all lists of that of tile `block` of a head, of kRows queries or keys; `tiles`: as many a sequence may have.
// Packed, tiles have numbers as sequence.cuh has them, and each sequence its own lists.
template <class V, class Rows, int kRows, class Params>
__device__ __forceinline__ long long list_number(const Params &p, const Sequence<V::kPacked> &s, int head, int block,
                                                 int tiles) {
    using S = Sequence<V::kPacked>;
    if constexpr (V::kPacked) {
        const long long before = MaskOwners::of(p).heads ? head : 0;
        const int of_head = S::template blocks<kRows>(p.problem, Rows::seqlen(p.problem));
        const int first = S::template first_tile<kRows>(Rows::first_row(s), s.index);
        return before * of_head + first + block;  // @list-of-its-sequence
    } else {
        return MaskOwners::of_lists<V>(p).number(p.problem, s.index, head) * tiles + block;  // @list-of-its-head
    }
}
// The list of query tile `block` of a head: the key blocks of kBlockN that it visits, in ascending order. At least one is there,
// though the count may be 0.
template <class V, class Params>
__device__ __forceinline__ int *key_list(const Params &p, const Sequence<V::kPacked> &s, int head, int block) {
    const int m_blocks = listed_queries<V>(p), n_blocks = listed_keys<V>(p);
    return p.key_lists + list_number<V, Queries, V::kBlockM>(p, s, head, block, m_blocks) * (1 + n_blocks);
}
// What a block visits of a tile's list, the i-th of `count` being list[1 + i]: all, or, where keys are divided (key_parts.cuh), as
// many as any other part, or one more. A mask may show keys of some parts alone, so these are not ranges of equal length, as without
// one.
template <class V>
struct ListPart {
    const int *list;
    int count;

    template <class Params>
    __device__ ListPart(const Params &p, const Sequence<V::kPacked> &s, int head, int block, int part)
        : list(key_list<V>(p, s, head, block)), count(list[0]) {
        if constexpr (V::kSplitKeys) {
            const int all = count, first = part * all / p.key_splits;
            list += first, count = (part + 1) * all / p.key_splits - first;  // @blocks-of-the-part
        }
    }
    // The sequence with the keys of these blocks.
    __device__ SequenceOf<V> keys_of(const Sequence<V::kPacked> &s) const {
        static_assert(V::kSplitKeys);
        const auto start = [&](int i) { return ListedBlock{list[i]}.block() * V::kBlockN; };
        if (count == 0) return {s, 0, 0};
        return {s, start(1), start(count) + V::kBlockN};  // @keys-of-the-listed-part
    }
};
// The numbers of a tile's key blocks; with a block mask, by its list.
template <class V, bool kListed = V::kBlockMask>
struct ListOf {
    __device__ static int key_block(int j) { return j; }
};
template <class V>
struct ListOf<V, true> {
    const int *list = nullptr;

    __device__ ListedBlock at(int j) const {
        // A part of no blocks computes one, of which its range then hides all.
        if (V::kSplitKeys && list == nullptr) return ListedBlock::of(0, 0x55 * kInPart);  // @part-of-no-blocks
        return {list[1 + j]};
    }
    __device__ int key_block(int j) const { return at(j).block(); }
};

// A tile's sequence with the keys that a block visits.
template <class V, class Params>
__device__ __forceinline__ SequenceOf<V> visited_keys(const Params &p, const Tile<V::kPacked> &tile, int part) {
    if constexpr (V::kBlockMask && V::kSplitKeys)
        return ListPart<V>(p, tile.sequence, tile.head, tile.block, part).keys_of(tile.sequence);
    else return with_part<V>(tile.sequence, p, part);
}

// The list of key block `block` as a head of q sees it: the query tiles of kBlockM that visit it, in descending order; behind
// them their ranks: how many key blocks each visits before this one.
template <class V>
__device__ __forceinline__ int *query_list(const BwdParams &p, const Sequence<V::kPacked> &s, int head, int block) {
    const int m_blocks = listed_queries<V>(p), n_blocks = listed_keys<V>(p);
    return p.query_lists + list_number<V, Keys, V::kBlockN>(p, s, head, block, n_blocks) * (1 + 2 * m_blocks);
}

// How far the lists of a key block for one head of q lie from those for the next.
template <class V>
__device__ __forceinline__ long long query_lists_of_head(const BwdParams &p) {
    const int m_blocks = listed_queries<V>(p);
    const int n_blocks = Sequence<V::kPacked>::template blocks<V::kBlockN>(p.problem, p.problem.seqlen_k);
    return MaskOwners::of(p).heads ? n_blocks * static_cast<long long>(1 + 2 * m_blocks) : 0;
}

// The key blocks that a tile of queries visits, from the first to the last: all between two bounds, or those of a list.
template <class V, bool kListed = V::kBlockMask>
struct KeyVisits {
    int first, count;

    template <class Params>
    __device__ KeyVisits(const Params &, const Mask<V> &mask, const Tile<V::kPacked> &, int q0, int /* part */)
        : first(mask.first_key_block(q0)), count(max(0, mask.end_key_block(q0) - first)) {}
    __device__ int block(int i) const { return first + i; }
    // Whether every row of the tile sees all of the i-th one.
    __device__ bool whole(const Mask<V> &mask, int q0, int i) const { return mask.full(q0, (first + i) * V::kBlockN); }
};

template <class V>
struct KeyVisits<V, true> : ListPart<V> {
    using ListPart<V>::list;

    template <class Params>
    __device__ KeyVisits(const Params &p, const Mask<V> &, const Tile<V::kPacked> &tile, int /* q0 */, int part)
        : ListPart<V>(p, tile.sequence, tile.head, tile.block, part) {}
    __device__ ListedBlock at(int i) const { return {list[1 + i]}; }
    __device__ int block(int i) const { return at(i).block(); }
    __device__ bool whole(const Mask<V> &, int /* q0 */, int i) const {
        return at(i).template whole<ceil_div(V::kBlockM, 64)>();
    }
};

#endif  // CUPYFLASH_LISTS_CUH
