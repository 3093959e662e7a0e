// For each tile of kBlockM queries of a head, the list of the blocks of kBlockN keys that it visits (lists.cuh). One warp a list.
#ifndef CUPYFLASH_KEY_LISTS_CUH
#define CUPYFLASH_KEY_LISTS_CUH
#include "attention/sights.cuh"

template <class V, class Params>
__device__ __forceinline__ void key_lists(const Params &p) {
    static_assert(V::kSmemBytes == 0);
    const int m_blocks = listed_queries<V>(p), n_blocks = listed_keys<V>(p);
    const auto at = listed_tile<V, Queries, V::kBlockM>(p, m_blocks);
    const int end = V::kPacked ? min(n_blocks, ceil_div(at.sequence.seqlen_k, V::kBlockN)) : n_blocks;
    const Sights<V> sights(p, at.sequence, at.head);
    int *const list = key_list<V>(p, at.sequence, at.head, at.block);
    int count = 0;
    #pragma unroll 1
    for (int first = 0; first < end; first += 32) {
        const int n = first + lane(), found = n < end ? sights.template of_groups<true>(at.block, n) : 0;
        const ptx::u32 visited = ptx::vote_ballot(found != 0);
        const int before = ptx::popc(visited & ((1u << lane()) - 1));
        if (found != 0) list[1 + count + before] = ListedBlock::of(n, found).entry;
        count += ptx::popc(visited);
    }
    if (lane() > 0) return;
    list[0] = count;
    // A tile that visits nothing may compute one block, of which it then sees nothing.
    if (count == 0 && n_blocks > 0) list[1] = ListedBlock::of(0, 0x55 * kInPart).entry;  // @block-of-nothing
}

#endif  // CUPYFLASH_KEY_LISTS_CUH
