// In which order the tiles of work are computed: by the hardware, which starts blocks in the order of their index, or by
// persistent blocks, which draw numbers. The order decides what shares the L2 cache and how even the tail is: heads are
// taken in sections (the plan chooses how many), and within a section every head's longest tiles come first. The last
// section may be larger than the others.
#ifndef CUPYFLASH_SCHEDULE_CUH
#define CUPYFLASH_SCHEDULE_CUH
#include "attention/sequence.cuh"

struct TileIndex {
    int block;           // along the sequence
    int head, sequence;  // sequence * heads + head runs over all heads

    // Tile number `index` of blocks * heads * sequences. kDescending: the last block of a sequence comes first.
    template <bool kDescending>
    __device__ static TileIndex at(int index, const Schedule &p, int blocks, int heads, int sequences) {
        const int last_start = sequences * heads - p.last_section;
        const bool is_last = index >= last_start * blocks;  // @last-section-begins
        const int section_start = is_last ? last_start : index / (p.section * blocks) * p.section;
        // @size-of-the-section
        const int section = is_last ? p.last_section : min(p.section, last_start - section_start);
        const int in_section = index - section_start * blocks;
        const int number = section_start + in_section % section, turn = in_section / section;
        return {kDescending ? blocks - 1 - turn : turn, number % heads, number / heads};  // @sequence-of-the-tile
    }
};

// What tiles are of: rows of queries, or of keys.
struct Queries {
    static constexpr bool kAreQueries = true;
    __device__ static int seqlen(const Problem &p) { return p.seqlen_q; }
    template <class Params>
    __device__ static int heads(const Params &p) {
        return p.problem.heads_q;
    }
    template <bool kPacked>
    __device__ static int first_row(const Sequence<kPacked> &s) {
        return s.row_q;
    }
    template <bool kPacked>
    __device__ static int rows(const Sequence<kPacked> &s) {
        return s.seqlen_q;
    }
};
struct Keys {
    static constexpr bool kAreQueries = false;
    __device__ static int seqlen(const Problem &p) { return p.seqlen_k; }
    template <class Params>
    __device__ static int heads(const Params &p) {
        return p.problem.heads_k;
    }
    template <bool kPacked>
    __device__ static int first_row(const Sequence<kPacked> &s) {
        return s.row_k;
    }
    template <bool kPacked>
    __device__ static int rows(const Sequence<kPacked> &s) {
        return s.rows_k;
    }
};

// A tile of work: kRows queries or keys of one head of one sequence.
template <bool kPacked>
struct Tile {
    int block;  // along the sequence
    int head;   // of q, or of k
    Sequence<kPacked> sequence;
};

// How many tiles there are, those without rows included.
template <class V, class Rows, int kRows, class Params>
__device__ __forceinline__ int count_tiles(const Params &p) {
    using S = Sequence<V::kPacked>;
    return S::template blocks<kRows>(p.problem, Rows::seqlen(p.problem)) * Rows::heads(p) * S::count(p.problem);
}
// One of those, by a whole warp if packed; it may lie behind the end of its sequence then, without rows. Packed, the blocks
// of all sequences are counted together.
template <class V, class Rows, int kRows, class Params>
__device__ __forceinline__ Tile<V::kPacked> tile_of(const Params &p, const TileIndex &index) {
    using S = Sequence<V::kPacked>;
    if constexpr (V::kPacked) {
        const S found = S::template find<Rows, kRows>(p, index.block);
        return {index.block - S::template first_tile<kRows>(Rows::first_row(found), found.index), index.head, found};
    } else {
        return {index.block, index.head, S::of(p, index.sequence)};
    }
}
// Tile `number` of them.
template <class V, class Rows, int kRows, bool kDescending, class Params>
__device__ __forceinline__ Tile<V::kPacked> tile_at(const Params &p, int number) {
    using S = Sequence<V::kPacked>;
    const Problem &problem = p.problem;
    const int blocks = S::template blocks<kRows>(problem, Rows::seqlen(problem));
    const int heads = Rows::heads(p), sequences = S::count(problem);
    auto index = TileIndex::at<kDescending>(number, p.schedule, blocks, heads, sequences);
    if constexpr (V::kBias && !V::kPacked) {
        // What heads have of their own and sequences share: those come one after the other, so that it is read once for all.
        const ScoreStrides &bias = p.bias_stride, &mask = p.mask_stride;
        if (bias.batch == 0 && mask.batch == 0 && (bias.head != 0 || mask.head != 0)) {
            const int all = index.sequence * heads + index.head;
            index.head = all / sequences, index.sequence = all % sequences;  // @sequences-that-share-a-bias
        }
    }
    return tile_of<V, Rows, kRows>(p, index);
}

// The row_stats of a query of a head: each sequence has a multiple of kRows of them.
template <int kRows, bool kPacked>
__device__ __forceinline__ float *row_stats_at(const BwdParams &p, const Sequence<kPacked> &s, int head, int query) {
    return p.row_stats + 2 * (s.template query_tile<kRows>(p.problem, head) * kRows + query);
}

#endif  // CUPYFLASH_SCHEDULE_CUH
