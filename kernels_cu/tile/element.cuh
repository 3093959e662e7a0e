// The element types. They are storage only: arithmetic is fp32. Tensor cores have no products of fp32: those are made of six
// products of bf16 (Henry, Tang & Heinecke 2019).
#ifndef CUPYFLASH_ELEMENT_CUH
#define CUPYFLASH_ELEMENT_CUH
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

// How many elements are 16 bytes, the widest load and store.
template <class T>
constexpr int kPerChunk = 16 / sizeof(T);

__device__ __forceinline__ void st_shared_pair(ptx::u32 addr, ptx::u32 x) { ptx::st_shared_b32(addr, x); }
__device__ __forceinline__ void st_shared_pair(ptx::u32 addr, const FloatPair &x) {
    ptx::st_shared_v2_f32(addr, x.x, x.y);
}
template <class T>
__device__ __forceinline__ typename T::Pair ld_shared_pair(ptx::u32 addr) {
    if constexpr (sizeof(T) == 2) {
        return ptx::ld_shared_b32(addr);
    } else {
        FloatPair x;
        ptx::ld_shared_v2_f32(x.x, x.y, addr);
        return x;
    }
}

template <class T>
__device__ __forceinline__ bool is_non_finite(ptx::u32 raw) {
    return (raw & T::kExponent) == T::kExponent;
}
// Which elements of a pair are not finite: bit 0 and bit 1.
template <class T>
__device__ __forceinline__ int non_finite(ptx::u32 x) {
    return is_non_finite<T>(x) | is_non_finite<T>(x >> 16) << 1;
}
template <class T>
__device__ __forceinline__ int non_finite(const FloatPair &x) {
    return !(fabsf(x.x) < ptx::infinity()) | !(fabsf(x.y) < ptx::infinity()) << 1;
}
// Of a pair those elements are left whose 16 bits of a mask are ones; the others become 0.
__device__ __forceinline__ void mask_pair(ptx::u32 &x, ptx::u32 mask) { x &= mask; }
__device__ __forceinline__ void mask_pair(FloatPair &x, ptx::u32 mask) {
    x = {mask & 0xffffu ? x.x : 0.f, mask >> 16 ? x.y : 0.f};
}
template <class Pair>
__device__ __forceinline__ Pair masked(Pair x, ptx::u32 mask) {
    mask_pair(x, mask);
    return x;
}
// Two of which each has the elements that the other lacks.
__device__ __forceinline__ ptx::u32 joined(ptx::u32 x, ptx::u32 y) { return x | y; }
__device__ __forceinline__ FloatPair joined(const FloatPair &x, const FloatPair &y) {
    const auto either = [](float a, float b) {
        return ptx::uint_as_float(ptx::float_as_uint(a) | ptx::float_as_uint(b));
    };
    return {either(x.x, y.x), either(x.y, y.y)};
}
// T::trace of many pairs, one after the other, beginning with 0, tells whether all were finite: 0 * x is then 0.
__device__ __forceinline__ bool is_clean(ptx::u32 trace) { return (trace & 0x7fff7fffu) == 0; }

// 16 bytes of neighbouring elements, which lie at a multiple of 16 bytes unless kUnaligned.
template <bool kUnaligned, class T>
__device__ __forceinline__ ptx::U128 load_chunk(const T *from) {
    if constexpr (kUnaligned) {
        ptx::U128 x;
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if constexpr (sizeof(T) == 2) x.x[i] = from[2 * i].raw | static_cast<ptx::u32>(from[2 * i + 1].raw) << 16;
            else x.x[i] = ptx::float_as_uint(from[i].raw);
        return x;
    } else {
        return *reinterpret_cast<const ptx::U128 *>(from);
    }
}

// Pair i of a chunk.
template <class T>
__device__ __forceinline__ typename T::Pair pair_of(const ptx::U128 &chunk, int i) {
    if constexpr (sizeof(T) == 2) return chunk.x[i];
    else return {ptx::uint_as_float(chunk.x[2 * i]), ptx::uint_as_float(chunk.x[2 * i + 1])};
}
template <class T>
__device__ __forceinline__ float dot_chunk(const ptx::U128 &x, const ptx::U128 &y) {
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < kPerChunk<T> / 2; ++i)
        sum = fmaf(T::lo(pair_of<T>(x, i)), T::lo(pair_of<T>(y, i)), sum),
        sum = fmaf(T::hi(pair_of<T>(x, i)), T::hi(pair_of<T>(y, i)), sum);
    return sum;
}

#endif  // CUPYFLASH_ELEMENT_CUH
