// Elements of dQ, dK and dV that are not finite, computed again (repair.cuh).
#ifndef CUPYFLASH_REPAIR_GRADIENTS_CUH
#define CUPYFLASH_REPAIR_GRADIENTS_CUH
#include "attention/blocks.cuh"
#include "attention/dropout.cuh"
#include "attention/repair.cuh"
#include "attention/score.cuh"

// For kernels that know no mask: whatever the mask, but for a range of keys; a window that is not there has no bounds. Any scale may be
// applied first; a slope in its unit needs one that is not 0.
template <class V>
struct AnyMask : V {
    static constexpr bool kCausal = false, kWindow = true, kScaleFirst = V::kAlibi, kPairedBias = false,
                          kBiasOfKeys = false;
    static constexpr int kBlockN = 64;
};

// Rows of dQ, dK and dV. kStatsRows: of the query tiles to which row_stats is padded.
template <class V, int kStatsRows, bool kUnaligned>
struct GradientRepair {
    using T = typename V::Element;
    static constexpr int D = V::kHeadDim, kDimV = V::kHeadDimV;
    const BwdParams &p;
    const Problem &problem;
    const SequenceOf<V> s;
    const Mask<V> mask;
    const Score<V> score;
    const int group;

    // The sequence is looked up again: what the main loop knows of it need not be kept.
    __device__ GradientRepair(const BwdParams &p, int sequence)
        : p(p),
          problem(p.problem),
          s(with_range<V>(Sequence<V::kPacked>::of(p, sequence), p)),
          mask(s, problem),
          score(problem),
          group(problem.heads_q / problem.heads_k) {}

    // Of columns [col0, col0 + kCols) in a row of a tile; nothing if there is no such query or key.
    template <int kCols = D, class Tile>
    __device__ void dq(int head, int query, const Tile &tile, int row, int col0 = 0) const {
        if (query >= s.seqlen_q) return;
        const int head_k = head / group;  // @head-of-k-repair-of-dq
        const T *const k = key_at(p.k, p.k_stride, head_k, 0);
        const Taken taken = reason<true>(head, query);
        const auto block_mask = BlockMask<V>::of(p, s.index, head);
        if constexpr (V::kBias) {  // which may hide all keys: each is asked below @nan-of-a-query-that-sees
        } else if constexpr (V::kBlockMask) {
            if (taken == kNaN && block_mask.sees_any(query, mask.first_key(query), mask.end_key(query))) return;
        } else if (taken == kNaN && mask.first_key(query) < mask.end_key(query)) return;
        repair_row<T, kCols>(tile, row, col0, D, score.scale, [&](auto &sum, bool reasons) {
            sum.add(
                k + col0, p.k_stride.row, mask.first_key(query), mask.end_key(query),
                [&](int key) {
                    if constexpr (V::kBias)
                        if (!counts(head, query, key)) return kNone;
                    if constexpr (V::kBlockMask)
                        if (!block_mask.sees(query, key)) return kNone;  // @hidden-key-of-dq
                    if (!reasons || taken != kNone) return V::kBias && reasons ? taken : kTerm;
                    return row_is_finite<T, D, kUnaligned>(k + key * p.k_stride.row) ? kNone : kTerm;
                },
                [&](int key) { return dS(head, query, head_k, key); });
        });
    }
    template <int kCols = D, class Tile>
    __device__ void dk(int head_k, int key, const Tile &tile, int row, int col0 = 0) const {
        over_queries<kCols, true>(p.q, p.q_stride, score.scale, head_k, key, tile, row, col0,
                                  [&](int head, int query) { return dS(head, query, head_k, key); });
    }
    template <int kCols = kDimV, class Tile>
    __device__ void dv(int head_k, int key, const Tile &tile, int row, int col0 = 0) const {
        over_queries<kCols, false>(p.dout, p.dout_stride, 1.f, head_k, key, tile, row, col0, [&](int head, int query) {
            return of_kept(head, query, key, P(head, query, key, S(head, query, head_k, key)));
        });
    }

  private:
    __device__ const float *stats(int head, int query) const { return row_stats_at<kStatsRows>(p, s, head, query); }
    // Whether a bias leaves a query and a key to each other.
    __device__ bool counts(int head, int query, int key) const {
        // @hidden-by-bias-repair
        return stats(head, query)[0] != kLseOfNothing && !place(head, query, key).hides();
    }
    // Whether a query's P (and kDS: its dS), O or dO may hold what is not finite: its lse and delta tell.
    template <bool kDS>
    __device__ Taken reason(int head, int query) const {
        const float *const x = stats(head, query);
        if constexpr (V::kBias)
            if (x[0] == kLseOfNothing) return kNone;
        if (!(fabsf(x[0]) < ptx::infinity()) || (kDS && x[1] != x[1])) return kNaN;
        return fabsf(x[1]) < ptx::infinity() ? kNone : kTerm;
    }
    // The same of a key's gradients, with what lse and delta do not tell.
    template <bool kDS>
    __device__ Taken reason(int head, int query, int key) const {
        const Taken taken = reason<kDS>(head, query);
        if constexpr (V::kDropout && !kDS)  // 0 times dO, whatever P is @p-of-what-is-dropped
            if (taken == kNaN && !keeps(head, query, key)) return kTerm;
        // Behind a sink lse is finite, too, where all scores are -inf. @q-behind-a-finite-lse
        if constexpr (kDS && (Score<V>::kFiniteOfAnyQ || V::kSink))
            if (taken == kNone && !row_is_finite<T, D, kUnaligned>(query_at(p.q, p.q_stride, head, query)))
                return kTerm;
        return taken;
    }
    __device__ const T *query_at(const void *x, const Strides &stride, int head, int query) const {
        return static_cast<const T *>(x) + s.q_offset(stride, head) + query * stride.row;
    }
    __device__ const T *key_at(const void *x, const Strides &stride, int head_k, int key) const {
        return static_cast<const T *>(x) + s.k_offset(stride, head_k) + key * stride.row;
    }
    __device__ float S(int head, int query, int head_k, int key) const {
        // @strides-of-k-repair
        return dot_rows<T, D, kUnaligned>(query_at(p.q, p.q_stride, head, query), key_at(p.k, p.k_stride, head_k, key));
    }
    __device__ typename Places<V>::At place(int head, int query, int key) const {
        return Places<V>::of(p, s, head).from(query, key)(0, 0);
    }
    __device__ float P(int head, int query, int key, float raw) const {
        return weight_ex2(score.exponent(raw, place(head, query, key), stats(head, query)[0]));
    }
    __device__ float dS(int head, int query, int head_k, int key) const {
        const float raw = S(head, query, head_k, key);
        // @strides-of-do-and-v-repair
        const float dP = dot_rows<T, kDimV, kUnaligned>(query_at(p.dout, p.dout_stride, head, query),
                                                        key_at(p.v, p.v_stride, head_k, key));
        const float weight = score.weight_in_repair(raw, P(head, query, key, raw), place(head, query, key));
        return weight * (of_kept(head, query, key, dP) - stats(head, query)[1]);
    }
    __device__ bool keeps(int head, int query, int key) const {
        return Dropout<V>::of(p, s.index, head).keeps(query, key);
    }
    __device__ float of_kept(int head, int query, int key, float x) const {
        return Dropout<V>::of_kept(keeps(head, query, key), x);
    }
    // The sum of weight(head, query) times that row of x.
    template <int kCols, bool kDS, class Tile, class Weight>
    __device__ void over_queries(const void *x, const Strides &stride, float factor, int head_k, int key,
                                 const Tile &tile, int row, int col0, Weight weight) const {
        if (key >= s.rows_k) return;
        const int end = mask.end_query(key);
        // @columns-of-dv-repaired
        repair_row<T, kCols>(tile, row, col0, kDS ? D : kDimV, factor, [&](auto &sum, bool reasons) {
            #pragma unroll 1
            for (int head = head_k * group; head < (head_k + 1) * group; ++head) {  // @repair-over-all-heads
                const auto block_mask = BlockMask<V>::of(p, s.index, head);
                sum.add(
                    query_at(x, stride, head, 0) + col0, stride.row, mask.first_query(key), end,  // @queries-of-the-key
                    [&](int query) {
                        if constexpr (V::kBias)
                            if (!counts(head, query, key)) return kNone;
                        if constexpr (V::kBlockMask)
                            if (!block_mask.sees(query, key)) return kNone;
                        return reasons ? reason<kDS>(head, query, key) : kTerm;
                    },
                    [&](int query) { return weight(head, query); });
            }
        });
    }
};

#endif  // CUPYFLASH_REPAIR_GRADIENTS_CUH
