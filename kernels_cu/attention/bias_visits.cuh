// Which tiles of dS are summed up in a tile of a bias's gradient: the gradient is summed over the dimensions along which the bias
// is broadcast. A tile of kBlockM queries and kBlockN keys of the result visits, one after the other, all that it is broadcast
// to and of which something is seen. Where queries or keys are broadcast, it stands for all of them.
#ifndef CUPYFLASH_BIAS_VISITS_CUH
#define CUPYFLASH_BIAS_VISITS_CUH
#include "attention/bias.cuh"
#include "attention/blocks.cuh"
#include "attention/mask.cuh"
#include "tile/sums.cuh"

template <class V>
struct BiasVisits {
    static constexpr int M = V::kBlockM, N = V::kBlockN;

    // What the tile belongs to along one dimension: the index-th of those of the result, or all there are if broadcast.
    struct Range {
        int first, end;
        __device__ Range(bool is_broadcast, int index, int count)
            : first(is_broadcast ? 0 : index), end(is_broadcast ? count : index + 1) {}
    };

    // One tile of those that are added up: blocks of queries and of keys of a head.
    struct Visit { int batch, head, m, n; };

    const BwdParams &p;
    const Problem &problem;
    const ScoreStrides &to;
    const int result_q, result_k;  // queries and keys that a tile of the result may have; packed, of a sequence
    Range keys, queries, heads, batches;

    // Of the index-th tile of the result.
    __device__ BiasVisits(const BwdParams &p, int index)
        : p(p),
          problem(p.problem),
          to(p.dbias_stride),
          result_q(V::kPacked && to.row != 0 ? p.max_seqlen_q : problem.seqlen_q),  // @dbias-of-its-room
          result_k(V::kPacked && to.key != 0 ? p.max_seqlen_k : problem.seqlen_k),
          keys(next(index, to.key == 0, ceil_div(result_k, N))),
          queries(next(index, to.row == 0, ceil_div(result_q, M))),
          heads(next(index, to.head == 0, problem.heads_q)),
          batches(next(index, to.batch == 0, problem.batch)) {}

    // How many tiles the result has.
    __device__ static int count(const BwdParams &p) {
        const BiasVisits first(p, 0);
        return (first.to.key == 0 ? 1 : ceil_div(first.result_k, N)) *
               (first.to.row == 0 ? 1 : ceil_div(first.result_q, M)) * (first.to.head == 0 ? 1 : p.problem.heads_q) *
               (first.to.batch == 0 ? 1 : p.problem.batch);
    }

    __device__ SequenceOf<V> sequence_of(int batch) const {
        return with_range<V>(Sequence<V::kPacked>::of(p, batch), p);
    }
    // The first tile, seen or not.
    __device__ Visit first() const { return {batches.first, heads.first, queries.first, keys.first}; }
    // To the first tile of which something is seen; false if there is none.
    __device__ __forceinline__ bool begin(Visit &at) const {
        at = {batches.first, heads.first, queries.first, keys.first - 1};
        return batches.first < batches.end && queries.first < queries.end && advance(at);
    }
    // To the next one.
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
                if (!is_empty(at.batch, at.head, at.m * M, at.n * N)) return true;
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

    // What a warp summed up leaves, rows [row0, row0 + kRows) of the tile: as it is, or its rows' sums in the first column, its
    // columns' in the first row, or both. All kWarps warps of the tile call it; `sync` brings them together, `sums` has N floats of
    // shared memory for each, which nobody reads any more.
    template <int kWarps, int kRows, class Sync>
    __device__ __forceinline__ void leave(AccTile<kRows, N> &sum, int row0, ptx::u32 sums, Sync sync) const {
        if (to.key == 0) sum_columns(sum);
        if (to.row == 0) sum_rows<kWarps>(sum, sums, sync);
        const int q0 = queries.first * M + row0, k0 = keys.first * N;
        const int rows = to.row == 0 ? (row0 == 0 ? 1 : 0) : result_q - q0;
        const int columns = to.key == 0 ? 1 : result_k - k0;
        const long long at = batches.first * to.batch + heads.first * to.head + q0 * to.row + k0 * to.key;
        const int first_row = fresh_lane() / 4, first_col = 2 * (fresh_lane() % 4);
        Element *const mine = static_cast<Element *>(p.dbias) + at + first_row * to.row + first_col * to.key;
        // Whether two neighbouring keys are written at once: they lie side by side, at a multiple of their size.
        // A thread's rows are 8 apart, so what holds for the first one holds for all.
        const bool pairs =  // @pairs-of-dbias
            to.key == 1 && reinterpret_cast<unsigned long long>(mine) % (2 * sizeof(Element)) == 0;
        #pragma unroll
        for (int a = 0; a < sum.kRowTiles; ++a)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = 16 * a + 8 * h;
                #pragma unroll
                for (int j = 0; j < sum.kColTiles; ++j) {
                    const float *const x = sum.x[a][j] + 2 * h;
                    const int left = columns - first_col - 8 * j;
                    if (first_row + row >= rows || left <= 0) continue;
                    Element *const there = mine + row * to.row + 8 * j * to.key;  // @dbias-stored
                    if (pairs && left > 1) {
                        store_pair(there, x[0], x[1]);
                    } else {
                        store(there, x[0]);
                        if (left > 1) store(there + to.key, x[1]);
                    }
                }
            }
    }

  private:
    using T = typename V::Element;
    using Element = typename Bias<V>::Element;
    __device__ static void store(T *to, float x) { to->raw = static_cast<ptx::u16>(T::pack(x, 0.f)); }
    __device__ static void store(float *to, float x) { *to = x; }
    __device__ static void store_pair(T *to, float x, float y) { *reinterpret_cast<ptx::u32 *>(to) = T::pack(x, y); }
    __device__ static void store_pair(float *to, float x, float y) {
        *reinterpret_cast<BiasPair<float> *>(to) = BiasPair<float>::of(x, y);
    }

    // The tile's index along a dimension, the last one first.
    __device__ static Range next(int &index, bool is_broadcast, int count) {
        const int size = is_broadcast ? 1 : count, found = index % size;
        index /= size;
        return Range(is_broadcast, found, count);
    }
    // Whether a block mask leaves nothing of a tile.
    __device__ bool is_empty(int sequence, int head, int q0, int k0) const {
        if constexpr (V::kBlockMask) {
            const auto mask = BlockMask<V>::of(p, sequence, head);
            #pragma unroll
            for (int m = 0; m < M; m += kMaskTile)
                #pragma unroll
                for (int n = 0; n < N; n += kMaskTile)
                    if (mask.kind(q0 + m, k0 + n) != kEmptyTile) return false;
            return true;
        } else {
            return false;
        }
    }
};

#endif  // CUPYFLASH_BIAS_VISITS_CUH
