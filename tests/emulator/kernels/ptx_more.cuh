// Instructions that the emulator has and no shipped kernel uses yet; the probes and hopper_micro.cuh use most of them.
#ifndef CUPYFLASH_PTX_MORE_CUH
#define CUPYFLASH_PTX_MORE_CUH
#include "hw/ptx_sm90.cuh"

namespace ptx {

__device__ __forceinline__ void ldmatrix_x1(u32 &r, u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(addr)
                 : "memory");
}
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- sm_90a: warps, launches, barriers ----
// elect.sync (9.7.13.14): true in one lane of the warp, always the same one.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(elected) : : "memory");
    return elected != 0;
}

// ---- Clusters ----
// Arrives at a barrier of another block of the cluster; `bar` comes from mapa.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" : : "r"(bar) : "memory");
}
__device__ __forceinline__ u32 ld_shared_cluster_b32(u32 addr) {
    u32 x;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
    return x;
}
__device__ __forceinline__ void st_shared_cluster_b32(u32 addr, u32 x) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" : : "r"(addr), "r"(x) : "memory");
}
// To another block of the cluster; dst and bar, which counts the bytes there, come from mapa.
__device__ __forceinline__ void cp_async_bulk_to_peer(u32 dst, u32 src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(dst), "r"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

// ---- stmatrix (9.7.14.5.16) ----
__device__ __forceinline__ void stmatrix_x1(u32 addr, u32 r0) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" : : "r"(addr), "r"(r0) : "memory");
}
__device__ __forceinline__ void stmatrix_x1_trans(u32 addr, u32 r0) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" : : "r"(addr), "r"(r0) : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(u32 addr, u32 r0, u32 r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :
                 : "r"(addr), "r"(r0), "r"(r1)
                 : "memory");
}

// ---- TMA (9.7.9.25.5) of other numbers of dimensions than the kernels', and what they do not do with theirs ----
#define CUPYFLASH_LIST(...) __VA_ARGS__
#define CUPYFLASH_TMA(kDims, coordinates, operands, from2, from4)                                                   \
    __device__ __forceinline__ void tma_load_##kDims##d(u32 dst, const TensorMap &map, u32 bar, coordinates,        \
                                                        u64 policy = kEvictNormal) {                                \
        asm volatile("cp.async.bulk.tensor." #kDims                                                                 \
                     "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"                                   \
                     ".L2::cache_hint [%0], [%1, {" from4 "}], [%2], %3;"                                           \
                     :                                                                                              \
                     : "r"(dst), "l"(&map), "r"(bar), "l"(policy), operands                                         \
                     : "memory");                                                                                   \
    }                                                                                                               \
    __device__ __forceinline__ void tma_store_##kDims##d(const TensorMap &map, u32 src, coordinates) {              \
        asm volatile("cp.async.bulk.tensor." #kDims "d.global.shared::cta.tile.bulk_group [%0, {" from2 "}], [%1];" \
                     :                                                                                              \
                     : "l"(&map), "r"(src), operands                                                                \
                     : "memory");                                                                                   \
    }
CUPYFLASH_TMA(1, CUPYFLASH_LIST(int c0), CUPYFLASH_LIST("r"(c0)), "%2", "%4")
CUPYFLASH_TMA(2, CUPYFLASH_LIST(int c0, int c1), CUPYFLASH_LIST("r"(c0), "r"(c1)), "%2, %3", "%4, %5")
CUPYFLASH_TMA(3, CUPYFLASH_LIST(int c0, int c1, int c2), CUPYFLASH_LIST("r"(c0), "r"(c1), "r"(c2)), "%2, %3, %4",
              "%4, %5, %6")
#undef CUPYFLASH_TMA
__device__ __forceinline__ void tma_store_5d(const TensorMap &map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 :
                 : "l"(&map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

// A multicast completes in the blocks of the cluster that the mask names, at the same offset and on the same barrier of
// each; a reduction in a bulk group. A negative coordinate of a reduction is an illegal instruction on an H200.
#define CUPYFLASH_TMA(kDims, coordinates, operands, from2, from5)                                                   \
    __device__ __forceinline__ void tma_load_multicast_##kDims##d(u32 dst, const TensorMap &map, u32 bar, u16 mask, \
                                                                  coordinates, u64 policy = kEvictNormal) {         \
        asm volatile("cp.async.bulk.tensor." #kDims                                                                 \
                     "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"                                   \
                     ".multicast::cluster.L2::cache_hint [%0], [%1, {" from5 "}], [%2], %3, %4;"                    \
                     :                                                                                              \
                     : "r"(dst), "l"(&map), "r"(bar), "h"(mask), "l"(policy), operands                              \
                     : "memory");                                                                                   \
    }                                                                                                               \
    __device__ __forceinline__ void tma_reduce_add_##kDims##d(const TensorMap &map, u32 src, coordinates) {         \
        asm volatile("cp.reduce.async.bulk.tensor." #kDims                                                          \
                     "d.global.shared::cta.add.tile.bulk_group"                                                     \
                     " [%0, {" from2 "}], [%1];"                                                                    \
                     :                                                                                              \
                     : "l"(&map), "r"(src), operands                                                                \
                     : "memory");                                                                                   \
    }
CUPYFLASH_TMA(1, CUPYFLASH_LIST(int c0), CUPYFLASH_LIST("r"(c0)), "%2", "%5")
CUPYFLASH_TMA(2, CUPYFLASH_LIST(int c0, int c1), CUPYFLASH_LIST("r"(c0), "r"(c1)), "%2, %3", "%5, %6")
CUPYFLASH_TMA(3, CUPYFLASH_LIST(int c0, int c1, int c2), CUPYFLASH_LIST("r"(c0), "r"(c1), "r"(c2)), "%2, %3, %4",
              "%5, %6, %7")
CUPYFLASH_TMA(4, CUPYFLASH_LIST(int c0, int c1, int c2, int c3), CUPYFLASH_LIST("r"(c0), "r"(c1), "r"(c2), "r"(c3)),
              "%2, %3, %4, %5", "%5, %6, %7, %8")
CUPYFLASH_TMA(5, CUPYFLASH_LIST(int c0, int c1, int c2, int c3, int c4),
              CUPYFLASH_LIST("r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)), "%2, %3, %4, %5, %6", "%5, %6, %7, %8, %9")
#undef CUPYFLASH_TMA
#undef CUPYFLASH_LIST

}  // namespace ptx

#endif  // CUPYFLASH_PTX_MORE_CUH
