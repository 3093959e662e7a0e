// Elements of O that are not finite, computed again (repair.cuh).
#ifndef CUPYFLASH_REPAIR_OUTPUT_CUH
#define CUPYFLASH_REPAIR_OUTPUT_CUH
#include "mask.cuh"
#include "repair.cuh"
#include "score.cuh"

// x[i], with x in registers: an index that is no constant would put x into local memory.
template <int kCount>
__device__ __forceinline__ float at_index(const float (&x)[kCount], int i) {
    float found = x[0];
    #pragma unroll
    for (int j = 1; j < kCount; ++j) {
        const float candidate = x[j];
        found = i == j ? candidate : found;
    }
    return found;
}

// Rows [row0, ...) of a tile that holds a warp's share of O, those of queries [query0, ...). m and inverse are what the
// softmax ends with, for the rows of each lane: P = inverse * 2^(factor * (S - m)).
template <class V, bool kUnaligned, class Tile, int kCount>
__device__ __forceinline__ void repair_output(const FwdParams &p, int batch, int head, int query0, const Tile &tile,
                                              int row0, float factor, const float (&m)[kCount],
                                              const float (&inverse)[kCount]) {
    using T = typename V::Element;
    constexpr int D = V::kHeadDim;
    const Problem &problem = p.problem;
    const Mask<V> mask(problem);
    const Score<V> score(problem);
    const int head_k = head / (problem.heads_q / problem.heads_k);
    const T *const k = static_cast<const T *>(p.k) + head_offset(p.k_stride, batch, head_k);
    const T *const v = static_cast<const T *>(p.v) + head_offset(p.v_stride, batch, head_k);
    #pragma unroll 1
    for (int row = 0; row < min(8 * kCount, problem.seqlen_q - query0); ++row) {
        const float top = ptx::shfl_index(at_index(m, row / 8), row % 8 * 4);
        const float by = ptx::shfl_index(at_index(inverse, row / 8), row % 8 * 4);
        if (!(by < ptx::infinity())) continue;  // NaN as a whole: a score is NaN or inf, or all are -inf
        const T *const q =
            static_cast<const T *>(p.q) + head_offset(p.q_stride, batch, head) + (query0 + row) * p.q_stride.row;
        repair_row<T, D>(tile, row0 + row, 0, D, 1.f, [&](auto &sum, bool reasons) {
            sum.add(
                v, p.v_stride.row, mask.first_key(query0 + row), mask.end_key(query0 + row),
                [&](int key) {
                    return reasons && row_is_finite<T, D, kUnaligned>(v + key * p.v_stride.row) ? kNone : kTerm;
                },
                [&](int key) {
                    const float s = score(dot_rows<T, D, kUnaligned>(q, k + key * p.k_stride.row));
                    return weight_ex2(fmaf(s - top, factor, ptx::lg2(by)));
                });
        });
    }
}

#endif  // CUPYFLASH_REPAIR_OUTPUT_CUH
