// What a cache holds: elements of q's type, or 8 bits each times the scale of their head and place,
//     K = k_scale * stored,   V = v_scale * stored,
// int8 or e4m3 (1 sign, 4 exponent and 3 mantissa bits, bias 7, no inf; all ones are NaN). Tensor cores multiply what is
// stored, which 16 bits hold exactly: of K as q's type, of V as fp16, and P with it. k_scale then multiplies the scores, and
// v_scale P.
#ifndef CUPYFLASH_STORED_CUH
#define CUPYFLASH_STORED_CUH
#include "tile/tile.cuh"

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

struct Int8 {
    ptx::u8 raw;

    // Bytes i and j of x as T, exactly: in the low and in the high half.
    template <class T, int i, int j>
    __device__ static ptx::u32 pair(ptx::u32 x) {
        constexpr ptx::u32 kEach = i | 4 << 4 | j << 8 | 4 << 12;  // the byte, below one of a constant
        if constexpr (kSame<T, Fp16>) {
            const ptx::u32 biased = ptx::prmt(x ^ 0x80808080, 0x64646464, kEach);  // 1024 + (x + 128)
            return ptx::fma_rn_f16x2(biased, 0x3c003c00, 0xe480e480);              // * 1 - 1152
        } else {
            const ptx::u32 whole = ptx::prmt(x, 0x43434343, kEach);
            const ptx::u32 sign = (whole & 0xff80ff80) ^ 0x80008000;          // -256 of a negative x, else -128
            return ptx::fma_rn_bf16x2(whole & 0xff7fff7f, 0x3f803f80, sign);  // (128 + its last 7 bits) * 1 + sign
        }
    }
    __device__ float value() const { return static_cast<signed char>(raw); }

    // The nearest, of two the even one; saturated. NaN becomes 0.
    __device__ static Int8 rounded(float x) {
        const float sum = fminf(fmaxf(x, -128.f), 127.f) + 12582912.f;  // 1.5 * 2^23: its last bits are the integer
        return {static_cast<ptx::u8>(x != x ? 0 : ptx::float_as_uint(sum))};
    }
};

struct E4m3 {
    ptx::u8 raw;

    template <class T, int i, int j>
    __device__ static ptx::u32 pair(ptx::u32 x) {
        const ptx::u32 halves = fp16_pair<i, j>(x);
        if constexpr (kSame<T, Fp16>) return halves;  // else their upper halves in fp32, which are all of so few bits
        else return ptx::prmt(ptx::float_as_uint(Fp16::lo(halves)), ptx::float_as_uint(Fp16::hi(halves)), 0x7632);
    }
    __device__ float value() const { return Fp16::lo(fp16_pair<0, 0>(raw)); }

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
    __device__ static ptx::u32 fp16_pair(ptx::u32 x) {
        if constexpr (ptx::kHasE4m3) {
            return ptx::cvt_rn_f16x2_e4m3x2(static_cast<ptx::u16>(ptx::prmt(x, 0, i | j << 4)));
        } else {
            const ptx::u32 upper = ptx::prmt(x, 0, 4 | i << 4 | 4 << 8 | j << 12);  // the upper byte of a half each
            ptx::u32 size = upper >> 1 & 0x3f803f80;                                // as fp16 has it, times 2^-8
            size |= (size + 0x00800080) & 0x40004000;                               // all ones are NaN
            return ptx::fma_rn_f16x2(size | (upper & 0x80008000), 0x5c005c00, 0);
        }
    }
};

// The elements of a cache, and P's.
template <class T, bool kInt8, bool kE4m3>
struct StoredKind {
    using Element = T;
    using OfP = T;
};
template <class T>
struct StoredKind<T, true, false> {
    using Element = Int8;
    using OfP = Fp16;
};
template <class T>
struct StoredKind<T, false, true> {
    using Element = E4m3;
    using OfP = Fp16;
};

template <class V>
constexpr bool kScaled = V::kInt8 || V::kE4m3;
template <class V>
using Stored = typename StoredKind<typename V::Element, V::kInt8, V::kE4m3>::Element;
template <class V>
using ElementOfP = typename StoredKind<typename V::Element, V::kInt8, V::kE4m3>::OfP;

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
