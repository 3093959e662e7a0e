// Layout probes: each kernel executes one instruction on data that the host laid out, and dumps what came out. They know
// nothing of layouts themselves, so a GPU and the emulator agree on the output only if they agree on the layout.
// All have one signature: a tensor map (unused by most), words in, words out, and eight integers.
#ifndef CUPYFLASH_PROBES_CUH
#define CUPYFLASH_PROBES_CUH
#include "ptx_more.cuh"

using namespace ptx;

struct ProbeArgs { int x[8]; };

#define PROBE(symbol, ...)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) symbol(const __grid_constant__ TensorMap map, const u32 *in, \
                                                             u32 *out, const __grid_constant__ ProbeArgs args) {   \
        __VA_ARGS__;                                                                                               \
    }
#define CLUSTER_PROBE(symbol, ...)                                                                                \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128) symbol(                           \
        const __grid_constant__ TensorMap map, const u32 *in, u32 *out, const __grid_constant__ ProbeArgs args) { \
        __VA_ARGS__;                                                                                              \
    }

// Shared memory from a multiple of 1024 bytes on, where all swizzles start.
__device__ __forceinline__ u32 tile_base() { return (dynamic_smem() + 1023) & ~1023u; }

// Words [0, words) of shared memory, filled from or written to global memory by all threads.
__device__ __forceinline__ void fill(u32 base, const u32 *in, int words, int threads) {
    for (int i = thread_index(); i < words; i += threads) st_shared_b32(base + 4 * i, in[i]);
}
__device__ __forceinline__ void dump(u32 *out, u32 base, int words, int threads) {
    for (int i = thread_index(); i < words; i += threads) out[i] = ld_shared_b32(base + 4 * i);
}

// ---- mma: in [32][a 4, b 2], out [32][d 4] ----
enum MmaKind { kBf16k16, kF16k16, kBf16k8, kF16k8, kTf32k8 };
template <MmaKind kKind>
__device__ void probe_mma(const u32 *in, u32 *out) {
    const u32 *mine = in + 6 * thread_index();
    const u32 a[4] = {mine[0], mine[1], mine[2], mine[3]};
    float d[4] = {1.f, 2.f, 3.f, 4.f};
    if constexpr (kKind == kBf16k16) mma_m16n8k16_bf16(d, a, mine[4], mine[5]);
    if constexpr (kKind == kF16k16) mma_m16n8k16_f16(d, a, mine[4], mine[5]);
    if constexpr (kKind == kBf16k8) mma_m16n8k8_bf16(d, a[0], a[1], mine[4]);
    if constexpr (kKind == kF16k8) mma_m16n8k8_f16(d, a[0], a[1], mine[4]);
    if constexpr (kKind == kTf32k8) mma_m16n8k8_tf32(d, a, mine[4], mine[5]);
    for (int i = 0; i < 4; ++i) reinterpret_cast<float *>(out)[4 * thread_index() + i] = d[i];
}

// ---- ldmatrix: in [256] words of shared memory, out [32][4]. kCount -2: x2.trans, -4: x4.trans ----
template <int kCount>
__device__ void probe_ldmatrix(const u32 *in, u32 *out) {
    const u32 base = tile_base();
    fill(base, in, 256, 32);
    bar_warp_sync();
    const u32 addr = base + 16 * (thread_index() * 5 % 32);  // rows in another order than the lanes
    u32 r[4] = {0, 0, 0, 0};
    if constexpr (kCount == 1) ldmatrix_x1(r[0], addr);
    if constexpr (kCount == -2) {
        u32 two[2];
        ldmatrix_x2_trans(two, addr);
        r[0] = two[0], r[1] = two[1];
    }
    if constexpr (kCount == 4) ldmatrix_x4(r, addr);
    if constexpr (kCount == -4) ldmatrix_x4_trans(r, addr);
    for (int i = 0; i < 4; ++i) out[4 * thread_index() + i] = r[i];
}

// ---- stmatrix: in [32][4] registers, out [256] words of shared memory ----
template <int kCount, bool kTrans>
__device__ void probe_stmatrix(const u32 *in, u32 *out) {
    const u32 base = tile_base();
    for (int i = thread_index(); i < 256; i += 32) st_shared_b32(base + 4 * i, 0);
    bar_warp_sync();
    const u32 addr = base + 16 * (thread_index() * 5 % 32);
    const u32 *mine = in + 4 * thread_index();
    const u32 r[4] = {mine[0], mine[1], mine[2], mine[3]};
    if constexpr (kCount == 1) kTrans ? stmatrix_x1_trans(addr, r[0]) : stmatrix_x1(addr, r[0]);
    if constexpr (kCount == 2) kTrans ? stmatrix_x2_trans(addr, r[0], r[1]) : stmatrix_x2(addr, r[0], r[1]);
    if constexpr (kCount == 4) kTrans ? stmatrix_x4_trans(addr, r) : stmatrix_x4(addr, r);
    bar_warp_sync();
    dump(out, base, 256, 32);
}

// ---- Rounding: in [n] floats, out [n][bf16x2, f16x2] ----
__device__ void probe_cvt(const u32 *in, u32 *out, int n) {
    for (int i = thread_index(); i < n; i += 32) {
        const float x = uint_as_float(in[i]), y = uint_as_float(in[n - 1 - i]);
        out[2 * i] = cvt_rn_bf16x2(x, y), out[2 * i + 1] = cvt_rn_f16x2(x, y);
    }
}

// ---- Signs: in [n] words, out [n] ----
__device__ void probe_signs(const u32 *in, u32 *out, int n) {
    for (int i = thread_index(); i < n; i += 32) out[i] = signs_of_halves(in[i]);
}

// ---- wgmma: in [image words][128 threads x 4 A registers], out [128][n / 2] ----
// x: words of the image, start of A, start of B, leading and stride bytes of A, of B, swizzle mode of the descriptor.
__device__ __forceinline__ u64 matrix_descriptor(u32 addr, int leading, int stride, int mode) {
    return static_cast<u64>((addr & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(mode) << 62;
}
template <int kN, bool kBf16, bool kRegistersA, int kTransA, int kTransB>
__device__ void probe_wgmma(const u32 *in, u32 *out, const ProbeArgs &args) {
    const int *x = args.x;
    const u32 base = tile_base();
    fill(base, in, x[0], 128);
    fence_proxy_async();
    bar_sync();
    const u64 a = matrix_descriptor(base + x[1], x[3], x[4], x[7]),
              b = matrix_descriptor(base + x[2], x[5], x[6], x[7]);
    const u32 *mine = in + x[0] + 4 * thread_index();
    const u32 r[4] = {mine[0], mine[1], mine[2], mine[3]};
    float d[kN / 2];
    for (int i = 0; i < kN / 2; ++i) d[i] = static_cast<float>(i);
    wgmma_pin(d);
    wgmma_fence();
    if constexpr (kRegistersA && kBf16) wgmma_bf16<kTransB>(d, r, b, true);
    if constexpr (kRegistersA && !kBf16) wgmma_f16<kTransB>(d, r, b, true);
    if constexpr (!kRegistersA && kBf16) wgmma_bf16<kTransA, kTransB>(d, a, b, true);
    if constexpr (!kRegistersA && !kBf16) wgmma_f16<kTransA, kTransB>(d, a, b, false);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_pin(d);
    for (int i = 0; i < kN / 2; ++i) reinterpret_cast<float *>(out)[kN / 2 * thread_index() + i] = d[i];
}

// ---- TMA. x: bytes of the box, c0 .. c4 ----
template <int kDims>
__device__ void probe_tma_load(const TensorMap &map, u32 *out, const ProbeArgs &args) {
    const int *x = args.x;
    const u32 base = tile_base(), bar = base + x[0];
    if (thread_index() == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, x[0]);
        if constexpr (kDims == 1) tma_load_1d(base, map, bar, x[1]);
        if constexpr (kDims == 2) tma_load_2d(base, map, bar, x[1], x[2]);
        if constexpr (kDims == 3) tma_load_3d(base, map, bar, x[1], x[2], x[3]);
        if constexpr (kDims == 4) tma_load_4d(base, map, bar, x[1], x[2], x[3], x[4], kEvictLast);
        if constexpr (kDims == 5) tma_load_5d(base, map, bar, x[1], x[2], x[3], x[4], x[5], kEvictFirst);
    }
    bar_sync();
    mbarrier_wait(bar, 0);
    dump(out, base, x[0] / 4, 128);
}
// in: the box as it lies in shared memory; the tensor of the map is the output buffer.
template <int kDims, bool kAdd>
__device__ void probe_tma_store(const TensorMap &map, const u32 *in, const ProbeArgs &args) {
    const int *x = args.x;
    const u32 base = tile_base();
    fill(base, in, x[0] / 4, 128);
    fence_proxy_async();
    bar_sync();
    if (thread_index() != 0) return;
    if constexpr (kDims == 1 && !kAdd) tma_store_1d(map, base, x[1]);
    if constexpr (kDims == 2 && !kAdd) tma_store_2d(map, base, x[1], x[2]);
    if constexpr (kDims == 3 && !kAdd) tma_store_3d(map, base, x[1], x[2], x[3]);
    if constexpr (kDims == 4 && !kAdd) tma_store_4d(map, base, x[1], x[2], x[3], x[4]);
    if constexpr (kDims == 5 && !kAdd) tma_store_5d(map, base, x[1], x[2], x[3], x[4], x[5]);
    if constexpr (kDims == 2 && kAdd) tma_reduce_add_2d(map, base, x[1], x[2]);
    if constexpr (kDims == 3 && kAdd) tma_reduce_add_3d(map, base, x[1], x[2], x[3]);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
}

// ---- 1-D bulk copies: in [x0 / 4] words to shared memory, twice added to out, then stored behind that ----
__device__ void probe_bulk(const u32 *in, u32 *out, const ProbeArgs &args) {
    const u32 bytes = args.x[0], base = tile_base(), bar = base + bytes;
    if (thread_index() == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, bytes);
        cp_async_bulk_load(base, in, bytes, bar);
        mbarrier_wait(bar, 0);
        cp_reduce_async_bulk_add_f32(reinterpret_cast<float *>(out), base, bytes);
        cp_reduce_async_bulk_add_f32(reinterpret_cast<float *>(out), base, bytes);
        cp_async_bulk_store(out + bytes / 4, base, bytes);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
        cp_async_bulk_wait_group<0>();
    }
}

// ---- A cluster of two blocks. Shared memory: tile [x0 bytes], tile of the peer, barriers at 2 * x0 ----
// Block 0 loads a box for both by multicast; each block sends its tile, increased by its rank, to the peer, and reads one
// word of the peer's first tile. out: [2][tile, received, word of the peer].
__device__ void probe_cluster(const TensorMap &map, u32 *out, const ProbeArgs &args) {
    const int *x = args.x;
    const u32 bytes = x[0], base = tile_base(), bar = base + 2 * bytes, rank = cluster_ctarank(), peer = rank ^ 1;
    if (thread_index() == 0) {
        mbarrier_init(bar, 1);
        mbarrier_init(bar + 8, 1);
        mbarrier_init(bar + 16, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, bytes);
        mbarrier_arrive_expect_tx(bar + 8, bytes);
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (rank == 0 && thread_index() == 0) tma_load_multicast_2d(base, map, bar, 3, x[1], x[2]);
    mbarrier_wait(bar, 0);
    bar_sync();
    for (u32 i = thread_index(); i < bytes / 4; i += 128)
        st_shared_b32(base + 4 * i, ld_shared_b32(base + 4 * i) + rank);
    fence_proxy_async();
    bar_sync();
    if (thread_index() == 0) {
        cp_async_bulk_to_peer(mapa(base + bytes, peer), base, bytes, mapa(bar + 8, peer));
        mbarrier_arrive_cluster(mapa(bar + 16, peer));
    }
    mbarrier_wait(bar + 8, 0);
    mbarrier_wait(bar + 16, 0);
    barrier_cluster_arrive();
    barrier_cluster_wait();
    u32 *mine = out + rank * (bytes / 2 + 1);
    dump(mine, base, bytes / 2, 128);
    if (thread_index() == 0) mine[bytes / 2] = ld_shared_cluster_b32(mapa(base + 8, peer));
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

// ---- Votes, shuffles, named barriers, elect. out [64] ----
__device__ void probe_warp(const u32 *in, u32 *out) {
    const int thread = thread_index();
    if (thread >= 64) bar_arrive(1, 128);
    else bar_sync(1, 128);
    const u32 ballot = vote_ballot(in[thread] & 1);
    const int shuffled = shfl_index(static_cast<int>(in[thread]), (thread * 7 + 3) % 32);
    const float crossed = shfl_xor(static_cast<float>(thread), 5);
    out[4 * thread] = ballot;
    out[4 * thread + 1] = static_cast<u32>(shuffled);
    out[4 * thread + 2] = static_cast<u32>(crossed);
    out[4 * thread + 3] = vote_any(in[thread] == 12345);
    if (elect_sync()) atomic_add(reinterpret_cast<int *>(out) + 512, 1);
}

#endif  // CUPYFLASH_PROBES_CUH
