// An 8-bit cache (stored.cuh) as rows of q's type, which the forward then reads (plan/prefill.py),
//     k_rows[s, r] = k_scale * k_cache[where row r of sequence b lies],   v_rows likewise,
// products in fp32, rounded once; what is finite stays so. s is b; packed, those that the forward takes have a slot each, in order,
// which slots[b] tells it. Rows are the keys after the append, if there are any, and zeros behind: the forward may read as far as a
// block beyond, without pages of a sequence without keys, too, and would repair rows if NaN were there.
// A block takes kBlockM rows of all heads, a thread 16 columns of K and V at a time. No shared memory.
#ifndef CUPYFLASH_DEQUANTIZE_CUH
#define CUPYFLASH_DEQUANTIZE_CUH
#include "decode/cached.cuh"
#include "decode/stored.cuh"

__device__ __forceinline__ int queries_of(const DequantizeParams &p, int b) {
    return Sequence<true>::start_q(p, b + 1) - Sequence<true>::start_q(p, b);
}

// The sequence that has the rows of a slot; packed the one of this number among those that the forward takes, by one warp. None
// where that is the batch.
template <class V>
__device__ __forceinline__ int sequence_of_slot(const DequantizeParams &p, int slot) {
    if constexpr (!V::kPacked) return slot;
    #pragma unroll 1
    for (int first = 0; first < p.problem.batch; first += 32) {
        const int b = first + lane();
        // @few-queries-left-out-of-rows
        const ptx::u32 many = ptx::vote_ballot(b < p.problem.batch && queries_of(p, b) >= V::kLeastQueries);
        const bool is_it = many >> lane() & 1 && ptx::popc(many & ((1u << lane()) - 1)) == slot;
        if (const ptx::u32 it = ptx::vote_ballot(is_it)) return first + ptx::popc(it - 1);
        slot -= ptx::popc(many);  // @slots-of-32-sequences
    }
    return p.problem.batch;
}

template <class T>
__device__ __forceinline__ float finite_product(float x, float scale) {
    const float y = x * scale;
    if constexpr (!kSame<T, Fp16>) return y;
    constexpr float kLargest = 65504.f, kInfinite = 3.402823466e38f;
    return fabsf(y) <= kInfinite ? fminf(fmaxf(y, -kLargest), kLargest) : y;  // @finite-in-fp16
}

// 16 columns, unless they are zero.
template <class T, class From>
__device__ __forceinline__ void dequantize16(const From *from, T *to, float scale, bool exists) {
    ptx::U128 wide[2]{};
    if (exists) {
        const ptx::U128 x = *reinterpret_cast<const ptx::U128 *>(from);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::u32 pairs[2];
            From::template halves<0, 1, 2, 3>(x.x[i], pairs[0], pairs[1]);
            #pragma unroll
            for (int j = 0; j < 2; ++j)
                wide[i / 2].x[i % 2 * 2 + j] =
                    T::pack(finite_product<T>(Fp16::lo(pairs[j]), scale), finite_product<T>(Fp16::hi(pairs[j]), scale));
        }
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) reinterpret_cast<ptx::U128 *>(to)[i] = wide[i];
}

template <class V>
__device__ __forceinline__ void dequantize(const DequantizeParams &p) {
    using T = typename V::Element;
    constexpr int kColumns = 16, kChunks = kWidest<V> / kColumns, kBehind = 256;
    static_assert(V::kHeadDim % kColumns == 0 && V::kHeadDimV % kColumns == 0 && V::kSmemBytes == 0);
    const Problem &problem = p.problem;
    const int blocks = ceil_div(problem.seqlen_k, V::kBlockM), slot = ptx::block_index() / blocks;
    const int row0 = ptx::block_index() % blocks * V::kBlockM, b = sequence_of_slot<V>(p, slot);
    if (b >= problem.batch) return;
    if (V::kPacked && row0 == 0 && ptx::thread_index() == 0) p.slots[b] = slot;  // @slot-of-the-sequence
    const int appended = V::kPacked && p.appended ? queries_of(p, b) : p.appended;
    const int keys = min(used_rows(p, b) + appended, problem.seqlen_k);  // @keys-with-the-new-ones-dequantized
    const int end = min(keys + kBehind, problem.seqlen_k);               // @zeros-behind-the-keys
    const int of_row = problem.heads_k * kChunks, count = min(V::kBlockM, end - row0) * of_row;
    #pragma unroll 1
    for (int i = ptx::thread_index(); i < count; i += 32 * V::kWarps) {
        const int row = row0 + i / of_row, head = i % of_row / kChunks, column = i % kChunks * kColumns;
        const bool exists = row < keys;
        const int place = exists ? place_of<V::kPaged>(p, b, row) : 0, own = row_in_place<V::kPaged>(p, row);
        const auto one = [&](const void *x, const Strides &s, void *rows, const float *scales, int columns) {
            if (column >= columns) return;  // @columns-of-the-narrower-rows
            const long long from = place * s.batch + own * s.row + head * s.head + column;
            const long long to = (static_cast<long long>(slot) * problem.seqlen_k + row) * problem.heads_k + head;
            const float scale = exists ? scales[place * p.scale_stride + head] : 0.f;  // @scale-of-its-place-in-rows
            dequantize16(static_cast<const Stored<V> *>(x) + from, static_cast<T *>(rows) + to * columns + column,
                         scale, exists);
        };
        one(p.k_cache, p.k_cache_stride, p.k_rows, p.k_scale, V::kHeadDim);
        one(p.v_cache, p.v_cache_stride, p.v_rows, p.v_scale, V::kHeadDimV);
    }
}

#endif  // CUPYFLASH_DEQUANTIZE_CUH
