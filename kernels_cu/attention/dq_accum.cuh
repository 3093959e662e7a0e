// How dQ leaves the backward's main loop: every key block adds its share to an fp32 accumulator in global memory. It starts
// at zero; or the first key block of a query tile stores its share, and the others add once that is done. A query tile lies
// there in fragment order, so that each addition of a warp is contiguous; bwd_convert.cuh reads the same order.
#ifndef CUPYFLASH_DQ_ACCUM_CUH
#define CUPYFLASH_DQ_ACCUM_CUH
#include "attention/schedule.cuh"
#include "tile/tile.cuh"

// The share of one warp: the block's warps divide the [kBlockM, kDim] tile, kDqWarpsM along the rows.
template <class V>
struct DqTile {
    static constexpr int kDim = round_up(V::kHeadDim, 16 * V::kSplitD);
    static constexpr int kRows = V::kBlockM / V::kDqWarpsM, kCols = kDim / (V::kWarps / V::kDqWarpsM);
    static_assert(kRows % 16 == 0 && kCols % 8 == 0, "the warps divide the tile in whole mma tiles");
    using Acc = AccTile<kRows, kCols>;

    __device__ static int row0() { return warp() % V::kDqWarpsM * kRows; }
    __device__ static int col0() { return warp() / V::kDqWarpsM * kCols; }

    // The accumulator of query tile m_block of a head.
    template <bool kPacked>
    __device__ static float *accum(const BwdParams &p, const Sequence<kPacked> &s, int head, int m_block) {
        // @accumulator-of-its-sequence
        const long long tile = s.template query_tile<V::kBlockM>(p.problem, head) + m_block;
        return p.dq_accum + tile * (V::kBlockM * kDim);
    }
    // Where element (row, col) of the tile lies in its accumulator.
    __device__ static int index(int row, int col) {
        const int warp_index = row / kRows + col / kCols * V::kDqWarpsM;
        const int r = row % kRows % 16, c = col % kCols % 8;  // within the mma tile
        const int group = (row % kRows / 16 * Acc::kColTiles + col % kCols / 8) * 4;
        const int i = 2 * (r / 8) + c % 2, owner = 4 * (r % 8) + c / 2;
        return warp_index * (kRows * kCols) + (group + i / ptx::kRedWidth * ptx::kRedWidth) * 32 +
               owner * ptx::kRedWidth + i % ptx::kRedWidth;
    }
    // f(accumulator elements, where they lie) for each group of elements that one instruction adds; of the warp's columns
    // [first_col, first_col + kSomeCols).
    template <int kSomeCols, class F>
    __device__ static void for_each_group(AccTile<kRows, kSomeCols> &acc, float *accum, F f, int first_col = 0) {
        const int thread = fresh_thread();
        float *mine = accum + thread / 32 * (kRows * kCols) + thread % 32 * ptx::kRedWidth;
        #pragma unroll
        for (int a = 0; a < Acc::kRowTiles; ++a)
            #pragma unroll
            for (int j = 0; j < acc.kColTiles; ++j)
                #pragma unroll
                for (int i = 0; i < 4; i += ptx::kRedWidth)
                    f(reinterpret_cast<float (&)[ptx::kRedWidth]>(acc.x[a][j][i]),
                      mine + ((a * Acc::kColTiles + first_col / 8 + j) * 4 + i) * 32);
    }
};

// Whether the first share is stored; packed, that of sequences of fewer keys than the plan says.
template <bool kPacked>
__device__ __forceinline__ bool first_share_is_stored(const BwdParams &p, const Sequence<kPacked> &s) {
    if constexpr (kPacked) return s.seqlen_k < p.schedule.first_stores;
    else return p.schedule.first_stores;
}

// How many shares of query tile m_block of a head are there, where somebody waits for them.
template <class V, bool kPacked>
__device__ __forceinline__ int *dq_turn(const BwdParams &p, const Sequence<kPacked> &s, int head, int m_block) {
    return p.dq_turn + s.template query_tile<V::kBlockM>(p.problem, head) + m_block;  // @turn-of-its-sequence
}

// Packed: whether lengths decrease somewhere (bwd_delta.cuh). Sequences then share rows, and who waits for a share waits for
// one that never comes.
template <class V>
__device__ __forceinline__ bool lengths_contradict(const BwdParams &p) {
    // @looked-at-again
    if constexpr (V::kPacked) return ptx::ld_acquire(p.lengths_contradict) != 0;
    else return false;
}

// A key block's place in the order of those that add to a query tile.
struct DqPlace {
    int *turn;  // of the query tile: how many have added
    int rank;   // of the key block
};

// Deterministic mode: the key blocks of one query tile add in the order of their index, and dq_turn counts them. Each visit
// has a barrier of all threads anyway, at which they meet: there thread 0 passes on the turn of the visit before, whose
// additions have arrived by then, and tells what it has seen of this visit's turn, which it has asked for long before. So
// nobody waits, unless the key blocks before are late.
template <class V>
struct DqTurn {
    int left = -1;    // the query tile that was added to last, by its place in dq_turn ...
    int shares = 0;   // ... and its turn once that has arrived
    int missing = 0;  // of the shares that come first, of this visit; thread 0's
    bool late = false;

    __device__ void look(const DqPlace &mine) {
        if (fresh_thread() == 0) missing = mine.rank - ptx::ld_relaxed(mine.turn);
    }
    __device__ void meet(const BwdParams &p) {
        if constexpr (V::kDeterministic) {
            // This thread's additions come before the turn that is passed on, and behind the one that was seen.
            // @additions-before-the-turn
            ptx::fence_gpu();
            late = ptx::bar_red_or(0, 32 * V::kWarps, missing != 0);  // @additions-of-all-threads
            if (left >= 0 && fresh_thread() == 0) ptx::st_release(p.dq_turn + left, shares);  // @turn-passed-on-sm80
        } else {
            ptx::bar_sync();
        }
    }
    // Blocks until all of lower rank have added. Those have a lower index, so they are running.
    __device__ void wait(const BwdParams &p, const DqPlace &mine) {
        if (late) {
            if (fresh_thread() == 0)
                while (ptx::ld_acquire(mine.turn) != mine.rank && !lengths_contradict<V>(p))
                    ptx::nanosleep();  // @turn-awaited-sm80
            ptx::bar_sync();           // the other threads add only after thread 0 has seen its turn @turn-seen-by-all
        }
        left = static_cast<int>(mine.turn - p.dq_turn), shares = mine.rank + 1;  // @turn-to-pass-on
    }
};

#endif  // CUPYFLASH_DQ_ACCUM_CUH
