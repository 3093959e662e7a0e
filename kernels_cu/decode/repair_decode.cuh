// Elements of O that are not finite, computed again (attention/repair.cuh), from the rows of the cache, each looked up again.
#ifndef CUPYFLASH_REPAIR_DECODE_CUH
#define CUPYFLASH_REPAIR_DECODE_CUH
#include "decode/parts.cuh"
#include "attention/repair_output.cuh"

// A row of 8-bit elements and its scale.
template <class Kv>
struct ScaledRow {
    const Kv *x;
    float scale;

    __device__ float operator[](int col) const { return scale * x[col].value(); }
};
template <class T, int kCols, bool kUnaligned, class Kv>
__device__ __forceinline__ float dot_rows(const T *q, const ScaledRow<Kv> &row) {
    float sum = 0.f;
    #pragma unroll 1
    for (int col = 0; col < kCols; ++col) sum = fmaf(value_of(q[col]), row.x[col].value(), sum);
    return sum * row.scale;
}
template <class T, int kCols, bool kUnaligned, class Kv>
__device__ __forceinline__ bool row_is_finite(const ScaledRow<Kv> &row) {
    float trace = 0.f;
    #pragma unroll 1
    for (int col = 0; col < kCols; ++col) trace = fmaf(0.f, row[col], trace);
    return trace == 0.f;
}

// Rows of K or V of one head of a sequence, as if they lay one behind the other.
template <class V>
struct CachedRows {
    using Kv = Stored<V>;
    const DecodeParams &p;
    const void *x;
    const Strides &s;
    const float *scale;  // of 8-bit elements
    int index, head;

    __device__ auto operator+(long long key) const {
        const int row = static_cast<int>(key), place = place_of<V::kPaged>(p, index, row);
        const Kv *const its = static_cast<const Kv *>(x) + place * s.batch + row_in_place<V::kPaged>(p, row) * s.row +
                              head * s.head;  // @rows-of-the-cache-repair
        if constexpr (kScaled<V>) return ScaledRow<Kv>{its, scale[place * p.scale_stride + head]};
        else return its;
    }
};

// One row in shared memory.
template <class T>
struct OneRow {
    ptx::u32 base;
    __device__ ptx::u32 at(int, int col) const { return base + sizeof(T) * col; }
};

// What repair_elements takes of shared memory: a row each warp.
template <class V>
__device__ constexpr int repaired_bytes() {
    return static_cast<int>(sizeof(typename V::Element)) * V::kWarps * V::kHeadDimV;
}

// Elements [begin, end) of a tile's result, as far as there are so many, that its block has written: those that are not
// finite. By all warps of the block; scratch: a row each.
template <class V>
__device__ __forceinline__ void repair_elements(const DecodeShares<V> &shares, const DecodeTile<V> &tile, int begin,
                                                int end, ptx::u32 scratch) {
    using T = typename V::Element;
    using Pair = typename T::Pair;
    constexpr int D = V::kHeadDim, kDimV = V::kHeadDimV, kPerRow = kDimV / 4;
    const DecodeParams &p = shares.p;
    const PackedRows<V> rows(shares, tile);
    const Mask<V> mask(with_range<V>(rows.sequence, p), p.problem);
    const Score<V> score(p.problem);
    end = min(end, V::kHeads * rows.count * kPerRow);
    const OneRow<T> line{scratch + warp() * (static_cast<int>(sizeof(T)) * kDimV)};
    #pragma unroll 1
    for (int r = begin / kPerRow + warp(); r * kPerRow < end; r += V::kWarps) {
        const int head = r / rows.count, row = r % rows.count, query = rows.query(row);
        const int first_col = max(0, begin - r * kPerRow) * 4, end_col = min(kPerRow, end - r * kPerRow) * 4;
        T *const o = static_cast<T *>(p.o) + rows.at(p.o_stride, head, row);
        #pragma unroll 1
        for (int col = 2 * fresh_lane(); col < kDimV; col += 64) {
            const bool own = first_col <= col && col < end_col;
            st_shared_pair(line.at(0, col), own ? *reinterpret_cast<const Pair *>(o + col) : Pair{});
        }
        ptx::bar_warp_sync();
        const T *const q = static_cast<const T *>(p.q) + rows.at(p.q_stride, head, row);
        const CachedRows<V> k{p, p.k, p.k_stride, p.k_scale, tile.index, rows.head_k + head};
        const CachedRows<V> v{p, p.v, p.v_stride, p.v_scale, tile.index, rows.head_k + head};
        const int first = mask.first_key(query), last = mask.end_key(query);
        const auto places = Places<V>::of(p, rows.sequence, rows.head_q(head, row)).from(query, 0);
        const auto value = [&](int key) {
            return score.value_or_hidden(dot_rows<T, D, V::kUnaligned>(q, k + key), places(0, key));
        };
        const auto sink = Sink<V>::of(p, rows.sequence, rows.head_q(head, row));
        RowSoftmax<V, decltype(value)> softmax{score, sink, first, last, value};
        repair_row<T, kDimV>(line, 0, 0, kDimV, 1.f, [&](auto &sum, bool reasons) {
            if (reasons) softmax.find();
            const float lse = softmax.lse;
            if constexpr (V::kBias)
                if (softmax.sees_nothing()) return;
            if (first < last && lse != lse) return sum.fill(lse);
            sum.add(
                v, 1, first, last,
                [&](int key) {
                    if constexpr (V::kBias)
                        if (places(0, key).hides()) return kNone;  // @hidden-by-bias-repair-decode
                    return reasons && row_is_finite<T, kDimV, V::kUnaligned>(v + key) ? kNone : kTerm;
                },
                [&](int key) { return softmax.weight(key); });
        });
        ptx::bar_warp_sync();
        #pragma unroll 1
        for (int col = 2 * fresh_lane(); col < kDimV; col += 64)
            if (first_col <= col && col < end_col)
                *reinterpret_cast<Pair *>(o + col) = ld_shared_pair<T>(line.at(0, col));
        ptx::bar_warp_sync();
    }
}

#endif  // CUPYFLASH_REPAIR_DECODE_CUH
