// The element types of 16 bits. They are storage only: arithmetic is fp32.
#ifndef CUPYFLASH_HALVES_CUH
#define CUPYFLASH_HALVES_CUH
#include "hw/ptx.cuh"

// Two neighbours of 16 bits are a word, `Pair`.
struct Bf16 {
    static constexpr ptx::u32 kExponent = 0x7f80;
    using Pair = ptx::u32;
    ptx::u16 raw;

    __device__ static ptx::u32 pack(float lo, float hi) { return ptx::cvt_rn_bf16x2(lo, hi); }
    __device__ static float lo(ptx::u32 x) { return ptx::uint_as_float(x << 16); }
    __device__ static float hi(ptx::u32 x) { return ptx::uint_as_float(x & 0xffff0000u); }
    __device__ static void mma(float (&d)[4], const ptx::u32 (&a)[4], ptx::u32 b0, ptx::u32 b1) {
        ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    }
    __device__ static ptx::u32 trace(ptx::u32 pair, ptx::u32 before) { return ptx::fma_rn_bf16x2(pair, 0, before); }
};

struct Fp16 {
    static constexpr ptx::u32 kExponent = 0x7c00;
    using Pair = ptx::u32;
    ptx::u16 raw;

    __device__ static ptx::u32 pack(float lo, float hi) { return ptx::cvt_rn_f16x2(lo, hi); }
    __device__ static float lo(ptx::u32 x) { return ptx::cvt_f32_f16(static_cast<ptx::u16>(x)); }
    __device__ static float hi(ptx::u32 x) { return ptx::cvt_f32_f16(static_cast<ptx::u16>(x >> 16)); }
    __device__ static void mma(float (&d)[4], const ptx::u32 (&a)[4], ptx::u32 b0, ptx::u32 b1) {
        ptx::mma_m16n8k16_f16(d, a, b0, b1);
    }
    __device__ static ptx::u32 trace(ptx::u32 pair, ptx::u32 before) { return ptx::fma_rn_f16x2(pair, 0, before); }
};

#endif  // CUPYFLASH_HALVES_CUH
