// Which query tiles a block of the backward visits: all that see its keys.
#ifndef CUPYFLASH_VISITS_CUH
#define CUPYFLASH_VISITS_CUH
#include "attention/mask.cuh"

// One visit: a query tile of a head.
struct Visit { int head, m_block; };

// The query tiles that keys [k0, k0 + kBlockN) visit: head by head of the group, each in descending order.
template <class V>
struct QueryTiles {
    int first, blocks, count;  // query tiles [first, first + blocks) of each head; visits in all

    __device__ QueryTiles(const Mask<V> &mask, int k0, int group)
        : first(mask.first_query_block(k0)), blocks(max(0, mask.end_query_block(k0) - first)) {
        if (!Mask<V>::kAllCount && !mask.some_count(k0)) blocks = 0;  // @visits-of-no-key
        count = group * blocks;                                       // @visits-of-all-heads
    }
    __device__ Visit begin(int head) const { return {head, first + blocks - 1}; }
    __device__ Visit after(const Visit &v) const {
        return v.m_block > first ? Visit{v.head, v.m_block - 1} : begin(v.head + 1);
    }
};

// The keys of a block, and the query tiles that it visits: head by head of the group, each in descending order.
template <class V>
struct BwdVisits {
    int head_k;
    SequenceOf<V> sequence;
    int k0, block;             // first key, and the block's number in the sequence
    int first, blocks, count;  // query tiles [first, first + blocks) of each head; visits in all
    int head, m_block;         // the current visit

    // Those of this block, where each block computes one tile; and of any tile.
    __device__ explicit BwdVisits(const BwdParams &p, int number = ptx::block_index())
        : BwdVisits(p, tile_at<V, Keys, V::kBlockN, false>(p, number)) {}
    __device__ BwdVisits(const BwdParams &p, const Tile<V::kPacked> &tile)
        : head_k(tile.head), sequence(with_range<V>(tile.sequence, p)), k0(tile.block * V::kBlockN), block(tile.block) {
        const Mask<V> mask(sequence, p.problem);
        const int group = p.problem.heads_q / p.problem.heads_k;
        const QueryTiles<V> tiles(mask, k0, group);
        first = tiles.first, blocks = tiles.blocks, count = tiles.count;
        head = head_k * group, m_block = first + blocks - 1;  // @first-head-of-the-group-sm90
    }
    __device__ void next() {
        if (--m_block < first) ++head, m_block = first + blocks - 1;
    }
    __device__ int q0() const { return m_block * V::kBlockM; }
};

#endif  // CUPYFLASH_VISITS_CUH
