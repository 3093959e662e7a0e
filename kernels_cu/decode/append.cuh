// New rows into a cache, in place behind those in use, and queries turned by their position,
//     k_cache[used + i] = rotated(k[i]),   v_cache[used + i] = v[i],   rotated_q[i] = rotated(q[i]),
// where each pair (a, b) of a row's first rotary_dim columns becomes (a cos - b sin, a sin + b cos) of position used + i
// (Su et al. 2021), in fp32, rounded once. An 8-bit cache (stored.cuh) gets rotated(k[i]) / k_scale and v[i] / v_scale, the
// scales those of their place, rounded to the nearest, where products, sums and quotients are rounded each. Positions that the
// tables do not have are not turned, rows behind the capacity are not written. One warp a row of one head; no shared memory.
#ifndef CUPYFLASH_APPEND_CUH
#define CUPYFLASH_APPEND_CUH
#include "decode/cached.cuh"
#include "decode/stored.cuh"

// Row `token` of q, k and v: number `i` of sequence `b`; none where that is the batch.
template <class V>
struct NewRow {
    int b, i;

    __device__ NewRow(const AppendParams &p, int token) {
        if constexpr (!V::kPacked) {
            b = token / p.problem.seqlen_q, i = token % p.problem.seqlen_q;
        } else {  // the last sequence that starts at or before it
            int before = 0;
            #pragma unroll 1
            for (int first = 0; first <= p.problem.batch; first += 32) {
                const int edge = first + lane();
                const bool starts = edge <= p.problem.batch && Sequence<true>::start_q(p, edge) <= token;
                before += ptx::popc(ptx::vote_ballot(starts));  // @sequences-that-start-before
            }
            b = before - 1, i = token - Sequence<true>::start_q(p, b);
        }
    }
};

template <class T>
__device__ __forceinline__ float table_entry(const AppendParams &p, const void *table, int position, int column) {
    const long long at = static_cast<long long>(position) * (p.rotary_dim / 2) + column;
    return p.tables_fp32 ? static_cast<const float *>(table)[at] : value_of(static_cast<const T *>(table)[at]);
}

// One row, by one warp. turned: how many columns are; scale: of 8-bit elements.
template <int D, class T, class To>
__device__ __forceinline__ void write_row(const AppendParams &p, const T *from, To *to, int position, int turned,
                                          float scale = 1.f) {
    constexpr bool kScales = !kSame<T, To>;
    #pragma unroll
    for (int c0 = 0; c0 < D; c0 += 32) {
        const int c = c0 + lane(), half = turned / 2;
        if (c >= D) continue;
        T x = from[c];
        float exact = value_of(x);
        if (c < turned) {
            const bool first = p.interleaved ? c % 2 == 0 : c < half;  // of its pair
            const int pair = p.interleaved ? c / 2 : c % half;
            const int other = p.interleaved ? c ^ 1 : first ? c + half : c - half;  // @other-of-the-pair
            const float cos = table_entry<T>(p, p.cos, position, pair), sin = table_entry<T>(p, p.sin, position, pair);
            const float own = value_of(x), its = value_of(from[other]);
            if constexpr (kScales) {
                const float added = ptx::mul_rn(its, sin);
                exact = ptx::add_rn(ptx::mul_rn(own, cos), first ? -added : added);
            } else {
                const float y = first ? own * cos - its * sin : own * cos + its * sin;  // @turned
                x = rounded_to<T>(y);
            }
        }
        if constexpr (kScales) to[c] = To::rounded(exact / scale);  // @quotient-by-the-scale
        else to[c] = x;
    }
}

template <class V>
__device__ __forceinline__ void append(const AppendParams &p) {
    using T = typename V::Element;
    constexpr int D = V::kHeadDim;
    static_assert(V::kSmemBytes == 0);
    // What follows may begin, and waits before it reads.
    if constexpr (V::kOverlaps) ptx::griddepcontrol_launch_dependents();
    const Problem &problem = p.problem;  // seqlen_q: new rows of a sequence; packed: of all
    const int heads_q = p.rotated_q ? problem.heads_q : 0, heads = heads_q + (p.k ? 2 * problem.heads_k : 0);
    const int number = ptx::block_index() * V::kWarps + warp(), token = number / heads, slot = number % heads;
    if (token >= problem.seqlen_q * (V::kPacked ? 1 : problem.batch)) return;
    const NewRow<V> at(p, token);
    if (at.b >= problem.batch) return;  // rows of no sequence
    if constexpr (V::kPacked)
        if (at.i < 0) return;  // edges that go back @rows-before-their-sequence
    const long long batch = V::kPacked ? 0 : at.b, row = V::kPacked ? token : at.i;
    const int position = used_rows(p, at.b) + at.i, turned = position < p.rotary_positions ? p.rotary_dim : 0;
    const auto given = [&](const void *x, const Strides &s, int head) {
        return static_cast<const T *>(x) + batch * s.batch + row * s.row + head * s.head;
    };
    if (slot < heads_q) {
        T *const to = static_cast<T *>(p.rotated_q) + ((batch * problem.seqlen_q + row) * problem.heads_q + slot) * D;
        return write_row<D>(p, given(p.q, p.q_stride, slot), to, position, turned);
    }
    if (position >= problem.seqlen_k) return;  // @room-in-the-cache
    const int place = place_of<V::kPaged>(p, at.b, position), own = row_in_place<V::kPaged>(p, position);
    const int head = (slot - heads_q) % problem.heads_k;
    const auto cache = [&](void *x, const Strides &s) {
        return static_cast<Stored<V> *>(x) + place * s.batch + own * s.row + head * s.head;
    };
    const auto scale = [&](const float *x) { return kScaled<V> ? x[place * p.scale_stride + head] : 1.f; };
    if (slot < heads_q + problem.heads_k)
        write_row<D>(p, given(p.k, p.k_stride, head), cache(p.k_cache, p.k_cache_stride), position, turned,
                     scale(p.k_scale));
    else
        write_row<V::kHeadDimV>(p, given(p.v, p.v_stride, head), cache(p.v_cache, p.v_cache_stride), position, 0,
                                scale(p.v_scale));  // @columns-of-v-appended
}

#endif  // CUPYFLASH_APPEND_CUH
