// Which query tiles a block of the backward visits: all that see its keys.
#ifndef CUPYFLASH_VISITS_CUH
#define CUPYFLASH_VISITS_CUH
#include "attention/mask.cuh"

// The keys of a block, and the query tiles that it visits: head by head of the group, each in descending order.
template <class V>
struct BwdVisits {
    const Problem &problem;
    TileIndex tile;
    int k0, first, blocks, count;  // first key; query tiles [first, first + blocks) of each head; visits in all
    int head, m_block;             // the current visit

    __device__ static int key_blocks(const Problem &p) { return ceil_div(p.seqlen_k, V::kBlockN); }
    // Those of this block, where each block computes one tile; of tile number `number`; and of any tile.
    __device__ explicit BwdVisits(const BwdParams &p) : BwdVisits(p, ptx::block_index()) {}
    __device__ BwdVisits(const BwdParams &p, int number)
        : BwdVisits(p.problem, TileIndex::at<false>(number, p, key_blocks(p.problem), p.problem.heads_k)) {}
    __device__ BwdVisits(const Problem &p, const TileIndex &tile) : problem(p), tile(tile) {
        k0 = tile.block * V::kBlockN;
        const Mask<V> mask(p);
        const int group = p.heads_q / p.heads_k;
        first = mask.first_query_block(k0), blocks = max(0, mask.end_query_block(k0) - first);
        count = group * blocks, head = tile.head * group, m_block = first + blocks - 1;
    }
    __device__ void next() {
        if (--m_block < first) ++head, m_block = first + blocks - 1;
    }
    __device__ int q0() const { return m_block * V::kBlockM; }
    __device__ int sequence() const { return tile.batch * problem.heads_q + head; }
};

#endif  // CUPYFLASH_VISITS_CUH
