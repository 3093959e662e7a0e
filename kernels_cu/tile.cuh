// Tiles: shared-memory tiles, accumulator tiles, operand fragments, and the GEMM shapes that attention needs, on
// mma.sync.m16n8k16. A lane of a warp is written as g = lane / 4, t = lane % 4 below.
#ifndef CUPYFLASH_TILE_CUH
#define CUPYFLASH_TILE_CUH
#include "element.cuh"
#include "schedule.cuh"

__device__ __forceinline__ int lane() { return ptx::thread_index() % 32; }
__device__ __forceinline__ int warp() { return ptx::thread_index() / 32; }
// The thread's index and lane computed anew where they stand. The kernels fill the register file with accumulators, so
// what a loop derives from the thread's index, addresses above all, must not be hoisted out of it and kept: that would
// spill.
__device__ __forceinline__ ptx::u32 fresh_thread() { return ptx::opaque(ptx::thread_index()); }
__device__ __forceinline__ int fresh_lane() { return fresh_thread() % 32; }

__device__ constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

// A row-major [kRows, kCols] tile of 16-bit elements in shared memory. A row is padded to an odd number of 16-byte
// chunks: the eight rows that one ldmatrix phase reads then lie in eight different groups of banks.
template <class T, int kRows_, int kCols_>
struct SmemTile {
    static_assert(kCols_ % 16 == 0, "one mma takes 16 columns");
    static constexpr int kRows = kRows_, kCols = kCols_, kChunks = kCols / 8;
    static constexpr int kRowBytes = 16 * (kChunks | 1), kBytes = kRows * kRowBytes;
    ptx::u32 base;

    __device__ ptx::u32 at(int row, int col) const { return base + row * kRowBytes + col * 2; }
    // The rest of the tile from row `row` on.
    __device__ SmemTile rows(int row) const { return {at(row, 0)}; }

    // Copies rows [row0, row0 + kRows) of src, [n_rows, kValidCols] with kValidCols a multiple of 8; whatever lies
    // outside becomes zero. Asynchronous (commit and wait outside) unless kUnaligned, the path for rows that are not
    // 16-byte aligned.
    template <int kThreads, int kValidCols, bool kUnaligned>
    __device__ void load_async(const T *src, long long stride, int row0, int n_rows) const {
        constexpr int kLanesPerRow = next_power_of_two(kChunks), kRowsPerPass = kThreads / kLanesPerRow;
        const ptx::u32 thread = fresh_thread();
        const int chunk = thread % kLanesPerRow, first = thread / kLanesPerRow;
        if (kLanesPerRow != kChunks && chunk >= kChunks) return;
        const T *from = src + (row0 + first) * stride + 8 * chunk;
        #pragma unroll
        for (int pass = 0; pass < ceil_div(kRows, kRowsPerPass); ++pass, from += kRowsPerPass * stride) {
            const int row = first + pass * kRowsPerPass;
            if (kRows % kRowsPerPass != 0 && row >= kRows) break;
            const bool valid = row0 + row < n_rows && (kValidCols == kCols || 8 * chunk < kValidCols);
            if constexpr (kUnaligned) {
                ptx::U128 x{};
                if (valid) {
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x.x[i] = from[2 * i].raw | static_cast<ptx::u32>(from[2 * i + 1].raw) << 16;
                }
                ptx::st_shared_v4_b32(at(row, 8 * chunk), x);
            } else {
                ptx::cp_async_16(at(row, 8 * chunk), from, valid);
            }
        }
    }
};

// One warp's [kRows, kCols] fp32 accumulator. Element i of tile (a, j) of a lane sits at row 16 a + g + 8 (i / 2),
// column 8 j + 2 t + i % 2: the D fragment of mma.m16n8k16, and of each warp of wgmma.m64nN, so that what is written
// against for_each serves both families.
template <int kRows, int kCols>
struct AccTile {
    static constexpr int kRowTiles = kRows / 16, kColTiles = kCols / 8;
    float x[kRowTiles][kColTiles][4];

    __device__ static int row(int a, int i) { return 16 * a + lane() / 4 + 8 * (i / 2); }
    __device__ static int col(int j, int i) { return 8 * j + 2 * (lane() % 4) + i % 2; }
    // f(row, col, element) for every element this lane holds, row and col counted from the lane's first one.
    template <class F>
    __device__ void for_each(F f) {
        #pragma unroll
        for (int a = 0; a < kRowTiles; ++a)
            #pragma unroll
            for (int j = 0; j < kColTiles; ++j)
                #pragma unroll
                for (int i = 0; i < 4; ++i) f(16 * a + 8 * (i / 2), 8 * j + i % 2, x[a][j][i]);
    }
    __device__ void zero() {
        for_each([](int, int, float &e) { e = 0.f; });
    }
    __device__ void scale(float factor) {
        for_each([&](int, int, float &e) { e *= factor; });
    }
    // Whether all elements of this lane are finite: x * 0 is 0 for finite x alone.
    __device__ bool finite() {
        float sum = 0.f;
        for_each([&](int, int, float &e) { sum = fmaf(e, 0.f, sum); });
        return sum == 0.f;
    }
};
// Reduces a value over the four lanes that hold one row of an accumulator.
template <class Op>
__device__ __forceinline__ float quad_reduce(float v, Op op) {
    v = op(v, ptx::shfl_xor(v, 1));
    return op(v, ptx::shfl_xor(v, 2));
}

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
    __device__ void from(const AccTile<kRows, kDepth> &acc) {
        #pragma unroll
        for (int k = 0; k < kSteps; ++k)
            #pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float *pair = &acc.x[r][2 * k + i / 2][2 * (i % 2)];
                    x[k][r][i] = T::pack(pair[0], pair[1]);
                }
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

#endif  // CUPYFLASH_TILE_CUH
