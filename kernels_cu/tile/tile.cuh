// Tiles: in shared memory, and accumulators in registers. A lane of a warp is written as g = lane / 4, t = lane % 4.
#ifndef CUPYFLASH_TILE_CUH
#define CUPYFLASH_TILE_CUH
#include "tile/element.cuh"
#include "tile/key_order.cuh"
#include "tile/sizes.cuh"

__device__ __forceinline__ int lane() { return ptx::thread_index() % 32; }
__device__ __forceinline__ int warp() { return ptx::thread_index() / 32; }
// The thread's index and lane computed again where they stand. The kernels fill the register file with accumulators, so
// what a loop derives from the thread's index, addresses above all, must not be hoisted out of it and kept: that would
// spill.
__device__ __forceinline__ ptx::u32 fresh_thread() { return ptx::opaque(ptx::thread_index()); }
__device__ __forceinline__ int fresh_lane() { return fresh_thread() % 32; }
// The kernel's parameters for a rare path: nothing that it computes from them is kept in registers for it by a main loop.
template <class Params>
__device__ __forceinline__ const Params &aside(const Params &p) {
    return *reinterpret_cast<const Params *>(ptx::opaque(reinterpret_cast<ptx::i64>(&p)));
}

// A row-major [kRows, kCols] tile in shared memory. The eight rows that one ldmatrix phase reads lie in eight different groups
// of banks. Of 16-bit elements, rows follow each other without gaps, so that copies write whole lines of 128 bytes, and are
// swizzled: chunks of 16 bytes exchange places with their neighbours. Of fp32, or kPadded, rows have gaps: each is padded to
// an odd number of eight elements, and of fp32 so are four rows: eight elements each of rows i to i + 3, and of every second
// row of eight, then lie in different banks.
template <class T, int kRows_, int kCols_, bool kPadded = sizeof(T) == 4>
struct SmemTile {
    static_assert(kCols_ % 16 == 0, "one mma takes 16 columns");
    static constexpr int kRows = kRows_, kCols = kCols_, kPer = kPerChunk<T>, kChunks = kCols / kPer;
    static constexpr int kBytesEach = sizeof(T);
    static_assert(kPadded || kBytesEach == 2);
    static constexpr int kPadBytes = kBytesEach == 2 ? 0 : 32;  // behind four rows
    static constexpr int kRowBytes = kBytesEach * (kPadded ? 8 * (kCols / 8 | 1) : kCols),
                         kBytes = kRows * kRowBytes + kRows / 4 * kPadBytes;
    // So many chunks exchange places. Rows begin in banks of multiples of these; those of eight that begin in the same banks
    // differ in row % 8 / (8 / kSwizzle).
    static constexpr int kSwizzle = kPadded ? 1 : kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    using Element = T;
    ptx::u32 base;

    __device__ ptx::u32 at(int row, int col) const {
        if constexpr (kPadded) return base + row * kRowBytes + row / 4 * kPadBytes + col * kBytesEach;
        else return base + row * kRowBytes + (2 * col ^ row % 8 / (8 / kSwizzle) * 16);  // @rows-lie-apart
    }
    // Where that is which lies row rows and col columns behind what is at `first`, multiples of 8. The column of `first`, but for
    // its place in a chunk, is a multiple of a power of two that no col reaches, so that no sum carries.
    __device__ ptx::u32 behind(ptx::u32 first, int row, int col) const {
        constexpr int kColumns = kPer * kSwizzle;
        if constexpr (kPadded) return SmemTile{first}.at(row, col);
        else return (first ^ 2 * (col % kColumns)) + row * kRowBytes + 2 * (col - col % kColumns);  // @chunk-behind
    }
    // The rest of the tile from row `row` on, a multiple of 8.
    __device__ SmemTile rows(int row) const { return {at(row, 0)}; }

    // Copies rows [row0, row0 + kRows) of src, [n_rows, kValidCols] with kValidCols a multiple of 8; whatever lies
    // outside becomes zero. Asynchronous (commit and wait outside) unless kUnaligned, the path for rows that are not
    // 16-byte aligned. Keys: in which order rows lie here (key_order.cuh).
    template <int kThreads, int kValidCols, bool kUnaligned, class Keys = KeysInOrder>
    __device__ void load_async(const T *src, long long stride, int row0, int n_rows) const {
        constexpr int kLanesPerRow = smaller(next_power_of_two(kChunks), kThreads),
                      kRowsPerPass = kThreads / kLanesPerRow;
        const ptx::u32 thread = fresh_thread();
        const int first = thread / kLanesPerRow;
        #pragma unroll
        for (int chunk0 = 0; chunk0 < kChunks; chunk0 += kLanesPerRow) {  // one, unless a row has more than threads
            const int chunk = chunk0 + thread % kLanesPerRow;
            if (kChunks % kLanesPerRow != 0 && chunk >= kChunks) return;
            const T *from = src + (row0 + first) * stride + kPer * chunk;
            #pragma unroll
            for (int pass = 0; pass < ceil_div(kRows, kRowsPerPass); ++pass, from += kRowsPerPass * stride) {
                const int row = first + pass * kRowsPerPass;
                if (kRows % kRowsPerPass != 0 && row >= kRows) break;
                // @columns-that-exist
                const bool valid = row0 + row < n_rows && (kValidCols == kCols || kPer * chunk < kValidCols);
                if constexpr (kUnaligned) {
                    // @rows-that-exist-unaligned
                    ptx::st_shared_v4_b32(at(Keys::row_of(row), kPer * chunk),
                                          valid ? load_chunk<true>(from) : ptx::U128{});
                } else {
                    ptx::cp_async_16(at(Keys::row_of(row), kPer * chunk), from, valid);  // @rows-that-exist
                }
            }
        }
    }

    // The same of aligned rows in two steps, for where there are no asynchronous copies: each thread loads its pieces, and
    // stores them later.
    template <int kThreads>
    static constexpr int kPieces = ceil_div(kRows, kThreads / next_power_of_two(kChunks));
    template <int kThreads, int kValidCols, int kHeld>
    __device__ void fetch(ptx::U128 (&held)[kHeld], const T *src, long long stride, int row0, int n_rows) const {
        for_each_piece<kThreads>([&](int pass, int row, int col) {
            const bool valid =
                row0 + row < n_rows && (kValidCols == kCols || col < kValidCols);  // @rows-that-exist-held
            held[pass] = valid ? load_chunk<false>(src + (row0 + row) * stride + col) : ptx::U128{};
        });
    }
    template <int kThreads, int kHeld>
    __device__ void put(const ptx::U128 (&held)[kHeld]) const {
        for_each_piece<kThreads>([&](int pass, int row, int col) { ptx::st_shared_v4_b32(at(row, col), held[pass]); });
    }

  private:
    template <int kThreads, class F>
    __device__ static void for_each_piece(F f) {
        constexpr int kLanesPerRow = next_power_of_two(kChunks), kRowsPerPass = kThreads / kLanesPerRow;
        static_assert(kRowsPerPass > 0);
        const int thread = fresh_thread(), chunk = thread % kLanesPerRow, first = thread / kLanesPerRow;
        if (kLanesPerRow != kChunks && chunk >= kChunks) return;
        #pragma unroll
        for (int pass = 0; pass < kPieces<kThreads>; ++pass) {
            const int row = first + pass * kRowsPerPass;
            if (kRows % kRowsPerPass == 0 || row < kRows) f(pass, row, kPer * chunk);
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

    __device__ static int row(int a, int i) { return 16 * a + fresh_lane() / 4 + 8 * (i / 2); }
    __device__ static int col(int j, int i) { return 8 * j + 2 * (fresh_lane() % 4) + i % 2; }
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
};
__device__ __forceinline__ ptx::U128 bits_of(const float (&x)[4]) {
    return {ptx::float_as_uint(x[0]), ptx::float_as_uint(x[1]), ptx::float_as_uint(x[2]), ptx::float_as_uint(x[3])};
}

// Reduces a value over the four lanes that hold one row of an accumulator.
template <class Op>
__device__ __forceinline__ float quad_reduce(float v, Op op) {
    v = op(v, ptx::shfl_xor(v, 1));
    return op(v, ptx::shfl_xor(v, 2));
}

// `before`, the same for all lanes, and the sum of their numbers up to this lane's.
__device__ __forceinline__ int prefix_sum(int own, int before = 0) {
    int upto = before + own;
    #pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int other = ptx::shfl_index(upto, max(0, lane() - i)) - before;
        upto += lane() >= i ? other : 0;
    }
    return upto;
}

// The sum over all threads of a block, in a fixed order: each warp leaves its own in shared memory, a float each; then any
// thread adds them up.
__device__ __forceinline__ void leave_sum_of_warp(float x) {
    #pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += ptx::shfl_xor(x, mask);  // @sum-of-all-lanes
    if (lane() == 0) ptx::st_shared_b32(ptx::dynamic_smem() + 4 * warp(), ptx::float_as_uint(x));
    ptx::bar_sync();  // all warps' sums are there @sums-of-all-warps
}
template <int kWarps>
__device__ __forceinline__ float sum_of_warps() {
    float total = 0.f;
    #pragma unroll
    for (int i = 0; i < kWarps; ++i) total += ptx::uint_as_float(ptx::ld_shared_b32(ptx::dynamic_smem() + 4 * i));
    return total;
}

#endif  // CUPYFLASH_TILE_CUH
