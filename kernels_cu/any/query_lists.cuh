// For each block of kBlockN keys as a head of q sees it, the list of the tiles of kBlockM queries that visit it (lists.cuh). One
// warp a list. It comes after key_lists.cuh, whose lists say the ranks.
#ifndef CUPYFLASH_QUERY_LISTS_CUH
#define CUPYFLASH_QUERY_LISTS_CUH
#include "attention/sights.cuh"

// How many entries of a list have a lower number than `block`.
__device__ __forceinline__ int rank_in(const int *list, int block) {
    int first = 0, end = list[0];
    while (first < end) {
        const int middle = (first + end) / 2;
        if (ListedBlock{list[1 + middle]}.block() < block) first = middle + 1;
        else end = middle;
    }
    return first;
}

template <class V>
__device__ __forceinline__ void query_lists(const BwdParams &p) {
    static_assert(V::kSmemBytes == 0);
    const int m_blocks = listed_queries<V>(p), n_blocks = listed_keys<V>(p);
    const auto at = listed_tile<V, Keys, V::kBlockN>(p, n_blocks);
    const int end = V::kPacked ? min(m_blocks, ceil_div(at.sequence.seqlen_q, V::kBlockM)) : m_blocks;
    const Sights<V> sights(p, at.sequence, at.head);
    int *const list = query_list<V>(p, at.sequence, at.head, at.block);
    int count = 0;
    #pragma unroll 1
    for (int last = end - 1; last >= 0; last -= 32) {
        const int m = last - lane(), found = m >= 0 ? sights.template of_groups<false>(m, at.block) : 0;
        const ptx::u32 visited = ptx::vote_ballot(found != 0);
        const int i = count + ptx::popc(visited & ((1u << lane()) - 1));
        if (found != 0) {
            list[1 + i] = ListedBlock::of(m, found).entry;
            if constexpr (V::kRanks)  // @rank-in-the-list
                list[1 + m_blocks + i] = rank_in(key_list<V>(p, at.sequence, at.head, m), at.block);
        }
        count += ptx::popc(visited);
    }
    if (lane() == 0) list[0] = count;
}

#endif  // CUPYFLASH_QUERY_LISTS_CUH
