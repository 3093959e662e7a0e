// What a user's own expressions make of scores (cupyflash/mods): the functions that they may call, and numbers that bring their
// derivative by the score along:
//     score' = score_mod(score, b, h, q, k),   d score' / d score by forward differentiation;   hidden unless mask_mod(b, h, q, k).
// The entry unit has a struct Mods with both.
#ifndef CUPYFLASH_MODS_CUH
#define CUPYFLASH_MODS_CUH
#include "attention/mod_arrays.cuh"
#include "attention/mod_places.cuh"
#include "tile/elementary.cuh"

namespace mods {

__device__ __forceinline__ float inf() { return ptx::infinity(); }

// A number and its derivative by the score.
struct Dual {
    float x, d;

    __device__ Dual(float x, float d = 0.f) : x(x), d(d) {}
    __device__ explicit operator bool() const { return x != 0.f; }
};
__device__ __forceinline__ Dual operator+(Dual a, Dual b) { return {a.x + b.x, a.d + b.d}; }
__device__ __forceinline__ Dual operator-(Dual a, Dual b) { return {a.x - b.x, a.d - b.d}; }
__device__ __forceinline__ Dual operator*(Dual a, Dual b) {
    return {a.x * b.x, a.d * b.x + a.x * b.d};  // @product-rule
}
// Of a constant nothing is added: 0 * inf would be NaN.
__device__ __forceinline__ Dual operator*(Dual a, float b) { return {a.x * b, a.d * b}; }  // @times-a-constant
__device__ __forceinline__ Dual operator*(float a, Dual b) { return b * a; }
__device__ __forceinline__ Dual operator-(Dual a) { return {-a.x, -a.d}; }
__device__ __forceinline__ bool operator<(Dual a, Dual b) { return a.x < b.x; }
__device__ __forceinline__ bool operator>(Dual a, Dual b) { return a.x > b.x; }
__device__ __forceinline__ bool operator<=(Dual a, Dual b) { return a.x <= b.x; }
__device__ __forceinline__ bool operator>=(Dual a, Dual b) { return a.x >= b.x; }
__device__ __forceinline__ bool operator==(Dual a, Dual b) { return a.x == b.x; }
__device__ __forceinline__ bool operator!=(Dual a, Dual b) { return a.x != b.x; }

// f(a), of whose derivative at a.x `slope` says what it is. A constant has none, whatever the slope: not 0 * inf.
__device__ __forceinline__ Dual chain(Dual a, float value, float slope) {
    return {value, a.d == 0.f ? 0.f : a.d * slope};  // @slope-of-a-constant
}

// r is 1 / b.
__device__ __forceinline__ float divide_by(float a, float b, float r) { return quotient_by(a, b, r); }
__device__ __forceinline__ Dual divide_by(Dual a, float b, float r) {
    return {quotient_by(a.x, b, r), quotient_by(a.d, b, r)};  // @by-a-constant
}
__device__ __forceinline__ float divide(float a, float b) { return divide_by(a, b, ptx::rcp(b)); }
__device__ __forceinline__ Dual divide(Dual a, float b) { return divide_by(a, b, ptx::rcp(b)); }
__device__ __forceinline__ Dual divide(Dual a, Dual b) {
    const float r = ptx::rcp(b.x), x = divide_by(a.x, b.x, r);
    return {x, divide_by(a.d - x * b.d, b.x, r)};
}
__device__ __forceinline__ float exp(float a) { return expf(a); }
__device__ __forceinline__ Dual exp(Dual a) { return chain(a, expf(a.x), expf(a.x)); }
__device__ __forceinline__ float exp2(float a) { return exp2f(a); }
__device__ __forceinline__ Dual exp2(Dual a) { return chain(a, exp2f(a.x), exp2f(a.x) * 0.6931471805599453f); }
__device__ __forceinline__ float log(float a) { return logarithm(a, 0.6931471805599453f, 1.f); }
__device__ __forceinline__ Dual log(Dual a) { return chain(a, log(a.x), near_quotient(1.f, a.x)); }
__device__ __forceinline__ float log2(float a) { return logarithm(a, 1.f, 1.4426950408889634f); }
__device__ __forceinline__ Dual log2(Dual a) { return chain(a, log2(a.x), near_quotient(1.4426950408889634f, a.x)); }
__device__ __forceinline__ float sqrt(float a) { return ptx::sqrt(a); }
__device__ __forceinline__ Dual sqrt(Dual a) { return chain(a, ptx::sqrt(a.x), 0.5f * ptx::rsqrt(a.x)); }
__device__ __forceinline__ float rsqrt(float a) { return ptx::rsqrt(a); }
__device__ __forceinline__ Dual rsqrt(Dual a) {
    const float r = ptx::rsqrt(a.x);
    return chain(a, r, -0.5f * r * (r * r));
}
__device__ __forceinline__ float tanh(float a) { return hyperbolic_tangent(a); }
__device__ __forceinline__ Dual tanh(Dual a) {
    const float t = tanh(a.x);
    return chain(a, t, 1.f - t * t);
}
__device__ __forceinline__ float sigmoid(float a) { return ptx::rcp(1.f + expf(-a)); }
__device__ __forceinline__ Dual sigmoid(Dual a) {
    const float y = sigmoid(a.x);
    return chain(a, y, y * (1.f - y));
}
__device__ __forceinline__ float sin(float a) { return sinf(a); }
__device__ __forceinline__ Dual sin(Dual a) { return chain(a, sinf(a.x), cosf(a.x)); }
__device__ __forceinline__ float cos(float a) { return cosf(a); }
__device__ __forceinline__ Dual cos(Dual a) { return chain(a, cosf(a.x), -sinf(a.x)); }
__device__ __forceinline__ float floor(float a) { return floorf(a); }
__device__ __forceinline__ float floor(Dual a) { return floorf(a.x); }
// a^n by products, n > 0.
template <int n>
__device__ __forceinline__ float whole_power(float a) {
    if constexpr (n == 1) return a;
    else if constexpr (n % 2) return a * whole_power<n - 1>(a);
    else return whole_power<n / 2>(a) * whole_power<n / 2>(a);
}
template <int n>
__device__ __forceinline__ Dual whole_power(Dual a) {
    const float below = whole_power<n - 1>(a.x);
    return chain(a, a.x * below, n * below);
}
// a^b, which is y, by a alone: b a^(b - 1), of which a^(b - 1) is y / a, but at 0 and inf.
__device__ __forceinline__ Dual power_by_base(Dual a, float b, float y) {
    const float edge = b == 1.f                    ? 1.f
                       : (b > 1.f) == (a.x == 0.f) ? 0.f
                                                   : ptx::infinity(),
                within = near_quotient(y, a.x);
    const float below = a.x == 0.f || fabsf(a.x) == ptx::infinity() ? edge : within;  // @edges-of-a-power
    return b == 0.f ? Dual{y, 0.f} : chain(a, y, b * below);
}
__device__ __forceinline__ float pow(float a, float b) { return powf(a, b); }
__device__ __forceinline__ Dual pow(Dual a, Dual b) {
    const float y = powf(a.x, b.x), by_a = power_by_base(a, b.x, y).d;
    // A power of 0 has no slope by the exponent: not 0 * inf.
    return {y, by_a + (b.d == 0.f || (a.x == 0.f && b.x >= 0.f) ? 0.f : b.d * y * log(a.x))};
}
// The same, b known to the compiler, and between -4 and 4.
__device__ __forceinline__ float known_power(float a, float b) { return power_by(a, b); }
__device__ __forceinline__ Dual known_power(Dual a, float b) { return power_by_base(a, b, power_by(a.x, b)); }

__device__ __forceinline__ int abs(int a) { return a < 0 ? -a : a; }
__device__ __forceinline__ float abs(float a) { return fabsf(a); }
__device__ __forceinline__ Dual abs(Dual a) { return {fabsf(a.x), a.x < 0.f ? -a.d : a.d}; }
template <class A, class B>
__device__ __forceinline__ auto min(A a, B b) -> decltype(a + b) {
    const decltype(a + b) x = a, y = b;
    return y < x ? y : x;
}
template <class A, class B>
__device__ __forceinline__ auto max(A a, B b) -> decltype(a + b) {
    const decltype(a + b) x = a, y = b;
    return x < y ? y : x;
}

// Integers; 0 where they would be divided by 0.
__device__ __forceinline__ int quotient(int a, int b) { return b == 0 ? 0 : a / b; }
__device__ __forceinline__ int remainder(int a, int b) { return a - b * quotient(a, b); }
__device__ __forceinline__ int floordiv(int a, int b) {
    return quotient(a, b) - (b != 0 && a % b != 0 && (a < 0) != (b < 0));
}
__device__ __forceinline__ int floormod(int a, int b) { return a - b * floordiv(a, b); }

}  // namespace mods

#endif  // CUPYFLASH_MODS_CUH
