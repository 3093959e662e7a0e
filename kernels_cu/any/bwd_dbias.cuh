// The gradient of a bias: dS (score_gradient.cuh), summed over the dimensions along which the bias is broadcast. A block owns a
// tile of kBlockM queries and kBlockN keys of the result, forms dS of it for all that the tile is broadcast to, one after the
// other, and writes the sum once: nothing is added in memory, in whatever order blocks run.
//
// Shared memory: Q | dO | K | V; at the end a row of fp32 sums a warp.
#ifndef CUPYFLASH_BWD_DBIAS_CUH
#define CUPYFLASH_BWD_DBIAS_CUH
#include "attention/score_gradient.cuh"
#include "attention/bias_visits.cuh"

template <class V>
struct DBias : ScoreGradient<V> {
    using Base = ScoreGradient<V>;
    using Base::M, Base::N, Base::problem, Base::row0;
    using typename Base::Acc;
    using Visit = typename BiasVisits<V>::Visit;
    static_assert(Base::TileQ::kBytes + Base::TileDO::kBytes + Base::TileK::kBytes + Base::TileV::kBytes ==
                      V::kSmemBytes &&
                  4 * N * V::kWarps <= Base::TileQ::kBytes);

    const BiasVisits<V> visits;

    __device__ explicit DBias(const BwdParams &p) : Base(p), visits(p, ptx::block_index()) {}

    __device__ void run() {
        Acc sum;
        sum.zero();
        Visit next;
        bool exists = visits.begin(next);
        if (exists) request(next);
        #pragma unroll 1
        while (exists) {
            const Visit now = next;
            const SequenceOf<V> sequence = visits.sequence_of(now.batch);
            const auto fetched = this->fetch(sequence, now.head, now.m * M, now.n * N);
            Acc S, dP;
            this->multiply(S, dP);
            exists = visits.advance(next);
            if (exists) request(next);  // it is on its way while dS is formed
            this->form(
                sequence, Mask<V>(sequence, problem), now.head, now.m * M, now.n * N, fetched, S, dP,
                [&](int row, int col, float, float dS) { sum.x[row / 16][col / 8][row / 8 % 2 * 2 + col % 2] += dS; });
        }
        // Sums in the place of Q, with which every warp was done when dO and V landed.
        visits.template leave<V::kWarps>(sum, row0, ptx::dynamic_smem(), [] { ptx::bar_sync(); });
    }

  private:
    __device__ __forceinline__ void request(const Visit &visit) const {
        Base::request(visits.sequence_of(visit.batch), visit.head, visit.m * M, visit.n * N, true);
    }
};

template <class V>
__device__ __forceinline__ void bwd_dbias(const BwdParams &p) {
    DBias<V>(p).run();
}

#endif  // CUPYFLASH_BWD_DBIAS_CUH
