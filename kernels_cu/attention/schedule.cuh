// In which order the tiles of work are computed: by the hardware, which starts blocks in the order of their index, or by
// persistent blocks, which draw numbers. The order decides what shares the L2 cache and how even the tail is: heads are
// taken in sections (plan.py chooses how many), and within a section every head's longest tiles come first. The last
// section may be larger than the others.
#ifndef CUPYFLASH_SCHEDULE_CUH
#define CUPYFLASH_SCHEDULE_CUH
#include "attention/params.cuh"
#include "hw/ptx.cuh"
#include "tile/sizes.cuh"

struct TileIndex {
    int block;        // along the sequence
    int head, batch;  // batch * heads + head runs over all sequences

    // Tile number `index` of blocks * heads * batch, of a plain params struct. kDescending: the last block of a sequence
    // comes first.
    template <bool kDescending, class Params>
    __device__ static TileIndex at(int index, const Params &params, int blocks, int heads) {
        const Schedule &p = params.schedule;
        const int last_start = params.problem.batch * heads - p.last_section;
        const bool is_last = index >= last_start * blocks;
        const int section_start = is_last ? last_start : index / (p.section * blocks) * p.section;
        const int section = is_last ? p.last_section : min(p.section, last_start - section_start);
        const int in_section = index - section_start * blocks;
        const int sequence = section_start + in_section % section, turn = in_section / section;
        return {kDescending ? blocks - 1 - turn : turn, sequence % heads, sequence / heads};
    }
    // The tile of this block, where each block computes one.
    template <bool kDescending, class Params>
    __device__ static TileIndex of(const Params &p, int blocks, int heads) {
        return at<kDescending>(ptx::block_index(), p, blocks, heads);
    }
};

// The row_stats of a query: of each sequence batch * heads_q + head there are a multiple of kRows.
template <int kRows>
__device__ __forceinline__ float *row_stats_at(const BwdParams &p, int sequence, int query) {
    return p.row_stats + 2 * (static_cast<long long>(sequence) * round_up(p.problem.seqlen_q, kRows) + query);
}

// Element offset of row 0 of one head.
__device__ __forceinline__ long long head_offset(const Strides &s, int batch, int head) {
    return batch * s.batch + head * s.head;
}

#endif  // CUPYFLASH_SCHEDULE_CUH
