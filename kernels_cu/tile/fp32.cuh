// fp32 as an element type. Tensor cores have no products of fp32: those are made of six products of bf16 (Henry, Tang &
// Heinecke 2019).
#ifndef CUPYFLASH_FP32_CUH
#define CUPYFLASH_FP32_CUH
#include "tile/halves.cuh"

struct alignas(8) FloatPair { float x, y; };

struct Fp32 {
    using Pair = FloatPair;
    float raw;

    __device__ __forceinline__ static FloatPair pack(float lo, float hi) { return {lo, hi}; }
    __device__ __forceinline__ static float lo(const FloatPair &x) { return x.x; }
    __device__ __forceinline__ static float hi(const FloatPair &x) { return x.y; }
    // a and b are sums of three bf16 each, which is exact; what is left out of their product is less than fp32 holds.
    // Tensor cores cut off what they add, which many additions would show: so each of these sums begins with 0, smaller
    // products first, and is added to d as fp32 is.
    __device__ __forceinline__ static void mma(float (&d)[4], const FloatPair (&a)[4], const FloatPair &b0,
                                               const FloatPair &b1) {
        ptx::u32 parts_a[3][4], parts_b0[3], parts_b1[3];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::u32 parts[3];
            split(a[i], parts);
            #pragma unroll
            for (int n = 0; n < 3; ++n) parts_a[n][i] = parts[n];
        }
        split(b0, parts_b0), split(b1, parts_b1);
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        #pragma unroll
        for (int order = 2; order >= 0; --order)
            #pragma unroll
            for (int n = 0; n <= order; ++n)  // @products-of-parts
                Bf16::mma(sum, parts_a[n], parts_b0[order - n], parts_b1[order - n]);
        #pragma unroll
        for (int i = 0; i < 4; ++i) d[i] += sum[i];
    }
    // The same of their largest parts alone: where an operand is not finite, the others are NaN.
    __device__ __forceinline__ static void mma_of_largest(float (&d)[4], const FloatPair (&a)[4], const FloatPair &b0,
                                                          const FloatPair &b1) {
        const auto largest = [](const FloatPair &x) { return Bf16::pack(x.x, x.y); };
        const ptx::u32 of_a[4] = {largest(a[0]), largest(a[1]), largest(a[2]), largest(a[3])};
        Bf16::mma(d, of_a, largest(b0), largest(b1));
    }
    __device__ __forceinline__ static ptx::u32 trace(const FloatPair &pair, ptx::u32 before) {
        return ptx::float_as_uint(fmaf(pair.y, 0.f, fmaf(pair.x, 0.f, ptx::uint_as_float(before))));
    }

  private:
    // The largest part first.
    __device__ __forceinline__ static void split(FloatPair x, ptx::u32 (&parts)[3]) {
        #pragma unroll
        for (int n = 0; n < 3; ++n) {
            parts[n] = Bf16::pack(x.x, x.y);
            x = {x.x - Bf16::lo(parts[n]), x.y - Bf16::hi(parts[n])};  // @what-is-left-of-a-number
        }
    }
};

#endif  // CUPYFLASH_FP32_CUH
