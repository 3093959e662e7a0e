// The GEMMs of one warp on mma.sync.m16n8k16: A operands from registers or shared memory, B always from shared memory.
#ifndef CUPYFLASH_GEMM_CUH
#define CUPYFLASH_GEMM_CUH
#include "tile/tile.cuh"

// ---- A operands: [kRows, kDepth] as fragments of 16 x 16; get(k) gives those of depth step k. kUnroll: see gemm ----

// In registers.
template <class T, int kRows, int kDepth>
struct FragA {
    static constexpr int kRowTiles = kRows / 16, kSteps = kDepth / 16, kUnroll = kSteps;
    ptx::u32 x[kSteps][kRowTiles][4];

    __device__ void get(int k, ptx::u32 (&a)[kRowTiles][4]) const {
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
            #pragma unroll
            for (int i = 0; i < 4; ++i) a[r][i] = x[k][r][i];
    }
    // The accumulator of one GEMM, rounded to T, is the A operand of the next: same lanes, no shuffle.
    __device__ void from(const AccTile<kRows, kDepth> &acc, int k) {  // depth step k
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *pair = &acc.x[r][2 * k + i / 2][2 * (i % 2)];
                x[k][r][i] = T::pack(pair[0], pair[1]);
            }
    }
    __device__ void from(const AccTile<kRows, kDepth> &acc) {
        #pragma unroll
        for (int k = 0; k < kSteps; ++k) from(acc, k);
    }
    // Reads it from rows [row0, ...), the first columns, of a shared-memory tile.
    template <class Tile>
    __device__ void load(const Tile &tile, int row0) {
        const int lane = fresh_lane();
        #pragma unroll
        for (int k = 0; k < kSteps; ++k)
            #pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                ptx::ldmatrix_x4(x[k][r], tile.at(row0 + 16 * r + lane % 16, 16 * k + lane / 16 * 8));
    }
    // Writes the operand to rows [row0, ...), columns [col0, ...) of a shared-memory tile.
    template <class Tile>
    __device__ void store(const Tile &tile, int row0, int col0) const {
        const int lane = fresh_lane();
        const Tile to{tile.at(row0 + lane / 4, col0 + 2 * (lane % 4))};
        #pragma unroll
        for (int k = 0; k < kSteps; ++k)
            #pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                #pragma unroll
                for (int i = 0; i < 4; ++i)
                    ptx::st_shared_b32(to.at(16 * r + 8 * (i % 2), 16 * k + 8 * (i / 2)), x[k][r][i]);
    }
};

// Rows [row0, row0 + kRows_) of a shared-memory tile.
template <class Tile, int kRows_>
struct SmemA {
    static constexpr int kRowTiles = kRows_ / 16, kSteps = Tile::kCols / 16, kUnroll = kSteps;
    Tile from;  // where this lane reads in depth step 0

    __device__ SmemA(const Tile &tile, int row0) {
        const int lane = fresh_lane();
        from.base = tile.at(row0 + lane % 16, lane / 16 * 8);
    }
    __device__ void get(int k, ptx::u32 (&a)[kRowTiles][4]) const {
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r) ptx::ldmatrix_x4(a[r], from.at(16 * r, 16 * k));
    }
};

// The same, of which few depth steps are unrolled: for where registers are scarce.
template <class Tile, int kRows_>
struct FewSteps : SmemA<Tile, kRows_> {
    static constexpr int kSteps = SmemA<Tile, kRows_>::kSteps;
    static constexpr int kUnroll = kSteps <= 4       ? kSteps
                                   : kSteps % 4 == 0 ? 4
                                   : kSteps % 3 == 0 ? 3
                                   : kSteps % 2 == 0 ? 2
                                                     : 1;
    using SmemA<Tile, kRows_>::SmemA;
};

// Columns [col0, col0 + kRows_) of a shared-memory tile, transposed.
template <class Tile, int kRows_, int kUnroll_>
struct SmemATransposed {
    static constexpr int kRowTiles = kRows_ / 16, kSteps = Tile::kRows / 16, kUnroll = kUnroll_ ? kUnroll_ : kSteps;
    Tile from;  // where this lane reads in depth step 0

    __device__ SmemATransposed(const Tile &tile, int col0) {
        const int lane = fresh_lane();
        from.base = tile.at(lane / 16 * 8 + lane % 8, col0 + lane / 8 % 2 * 8);
    }
    __device__ void get(int k, ptx::u32 (&a)[kRowTiles][4]) const {
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r) ptx::ldmatrix_x4_trans(a[r], from.at(16 * k, 16 * r));
    }
};

// ---- GEMMs of one warp ----
// The fragments of depth step k + 1 are on their way while step k multiplies. Every A::kUnroll steps the loop branches,
// which the compiler moves no load across: it otherwise fetches as far ahead as registers last.

// acc += A * B; load_b(k, j, r) fetches the B fragments of depth step k for columns [16 j, 16 j + 16).
template <class T, class A, int kRows, int kCols, class LoadB>
__device__ __forceinline__ void gemm(AccTile<kRows, kCols> &acc, const A &a_operand, LoadB load_b) {
    constexpr int kPairs = ceil_div(kCols, 16);
    static_assert(A::kSteps % A::kUnroll == 0);
    const auto multiply = [&](int k0) {  // depth steps [k0, k0 + kUnroll)
        ptx::u32 a[2][A::kRowTiles][4], b[2][kPairs][4];
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
            for (int j = 0; j < kPairs; ++j) {
                const ptx::u32(&r)[4] = b[k % 2][j];
                #pragma unroll
                for (int i = 0; i < A::kRowTiles; ++i) {
                    T::mma(acc.x[i][2 * j], a[k % 2][i], r[0], r[1]);
                    if (2 * j + 1 < kCols / 8) T::mma(acc.x[i][2 * j + 1], a[k % 2][i], r[2], r[3]);
                }
            }
        }
    };
    if constexpr (A::kUnroll == A::kSteps) {
        multiply(0);
    } else {
        #pragma unroll 1
        for (int k0 = 0; k0 < A::kSteps; k0 += A::kUnroll) multiply(k0);
    }
}

// acc += A * B^T with B a [kCols, depth] tile: S = Q K^T.
template <class T, class A, int kRows, int kCols, class Tile>
__device__ __forceinline__ void gemm_nt(AccTile<kRows, kCols> &acc, const A &a, const Tile &b) {
    const int lane = fresh_lane();
    const Tile from{b.at(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8)};
    gemm<T>(acc, a, [&](int k, int j, ptx::u32(&r)[4]) { ptx::ldmatrix_x4(r, from.at(16 * j, 16 * k)); });
}

// acc += A * B with B columns [col0, col0 + kCols) of a [depth, ...] tile: O += P V. With an odd number of column tiles
// the last load takes 8 columns more, which no mma uses.
template <class T, class A, int kRows, int kCols, class Tile>
__device__ __forceinline__ void gemm_nn(AccTile<kRows, kCols> &acc, const A &a, const Tile &b, int col0 = 0) {
    const int lane = fresh_lane();
    const Tile from{b.at(lane % 16, col0 + lane / 16 * 8)};
    gemm<T>(acc, a, [&](int k, int j, ptx::u32(&r)[4]) { ptx::ldmatrix_x4_trans(r, from.at(16 * k, 16 * j)); });
}

#endif  // CUPYFLASH_GEMM_CUH
