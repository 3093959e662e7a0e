// NaN and inf in rows that only some rows of a tile see. A hidden element has P = 0, but 0 * NaN is NaN, so the
// ordinary product P V would leak it. When an operand of a partly hidden block holds a non-finite element:
//     acc += P * (V with its non-finite elements replaced by 0),
// and at the end every non-finite V element is added to those rows of the result that see it (P > 0 there, so inf stays
// inf of its sign). That second part is rare and works on global memory, element by element.
#ifndef CUPYFLASH_NONFINITE_CUH
#define CUPYFLASH_NONFINITE_CUH
#include "tile.cuh"

template <class T>
__device__ __forceinline__ bool is_non_finite(ptx::u16 raw) {
    return (raw & T::kExponent) == T::kExponent;
}

// f(x) for every 16-byte chunk of the tile, all threads of the block together; writes back what f changed.
template <int kThreads, class Tile, class F>
__device__ __forceinline__ void for_each_chunk(const Tile &tile, F f) {
    #pragma unroll 1
    for (int i = ptx::thread_index(); i < Tile::kRows * Tile::kCols / 8; i += kThreads) {
        const ptx::u32 addr = tile.at(i / (Tile::kCols / 8), i % (Tile::kCols / 8) * 8);
        ptx::U128 x = ptx::ld_shared_v4_b32(addr);
        if (f(x)) ptx::st_shared_v4_b32(addr, x);
    }
}

// Replaces the non-finite elements of the tile by 0.
template <class T, int kThreads, class Tile>
__device__ __forceinline__ void clear_non_finite(const Tile &tile) {
    for_each_chunk<kThreads>(tile, [](ptx::U128 &x) {
        bool changed = false;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (is_non_finite<T>(static_cast<ptx::u16>(x.x[i]))) x.x[i] &= 0xffff0000u, changed = true;
            if (is_non_finite<T>(static_cast<ptx::u16>(x.x[i] >> 16))) x.x[i] &= 0x0000ffffu, changed = true;
        }
        return changed;
    });
}

// The sum of the non-finite elements of column `col` of src, [n_rows, ...], whose row is visible; 0 if there is none.
template <class T, class Visible>
__device__ __forceinline__ float sum_non_finite(const T *src, long long stride, int n_rows, int col, Visible visible) {
    float sum = 0.f;
    #pragma unroll 1
    for (int row = 0; row < n_rows; ++row) {
        const ptx::u16 raw = src[row * stride + col].raw;
        if (is_non_finite<T>(raw) && visible(row)) sum += T::lo(raw);
    }
    return sum;
}

// dst[i][col] += the non-finite src[j][col] that i sees, for all i < n_dst and j < n_src. All threads of the block
// together; what they stored to dst before must be visible to the block.
template <class T, int kThreads, int kCols, class Sees>
__device__ __forceinline__ void add_non_finite(T *dst, long long dst_stride, int n_dst, const T *src,
                                               long long src_stride, int n_src, Sees sees) {
    #pragma unroll 1
    for (int e = ptx::thread_index(); e < n_dst * kCols; e += kThreads) {
        const int row = e / kCols, col = e % kCols;
        const float sum = sum_non_finite<T>(src, src_stride, n_src, col, [&](int j) { return sees(row, j); });
        ptx::u16 &x = dst[row * dst_stride + col].raw;
        if (sum != 0.f) x = static_cast<ptx::u16>(T::pack(T::lo(x) + sum, 0.f));
    }
}

// The dot product of two rows, which are 16-byte aligned.
template <class T, int kCols>
__device__ __forceinline__ float dot_rows(const T *x, const T *y) {
    float sum = 0.f;
    #pragma unroll 2
    for (int col = 0; col < kCols; col += 8) {
        const ptx::U128 a = *reinterpret_cast<const ptx::U128 *>(x + col);
        const ptx::U128 b = *reinterpret_cast<const ptx::U128 *>(y + col);
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            sum = fmaf(T::lo(a.x[i]), T::lo(b.x[i]), sum), sum = fmaf(T::hi(a.x[i]), T::hi(b.x[i]), sum);
    }
    return sum;
}

// One row of a result anew, by one warp and straight from global memory: a weighted sum of rows, of which a lane holds
// two columns of 64. For kernels that cannot run a tile twice.
template <class T, int kCols>
struct RowSum {
    static constexpr int kPairs = ceil_div(kCols, 64);
    float sum[kPairs][2] = {};

    // += weight(j) * src[j] for j in [first, end); a lane takes one weight of 32. kAsItself: a non-finite element counts
    // as itself however small its weight.
    template <bool kAsItself, class Weight>
    __device__ void add(const T *src, long long stride, int first, int end, Weight weight) {
        #pragma unroll 1
        for (int block = first; block < end; block += 32) {
            const int mine = block + lane();
            const float w = mine < end ? weight(mine) : 0.f;
            #pragma unroll 1
            for (int j = 0; j < min(32, end - block); ++j) {
                const float w_j = ptx::shfl_index(w, j);
                #pragma unroll
                for (int i = 0; i < kPairs; ++i) {
                    const int col = 64 * i + 2 * lane();
                    if (kCols % 64 != 0 && col >= kCols) continue;
                    const ptx::u32 x = *reinterpret_cast<const ptx::u32 *>(src + (block + j) * stride + col);
                    sum[i][0] += term<kAsItself>(static_cast<ptx::u16>(x), w_j);
                    sum[i][1] += term<kAsItself>(static_cast<ptx::u16>(x >> 16), w_j);
                }
            }
        }
    }
    // factor times the sum, rounded into row `row` of a tile.
    template <class Tile>
    __device__ void store(const Tile &tile, int row, float factor) const {
        #pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int col = 64 * i + 2 * lane();
            if (col < kCols) ptx::st_shared_b32(tile.at(row, col), T::pack(sum[i][0] * factor, sum[i][1] * factor));
        }
    }

    // The same into global memory.
    __device__ void write(T *to, float factor) const {
        #pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int col = 64 * i + 2 * lane();
            if (col < kCols) *reinterpret_cast<ptx::u32 *>(to + col) = T::pack(sum[i][0] * factor, sum[i][1] * factor);
        }
    }

  private:
    template <bool kAsItself>
    __device__ static float term(ptx::u16 raw, float weight) {
        return kAsItself && is_non_finite<T>(raw) ? T::lo(raw) : weight * T::lo(raw);
    }
};

// Row `row` of a result tile anew: the sum over keys [first, end) of weight(k . q) v, times `inverse`; a non-finite
// element of v counts as itself.
template <class T, int kCols, class Tile, class Weight>
__device__ __forceinline__ void recompute_row(const Tile &tile, int row, const T *q, const T *k, long long k_stride,
                                              const T *v, long long v_stride, int first, int end, float inverse,
                                              Weight weight) {
    RowSum<T, kCols> sum;
    sum.template add<true>(v, v_stride, first, end,
                           [&](int key) { return weight(dot_rows<T, kCols>(q, k + key * k_stride)); });
    sum.store(tile, row, inverse);
}

// f(row) for those of the warp's 16 accumulator rows that hold a non-finite element; f is called by the whole warp.
template <int kCols, class F>
__device__ __forceinline__ void for_each_non_finite_row(const AccTile<16, kCols> &acc, F f) {
    float sum[2] = {};  // 0 if all elements are finite, else NaN
    #pragma unroll
    for (int i = 0; i < kCols / 2; ++i) sum[i / 2 % 2] = fmaf(acc.x[0][i / 4][i % 4], 0.f, sum[i / 2 % 2]);
    if (!ptx::vote_any(sum[0] + sum[1] != 0.f)) return;
    #pragma unroll 1
    for (int row = 0; row < 16; ++row) {
        const float row_sum = quad_reduce(row < 8 ? sum[0] : sum[1], [](float a, float b) { return a + b; });
        if (ptx::shfl_index(row_sum, row % 8 * 4) != 0.f) f(row);
    }
}

#endif  // CUPYFLASH_NONFINITE_CUH
