// NaN and inf. The products P V, P^T dO, dS^T Q and dS K let two things go wrong where an operand is not finite: a hidden
// element has weight 0, and 0 * NaN leaks it; and a weight that float64 would hold is rounded to 0, so that 0 * inf is NaN
// where inf is right. Both leave a value that is not finite, never a wrong finite one. So each warp looks at what it has
// staged, and computes such elements again: in fp32, over visible elements alone, straight from global memory, with weights
// that are 0 only where those of float64 are. A first round takes the terms that can be the reason, which are few; if none is,
// something hidden leaked, or fp32 holds what 16 bits did not, and a second round takes all terms. NaN stays NaN whatever is
// added, so a row that is NaN by right is told early: a model that diverged must not take hours to say so.
#ifndef CUPYFLASH_REPAIR_CUH
#define CUPYFLASH_REPAIR_CUH
#include "tile/tile.cuh"

// 2^x, but 0 only where float64 has 0 (x below -1074); what is too small for fp32 becomes its smallest number.
__device__ __forceinline__ float weight_ex2(float x) {
    const float w = ptx::ex2(x);
    return w == 0.f && x >= -1074.f ? ptx::uint_as_float(1) : w;
}

// The dot product of two rows.
template <class T, int kCols, bool kUnaligned>
__device__ __forceinline__ float dot_rows(const T *x, const T *y) {
    float sum = 0.f;
    #pragma unroll 1
    for (int col = 0; col < kCols; col += kPerChunk<T>)
        sum += dot_chunk<T>(load_chunk<kUnaligned>(x + col), load_chunk<kUnaligned>(y + col));
    return sum;
}
template <class T, int kCols, bool kUnaligned>
__device__ __forceinline__ bool row_is_finite(const T *x) {
    ptx::u32 trace = 0;
    #pragma unroll 1
    for (int col = 0; col < kCols; col += kPerChunk<T>) {
        const ptx::U128 chunk = load_chunk<kUnaligned>(x + col);
        #pragma unroll
        for (int i = 0; i < kPerChunk<T> / 2; ++i) trace = T::trace(pair_of<T>(chunk, i), trace);
    }
    return is_clean(trace);
}

// Whether a term is taken: no, yes, or its weight is NaN, and with it the whole row.
enum Taken { kNone = 0, kTerm = 1, kNaN = 2 };

// One row of a result, by one warp: sum over j of weight(j) * src[j]. A lane holds two columns of 64.
template <class T, int kCols>
struct RowSum {
    static constexpr int kPairs = ceil_div(kCols, 64);
    ptx::u32 wanted = 0;  // bit 2 i + e: element e of this lane's pair i is to be computed
    float sum[kPairs][2];

    // Wants the elements of columns [col0, end_col) of a tile's row that are not finite; whether there are any.
    template <class Tile>
    __device__ bool want(const Tile &tile, int row, int col0, int end_col) {
        #pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int col = column(i);
            if (col >= kCols || col0 + col >= end_col) continue;
            const typename T::Pair x = ld_shared_pair<T>(tile.at(row, col0 + col));
            wanted |= non_finite<T>(x) << 2 * i;
        }
        return ptx::vote_any(wanted != 0);
    }
    __device__ void fill(float x) {
        #pragma unroll
        for (int i = 0; i < kPairs; ++i) sum[i][0] = sum[i][1] = x;
    }
    // += the terms of [first, end) that are chosen; a lane answers for one of 32. NaN is looked for first, since it needs no
    // weight. Row j is src + j * stride, a pointer or what gives its elements likewise.
    template <class Rows, class Chosen, class Weight>
    __device__ void add(Rows src, long long stride, int first, int end, Chosen chosen, Weight weight) {
        #pragma unroll 1
        for (int block = first; block < end && !settled(); block += 32) {
            const int mine = block + fresh_lane();
            const int takes = mine < end ? chosen(mine) : kNone;
            if (!ptx::vote_any(takes != kNone)) continue;
            const auto for_each_taken = [&](auto f) {  // f(j, row of src), until it says stop
                #pragma unroll 1
                for (int j = 0; j < 32; ++j)
                    if (ptx::shfl_index(takes, j) != kNone && f(j, src + (block + j) * stride)) break;
            };
            const bool whole = ptx::vote_any(takes == kNaN);
            for_each_element([&](int, int, float &x) { x = whole ? ptx::nan() : x; });
            if (!whole)
                for_each_taken([&](int, auto row) {
                    for_each_element([&](int col, int e, float &x) {
                        const float y = value_of(row[col + e]);
                        x = y != y ? y : x;
                    });
                    return settled();
                });
            if (settled()) return;
            const float w = takes != kNone ? weight(mine) : 0.f;
            for_each_taken([&](int j, auto row) {
                const float w_j = ptx::shfl_index(w, j);
                for_each_element([&](int col, int e, float &x) { x = fmaf(w_j, value_of(row[col + e]), x); });
                return false;
            });
        }
    }
    // Whether every wanted sum is NaN, as it then stays.
    __device__ bool settled() const {
        return all_are([](float x) { return x != x; });
    }
    // Whether f holds for each wanted sum of the warp.
    template <class F>
    __device__ bool all_are(F f) const {
        bool all = true;
        #pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) all = all && (!(wanted >> i & 1) || f(sum[i / 2][i % 2]));
        return ptx::vote_all(all);
    }
    // Writes what was wanted, times factor.
    template <class Tile>
    __device__ void store(const Tile &tile, int row, int col0, float factor) const {
        #pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const ptx::u32 bits = wanted >> 2 * i & 3;
            if (bits == 0) continue;
            const ptx::u32 at = tile.at(row, col0 + column(i)),
                           keep = (bits & 1 ? 0 : 0xffffu) | (bits & 2 ? 0 : 0xffff0000u);
            const typename T::Pair x = T::pack(sum[i][0] * factor, sum[i][1] * factor);
            st_shared_pair(at, joined(masked(ld_shared_pair<T>(at), keep), masked(x, ~keep)));
        }
    }

  private:
    __device__ static int column(int i) { return 64 * i + 2 * fresh_lane(); }
    // f(column of the pair, element, sum) for the pairs of which something is wanted.
    template <class F>
    __device__ void for_each_element(F f) {
        #pragma unroll
        for (int i = 0; i < kPairs; ++i)
            if (wanted >> 2 * i & 3) f(column(i), 0, sum[i][0]), f(column(i), 1, sum[i][1]);
    }
};

// Computes the elements of row `row` of a tile, columns [col0, col0 + kCols) and below end_col, that are not finite, again.
// add(sum, true) adds the terms that can be the reason, add(sum, false) all of them.
template <class T, int kCols, class Tile, class Add>
__device__ __forceinline__ void repair_row(const Tile &tile, int row, int col0, int end_col, float factor, Add add) {
    RowSum<T, kCols> sum;
    if (!sum.want(tile, row, col0, end_col)) return;
    #pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        sum.fill(0.f);
        add(sum, round == 0);
        if (sum.all_are([](float x) { return !(fabsf(x) < ptx::infinity()); })) break;
    }
    sum.store(tile, row, col0, factor);
}

#endif  // CUPYFLASH_REPAIR_CUH
