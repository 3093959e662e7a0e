// The 16-bit element types. They are storage only: arithmetic is fp32.
#ifndef CUPYFLASH_ELEMENT_CUH
#define CUPYFLASH_ELEMENT_CUH
#include "hw/ptx.cuh"

struct Bf16 {
    static constexpr ptx::u32 kExponent = 0x7f80;
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
    ptx::u16 raw;

    __device__ static ptx::u32 pack(float lo, float hi) { return ptx::cvt_rn_f16x2(lo, hi); }
    __device__ static float lo(ptx::u32 x) { return ptx::cvt_f32_f16(static_cast<ptx::u16>(x)); }
    __device__ static float hi(ptx::u32 x) { return ptx::cvt_f32_f16(static_cast<ptx::u16>(x >> 16)); }
    __device__ static void mma(float (&d)[4], const ptx::u32 (&a)[4], ptx::u32 b0, ptx::u32 b1) {
        ptx::mma_m16n8k16_f16(d, a, b0, b1);
    }
    __device__ static ptx::u32 trace(ptx::u32 pair, ptx::u32 before) { return ptx::fma_rn_f16x2(pair, 0, before); }
};

template <class T>
__device__ __forceinline__ bool is_non_finite(ptx::u32 raw) {
    return (raw & T::kExponent) == T::kExponent;
}
// T::trace of many pairs, one after the other, beginning with 0, tells whether all were finite: 0 * x is then 0.
__device__ __forceinline__ bool is_clean(ptx::u32 trace) { return (trace & 0x7fff7fffu) == 0; }

// 8 neighbouring elements, which lie at a multiple of 16 bytes unless kUnaligned.
template <bool kUnaligned, class T>
__device__ __forceinline__ ptx::U128 load8(const T *from) {
    if constexpr (kUnaligned) {
        ptx::U128 x;
        #pragma unroll
        for (int i = 0; i < 4; ++i) x.x[i] = from[2 * i].raw | static_cast<ptx::u32>(from[2 * i + 1].raw) << 16;
        return x;
    } else {
        return *reinterpret_cast<const ptx::U128 *>(from);
    }
}

template <class T>
__device__ __forceinline__ float dot8(const ptx::U128 &x, const ptx::U128 &y) {
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        sum = fmaf(T::lo(x.x[i]), T::lo(y.x[i]), sum), sum = fmaf(T::hi(x.x[i]), T::hi(y.x[i]), sum);
    return sum;
}

#endif  // CUPYFLASH_ELEMENT_CUH
