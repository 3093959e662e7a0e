// A small warp-specialised Hopper kernel that uses what large ones use: one producer warpgroup (TMA, 128-byte swizzle,
// ring of kStages over mbarriers), one consumer warpgroup:
//     O = sum over key blocks of f16(scale * Q K^T) V     (attention without the softmax)
// S = Q K^T with both operands in shared memory, O += P V with P in registers and V MN-major; O leaves by a TMA store.
// q, k, v, o: [sequences, length, 64] of fp16. A block takes 64 rows of q. Shared memory: Q | K ring | V ring | barriers.
#ifndef CUPYFLASH_HOPPER_MICRO_CUH
#define CUPYFLASH_HOPPER_MICRO_CUH
#include "ptx_more.cuh"

using namespace ptx;

constexpr int kStages = 2, kTileBytes = 64 * 128;
constexpr u32 kStrideBytes = 1024;  // eight rows of 128 bytes

struct MicroArgs {
    int key_blocks, query_blocks;
    float scale;
};

// Matrix descriptor of a tile with 128-byte swizzle.
__device__ __forceinline__ u64 tile_descriptor(u32 addr, u32 leading_bytes) {
    return static_cast<u64>((addr & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(kStrideBytes >> 4) << 32 | 1ull << 62;
}

struct Ring {
    u32 full, empty;  // mbarriers, one each a stage
    __device__ u32 full_of(int block) const { return full + 8 * (block % kStages); }
    __device__ u32 empty_of(int block) const { return empty + 8 * (block % kStages); }
    __device__ u32 parity(int block) const { return block / kStages & 1; }
};

__device__ __forceinline__ void produce(const TensorMap &q, const TensorMap &k, const TensorMap &v, u32 sQ, u32 sK,
                                        u32 sV, u32 q_full, Ring ring, int row, int sequence, int blocks) {
    mbarrier_arrive_expect_tx(q_full, kTileBytes);
    tma_load_3d(sQ, q, q_full, 0, row, sequence);
    for (int b = 0; b < blocks; ++b) {
        const int stage = b % kStages;
        mbarrier_wait(ring.empty_of(b), ring.parity(b) ^ 1);  // the consumers have left this stage
        mbarrier_arrive_expect_tx(ring.full_of(b), 2 * kTileBytes);
        tma_load_3d(sK + stage * kTileBytes, k, ring.full_of(b), 0, b * 64, sequence);
        tma_load_3d(sV + stage * kTileBytes, v, ring.full_of(b), 0, b * 64, sequence);
    }
}

__device__ __forceinline__ void consume(const TensorMap &out, u32 sQ, u32 sK, u32 sV, u32 q_full, Ring ring, int row,
                                        int sequence, const MicroArgs &args) {
    const int thread = thread_index() % 128, warp = thread / 32, lane = thread % 32;
    float o[32];
    for (int i = 0; i < 32; ++i) o[i] = 0.f;
    mbarrier_wait(q_full, 0);
    for (int b = 0; b < args.key_blocks; ++b) {
        const u32 K = sK + b % kStages * kTileBytes, V = sV + b % kStages * kTileBytes;
        mbarrier_wait(ring.full_of(b), ring.parity(b));
        float s[32];
        wgmma_pin(s);
        wgmma_fence();
        for (int d = 0; d < 4; ++d)
            wgmma_f16<0, 0>(s, tile_descriptor(sQ + 32 * d, 16), tile_descriptor(K + 32 * d, 16), d != 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_pin(s);
        u32 p[4][4];
        for (int d = 0; d < 4; ++d)
            for (int i = 0; i < 4; ++i)
                p[d][i] = cvt_rn_f16x2(s[8 * d + 2 * i] * args.scale, s[8 * d + 2 * i + 1] * args.scale);
        wgmma_pin(o);
        wgmma_fence();
        for (int d = 0; d < 4; ++d) wgmma_f16<1>(o, p[d], tile_descriptor(V + 2048 * d, kTileBytes), true);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_pin(o);
        mbarrier_arrive(ring.empty_of(b));
    }
    // Each warp overwrites its own 16 rows of Q, which it alone has read.
    for (int j = 0; j < 8; j += 2) {
        const int matrix = lane / 8, row_of = 16 * warp + lane % 8 + 8 * (matrix % 2), chunk = j + matrix / 2;
        u32 r[4];
        for (int i = 0; i < 4; ++i) r[i] = cvt_rn_f16x2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
        stmatrix_x4(sQ + 128 * row_of + 16 * (chunk ^ row_of % 8), r);
    }
    fence_proxy_async();
    bar_sync(1, 128);
    if (warp == 0 && elect_sync()) {
        tma_store_3d(out, sQ, 0, row, sequence);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    hopper_micro(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                 const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                 const __grid_constant__ MicroArgs args) {
    const u32 sQ = (dynamic_smem() + 1023) & ~1023u, sK = sQ + kTileBytes, sV = sK + kStages * kTileBytes;
    const u32 q_full = sV + kStages * kTileBytes;
    const Ring ring{q_full + 8, q_full + 8 + 8 * kStages};
    const int row = block_index() % args.query_blocks * 64, sequence = block_index() / args.query_blocks;
    if (thread_index() == 0) {
        mbarrier_init(q_full, 1);
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(ring.full + 8 * s, 1);
            mbarrier_init(ring.empty + 8 * s, 128);
        }
        fence_mbarrier_init();
    }
    bar_sync();
    if (thread_index() < 128) {
        setmaxnreg_dec<40>();
        if (thread_index() < 32 && elect_sync())
            produce(q, k, v, sQ, sK, sV, q_full, ring, row, sequence, args.key_blocks);
    } else {
        setmaxnreg_inc<232>();
        consume(o, sQ, sK, sV, q_full, ring, row, sequence, args);
    }
}

#endif  // CUPYFLASH_HOPPER_MICRO_CUH
