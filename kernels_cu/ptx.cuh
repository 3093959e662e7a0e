// PTX instructions and CUDA built-ins, one thin wrapper each, named as the instruction is. No logic lives here, and no
// other file but ptx*.cuh holds asm. Sections refer to the PTX ISA manual, version 8.5.
//
// The include guard is a macro, not #pragma once, on purpose: the CPU build (tests/emulator) defines it and brings its
// own definition of every name below, so the kernels themselves compile unchanged.
#ifndef CUPYFLASH_PTX_CUH
#define CUPYFLASH_PTX_CUH

namespace ptx {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(16) U128 { u32 x[4]; };  // 16 bytes: the widest load and store

// ---- Special registers (10) ----
__device__ __forceinline__ int thread_index() { return threadIdx.x; }
__device__ __forceinline__ int block_index() { return blockIdx.x; }
__device__ __forceinline__ int grid_size() { return gridDim.x; }
// Cycles of this multiprocessor, and nanoseconds of the GPU's common clock.
__device__ __forceinline__ i64 clock64() { return ::clock64(); }
__device__ __forceinline__ i64 globaltimer() {
    i64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// ---- Shared memory: addresses are 32-bit offsets into the block's window ----
// The block's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ u32 dynamic_smem() {
    extern __shared__ __align__(128) unsigned char cupyflash_smem[];
    return static_cast<u32>(__cvta_generic_to_shared(cupyflash_smem));
}
// ld.shared, st.shared (9.7.9.8, 9.7.9.11)
__device__ __forceinline__ void ld_shared_v4_f32(float (&x)[4], u32 addr) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(addr)
                 : "memory");
}
__device__ __forceinline__ U128 ld_shared_v4_b32(u32 addr) {
    U128 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
                 : "r"(addr)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 ld_shared_b32(u32 addr) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
    return x;
}
__device__ __forceinline__ void st_shared_b32(u32 addr, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(addr), "r"(x) : "memory");
}
__device__ __forceinline__ void st_shared_v4_b32(u32 addr, const U128 &v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(v.x[0]), "r"(v.x[1]), "r"(v.x[2]), "r"(v.x[3])
                 : "memory");
}

// ---- Barriers and warp collectives (9.7.13) ----
__device__ __forceinline__ void bar_sync() { __syncthreads(); }                          // bar.sync 0
__device__ __forceinline__ bool bar_red_or(bool p) { return __syncthreads_or(p) != 0; }  // bar.red.or.pred
__device__ __forceinline__ void bar_warp_sync() { __syncwarp(); }
__device__ __forceinline__ bool vote_any(bool p) { return __any_sync(0xffffffffu, p); }
__device__ __forceinline__ bool vote_all(bool p) { return __all_sync(0xffffffffu, p); }
__device__ __forceinline__ int shfl_index(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ float shfl_index(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ float shfl_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// ---- Asynchronous copies, global to shared (9.7.9.25) ----
// cp.async of 16 bytes; writes 16 zero bytes, reading nothing, when !valid. Both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_16(u32 dst, const void *src, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}
// cp.async of 8 bytes; otherwise as above.
__device__ __forceinline__ void cp_async_8(u32 dst, const void *src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" : : "r"(dst), "l"(src), "r"(valid ? 8 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's newest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Matrix fragments (9.7.14.5) ----
// ldmatrix: four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
// mma.m16n8k16: d (16x8, fp32) += a (16x16, row) * b (16x8, column). Operands are bf16 or fp16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Numbers (9.7.3, 9.7.9.21) ----
// Two fp32 rounded to nearest even and packed: lo in the low half.
__device__ __forceinline__ u32 cvt_rn_bf16x2(float lo, float hi) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
    return x;
}
__device__ __forceinline__ u32 cvt_rn_f16x2(float lo, float hi) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
    return x;
}
__device__ __forceinline__ float cvt_f32_f16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float nan() { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ float uint_as_float(u32 x) { return __uint_as_float(x); }
// 2^x and log2(x); subnormal arguments and results are zero.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- Global memory shared between blocks (9.7.13.6, 9.7.9.8) ----
// How many consecutive floats one red_add adds: sm_90 has a 16-byte form, which needs an aligned address.
#if __CUDA_ARCH__ >= 900
constexpr int kRedWidth = 4;
#else
constexpr int kRedWidth = 1;
#endif
// red.global.add: p[0 .. kRedWidth) += x, without order among the adds of different threads.
__device__ __forceinline__ void red_add(float *p, const float (&x)[kRedWidth]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" : : "l"(p), "f"(x[0]) : "memory");
#endif
}
__device__ __forceinline__ void red_add_f32(float *p, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" : : "l"(p), "f"(x) : "memory");
}
// atom.add: the value before. The second form also orders this thread's other accesses around it.
__device__ __forceinline__ int atomic_add(int *p, int x) {
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
    return before;
}
__device__ __forceinline__ int atomic_add_acq_rel(int *p, int x) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
    return before;
}
__device__ __forceinline__ int ld_acquire(const int *p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void st_release(int *p, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" : : "l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ void nanosleep() { asm volatile("nanosleep.u32 20;" ::: "memory"); }
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Hides where a value comes from, so that the compiler computes it here instead of keeping it in registers all along.
__device__ __forceinline__ i64 opaque(i64 x) {
    asm volatile("" : "+l"(x));
    return x;
}
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

}  // namespace ptx

#endif  // CUPYFLASH_PTX_CUH
