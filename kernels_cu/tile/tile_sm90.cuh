// Hopper's tiles: shared memory as TMA fills it and wgmma reads it, and the products of one warpgroup. Accumulators are
// those of tile.cuh: each of the four warps holds 16 of the 64 rows.
#ifndef CUPYFLASH_TILE_SM90_CUH
#define CUPYFLASH_TILE_SM90_CUH
#include "tile/gemm.cuh"
#include "hw/ptx_sm90.cuh"

// A [kRows, kCols] tile of 16-bit elements with the 128-byte swizzle: chunks of 64 columns one after the other, in a chunk
// 128 bytes a row, and the 16-byte piece c of row r in place c ^ (r % 8). Aligned to 1024 bytes.
template <class T, int kRows_, int kCols_>
struct SwizzledTile {
    static_assert(kRows_ % 8 == 0);
    static constexpr int kRows = kRows_, kCols = kCols_, kChunks = ceil_div(kCols, 64);
    static constexpr int kChunkBytes = 128 * kRows, kBytes = kChunks * kChunkBytes;
    ptx::u32 base;

    __device__ ptx::u32 at(int row, int col) const {
        return base + col / 64 * kChunkBytes + row * 128 + ((col / 8 % 8 ^ row % 8) * 16) + col % 8 * 2;  // @swizzled
    }
    // The tile from row `row` (a multiple of 8) on, and from column 64 c on.
    __device__ SwizzledTile from_row(int row) const { return {base + 128 * row}; }
    __device__ SwizzledTile from_chunk(int c) const { return {base + c * kChunkBytes}; }

    // Rows [row, row + kRows) of one head, by one thread; what lies outside of the tensor arrives as zeros.
    // more_bytes: of other copies that complete the same barrier.
    __device__ void load(const ptx::TensorMap &map, ptx::u32 full, int row, int head, int batch, ptx::u64 policy,
                         int more_bytes = 0) const {
        ptx::mbarrier_arrive_expect_tx(full, kBytes + more_bytes);  // @bytes-of-the-tile
        #pragma unroll
        for (int c = 0; c < kChunks; ++c)
            ptx::tma_load_4d(base + c * kChunkBytes, map, full, 64 * c, row, head, batch, policy);
    }
    // The same of rows in the order of InterleavedKeys (key_order.cuh), from a multiple of 8 on; the map's dimensions are
    // [head_dim, 8, seqlen / 8, heads, batch].
    __device__ void load_interleaved(const ptx::TensorMap &map, ptx::u32 full, int row, int head, int batch,
                                     ptx::u64 policy) const {
        ptx::mbarrier_arrive_expect_tx(full, kBytes);  // @bytes-of-the-interleaved-tile
        #pragma unroll
        for (int c = 0; c < kChunks; ++c)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                // @two-rows-of-every-eight
                ptx::tma_load_5d(from_chunk(c).from_row(i * kRows / 4).base, map, full, 64 * c, 2 * i, row / 8, head,
                                 batch, policy);
    }
    // The way back, as one bulk group; what lies outside of the tensor is not written.
    __device__ void store(const ptx::TensorMap &map, int row, int head, int batch) const {
        #pragma unroll
        for (int c = 0; c < kChunks; ++c) ptx::tma_store_4d(map, base + c * kChunkBytes, 64 * c, row, head, batch);
        ptx::cp_async_bulk_commit_group();
    }

    // The same tile; its address and the descriptors that follow from it are computed again, not kept. Kept through a loop
    // they would spill, or come back to uniform registers one by one.
    __device__ SwizzledTile fresh() const { return {static_cast<ptx::u32>(ptx::opaque(static_cast<int>(base)))}; }

    // Matrix descriptors of 16 columns (K-major) or 16 rows (MN-major), the k-th such slice: wgmma's operand of depth
    // step k. Fields: address, leading and stride byte offset, each / 16; 128-byte swizzle (PTX ISA 9.7.15.5.1.2).
    // @depth-steps-across-chunks
    __device__ ptx::u64 columns(int k) const { return descriptor(16, k / 4 * kChunkBytes + k % 4 * 32); }
    __device__ ptx::u64 rows(int k) const { return descriptor(kChunkBytes, k * 16 * 128); }  // @leading-bytes

  private:
    // Of what lies `offset` bytes behind the tile's begin: in shared memory, so below 256 KiB, and no field overflows.
    __device__ ptx::u64 descriptor(ptx::u32 leading_bytes, ptx::u32 offset) const {
        const ptx::u32 low = (base >> 4) + (leading_bytes >> 4 << 16) + (offset >> 4);
        return static_cast<ptx::u64>(1u << 30 | 1024 >> 4) << 32 | low;  // @stride-bytes
    }
};

// wgmma for an element type: a from shared memory (K-major) or registers; kTransB: b lies MN-major.
template <int kTransB, int kHalf>
__device__ __forceinline__ void wgmma(Bf16, float (&d)[kHalf], ptx::u64 a, ptx::u64 b, bool accumulate) {
    ptx::wgmma_bf16<0, kTransB>(d, a, b, accumulate);
}
template <int kTransB, int kHalf>
__device__ __forceinline__ void wgmma(Fp16, float (&d)[kHalf], ptx::u64 a, ptx::u64 b, bool accumulate) {
    ptx::wgmma_f16<0, kTransB>(d, a, b, accumulate);
}
template <int kTransB, int kHalf>
__device__ __forceinline__ void wgmma(Bf16, float (&d)[kHalf], const ptx::u32 (&a)[4], ptx::u64 b, bool accumulate) {
    ptx::wgmma_bf16<kTransB>(d, a, b, accumulate);
}
template <int kTransB, int kHalf>
__device__ __forceinline__ void wgmma(Fp16, float (&d)[kHalf], const ptx::u32 (&a)[4], ptx::u64 b, bool accumulate) {
    ptx::wgmma_f16<kTransB>(d, a, b, accumulate);
}

// An accumulator as wgmma's list of registers.
template <int kCols>
__device__ __forceinline__ float (&registers_of(AccTile<16, kCols> &acc))
    [kCols / 2] { return reinterpret_cast<float (&)[kCols / 2]>(acc.x); }
// After the wait: the compiler must not move uses of the accumulator before this point.
template <int kCols>
__device__ __forceinline__ void arrived(AccTile<16, kCols> &acc) {
    ptx::wgmma_pin(registers_of(acc));
}

// Issue products, each one group, to be waited for. A and B are tiles; kDepth is their common dimension.
// acc (+)= A B^T, as in S = Q K^T.
template <class T, int kDepth, bool kAdd = false, int kCols, class TileA, class TileB>
__device__ __forceinline__ void issue_nt(AccTile<16, kCols> &acc, const TileA &a, const TileB &b) {
    ptx::wgmma_fence();  // @registers-settled-nt
    #pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) wgmma<0>(T{}, registers_of(acc), a.columns(k), b.columns(k), kAdd || k != 0);
    ptx::wgmma_commit_group();
}
// acc = A B^T with the first columns of A, those that `held` has, in registers; the others are read from the tile.
template <class T, int kDepth, int kHeld, int kCols, class TileA, class TileB>
__device__ __forceinline__ void issue_nt(AccTile<16, kCols> &acc, const FragA<T, 16, kHeld> &held, const TileA &a,
                                         const TileB &b) {
    ptx::wgmma_fence();  // @registers-settled-held
    #pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
        if (16 * k < kHeld) wgmma<0>(T{}, registers_of(acc), held.x[k][0], b.columns(k), k != 0);
        else wgmma<0>(T{}, registers_of(acc), a.columns(k), b.columns(k), k != 0);
    ptx::wgmma_commit_group();
}
// acc = A B, as in dQ = dS K.
template <class T, int kDepth, int kCols, class TileA, class TileB>
__device__ __forceinline__ void issue_nn(AccTile<16, kCols> &acc, const TileA &a, const TileB &b) {
    ptx::wgmma_fence();  // @registers-settled-nn
    #pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) wgmma<1>(T{}, registers_of(acc), a.columns(k), b.rows(k), k != 0);
    ptx::wgmma_commit_group();
}
// acc += A B with A in registers, as in O += P V; without `add`, acc = A B.
template <class T, int kDepth, int kCols, class TileB>
__device__ __forceinline__ void issue_nn(AccTile<16, kCols> &acc, const FragA<T, 16, kDepth> &a, const TileB &b,
                                         bool add = true) {
    ptx::wgmma_fence();
    #pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) wgmma<1>(T{}, registers_of(acc), a.x[k][0], b.rows(k), add || k != 0);
    ptx::wgmma_commit_group();
}

// acc = A B^T for the 16 rows of one warp, on mma.sync: for what happens rarely, so small rather than fast.
template <class T, int kDepth, int kCols, class TileA, class TileB>
__device__ __forceinline__ void multiply_nt(AccTile<16, kCols> &acc, const TileA &a, int row0, const TileB &b) {
    acc.zero();
    #pragma unroll 1
    for (int k = 0; k < kDepth / 16; ++k) {
        const int lane = fresh_lane();
        ptx::u32 frag_a[4], frag_b[4];
        ptx::ldmatrix_x4(frag_a, a.at(row0 + lane % 16, 16 * k + lane / 16 * 8));
        #pragma unroll
        for (int j = 0; j < kCols / 16; ++j) {
            ptx::ldmatrix_x4(frag_b, b.at(16 * j + lane / 16 * 8 + lane % 8, 16 * k + lane / 8 % 2 * 8));
            T::mma(acc.x[0][2 * j], frag_a, frag_b[0], frag_b[1]);
            T::mma(acc.x[0][2 * j + 1], frag_a, frag_b[2], frag_b[3]);
        }
    }
}

// Rounds one warp's accumulator into its rows [row0, row0 + 16) of a tile, from which TMA stores it. True if all of this
// lane's elements are finite.
template <class T, int kCols, class Tile>
__device__ __forceinline__ bool stage(const Tile &tile, int row0, const AccTile<16, kCols> &acc) {
    const int lane = fresh_lane();
    ptx::u32 trace = 0;
    #pragma unroll
    for (int j = 0; j < kCols / 8; j += 2) {
        const ptx::u32 to = tile.at(row0 + lane % 16, 8 * j + lane / 16 * 8);
        const auto pair = [&](int column, int half) {
            const ptx::u32 x = T::pack(acc.x[0][column][2 * half], acc.x[0][column][2 * half + 1]);
            trace = T::trace(x, trace);
            return x;
        };
        if (j + 1 < kCols / 8) {
            const ptx::u32 r[4] = {pair(j, 0), pair(j, 1), pair(j + 1, 0), pair(j + 1, 1)};
            ptx::stmatrix_x4(to, r);
        } else {
            ptx::stmatrix_x2(to, pair(j, 0), pair(j, 1));
        }
    }
    return is_clean(trace);
}

// Writes an A operand of one warp, [16, kRows], transposed into columns [col0, col0 + 16) of a tile.
template <class T, int kRows, class Tile>
__device__ __forceinline__ void stage_transposed(const Tile &tile, int col0, const FragA<T, 16, kRows> &a) {
    const int lane = fresh_lane();
    #pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
        // The order of the four matrices is that of the operand's registers: none is moved.
        ptx::stmatrix_x4_trans(tile.at(16 * k + lane / 16 * 8 + lane % 8, col0 + lane / 8 % 2 * 8), a.x[k][0]);
    }
}

#endif  // CUPYFLASH_TILE_SM90_CUH
