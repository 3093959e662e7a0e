// Tile after tile of the sequences over a cache that have many queries, as a warp finds them (work_sm90.cuh). Others, and rows
// of no sequence, are left to attention over a cache.
#ifndef CUPYFLASH_PREFILL_SM90_CUH
#define CUPYFLASH_PREFILL_SM90_CUH
#include "attention/pages.cuh"
#include "attention/key_parts.cuh"
#include "attention/work_sm90.cuh"

// Whole tiles first, of each sequence from its last one on, and then what is left of each: where queries are few beside keys, that
// takes less time, and evens out the tail.
template <class V, class Params>
struct LongSequences {
    static constexpr int kRows = V::kBlockM;
    const Params &p;
    int whole = 0, all = 0;  // tiles of a head

    __device__ explicit LongSequences(const Params &p) : p(p) {
        #pragma unroll 1
        for (int b = lane(); b < p.problem.batch; b += 32) {
            const int rows = rows_of(b);
            whole += rows / kRows, all += ceil_div(rows, kRows);
        }
        #pragma unroll
        for (int i = 1; i < 32; i *= 2) whole += ptx::shfl_xor(whole, i), all += ptx::shfl_xor(all, i);
    }
    __device__ int count() const { return all * p.problem.heads_q; }
    __device__ Tile<true> at(int number) const {
        const auto index = TileIndex::at<false>(number, p.schedule, all, p.problem.heads_q, 1);
        const bool is_whole = index.block < whole;
        int left = is_whole ? index.block : index.block - whole, b = 0;  // @whole-tiles-first
        #pragma unroll 1
        for (int b0 = 0; b0 < p.problem.batch; b0 += 32) {
            const int rows = rows_of(b0 + lane()), own = is_whole ? rows / kRows : rows % kRows > 0;
            const int upto = prefix_sum(own);
            const int found = ptx::popc(ptx::vote_ballot(upto <= left));
            if (found < 32) {
                b = b0 + found, left -= ptx::shfl_index(upto - own, found);
                break;
            }
            left -= ptx::shfl_index(upto, 31);  // @tiles-of-32-sequences
        }
        const Sequence<true> s = Sequence<true>::of(p, b);
        return {is_whole ? s.seqlen_q / kRows - 1 - left : s.seqlen_q / kRows, index.head, s};
    }

  private:
    __device__ int rows_of(int b) const {
        if (b >= p.problem.batch) return 0;
        const int rows = Sequence<true>::start_q(p, b + 1) - Sequence<true>::start_q(p, b);
        return rows < V::kLeastQueries ? 0 : rows;  // @few-queries-left-out
    }
};

// The same by the parts of their keys; a tile's head says which one, too (QueryWork).
template <class Tiles>
struct TilesByParts {
    const FwdParams &p;
    const Tiles &tiles;

    __device__ Tile<true> at(int number) const {
        Tile<true> tile = tiles.at(number / p.key_splits);
        tile.head = tile.head * p.key_splits + number % p.key_splits;  // @head-and-part
        return tile;
    }
};

template <class V>
__device__ __forceinline__ void schedule_long_sequences(const FwdParams &p, int *counter,
                                                        const TileQueue<true> &queue) {
    const PagedSequences<FwdParams> lengths(p);
    const LongSequences<V, PagedSequences<FwdParams>> tiles(lengths);
    if constexpr (V::kSplitKeys)
        schedule_tiles<Queries, V::kBlockM>(TilesByParts<decltype(tiles)>{p, tiles}, tiles.count() * p.key_splits,
                                            counter, queue);
    else schedule_tiles<Queries, V::kBlockM>(tiles, tiles.count(), counter, queue);
}

#endif  // CUPYFLASH_PREFILL_SM90_CUH
