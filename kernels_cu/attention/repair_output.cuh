// Elements of O that are not finite, computed again (repair.cuh), and with them their rows' softmax: the kernels then need not
// keep its maxima and sums until here.
#ifndef CUPYFLASH_REPAIR_OUTPUT_CUH
#define CUPYFLASH_REPAIR_OUTPUT_CUH
#include "attention/blocks.cuh"
#include "attention/dropout.cuh"
#include "attention/pages.cuh"
#include "attention/repair.cuh"
#include "attention/sink.cuh"

// log2 of the sum of 2^x(i) over [first, end), by one warp, in every lane. NaN where a weight 2^(x(i) - that) would be: if an
// x is NaN or inf, or if all are -inf: that is then -inf if kMayBeNothing.
template <bool kMayBeNothing, class X>
__device__ __forceinline__ float log2_sum_ex2(int first, int end, X x) {
    float top = -ptx::infinity(), sum = 0.f;  // of this lane: the sum of 2^(x - top)
    #pragma unroll 1
    for (int i = first + fresh_lane(); i < end; i += 32) {  // @softmax-of-all-keys
        const float x_i = x(i);
        if (x_i == -ptx::infinity()) continue;
        const float before = top;
        top = fmaxf(top, x_i);
        sum = sum * ptx::ex2(before - top) + ptx::ex2(x_i - top);  // NaN if x is NaN or inf
    }
    #pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other_top = ptx::shfl_xor(top, mask), other_sum = ptx::shfl_xor(sum, mask), before = top;
        top = fmaxf(top, other_top);
        const float mine = sum == 0.f ? 0.f : sum * ptx::ex2(before - top);
        sum = mine + (other_sum == 0.f ? 0.f : other_sum * ptx::ex2(other_top - top));
    }
    return sum == 0.f ? (kMayBeNothing ? -ptx::infinity() : ptx::nan()) : top + ptx::lg2(sum);
}

// The largest x(i) of [first, end), by one warp, in every lane; NaN counts for nothing, and where all are -inf it is 0.
template <class X>
__device__ __forceinline__ float largest_or_zero(int first, int end, X x) {
    float top = -ptx::infinity();
    #pragma unroll 1
    for (int i = first + fresh_lane(); i < end; i += 32) top = fmaxf(top, x(i));
    #pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, ptx::shfl_xor(top, mask));
    return finite_or_zero(top);
}

// The softmax of one row of keys [first, end), by one warp. value(key): a score, as Score has it.
template <class V, class Value>
struct RowSoftmax {
    const Score<V> &score;
    const Sink<V> &sink;  // which stands behind the last key
    const int first, end;
    const Value &value;
    float top = 0.f;  // kNatural: the largest, since the factor may carry scores beyond fp32
    float lse = 0.f;  // of what is left of them, in powers of two

    __device__ float exponent(int key) const {
        if constexpr (Score<V>::kNatural) return (value(key) - top) * score.log2_factor;
        else return value(key) * score.log2_factor;  // @scores-as-in-the-kernel
    }
    __device__ void find() {
        if constexpr (Score<V>::kNatural) {
            top = largest_or_zero(first, end, value);                   // @factor-behind-the-maximum
            if constexpr (Sink<V>::kAny) top = fmaxf(top, sink.logit);  // @sink-beyond-all-scores
        }
        // @sink-of-the-row
        lse = log2_sum_ex2<V::kBias>(first, end + Sink<V>::kAny, [&](int i) {
            if constexpr (Sink<V>::kAny)
                if (i == end) return Score<V>::kNatural ? (sink.logit - top) * kLog2e : sink.log2();
            return exponent(i);
        });
    }
    __device__ bool sees_nothing() const { return lse == -ptx::infinity(); }
    __device__ float natural() const { return fmaf(lse, kLn2, top); }
    __device__ float weight(int key) const { return weight_ex2(exponent(key) - lse); }
};

// Rows [row0, row0 + kRows), columns [col0, col0 + kCols) of a tile that holds a warp's share of O, those of queries
// [query0, ...) of a sequence. That is looked up again: what the main loop knows of it need not be kept.
template <class V, bool kUnaligned, int kRows, int kCols = V::kHeadDimV, class Tile>
__device__ __forceinline__ void repair_output(const FwdParams &p, int sequence, int head, int query0, const Tile &tile,
                                              int row0, int col0 = 0) {
    using T = typename V::Element;
    constexpr int D = V::kHeadDim, kDimV = V::kHeadDimV;
    const Problem &problem = p.problem;
    const auto s = with_range<V>(Sequence<V::kPacked>::of(sequences_of<V>(p), sequence), p);
    const Mask<V> mask(s, problem);
    const Score<V> score(problem);
    const auto block_mask = BlockMask<V>::of(p, s, head);
    const int head_k = head / (problem.heads_q / problem.heads_k);                        // @head-of-k-repair-of-o
    const KeyRows<V> k(p, p.k, p.k_stride, s, head_k), v(p, p.v, p.v_stride, s, head_k);  // @heads-of-v-repair-of-o
    #pragma unroll 1
    for (int row = 0; row < min(kRows, s.seqlen_q - query0); ++row) {
        const T *const q = static_cast<const T *>(p.q) + s.q_offset(p.q_stride, head) + (query0 + row) * p.q_stride.row;
        const int first = mask.first_key(query0 + row), end = mask.end_key(query0 + row);  // @keys-of-the-row
        const auto places = Places<V>::of(p, s, head).from(query0 + row, 0);
        const auto value = [&](int key) {
            if constexpr (V::kBlockMask)
                if (!block_mask.sees(query0 + row, key)) return -ptx::infinity();  // @hidden-key-of-the-sum
            const float raw = dot_rows<T, D, kUnaligned>(q, k.row(key));
            return score.value_or_hidden(raw, places(0, key));  // @score-of-a-repaired-row
        };
        const auto sink = Sink<V>::of(p, s, head);
        RowSoftmax<V, decltype(value)> softmax{score, sink, first, end, value};
        // @columns-of-o-repaired
        repair_row<T, kCols>(tile, row0 + row, col0, kDimV, Dropout<V>::factor(p), [&](auto &sum, bool reasons) {
            if (reasons) softmax.find();
            const float lse = softmax.lse;
            if constexpr (V::kBias) {
                // By the lane that stored the NaN which a hidden key may have left there, of the warp with the first
                // columns: such a NaN is in all. (None is where no key is seen.) @lse-repaired
                if (reasons && first < end && p.lse && fresh_lane() == row % 8 * 4 && (kCols >= kDimV || col0 == 0))
                    p.lse[s.lse_row(problem, head) + query0 + row] = softmax.natural();
                if (softmax.sees_nothing()) return;
            }
            if constexpr (V::kBlockMask) {
                if (lse != lse && block_mask.sees_any(query0 + row, first, end)) return sum.fill(lse);
            } else if (first < end && lse != lse) return sum.fill(lse);
            sum.add(
                v.from_column(col0), v.step(), first, end,  // @rows-of-v-repair-of-o
                [&](int key) {
                    if constexpr (V::kBlockMask)
                        if (!block_mask.sees(query0 + row, key)) return kNone;  // @hidden-key-of-the-output
                    if constexpr (V::kBias)
                        if (places(0, key).hides()) return kNone;  // @hidden-by-bias-repair-of-o
                    return reasons && row_is_finite<T, kDimV, kUnaligned>(v.row(key)) ? kNone : kTerm;
                },
                [&](int key) {
                    const float weight = softmax.weight(key);
                    if constexpr (!V::kDropout) return weight;
                    else return Dropout<V>::of(p, s.index, head).keeps(query0 + row, key) ? weight : 0.f;
                });
        });
    }
}

#endif  // CUPYFLASH_REPAIR_OUTPUT_CUH
