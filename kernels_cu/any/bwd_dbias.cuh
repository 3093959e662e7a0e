// The gradient of a bias: dS (score_gradient.cuh), summed over the dimensions along which the bias is broadcast. A block owns a
// tile of kBlockM queries and kBlockN keys of the result, forms dS of it for all that the tile is broadcast to, one after the
// other, and writes the sum once: nothing is added in memory, in whatever order blocks run. Where queries or keys are broadcast,
// a tile stands for all of them, and its rows or columns are added up at the end.
//
// Shared memory: Q | dO | K | V; at the end a row of fp32 sums a warp.
#ifndef CUPYFLASH_BWD_DBIAS_CUH
#define CUPYFLASH_BWD_DBIAS_CUH
#include "any/score_gradient.cuh"
#include "tile/sums.cuh"

template <class V>
struct DBias : ScoreGradient<V> {
    using Base = ScoreGradient<V>;
    using Base::M, Base::N, Base::p, Base::problem, Base::row0;
    using typename Base::Acc;
    using typename Base::T;
    static_assert(2 * Base::TileQ::kBytes + 2 * Base::TileK::kBytes == V::kSmemBytes &&
                  4 * N * V::kWarps <= Base::TileQ::kBytes);

    // What the tile belongs to along one dimension: the index-th of those of the result, or all there are if broadcast.
    struct Range {
        int first, end;
        __device__ Range(bool is_broadcast, int index, int count)
            : first(is_broadcast ? 0 : index), end(is_broadcast ? count : index + 1) {}
    };

    // One tile of those that the block adds up: blocks of queries and of keys of a head.
    struct Visit { int batch, head, m, n; };

    const ScoreStrides &to;
    const int result_q, result_k;  // queries and keys that a tile of the result may have; packed, of a sequence
    Range keys, queries, heads, batches;
    Acc sum;

    __device__ explicit DBias(const BwdParams &p) : DBias(p, p.dbias_stride, ptx::block_index()) {}

    __device__ void run() {
        Visit next{batches.first, heads.first, queries.first, keys.first - 1};
        bool exists = batches.first < batches.end && queries.first < queries.end && advance(next);
        if (exists) request(next);
        #pragma unroll 1
        while (exists) {
            const Visit now = next;
            const SequenceOf<V> sequence = sequence_of(now.batch);
            const auto fetched = this->fetch(sequence, now.head, now.m * M, now.n * N);
            Acc S, dP;
            this->multiply(S, dP);
            exists = advance(next);
            if (exists) request(next);  // it is on its way while dS is formed
            this->form(
                sequence, Mask<V>(sequence, problem), now.head, now.m * M, now.n * N, fetched, S, dP,
                [&](int row, int col, float, float dS) { sum.x[row / 16][col / 8][row / 8 % 2 * 2 + col % 2] += dS; });
        }
        leave(batches.first, heads.first, queries.first * M, keys.first * N);
    }

  private:
    __device__ DBias(const BwdParams &p, const ScoreStrides &to, int index)
        : Base(p),
          to(to),
          result_q(V::kPacked && to.row != 0 ? p.max_seqlen_q : problem.seqlen_q),  // @dbias-of-its-room
          result_k(V::kPacked && to.key != 0 ? p.max_seqlen_k : problem.seqlen_k),
          keys(next(index, to.key == 0, ceil_div(result_k, N))),
          queries(next(index, to.row == 0, ceil_div(result_q, M))),
          heads(next(index, to.head == 0, problem.heads_q)),
          batches(next(index, to.batch == 0, problem.batch)) {
        sum.zero();
    }
    // The block's index along a dimension, the last one first.
    __device__ static Range next(int &index, bool is_broadcast, int count) {
        const int size = is_broadcast ? 1 : count, found = index % size;
        index /= size;
        return Range(is_broadcast, found, count);
    }
    __device__ SequenceOf<V> sequence_of(int batch) const {
        return with_range<V>(Sequence<V::kPacked>::of(p, batch), p);
    }
    __device__ __forceinline__ void request(const Visit &visit) const {
        Base::request(sequence_of(visit.batch), visit.head, visit.m * M, visit.n * N, true);
    }
    // To the next tile of which something is seen; false if there is none.
    __device__ __forceinline__ bool advance(Visit &at) const {
        #pragma unroll 1
        for (++at.n;; ++at.n) {
            const SequenceOf<V> sequence = sequence_of(at.batch);
            const Mask<V> mask(sequence, problem);
            // Of packed sequences each has its own number of queries.
            const int end_query_block = V::kPacked ? min(queries.end, ceil_div(sequence.seqlen_q, M)) : queries.end;
            at.n = max(at.n, max(keys.first, mask.first_key_block(at.m * M)));
            // @dbias-of-blocks-that-are-seen
            if ((!V::kPacked || at.m < end_query_block) && at.n < min(keys.end, mask.end_key_block(at.m * M))) {
                if (!this->is_empty(at.batch, at.head, at.m * M, at.n * N)) return true;
                continue;
            }
            at.n = -1;
            if (++at.m < end_query_block) continue;
            at.m = queries.first;
            if (++at.head < heads.end) continue;  // @dbias-of-all-heads
            at.head = heads.first;
            if (++at.batch >= batches.end) return false;  // @dbias-of-all-sequences
        }
    }

    // What was summed up leaves: as it is, or its rows' sums in the first column, its columns' in the first row, or both.
    __device__ void leave(int batch, int head, int q0, int k0) {
        if (to.key == 0) sum_columns(sum);
        // In the place of Q, with which every warp was done when dO and V landed.
        if (to.row == 0) sum_rows<V::kWarps>(sum, ptx::dynamic_smem());
        const int rows = to.row == 0 ? (row0 == 0 ? 1 : 0) : result_q - q0 - row0;
        const int columns = to.key == 0 ? 1 : result_k - k0;
        const long long at = batch * to.batch + head * to.head + (q0 + row0) * to.row + k0 * to.key;
        const int first_row = fresh_lane() / 4, first_col = 2 * (fresh_lane() % 4);
        using Element = typename Bias<V>::Element;
        Element *const mine = static_cast<Element *>(p.dbias) + at + first_row * to.row + first_col * to.key;
        sum.for_each([&](int row, int col, float &x) {
            if (first_row + row >= rows || first_col + col >= columns) return;
            store(mine + row * to.row + col * to.key, x);  // @dbias-stored
        });
    }
    __device__ static void store(T *to, float x) { to->raw = static_cast<ptx::u16>(T::pack(x, 0.f)); }
    __device__ static void store(float *to, float x) { *to = x; }
};

template <class V>
__device__ __forceinline__ void bwd_dbias(const BwdParams &p) {
    DBias<V>(p).run();
}

#endif  // CUPYFLASH_BWD_DBIAS_CUH
