// The GEMMs of one warp on mma.sync, 16 x 8 x 16 at a time (operands.cuh); B always from shared memory.
#ifndef CUPYFLASH_GEMM_CUH
#define CUPYFLASH_GEMM_CUH
#include "tile/operands.cuh"

// The fragments of depth step k + 1 are on their way while step k multiplies. Every A::kUnroll steps the loop branches,
// which the compiler moves no load across: it otherwise fetches as far ahead as registers last.

// Columns [16 j, 16 j + 16) of acc, those that exist, += a times their fragments b, of one depth step.
template <class T, int kRows, int kCols>
__device__ __forceinline__ void multiply_columns(AccTile<kRows, kCols> &acc, int j,
                                                 const typename T::Pair (&a)[kRows / 16][4],
                                                 const typename T::Pair (&b)[4]) {
    #pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
        T::mma(acc.x[i][2 * j], a[i], b[0], b[1]);
        if (2 * j + 1 < kCols / 8) T::mma(acc.x[i][2 * j + 1], a[i], b[2], b[3]);
    }
}

// acc += A * B; load_b(k, j, r) fetches the B fragments of depth step k for columns [16 j, 16 j + 16).
template <class T, class A, int kRows, int kCols, class LoadB>
__device__ __forceinline__ void gemm(AccTile<kRows, kCols> &acc, const A &a_operand, LoadB load_b) {
    using Pair = typename T::Pair;
    constexpr int kPairs = ceil_div(kCols, 16);
    static_assert(A::kSteps % A::kUnroll == 0);
    const auto multiply = [&](int k0) {  // depth steps [k0, k0 + kUnroll)
        if constexpr (sizeof(T) == 2) {
            Pair a[2][A::kRowTiles][4], b[2][kPairs][4];
            const auto load = [&](int k) {
                a_operand.get(k0 + k, a[k % 2]);
                #pragma unroll
                for (int j = 0; j < kPairs; ++j) load_b(k0 + k, j, b[k % 2][j]);
            };
            load(0);
            #pragma unroll
            for (int k = 0; k < A::kUnroll; ++k) {
                if (k + 1 < A::kUnroll) load(k + 1);
                #pragma unroll
                for (int j = 0; j < kPairs; ++j) multiply_columns<T>(acc, j, a[k % 2], b[k % 2][j]);
            }
        } else {  // twice as many registers, and six times as many products: those of the next columns are enough
            constexpr int kCount = A::kUnroll * kPairs;
            Pair a[A::kRowTiles][4], b[2][4];
            load_b(k0, 0, b[0]);
            for_each_constant<kCount>([&](auto number) {  // a loop so large would not be unrolled
                constexpr int n = decltype(number)::value, next = n + 1;
                if (n % kPairs == 0) a_operand.get(k0 + n / kPairs, a);
                if (next < kCount) load_b(k0 + next / kPairs, next % kPairs, b[next % 2]);
                multiply_columns<T>(acc, n % kPairs, a, b[n % 2]);
            });
        }
    };
    if constexpr (A::kUnroll == A::kSteps) {
        multiply(0);
    } else {
        #pragma unroll 1
        for (int k0 = 0; k0 < A::kSteps; k0 += A::kUnroll) multiply(k0);
    }
}

// Of products of fp32, which are NaN where an operand is not finite, those that are infinite: S = -inf hides a key. acc was 0.
template <class T, class A, int kRows, int kCols, class LoadB>
__device__ __forceinline__ void settle_infinite(AccTile<kRows, kCols> &acc, const A &a_operand, LoadB load_b) {
    float trace = 0.f;
    acc.for_each([&](int, int, float x) { trace = fmaf(x, 0.f, trace); });
    if (!ptx::vote_any(trace != trace)) return;
    for_each_constant<kCols / 16>([&](auto columns) {
        constexpr int j = decltype(columns)::value;
        AccTile<kRows, 16> largest;
        largest.zero();
        #pragma unroll 1
        for (int k = 0; k < A::kSteps; ++k) {
            typename T::Pair a[A::kRowTiles][4], b[4];
            a_operand.get(k, a);
            load_b(k, j, b);
            #pragma unroll
            for (int i = 0; i < A::kRowTiles; ++i) {
                T::mma_of_largest(largest.x[i][0], a[i], b[0], b[1]);
                T::mma_of_largest(largest.x[i][1], a[i], b[2], b[3]);
            }
        }
        largest.for_each([&](int row, int col, float x) {
            float &found = acc.x[row / 16][2 * j + col / 8][row % 16 / 8 * 2 + col % 2];
            found = found != found ? x : found;  // @infinite-products
        });
    });
}

// acc += A * B^T with B a [kCols, depth] tile: S = Q K^T.
template <class T, class A, int kRows, int kCols, class Tile>
__device__ __forceinline__ void gemm_nt(AccTile<kRows, kCols> &acc, const A &a, const Tile &b) {
    const FourMatrices<Tile, true, false> from(b, 0, 0);
    const auto load_b = [&](int k, int j, typename T::Pair(&r)[4]) { from.load(r, 16 * j, 16 * k); };
    gemm<T>(acc, a, load_b);
    if constexpr (sizeof(T) == 4) settle_infinite<T>(acc, a, load_b);
}

// acc += A * B with B columns [col0, col0 + kCols) of a [depth, ...] tile: O += P V. With an odd number of column tiles
// the last load takes 8 columns more, which no mma uses.
template <class T, class A, int kRows, int kCols, class Tile>
__device__ __forceinline__ void gemm_nn(AccTile<kRows, kCols> &acc, const A &a, const Tile &b, int col0 = 0) {
    const FourMatrices<Tile, false, true> from(b, 0, col0);
    gemm<T>(acc, a, [&](int k, int j, typename T::Pair(&r)[4]) { from.load(r, 16 * k, 16 * j); });
}

#endif  // CUPYFLASH_GEMM_CUH
