// What the twins of ptx.cuh do: compiled with the runtime, once for all kernels.
#include "ptx.h"

namespace ptx {

// ---- Special registers ----
int thread_index() { return emu_self->thread; }
int block_index() { return emu_self->block; }
int grid_size() { return emu_self->blocks; }
i64 clock64() { return 0; }
i64 globaltimer() { return 0; }

// ---- Shared memory ----
u32 dynamic_smem() { return emu_smem_base(); }
void ld_shared_v4_f32(float (&x)[4], u32 addr, EMU_PLACE) { emu_ld_shared(addr, 16, x, EMU_SITE); }
void ld_shared_v2_f32(float &x, float &y, u32 addr, EMU_PLACE) {
    float both[2];
    emu_ld_shared(addr, 8, both, EMU_SITE);
    x = both[0], y = both[1];
}
u32 ld_shared_b32(u32 addr, EMU_PLACE) {
    u32 x;
    emu_ld_shared(addr, 4, &x, EMU_SITE);
    return x;
}
void st_shared_b32(u32 addr, u32 x, EMU_PLACE) { emu_st_shared(addr, 4, &x, EMU_SITE); }
void st_shared_v2_f32(u32 addr, float x, float y, EMU_PLACE) {
    const float both[2] = {x, y};
    emu_st_shared(addr, 8, both, EMU_SITE);
}
void st_shared_v4_b32(u32 addr, const U128 &v, EMU_PLACE) { emu_st_shared(addr, 16, &v, EMU_SITE); }

// ---- Barriers and warp collectives ----
void bar_sync(EMU_PLACE) { emu_bar(0, -1, kEmuBarSync, false, EMU_SITE); }
void bar_sync(int id, int threads, EMU_PLACE) { emu_bar(id, threads, kEmuBarSync, false, EMU_SITE); }
void bar_arrive(int id, int threads, EMU_PLACE) { emu_bar(id, threads, kEmuBarArrive, false, EMU_SITE); }
bool bar_red_or(int id, int threads, bool p, EMU_PLACE) { return emu_bar(id, threads, kEmuBarRedOr, p, EMU_SITE); }
void bar_warp_sync(EMU_PLACE) { emu_bar_warp_sync(EMU_SITE); }
bool vote_any(bool p, EMU_PLACE) { return emu_ballot(p, EMU_SITE) != 0; }
bool vote_all(bool p, EMU_PLACE) { return emu_ballot(p, EMU_SITE) == 0xffffffffu; }
u32 vote_ballot(bool p, EMU_PLACE) { return emu_ballot(p, EMU_SITE); }
int shfl_index(int x, int lane, EMU_PLACE) { return static_cast<int>(emu_shfl(static_cast<u32>(x), lane, EMU_SITE)); }
float shfl_index(float x, int lane, EMU_PLACE) {
    u32 bits;
    memcpy(&bits, &x, 4);
    bits = emu_shfl(bits, lane, EMU_SITE);
    memcpy(&x, &bits, 4);
    return x;
}
float shfl_xor(float x, int mask, EMU_PLACE) {
    u32 bits;
    memcpy(&bits, &x, 4);
    bits = emu_shfl(bits, (emu_self->thread & 31) ^ mask, EMU_SITE);
    memcpy(&x, &bits, 4);
    return x;
}

// ---- Asynchronous copies ----
void cp_async_16(u32 dst, const void *src, bool valid, EMU_PLACE) { emu_cp_async(dst, src, 16, valid, EMU_SITE); }
void cp_async_8(u32 dst, const void *src, bool valid, EMU_PLACE) { emu_cp_async(dst, src, 8, valid, EMU_SITE); }
void cp_async_4(u32 dst, const void *src, bool valid, EMU_PLACE) { emu_cp_async(dst, src, 4, valid, EMU_SITE); }
void cp_async_commit_group() { emu_cp_async_commit(); }

// ---- Matrix fragments ----
void ldmatrix_x4(u32 (&r)[4], u32 addr, EMU_PLACE) { emu_ldmatrix(r, 4, addr, false, EMU_SITE); }
void ldmatrix_x4_trans(u32 (&r)[4], u32 addr, EMU_PLACE) { emu_ldmatrix(r, 4, addr, true, EMU_SITE); }
u32 movmatrix_trans(u32 x, EMU_PLACE) {
    const int row = (emu_self->thread & 31) / 4, column = (emu_self->thread & 31) % 4 * 2;  // of the transpose
    const u32 low = emu_shfl(x, column * 4 + row / 2, EMU_SITE), high = emu_shfl(x, column * 4 + 4 + row / 2, EMU_SITE);
    return (low >> row % 2 * 16 & 0xffff) | (high >> row % 2 * 16) << 16;
}
void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_PLACE) {
    const u32 b[2] = {b0, b1};
    emu_mma(d, a, b, 16, kEmuBf16, EMU_SITE);
}
void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_PLACE) {
    const u32 b[2] = {b0, b1};
    emu_mma(d, a, b, 16, kEmuF16, EMU_SITE);
}

// ---- Numbers ----
int popc(u32 x) { return __builtin_popcount(x); }
float uint_as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
u32 float_as_uint(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
u32 cvt_rn_bf16(float x) {
    const u32 bits = float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
u32 cvt_rn_bf16x2(float lo, float hi) { return cvt_rn_bf16(lo) | cvt_rn_bf16(hi) << 16; }
u32 cvt_rn_f16(float x) { return x != x ? 0x7fffu : emu_f32_to_f16(x); }
u32 cvt_rn_f16x2(float lo, float hi) { return cvt_rn_f16(lo) | cvt_rn_f16(hi) << 16; }
float cvt_f32_f16(u16 x) {
#ifdef __F16C__
    using Halves = short __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(Halves{static_cast<short>(x)})[0];
#else
    return emu_f16_to_f32(x);
#endif
}
u32 signs_of_halves(u32 x) { return (x >> 15 & 1) * 0xffffu | (x >> 31) * 0xffff0000u; }
u32 prmt(u32 a, u32 b, u32 selector) {
    const u64 both = static_cast<u64>(b) << 32 | a;
    u32 y = 0;
    for (int i = 0; i < 4; ++i) y |= (both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return y;
}
float e4m3_to_f32(u32 x) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    const float size = exponent ? ldexpf(1 + mantissa / 8.f, exponent - 7) : ldexpf(mantissa / 8.f, -6);
    return (x & 0x7f) == 0x7f ? __builtin_nanf("") : x & 0x80 ? -size : size;
}
float mul_rn(float x, float y) { return x * y; }
float add_rn(float x, float y) { return x + y; }
u32 fma_rn_bf16x2(u32 a, u32 b, u32 c) {
    const auto half = [](u32 x, int i) { return uint_as_float((x >> 16 * i) << 16); };
    return cvt_rn_bf16x2(fmaf(half(a, 0), half(b, 0), half(c, 0)), fmaf(half(a, 1), half(b, 1), half(c, 1)));
}
u32 fma_rn_f16x2(u32 a, u32 b, u32 c) {
    const auto half = [](u32 x, int i) { return cvt_f32_f16(static_cast<u16>(x >> 16 * i)); };
    return cvt_rn_f16x2(fmaf(half(a, 0), half(b, 0), half(c, 0)), fmaf(half(a, 1), half(b, 1), half(c, 1)));
}
float infinity() { return uint_as_float(0x7f800000); }
float nan() { return uint_as_float(0x7fffffff); }
float flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
float ex2(float x) { return flush(exp2f(flush(x))); }
float rcp(float x) { return flush(1 / flush(x)); }
float lg2(float x) { return log2f(flush(x)); }
float sqrt(float x) { return sqrtf(x); }
float rsqrt(float x) { return 1 / sqrtf(x); }

// ---- Global memory shared between blocks ----
void red_add(float *p, float x, EMU_PLACE) { emu_red_add_f32(p, &x, 1, EMU_SITE); }
int atomic_add(int *p, int x, EMU_PLACE) { return emu_atomic_add_s32(p, x, false, EMU_SITE); }
int atomic_add_acq_rel(int *p, int x, EMU_PLACE) { return emu_atomic_add_s32(p, x, true, EMU_SITE); }
int ld_acquire(const int *p, EMU_PLACE) { return emu_ld_acquire(p, EMU_SITE); }
int ld_relaxed(const int *p, EMU_PLACE) { return emu_ld_relaxed(p, EMU_SITE); }
void st_release(int *p, int x, EMU_PLACE) { emu_st_release(p, x, EMU_SITE); }
void nanosleep(EMU_PLACE) { emu_nanosleep(EMU_SITE); }
void fence_gpu() {}  // the emulator's memory is sequentially consistent: release and acquire carry the order
i64 opaque(i64 x) { return x; }
int opaque(int x) { return x; }

}  // namespace ptx
