// Twin of kernels_cu/ptx.cuh: the same names, on the emulator. Defining the guard keeps the real one out.
#ifndef CUPYFLASH_PTX_CUH
#define CUPYFLASH_PTX_CUH
#include "cuda_language.h"

#pragma GCC visibility push(default)  // what is declared only is in the runtime
namespace ptx {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(16) U128 { u32 x[4]; };

// ---- Special registers ----
int thread_index();
int block_index();
int grid_size();
i64 clock64();
i64 globaltimer();

// ---- Shared memory ----
u32 dynamic_smem();
void ld_shared_v4_f32(float (&x)[4], u32 addr, EMU_HERE);
void ld_shared_v2_f32(float &x, float &y, u32 addr, EMU_HERE);
// Inlined: a struct that a call returns would be stored before the store is checked.
__forceinline__ U128 ld_shared_v4_b32(u32 addr, EMU_HERE) {
    U128 v;
    emu_ld_shared(addr, 16, &v, EMU_SITE);
    return v;
}
u32 ld_shared_b32(u32 addr, EMU_HERE);
void st_shared_b32(u32 addr, u32 x, EMU_HERE);
void st_shared_v2_f32(u32 addr, float x, float y, EMU_HERE);
void st_shared_v4_b32(u32 addr, const U128 &v, EMU_HERE);

// ---- Barriers and warp collectives ----
void bar_sync(EMU_HERE);
void bar_sync(int id, int threads, EMU_HERE);
void bar_arrive(int id, int threads, EMU_HERE);
bool bar_red_or(int id, int threads, bool p, EMU_HERE);
void bar_warp_sync(EMU_HERE);
bool vote_any(bool p, EMU_HERE);
bool vote_all(bool p, EMU_HERE);
u32 vote_ballot(bool p, EMU_HERE);
int shfl_index(int x, int lane, EMU_HERE);
float shfl_index(float x, int lane, EMU_HERE);
float shfl_xor(float x, int mask, EMU_HERE);

// ---- Asynchronous copies ----
#if EMULATED_ARCH >= 800
constexpr bool kHasAsyncCopies = true;
#else
constexpr bool kHasAsyncCopies = false;
#endif
void cp_async_16(u32 dst, const void *src, bool valid, EMU_HERE);
void cp_async_8(u32 dst, const void *src, bool valid, EMU_HERE);
void cp_async_4(u32 dst, const void *src, bool valid, EMU_HERE);
void cp_async_commit_group();
template <int kPending>
inline void cp_async_wait_group() {
    emu_cp_async_wait(kPending);
}

// ---- Matrix fragments ----
void ldmatrix_x4(u32 (&r)[4], u32 addr, EMU_HERE);
void ldmatrix_x4_trans(u32 (&r)[4], u32 addr, EMU_HERE);
u32 movmatrix_trans(u32 x, EMU_HERE);
void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_HERE);
void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_HERE);

// ---- Numbers ----
int popc(u32 x);
float uint_as_float(u32 x);
u32 float_as_uint(float x);
u32 cvt_rn_bf16(float x);
u32 cvt_rn_bf16x2(float lo, float hi);
u32 cvt_rn_f16(float x);
u32 cvt_rn_f16x2(float lo, float hi);
float cvt_f32_f16(u16 x);
u32 prmt(u32 a, u32 b, u32 selector);
u32 signs_of_halves(u32 x);
#if EMULATED_ARCH >= 890
constexpr bool kHasE4m3 = true;
#else
constexpr bool kHasE4m3 = false;
#endif
float e4m3_to_f32(u32 x);
template <int kUpper>
inline u32 cvt_rn_f16x2_e4m3x2(u32 x) {
    return cvt_rn_f16x2(e4m3_to_f32(x >> 16 * kUpper & 0xff), e4m3_to_f32(x >> (16 * kUpper + 8) & 0xff));
}
float mul_rn(float x, float y);
float add_rn(float x, float y);
u32 fma_rn_bf16x2(u32 a, u32 b, u32 c);
u32 fma_rn_f16x2(u32 a, u32 b, u32 c);
float infinity();
float nan();
// .ftz: subnormal arguments and results are zero.
float flush(float x);
float ex2(float x);
float rcp(float x);
float lg2(float x);
// These are not.
float sqrt(float x);
float rsqrt(float x);

// ---- Global memory shared between blocks ----
#if EMULATED_ARCH >= 900
constexpr int kRedWidth = 4;
#else
constexpr int kRedWidth = 1;
#endif
inline void red_add(float *p, const float (&x)[kRedWidth], EMU_HERE) { emu_red_add_f32(p, x, kRedWidth, EMU_SITE); }
void red_add(float *p, float x, EMU_HERE);
int atomic_add(int *p, int x, EMU_HERE);
int atomic_add_acq_rel(int *p, int x, EMU_HERE);
int ld_acquire(const int *p, EMU_HERE);
int ld_relaxed(const int *p, EMU_HERE);
void st_release(int *p, int x, EMU_HERE);
void nanosleep(EMU_HERE);
inline void trap() { __builtin_trap(); }
void fence_gpu();

i64 opaque(i64 x);
int opaque(int x);

}  // namespace ptx
#pragma GCC visibility pop

#endif
