// What a cache holds: elements of q's type, or 8 bits each times the scale of their head and place,
//     K = k_scale * stored,   V = v_scale * stored,
// int8 or e4m3 (1 sign, 4 exponent and 3 mantissa bits, bias 7, no inf; all ones are NaN). Tensor cores multiply what is
// stored, which fp16 holds exactly, and Q and P as fp16 with it. k_scale then multiplies the scores, and v_scale P.
#ifndef CUPYFLASH_STORED_CUH
#define CUPYFLASH_STORED_CUH
#include "tile/tile.cuh"

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

struct Int8 {
    ptx::u8 raw;

    // Bytes i and j, and k and l of x as halves, exactly.
    template <int i, int j, int k, int l>
    __device__ static void halves(ptx::u32 x, ptx::u32 &first, ptx::u32 &second) {
        first = pair<i, j>(x ^ 0x80808080), second = pair<k, l>(x ^ 0x80808080);
    }
    __device__ float value() const { return static_cast<signed char>(raw); }

    // The nearest, of two the even one; saturated. NaN becomes 0.
    __device__ static Int8 rounded(float x) {
        const float sum = fminf(fmaxf(x, -128.f), 127.f) + 12582912.f;  // 1.5 * 2^23: its last bits are the integer
        return {static_cast<ptx::u8>(x != x ? 0 : ptx::float_as_uint(sum))};
    }

  private:
    // Of bytes more by 128: below the upper byte of 1024, less 1152.
    template <int i, int j>
    __device__ static ptx::u32 pair(ptx::u32 x) {
        return ptx::fma_rn_f16x2(ptx::prmt(x, 0x64646464, i | 4 << 4 | j << 8 | 4 << 12), 0x3c003c00, 0xe480e480);
    }
};

struct E4m3 {
    ptx::u8 raw;

    // As Int8's.
    template <int i, int j, int k, int l>
    __device__ static void halves(ptx::u32 x, ptx::u32 &first, ptx::u32 &second) {
        if constexpr (ptx::kHasE4m3) {
            constexpr ptx::u32 kOrder = i | j << 4 | k << 8 | l << 12;
            const ptx::u32 in_order = kOrder == 0x3210 ? x : ptx::prmt(x, 0, kOrder);
            first = ptx::cvt_rn_f16x2_e4m3x2<0>(in_order), second = ptx::cvt_rn_f16x2_e4m3x2<1>(in_order);
        } else {
            first = pair_by_bits<i, j>(x), second = pair_by_bits<k, l>(x);
        }
    }
    __device__ float value() const {
        ptx::u32 half, other;
        halves<0, 0, 0, 0>(raw, half, other);
        return Fp16::lo(half);
    }

    // The nearest, of two the even one; saturated to 448. NaN stays NaN.
    __device__ static E4m3 rounded(float x) {
        const float size = fminf(fabsf(x), 448.f);
        const ptx::u32 bits = ptx::float_as_uint(size), sign = ptx::float_as_uint(x) >> 24 & 0x80;
        // Below 2^-6 multiples of 2^-9: the last bits of a sum with 2^14. Else exponent and 3 bits, rebiased by 120.
        const ptx::u32 small = ptx::float_as_uint(size + 16384.f) - ptx::float_as_uint(16384.f);
        const ptx::u32 large = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);  // @nearest-e4m3
        return {static_cast<ptx::u8>(x != x ? 0x7f : sign | (size < 0.015625f ? small : large))};
    }

  private:
    template <int i, int j>
    __device__ static ptx::u32 pair_by_bits(ptx::u32 x) {
        const ptx::u32 upper = ptx::prmt(x, 0, 4 | i << 4 | 4 << 8 | j << 12);  // the upper byte of a half each
        ptx::u32 size = upper >> 1 & 0x3f803f80;                                // as fp16 has it, times 2^-8
        size |= (size + 0x00800080) & 0x40004000;                               // all ones are NaN
        return ptx::fma_rn_f16x2(size | (upper & 0x80008000), 0x5c005c00, 0);
    }
};

// The elements of a cache.
template <class T, bool kInt8, bool kE4m3>
struct StoredKind {
    using Element = T;
};
template <class T>
struct StoredKind<T, true, false> {
    using Element = Int8;
};
template <class T>
struct StoredKind<T, false, true> {
    using Element = E4m3;
};

template <class V>
constexpr bool kScaled = V::kInt8 || V::kE4m3;
template <class V>
using Stored = typename StoredKind<typename V::Element, V::kInt8, V::kE4m3>::Element;

// 16 neighbouring bytes, of which the first `count` exist; the others are zero. They may lie anywhere.
template <class Byte>
__device__ __forceinline__ ptx::U128 load16(const Byte *from, int count) {
    ptx::U128 x{};
    #pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) x.x[i / 4] |= static_cast<ptx::u32>(from[i].raw) << 8 * (i % 4);
    return x;
}

#endif  // CUPYFLASH_STORED_CUH
