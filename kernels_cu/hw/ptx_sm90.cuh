// PTX instructions of sm_90a, one thin wrapper each, named as the instruction is. As in ptx.cuh no logic lives here,
// and the include guard is the seam at which the CPU build (tests/emulator) puts its own definitions. Sections refer to
// the PTX ISA manual, version 8.5.
#ifndef CUPYFLASH_PTX_SM90_CUH
#define CUPYFLASH_PTX_SM90_CUH
#include "hw/ptx.cuh"

namespace ptx {

// The block's dynamic shared memory, aligned as tiles with the 128-byte swizzle need it.
__device__ __forceinline__ u32 dynamic_smem_1024() {
    extern __shared__ __align__(1024) unsigned char cupyflash_smem_1024[];
    return static_cast<u32>(__cvta_generic_to_shared(cupyflash_smem_1024));
}

// ---- Warps and registers ----
// setmaxnreg (9.7.19.5): registers a thread of this warpgroup may use from here on.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// ---- Programmatic dependent launch: griddepcontrol (9.7.13.13) ----
// Until the kernels in front of this one on its stream have ended, and what they wrote can be seen.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" : : : "memory"); }
// The kernel behind this one may start once all blocks have come here.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// ---- Clusters ----
__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// barrier.cluster (9.7.13.3), by whole warps.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}
// The address of the same place in the shared memory of block `rank` (9.7.9.23).
__device__ __forceinline__ u32 mapa(u32 addr, u32 rank) {
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(addr), "r"(rank));
    return mapped;
}
__device__ __forceinline__ void ld_shared_cluster_v4_f32(float (&x)[4], u32 addr) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(addr)
                 : "memory");
}
__device__ __forceinline__ void ld_shared_cluster_v2_f32(float &x, float &y, u32 addr) {
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(addr) : "memory");
}

// ---- mbarrier (9.7.13.15): 8 bytes of shared memory ----
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}
// Makes initialised barriers visible to the asynchronous proxy and to the cluster (9.7.13.4).
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}
// Arrives, and makes the phase wait for `bytes` more of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}
// Waits until the phase of this parity is complete: mbarrier.try_wait, which may give up early, in a loop.
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{.reg .pred p;\n"
        "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE_%=;\n"
        "bra WAIT_%=;\n"
        "DONE_%=: }"
        :
        : "r"(bar), "r"(parity)
        : "memory");
}
// Orders this thread's ordinary accesses to shared memory before asynchronous ones: TMA, wgmma (9.7.13.4).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
// The same for global memory, in both directions.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" : : : "memory"); }

// ---- stmatrix (9.7.14.5.16): 8x8 matrices of 16-bit elements; lane i addresses row i % 8 of matrix i / 8 ----
__device__ __forceinline__ void stmatrix_x2(u32 addr, u32 r0, u32 r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" : : "r"(addr), "r"(r0), "r"(r1) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- Bulk copies of contiguous bytes (9.7.9.25.4); addresses and sizes are multiples of 16 ----
// From global to shared memory; completes on an mbarrier.
__device__ __forceinline__ void cp_async_bulk_load(u32 dst, const void *src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(dst), "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void cp_async_bulk_store(void *dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}
// dst[i] += the floats at src.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float *dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}
// Stores and reductions complete in groups of the issuing thread.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}
// Until at most kPending groups are under way; _read: or have at least read their sources.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

// ---- TMA (9.7.9.25.5): boxes of tensors ----
struct alignas(64) TensorMap { u64 opaque[16]; };  // the driver's CUtensorMap; a kernel parameter, __grid_constant__

// L2 cache policies, as createpolicy encodes them.
constexpr u64 kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void prefetch_tensormap(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Coordinates are innermost first. A load completes on an mbarrier, a store in a bulk group; what lies outside of the
// tensor is read as zero and not written. An H200 is stricter: it writes the last 16 bytes of a row whole, even if the
// tensor ends in between; and a box that does not begin at a multiple of 16 bytes of its row, or a store at a negative
// coordinate, is an illegal instruction.
__device__ __forceinline__ void tma_load_4d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3,
                                            u64 policy = kEvictNormal) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
        :
        : "r"(dst), "l"(&map), "r"(bar), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
__device__ __forceinline__ void tma_load_5d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3,
                                            int c4, u64 policy = kEvictNormal) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;"
        :
        : "r"(dst), "l"(&map), "r"(bar), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
__device__ __forceinline__ void tma_store_4d(const TensorMap &map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 :
                 : "l"(&map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// ---- wgmma (9.7.15): d (64 x n, fp32) (+)= a (64 x 16) * b (16 x n), by the four warps of a warpgroup ----
// Orders the warpgroup's register accesses before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}
// The compiler does not see that wgmma works on its accumulators until the wait: uses of d stay on their side of this.
template <int kHalf>
__device__ __forceinline__ void wgmma_pin(float (&d)[kHalf]) {
    #pragma unroll
    for (int i = 0; i < kHalf; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// wgmma_bf16, wgmma_f16: the width n is twice the number of accumulators a lane holds; !accumulate: d = a * b. b is a
// matrix descriptor, a another (first form) or the fragments of mma.m16n8k16 (second form). kTransA, kTransB: 1 if that
// operand lies MN-major in shared memory, 0 if K-major.
#define CUPYFLASH_WGMMA_OF(name, type, n, i0, i1, i2, i3, i4, i5, i6)                                         \
    template <int kTransA, int kTransB>                                                                       \
    __device__ __forceinline__ void name(float (&d)[n / 2], u64 a, u64 b, bool accumulate) {                  \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2                                                    \
                     ", 0;\n"                                                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" CUPYFLASH_LIST_##n  \
                     "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";}"                                   \
                     : CUPYFLASH_REGS_##n                                                                     \
                     : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA), "n"(kTransB));        \
    }                                                                                                         \
    template <int kTransB>                                                                                    \
    __device__ __forceinline__ void name(float (&d)[n / 2], const u32(&a)[4], u64 b, bool accumulate) {       \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5                                                    \
                     ", 0;\n"                                                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" CUPYFLASH_LIST_##n  \
                     "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";}"             \
                     : CUPYFLASH_REGS_##n                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
                       "n"(kTransB));                                                                         \
    }
#define CUPYFLASH_WGMMA(n, ...)                            \
    CUPYFLASH_WGMMA_OF(wgmma_bf16, "bf16", n, __VA_ARGS__) \
    CUPYFLASH_WGMMA_OF(wgmma_f16, "f16", n, __VA_ARGS__)

// The accumulators as text and as operands; then one line a width: its number, and those of the operands that follow.
#define CUPYFLASH_LIST_8 "%0, %1, %2, %3"
#define CUPYFLASH_REGS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define CUPYFLASH_LIST_16 CUPYFLASH_LIST_8 ", %4, %5, %6, %7"
#define CUPYFLASH_REGS_16 CUPYFLASH_REGS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define CUPYFLASH_LIST_24 CUPYFLASH_LIST_16 ", %8, %9, %10, %11"
#define CUPYFLASH_REGS_24 CUPYFLASH_REGS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define CUPYFLASH_LIST_32 CUPYFLASH_LIST_24 ", %12, %13, %14, %15"
#define CUPYFLASH_REGS_32 CUPYFLASH_REGS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define CUPYFLASH_LIST_40 CUPYFLASH_LIST_32 ", %16, %17, %18, %19"
#define CUPYFLASH_REGS_40 CUPYFLASH_REGS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define CUPYFLASH_LIST_48 CUPYFLASH_LIST_40 ", %20, %21, %22, %23"
#define CUPYFLASH_REGS_48 CUPYFLASH_REGS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define CUPYFLASH_LIST_56 CUPYFLASH_LIST_48 ", %24, %25, %26, %27"
#define CUPYFLASH_REGS_56 CUPYFLASH_REGS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define CUPYFLASH_LIST_64 CUPYFLASH_LIST_56 ", %28, %29, %30, %31"
#define CUPYFLASH_REGS_64 CUPYFLASH_REGS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define CUPYFLASH_LIST_72 CUPYFLASH_LIST_64 ", %32, %33, %34, %35"
#define CUPYFLASH_REGS_72 CUPYFLASH_REGS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define CUPYFLASH_LIST_80 CUPYFLASH_LIST_72 ", %36, %37, %38, %39"
#define CUPYFLASH_REGS_80 CUPYFLASH_REGS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define CUPYFLASH_LIST_88 CUPYFLASH_LIST_80 ", %40, %41, %42, %43"
#define CUPYFLASH_REGS_88 CUPYFLASH_REGS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define CUPYFLASH_LIST_96 CUPYFLASH_LIST_88 ", %44, %45, %46, %47"
#define CUPYFLASH_REGS_96 CUPYFLASH_REGS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define CUPYFLASH_LIST_104 CUPYFLASH_LIST_96 ", %48, %49, %50, %51"
#define CUPYFLASH_REGS_104 CUPYFLASH_REGS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define CUPYFLASH_LIST_112 CUPYFLASH_LIST_104 ", %52, %53, %54, %55"
#define CUPYFLASH_REGS_112 CUPYFLASH_REGS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define CUPYFLASH_LIST_120 CUPYFLASH_LIST_112 ", %56, %57, %58, %59"
#define CUPYFLASH_REGS_120 CUPYFLASH_REGS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define CUPYFLASH_LIST_128 CUPYFLASH_LIST_120 ", %60, %61, %62, %63"
#define CUPYFLASH_REGS_128 CUPYFLASH_REGS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define CUPYFLASH_LIST_136 CUPYFLASH_LIST_128 ", %64, %65, %66, %67"
#define CUPYFLASH_REGS_136 CUPYFLASH_REGS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define CUPYFLASH_LIST_144 CUPYFLASH_LIST_136 ", %68, %69, %70, %71"
#define CUPYFLASH_REGS_144 CUPYFLASH_REGS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define CUPYFLASH_LIST_152 CUPYFLASH_LIST_144 ", %72, %73, %74, %75"
#define CUPYFLASH_REGS_152 CUPYFLASH_REGS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define CUPYFLASH_LIST_160 CUPYFLASH_LIST_152 ", %76, %77, %78, %79"
#define CUPYFLASH_REGS_160 CUPYFLASH_REGS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define CUPYFLASH_LIST_168 CUPYFLASH_LIST_160 ", %80, %81, %82, %83"
#define CUPYFLASH_REGS_168 CUPYFLASH_REGS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define CUPYFLASH_LIST_176 CUPYFLASH_LIST_168 ", %84, %85, %86, %87"
#define CUPYFLASH_REGS_176 CUPYFLASH_REGS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define CUPYFLASH_LIST_184 CUPYFLASH_LIST_176 ", %88, %89, %90, %91"
#define CUPYFLASH_REGS_184 CUPYFLASH_REGS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define CUPYFLASH_LIST_192 CUPYFLASH_LIST_184 ", %92, %93, %94, %95"
#define CUPYFLASH_REGS_192 CUPYFLASH_REGS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define CUPYFLASH_LIST_200 CUPYFLASH_LIST_192 ", %96, %97, %98, %99"
#define CUPYFLASH_REGS_200 CUPYFLASH_REGS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define CUPYFLASH_LIST_208 CUPYFLASH_LIST_200 ", %100, %101, %102, %103"
#define CUPYFLASH_REGS_208 CUPYFLASH_REGS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define CUPYFLASH_LIST_216 CUPYFLASH_LIST_208 ", %104, %105, %106, %107"
#define CUPYFLASH_REGS_216 CUPYFLASH_REGS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define CUPYFLASH_LIST_224 CUPYFLASH_LIST_216 ", %108, %109, %110, %111"
#define CUPYFLASH_REGS_224 CUPYFLASH_REGS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define CUPYFLASH_LIST_232 CUPYFLASH_LIST_224 ", %112, %113, %114, %115"
#define CUPYFLASH_REGS_232 CUPYFLASH_REGS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define CUPYFLASH_LIST_240 CUPYFLASH_LIST_232 ", %116, %117, %118, %119"
#define CUPYFLASH_REGS_240 CUPYFLASH_REGS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define CUPYFLASH_LIST_248 CUPYFLASH_LIST_240 ", %120, %121, %122, %123"
#define CUPYFLASH_REGS_248 CUPYFLASH_REGS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define CUPYFLASH_LIST_256 CUPYFLASH_LIST_248 ", %124, %125, %126, %127"
#define CUPYFLASH_REGS_256 CUPYFLASH_REGS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
CUPYFLASH_WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
CUPYFLASH_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
CUPYFLASH_WGMMA(24, 12, 13, 14, 15, 16, 17, 18)
CUPYFLASH_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
CUPYFLASH_WGMMA(40, 20, 21, 22, 23, 24, 25, 26)
CUPYFLASH_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
CUPYFLASH_WGMMA(56, 28, 29, 30, 31, 32, 33, 34)
CUPYFLASH_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
CUPYFLASH_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
CUPYFLASH_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
CUPYFLASH_WGMMA(88, 44, 45, 46, 47, 48, 49, 50)
CUPYFLASH_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
CUPYFLASH_WGMMA(104, 52, 53, 54, 55, 56, 57, 58)
CUPYFLASH_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
CUPYFLASH_WGMMA(120, 60, 61, 62, 63, 64, 65, 66)
CUPYFLASH_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
CUPYFLASH_WGMMA(136, 68, 69, 70, 71, 72, 73, 74)
CUPYFLASH_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
CUPYFLASH_WGMMA(152, 76, 77, 78, 79, 80, 81, 82)
CUPYFLASH_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
CUPYFLASH_WGMMA(168, 84, 85, 86, 87, 88, 89, 90)
CUPYFLASH_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
CUPYFLASH_WGMMA(184, 92, 93, 94, 95, 96, 97, 98)
CUPYFLASH_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
CUPYFLASH_WGMMA(200, 100, 101, 102, 103, 104, 105, 106)
CUPYFLASH_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
CUPYFLASH_WGMMA(216, 108, 109, 110, 111, 112, 113, 114)
CUPYFLASH_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
CUPYFLASH_WGMMA(232, 116, 117, 118, 119, 120, 121, 122)
CUPYFLASH_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
CUPYFLASH_WGMMA(248, 124, 125, 126, 127, 128, 129, 130)
CUPYFLASH_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#undef CUPYFLASH_WGMMA
#undef CUPYFLASH_WGMMA_OF

}  // namespace ptx

#endif  // CUPYFLASH_PTX_SM90_CUH
