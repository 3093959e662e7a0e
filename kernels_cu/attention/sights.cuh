// What queries and keys of the kernels' tiles see of each other, by the block mask, the causal bound or window and the range of keys
// together: what the lists of lists.cuh are made of.
#ifndef CUPYFLASH_SIGHTS_CUH
#define CUPYFLASH_SIGHTS_CUH
#include "attention/lists.cuh"
#include "attention/pages.cuh"

// What some of the queries of a tile see of some keys of a block: groups of at most 64 of each, which lie within one tile of the
// mask, but for rows of a whole sequence (kOfWhole).
template <class V>
struct GroupsOf : V {
    static constexpr int kBlockM = V::kBlockM < 64 ? V::kBlockM : 64, kBlockN = V::kBlockN < 64 ? V::kBlockN : 64;
    static constexpr int kGroupsM = V::kBlockM / kBlockM, kGroupsN = V::kBlockN / kBlockN;
    static_assert(V::kBlockM % kBlockM == 0 && V::kBlockN % kBlockN == 0 && 64 % kBlockM == 0 && 64 % kBlockN == 0);
};

template <class V>
struct Sights {
    using Groups = GroupsOf<V>;
    const Mask<Groups> mask;
    const BlockMask<V> block_mask;

    template <class Params>
    __device__ Sights(const Params &p, const Sequence<V::kPacked> &s, int head)
        : mask(with_range<V>(s, p), p.problem), block_mask(BlockMask<V>::of(p, s, head)) {}

    // Of one group of queries and one of keys.
    __device__ int of(int q0, int k0) const {
        const int end_query = min(q0 + Groups::kBlockM, mask.seqlen_q);
        if (q0 >= end_query || !mask.some_count(k0)) return kHidden;
        if (k0 >= mask.end_key(end_query - 1) || k0 + Groups::kBlockN <= mask.first_key(q0)) return kHidden;
        if (block_mask.is_beyond(q0, k0)) return kHidden;
        // Rows of a whole sequence lie in two tiles, at most. @tile-of-the-last-row
        const int kind = block_mask.kind(q0, k0), last = V::kOfWhole ? block_mask.kind(end_query - 1, k0) : kind;
        if (kind == kEmptyTile && last == kEmptyTile) return kHidden;
        // A forward's rows behind the last query may see anything: nobody writes them.
        const bool all_count = !V::kBackward || end_query == q0 + Groups::kBlockM;
        const bool is_full = kind == kFullTile && last == kFullTile && all_count;
        return is_full && mask.full(q0, k0) ? kWhole : kInPart;  // @whole-in-mask-and-bounds
    }
    // Of query tile m and key block n: two bits a group of queries, or of keys, over all groups of the other.
    template <bool kByQueries>
    __device__ int of_groups(int m, int n) const {
        constexpr int kMine = kByQueries ? Groups::kGroupsM : Groups::kGroupsN;
        constexpr int kOthers = kByQueries ? Groups::kGroupsN : Groups::kGroupsM;
        int found = 0;
        #pragma unroll
        for (int mine = 0; mine < kMine; ++mine) {
            int least = kWhole, most = kHidden;
            #pragma unroll
            for (int other = 0; other < kOthers; ++other) {
                const int i = kByQueries ? mine : other, j = kByQueries ? other : mine;
                const int sight = of(m * V::kBlockM + i * Groups::kBlockM, n * V::kBlockN + j * Groups::kBlockN);
                least = min(least, sight), most = max(most, sight);
            }
            found |= (most == kHidden ? kHidden : least == kWhole ? kWhole : kInPart) << 2 * mine;
        }
        return found;
    }
};

// The tile of kRows queries or keys whose list this warp makes; packed, it may have no rows. `tiles`: as many a sequence may
// have.
template <class V, class Rows, int kRows, class Params>
__device__ __forceinline__ Tile<V::kPacked> listed_tile(const Params &p, int tiles) {
    const int blocks = V::kPacked ? Sequence<true>::blocks<kRows>(p.problem, Rows::seqlen(p.problem)) : tiles;
    const int heads = MaskOwners::of_lists<V>(p).heads ? p.problem.heads_q : 1, number = ptx::block_index();
    return tile_of<V, Rows, kRows>(sequences_of<V>(p),
                                   {number % blocks, number / blocks % heads, number / blocks / heads});
}

#endif  // CUPYFLASH_SIGHTS_CUH
