// The gradients of the arrays that a score_mod reads (cupyflash/mods/learned.py):
//     d array[i] = sum of dS * d score_mod / d read, over all scores, and all reads that are of element i,
// dS the gradient by what score_mod makes of a score (score_gradient.cuh). A block owns a tile of kBlockM queries of a head of q
// and goes through the keys that it sees, tile by tile: dS is formed in fragments, left in shared memory with the scores, and
// there each thread takes the scores of a line, along which many reads are of one element (V::kWalk). It adds those up by
// itself and then, atomically, to the fp32 sums in memory; so their order, and the last bits, are not always the same.
// bwd_dmods_sums.cuh clears them before and stores them behind.
//
// Shared memory: Q | dO | K | V; S | dS in fp32 in the place of K and V.
#ifndef CUPYFLASH_BWD_DMODS_CUH
#define CUPYFLASH_BWD_DMODS_CUH
#include "attention/score_gradient.cuh"

// What a thread adds to an element, as long as it is the same one.
struct ElementSum {
    float *to = nullptr;
    float sum = 0.f;

    __device__ void add(float *element, float x) {
        if (element != to) leave(), to = element;  // @sum-of-another-element
        sum += x;
    }
    __device__ void leave() {
        if (to) ptx::red_add(to, sum);  // @dmods-added
        sum = 0.f;                      // @sum-begins-again
    }
};

// The scores of a tile that a thread visits, one a step: those of a line, a diagonal (which goes on in column 0) or one of a
// row or column. Lines of neighbouring threads lie side by side.
template <class V>
struct Walk {
    enum { kAlongDiagonals, kAlongKeys, kAlongQueries };  // mods/learned.py
    static constexpr int M = V::kBlockM, N = V::kBlockN, kSteps = M * N / (32 * V::kWarps);
    static constexpr int kLines = V::kWalk == kAlongKeys ? M : N;
    static_assert(32 * V::kWarps % kLines == 0);
    int row, col;

    __device__ static Walk at(int step) {
        const int thread = fresh_thread(), line = thread % kLines, along = thread / kLines * kSteps + step;
        if constexpr (V::kWalk == kAlongKeys) return {line, along};
        else return {along, V::kWalk == kAlongQueries ? line : (line + along) % N};
    }
};

template <class V>
struct DMods : ScoreGradient<V> {
    using Base = ScoreGradient<V>;
    using Base::M, Base::N, Base::p, Base::row0;
    using typename Base::Acc;
    static constexpr int kStride = N + 1;  // so that neighbours of a row and of a column lie in different banks
    static_assert(V::kSmemBytes == Base::TileQ::kBytes + Base::TileDO::kBytes +
                                       larger(Base::TileK::kBytes + Base::TileV::kBytes, 8 * M * kStride));
    ElementSum sums[V::kReads];

    __device__ explicit DMods(const BwdParams &p) : Base(p) {}

    __device__ static ptx::u32 score_at(int row, int col) { return Base::k().base + 4 * (row * kStride + col); }
    __device__ static ptx::u32 dS_at(int row, int col) { return score_at(row, col) + 4 * M * kStride; }

    __device__ void run() {
        const auto tile = tile_at<V, Queries, M, V::kCausal>(p, ptx::block_index());
        const int q0 = tile.block * M;
        const auto sequence = with_range<V>(tile.sequence, p);
        const Mask<V> mask(sequence, this->problem);
        if (q0 >= sequence.seqlen_q) return;  // packed: room that no rows need
        bool is_first = true;
        #pragma unroll 1
        for (int n = mask.first_key_block(q0); n < mask.end_key_block(q0); ++n) {
            if (this->is_empty(sequence.index, tile.head, q0, n * N)) continue;
            Acc S, dP;
            this->request(sequence, tile.head, q0, n * N, is_first);
            this->multiply(S, dP);
            is_first = false;
            ptx::bar_sync();  // every warp is done with K and V @dmods-in-the-place-of-k
            const int row = row0 + fresh_lane() / 4, col = 2 * (fresh_lane() % 4);
            this->form(sequence, mask, tile.head, q0, n * N, NotFetched{}, S, dP, [&](int i, int j, float s, float dS) {
                ptx::st_shared_b32(score_at(row + i, col + j), ptx::float_as_uint(this->score.own(s)));
                ptx::st_shared_b32(dS_at(row + i, col + j), ptx::float_as_uint(dS));
            });
            ptx::bar_sync();  // all scores are here @dmods-scores-of-all-warps
            add(sequence.index, tile.head, q0, n * N);
        }
        #pragma unroll
        for (int i = 0; i < V::kReads; ++i) sums[i].leave();  // @dmods-left-over
    }

    // What the scores of a tile give to the elements that they are made of.
    __device__ __forceinline__ void add(int sequence, int head, int q0, int k0) {
        const typename V::Mods mods(p);
        #pragma unroll 1
        for (int step = 0; step < Walk<V>::kSteps; ++step) {
            const auto at = Walk<V>::at(step);
            const float dS = ptx::uint_as_float(ptx::ld_shared_b32(dS_at(at.row, at.col)));
            if (dS == 0.f) continue;  // hidden, or without weight
            const float score = ptx::uint_as_float(ptx::ld_shared_b32(score_at(at.row, at.col)));
            mods.derive(p, score, sequence, head, q0 + at.row, k0 + at.col, [&](int read, float *element, float by_it) {
                sums[read].add(element, dS * by_it);  // @derivative-by-the-read
            });
        }
    }
};

template <class V>
__device__ __forceinline__ void bwd_dmods(const BwdParams &p) {
    DMods<V>(p).run();
}

#endif  // CUPYFLASH_BWD_DMODS_CUH
