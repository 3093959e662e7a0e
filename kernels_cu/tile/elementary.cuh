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

#endif  // CUPYFLASH_ELEMENTARY_CUH
