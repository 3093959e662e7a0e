// What kernels do with elements of either size: pairs, chunks of 16 bytes, and whether they are finite.
#ifndef CUPYFLASH_ELEMENT_CUH
#define CUPYFLASH_ELEMENT_CUH
#include "tile/fp32.cuh"

// An element as fp32, and back.
template <class T>
__device__ __forceinline__ float value_of(const T &x) {
    return T::lo(x.raw);
}
__device__ __forceinline__ float value_of(const Fp32 &x) { return x.raw; }
__device__ __forceinline__ float value_of(float x) { return x; }
template <class T>
__device__ __forceinline__ T rounded_to(float x) {
    if constexpr (sizeof(T) == 2) return {static_cast<ptx::u16>(T::pack(x, 0.f))};
    else return {x};
}

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
