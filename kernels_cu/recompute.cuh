// Rows of the gradients anew, each by one warp and straight from global memory: for those that are not finite, perhaps only
// because 0 * NaN of a hidden query or key leaked into them (nonfinite.cuh). Rows that are NaN by right are told cheaply: a
// model that diverged must not take hours to say so.
#ifndef CUPYFLASH_RECOMPUTE_CUH
#define CUPYFLASH_RECOMPUTE_CUH
#include "mask.cuh"
#include "nonfinite.cuh"
#include "score.cuh"

template <class V>
struct Recompute {
    using T = typename V::Element;
    static constexpr int D = V::kHeadDim;
    static_assert(V::kBlockM == 64, "row_stats are padded to tiles of 64 queries, whatever a kernel keeps");
    const BwdParams &p;
    const Problem &problem;
    const Mask<V> mask;
    const Score<V> score;
    const int batch;

    // A gradient's row but for its factor.
    struct Row {
        RowSum<T, D> sum;
        float factor;
        template <class Tile>
        __device__ void store(const Tile &tile, int row) const {
            sum.store(tile, row, factor);
        }
        __device__ void write(T *to) const { sum.write(to, factor); }
    };

    __device__ Recompute(const BwdParams &p, int batch)
        : p(p), problem(p.problem), mask(problem), score(problem), batch(batch) {}

    __device__ Row dq(int head, int query) const {
        Row row{{}, score.scale};
        const int head_k = head / (problem.heads_q / problem.heads_k);
        row.sum.template add<false>(at(p.k, p.k_stride, head_k, 0), p.k_stride.row, mask.first_key(query),
                                    mask.end_key(query), [&](int key) { return dS(head, query, head_k, key); });
        return row;
    }
    __device__ Row dk(int head_k, int key) const {
        return over_queries<false>(p.q, p.q_stride, head_k, key, score.scale,
                                   [&](int head, int query) { return dS(head, query, head_k, key); });
    }
    __device__ Row dv(int head_k, int key) const {
        return over_queries<true>(p.dout, p.dout_stride, head_k, key, 1.f,
                                  [&](int head, int query) { return P(head, query, head_k, key); });
    }
    // dK (kOfDK) or dV of a key, into a row of a tile; nothing if there is no such key or it is NaN as a whole.
    template <bool kOfDK, class Tile>
    __device__ void store_key(int head_k, int key, const Tile &tile, int row) const {
        if (key >= problem.seqlen_k || is_nan<kOfDK>(head_k, key)) return;
        if constexpr (kOfDK) dk(head_k, key).store(tile, row);
        else dv(head_k, key).store(tile, row);
    }
    // Whether a row of dQ is NaN as a whole, since its lse or delta is.
    __device__ bool dq_is_nan(int head, int query) const {
        const float *const x = stats(head, query);
        return !mask.sees_nothing(query) && (x[0] != x[0] || x[1] != x[1]);
    }
    __device__ const float *stats(int head, int query) const {
        return row_stats_at<V::kBlockM>(p, batch * problem.heads_q + head, query);
    }

  private:
    // dK (kOfDK) or dV of a key is NaN if a query that sees it has an lse of NaN, and dK with its delta. A delta of NaN may
    // come from one NaN in dO; dV is NaN if all of that row is, for which the first query stands.
    template <bool kOfDK>
    __device__ bool is_nan(int head_k, int key) const {
        const int group = problem.heads_q / problem.heads_k, first = mask.first_query(key), end = mask.end_query(key);
        bool found = false;
        #pragma unroll 1
        for (int head = head_k * group; head < (head_k + 1) * group; ++head)
            #pragma unroll 1
            for (int query = first + lane(); query < end; query += 32) {
                const float *const x = stats(head, query);
                found |= x[0] != x[0] || (kOfDK && x[1] != x[1]);
            }
        if (ptx::vote_any(found)) return true;
        if (kOfDK || first >= end) return false;
        const T *dout = at(p.dout, p.dout_stride, head_k * group, first);
        #pragma unroll 1
        for (int col = lane(); col < D; col += 32) found |= T::lo(dout[col].raw) == T::lo(dout[col].raw);
        return !ptx::vote_any(found);
    }
    __device__ const T *at(const void *x, const Strides &s, int head, int i) const {
        return static_cast<const T *>(x) + head_offset(s, batch, head) + i * s.row;
    }
    __device__ float P(int head, int query, int head_k, int key) const {
        const float s = dot_rows<T, D>(at(p.q, p.q_stride, head, query), at(p.k, p.k_stride, head_k, key));
        return ptx::ex2(fmaf(score(s), score.log2_factor, -stats(head, query)[0]));
    }
    __device__ float dS(int head, int query, int head_k, int key) const {
        const float dP = dot_rows<T, D>(at(p.dout, p.dout_stride, head, query), at(p.v, p.v_stride, head_k, key));
        return score.grad(P(head, query, head_k, key) * (dP - stats(head, query)[1]));
    }
    template <bool kAsItself, class Weight>
    __device__ Row over_queries(const void *x, const Strides &stride, int head_k, int key, float factor,
                                Weight weight) const {
        Row row{{}, factor};
        const int group = problem.heads_q / problem.heads_k;
        #pragma unroll 1
        for (int head = head_k * group; head < (head_k + 1) * group; ++head)
            row.sum.template add<kAsItself>(at(x, stride, head, 0), stride.row, mask.first_query(key),
                                            mask.end_query(key), [&](int query) { return weight(head, query); });
        return row;
    }
};

#endif  // CUPYFLASH_RECOMPUTE_CUH
