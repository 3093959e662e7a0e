// Tile after tile of packed sequences, as a warp finds them that does nothing else (work_sm90.cuh).
#ifndef CUPYFLASH_PACKED_SM90_CUH
#define CUPYFLASH_PACKED_SM90_CUH
#include "attention/schedule.cuh"

// Up to 32 sequences: a lane keeps one, with the number of its tiles. They are then counted exactly, without a gap, and
// nothing is read again.
template <class V, class Rows, int kRows, bool kDescending, class Params>
struct KeptTiles {
    using S = Sequence<true>;
    const Params &p;
    S mine;   // this lane's sequence, in the order in which tiles come
    int end;  // the tiles of all lanes up to this one

    __device__ explicit KeptTiles(const Params &p) : p(p) {
        const int lane = ptx::thread_index() % 32;
        mine = S::of(p, max(0, index_of(min(lane, p.problem.batch - 1))));
        end = lane < p.problem.batch ? ceil_div(Rows::rows(mine), kRows) : 0;
        #pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            const int before = ptx::shfl_index(end, lane - step);
            if (lane >= step) end += before;
        }
    }

    // Tile `number`; it may hold no rows.
    __device__ Tile<true> at(int number) const {
        const int blocks = S::template blocks<kRows>(p.problem, Rows::seqlen(p.problem));
        const auto index = TileIndex::at<false>(number, p.schedule, blocks, Rows::heads(p), 1);
        const int lane = 32 - ptx::popc(ptx::vote_ballot(end > index.block));
        if (lane == 32)  // rows behind the last sequence
            // @kept-tile-of-rows-outside
            return {index.block - ptx::shfl_index(end, 31), index.head, S::of(p, p.problem.batch)};
        const auto of = [&](int x) { return ptx::shfl_index(x, lane); };
        const S found = {index_of(lane), of(mine.seqlen_q), of(mine.seqlen_k),
                         of(mine.row_q), of(mine.row_k),    of(mine.rows_k)};
        const int left = of(end) - 1 - index.block;  // tiles of the sequence that come after this one
        // @kept-tile-of-its-sequence
        return {kDescending ? left : ceil_div(Rows::rows(found), kRows) - 1 - left, index.head, found};
    }

  private:
    // The sequence of a lane.
    __device__ int index_of(int lane) const { return kDescending ? p.problem.batch - 1 - lane : lane; }
};

// More: each tile is searched for (schedule.cuh).
template <class V, class Rows, int kRows, bool kDescending, class Params>
struct SearchedTiles {
    const Params &p;

    __device__ Tile<true> at(int number) const { return tile_at<V, Rows, kRows, kDescending>(p, number); }
};

#endif  // CUPYFLASH_PACKED_SM90_CUH
