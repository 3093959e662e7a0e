// Functions of fp32 without a branch, nor a division as IEEE has it: a score is one of many that a lane computes beside products.
#ifndef CUPYFLASH_ELEMENTARY_CUH
#define CUPYFLASH_ELEMENTARY_CUH
#include "hw/ptx.cuh"

// a / b, where r is 1 / b to a unit in its last place: rounded as fp32 has it, and exact where a quotient is (Markstein 1990), unless
// b or the quotient is beyond 2^126 or below 2^-126.
__device__ __forceinline__ float quotient_by(float a, float b, float r) {
    const float q = a * r, left = fmaf(-q, b, a);
    return fabsf(left) < ptx::infinity() ? fmaf(left, r, q) : q;  // @quotient-corrected
}

// a / b to 3 units in the last place, b of any size: of a subnormal number, and of 2^126 and more, the machine has no reciprocal.
__device__ __forceinline__ float near_quotient(float a, float b) {
    const float size = fabsf(b), scale = size < 1e-37f  ? 16777216.f
                                         : size > 1e37f ? 5.9604645e-8f
                                                        : 1.f;  // @scaled-reciprocal
    return a * scale * ptx::rcp(b * scale);
}

// To 2.5 units in the last place: 1 - 2 / (1 + e^2|x|), and where that would cancel x + x^3 P(x^2), fitted for the least relative error.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
    const float square = x * x, far = fmaf(-2.f, ptx::rcp(1.f + ptx::ex2(fabsf(x) * 2.8853900818f)), 1.f);
    float near = -0.0051386510f;
    near = fmaf(near, square, 0.0200919565f);
    near = fmaf(near, square, -0.0535588562f);
    near = fmaf(near, square, 0.1332911104f);
    near = fmaf(near, square, -0.3333319128f);
    return fabsf(x) < 0.7f ? fmaf(near * square, x, x) : copysignf(far, x);  // @tangent-of-small-numbers
}

// log x to 9 units in the last place: the machine's log2, and where that would cancel d + d^2 P(d), d = x - 1, fitted likewise.
// of_2, of_e: the logarithms of 2 and e to the same base.
__device__ __forceinline__ float logarithm(float x, float of_2, float of_e) {
    const bool is_small = x < 1.1754944e-38f;  // of subnormal numbers the machine has none
    // @logarithm-of-subnormal-numbers
    const float d = x - 1.f, far = (ptx::lg2(is_small ? x * 16777216.f : x) - (is_small ? 24.f : 0.f)) * of_2;
    float near = -0.1141981161f;
    near = fmaf(near, d, 0.1522402351f);
    near = fmaf(near, d, -0.1677812992f);
    near = fmaf(near, d, 0.1997599805f);
    near = fmaf(near, d, -0.2499764668f);
    near = fmaf(near, d, 0.3333351556f);
    near = fmaf(near, d, -0.5000001052f);
    near = fmaf(near * d, d, d) * of_e;
    return fabsf(d - 0.025f) < 0.225f ? near : far;  // @logarithm-near-1
}

// x^b to 12 units in the last place, b known to the compiler, |b| from 2^-10 to 4; NaN of x < 0, but for -inf. With x = 2^e m,
// m from 0.75 to 1.5, e b + log2(m) b is a whole number and a rest, of which the machine makes a power of 2. 0 and inf have an e
// beyond all others.
__device__ __forceinline__ float power_by(float x, float b) {
    const float positive = x == -ptx::infinity() ? ptx::infinity() : x + 0.f;  // neither -inf nor -0 @root-of-minus-inf
    if (b == 0.5f) return ptx::sqrt(positive);
    if (b == -0.5f) return ptx::rsqrt(positive);
    const bool is_small = x < 1.1754944e-38f;
    const ptx::u32 bits = ptx::float_as_uint(is_small ? x * 16777216.f : x);
    const int shift = static_cast<int>(bits - 0x3f400000u) >> 23;
    const float near_1 = ptx::uint_as_float(bits - (static_cast<ptx::u32>(shift) << 23));
    const float log2_m =
        x >= 0.f || x == -ptx::infinity() ? ptx::lg2(near_1) : ptx::nan();  // @power-of-numbers-below-0
    float e = static_cast<float>(shift - (is_small ? 24 : 0));              // @power-of-subnormal-numbers
    e = x == 0.f ? -1e6f : fabsf(x) == ptx::infinity() ? 1e6f : e;          // @power-of-0-and-inf
    const float whole = rintf(fmaf(e, b, log2_m * b)), rest = fmaf(log2_m, b, fmaf(e, b, -whole));
    // 2^whole by two factors, since it may be less or more than fp32 holds.
    const int most = static_cast<int>(fminf(fmaxf(whole, -252.f), 252.f)), half = most / 2;
    const auto power_of_2 = [](int n) { return ptx::uint_as_float(static_cast<ptx::u32>(n + 127) << 23); };
    return ptx::ex2(rest) * power_of_2(half) * power_of_2(most - half);
}

#endif  // CUPYFLASH_ELEMENTARY_CUH
