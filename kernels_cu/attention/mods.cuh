// What a user's own expressions make of scores (cupyflash/mods): the functions that they may call, and numbers that bring their
// derivative by the score along:
//     score' = score_mod(score, b, h, q, k),   d score' / d score by forward differentiation;   hidden unless mask_mod(b, h, q, k).
// The entry unit has a struct Mods with both.
#ifndef CUPYFLASH_MODS_CUH
#define CUPYFLASH_MODS_CUH
#include "attention/mod_places.cuh"
#include "attention/params.cuh"
#include "tile/element.cuh"
#include "tile/elementary.cuh"

__device__ __forceinline__ float mod_value(float x) { return x; }
__device__ __forceinline__ float mod_value(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float mod_value(Fp16 x) { return Fp16::lo(x.raw); }
__device__ __forceinline__ float mod_value(Bf16 x) { return Bf16::lo(x.raw); }
__device__ __forceinline__ int mod_value(int x) { return x; }
__device__ __forceinline__ int mod_value(long long x) {  // the nearest int
    return static_cast<int>(x < -0x80000000ll ? -0x80000000ll : x > 0x7fffffff ? 0x7fffffff : x);
}
__device__ __forceinline__ bool mod_value(unsigned char x) { return x != 0; }

// The gradient of such a number leaves.
__device__ __forceinline__ void mod_store(float *to, float x) { *to = x; }
__device__ __forceinline__ void mod_store(double *to, float x) { *to = x; }
__device__ __forceinline__ void mod_store(Fp16 *to, float x) { to->raw = static_cast<ptx::u16>(Fp16::pack(x, 0.f)); }
__device__ __forceinline__ void mod_store(Bf16 *to, float x) { to->raw = static_cast<ptx::u16>(Bf16::pack(x, 0.f)); }

// A contiguous array; an index out of range counts as the nearest one in it, and an array without elements as 0.
template <class T, int kDims>
struct ModArray {
    const T *at;
    int lengths[4];

    __device__ ModArray(const void *x, const Lengths &n) : at(static_cast<const T *>(x)), lengths{n.a, n.b, n.c, n.d} {}

    template <class... Index>
    __device__ auto operator()(Index... index) const {
        const long long i = element(index...);
        return i < 0 ? decltype(mod_value(*at)){} : mod_value(at[i]);
    }
    // Where what is read lies in something of this shape; null if there are no elements.
    template <class... Index>
    __device__ float *place_of(float *like, Index... index) const {
        const long long i = element(index...);
        return i < 0 ? nullptr : like + i;
    }
    __device__ long long count() const {
        return static_cast<long long>(lengths[0]) * lengths[1] * lengths[2] * lengths[3];
    }
    // x becomes element i of something of this type and shape.
    __device__ void store(void *to, long long i, float x) const { mod_store(static_cast<T *>(to) + i, x); }

  private:
    // The number of an element; -1 if there are none.
    template <class... Index>
    __device__ long long element(Index... index) const {
        static_assert(sizeof...(Index) == kDims);
        const int given[kDims] = {static_cast<int>(index)...};
        long long found = 0;
        bool is_empty = false;
        #pragma unroll
        for (int i = 0; i < kDims; ++i) {
            found = found * lengths[i] + max(0, min(given[i], lengths[i] - 1));  // @index-in-range
            is_empty = is_empty || lengths[i] == 0;
        }
        return is_empty ? -1 : found;
    }
};

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
__device__ __forceinline__ Dual times(Dual a, Place b) { return a * real(b); }
__device__ __forceinline__ Dual operator-(Dual a) { return {-a.x, -a.d}; }
__device__ __forceinline__ bool operator<(Dual a, Dual b) { return a.x < b.x; }
__device__ __forceinline__ bool operator>(Dual a, Dual b) { return a.x > b.x; }
__device__ __forceinline__ bool operator<=(Dual a, Dual b) { return a.x <= b.x; }
__device__ __forceinline__ bool operator>=(Dual a, Dual b) { return a.x >= b.x; }
__device__ __forceinline__ bool operator==(Dual a, Dual b) { return a.x == b.x; }
__device__ __forceinline__ bool operator!=(Dual a, Dual b) { return a.x != b.x; }

// f(a), of whose derivative at a.x `slope` says what it is.
__device__ __forceinline__ Dual chain(Dual a, float value, float slope) { return {value, a.d * slope}; }

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
__device__ __forceinline__ float log(float a) { return logf(a); }
__device__ __forceinline__ Dual log(Dual a) { return chain(a, logf(a.x), 1.f / a.x); }
__device__ __forceinline__ float log2(float a) { return log2f(a); }
__device__ __forceinline__ Dual log2(Dual a) { return chain(a, log2f(a.x), 1.4426950408889634f / a.x); }
__device__ __forceinline__ float sqrt(float a) { return sqrtf(a); }
__device__ __forceinline__ Dual sqrt(Dual a) { return chain(a, sqrtf(a.x), 0.5f / sqrtf(a.x)); }
__device__ __forceinline__ float rsqrt(float a) { return 1.f / sqrtf(a); }
__device__ __forceinline__ Dual rsqrt(Dual a) { return chain(a, 1.f / sqrtf(a.x), -0.5f / (a.x * sqrtf(a.x))); }
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
__device__ __forceinline__ float squared(float a) { return a * a; }
// A constant has no slope: not 0 * inf.
__device__ __forceinline__ Dual squared(Dual a) {
    return {a.x * a.x, a.d == 0.f ? 0.f : 2.f * a.x * a.d};  // @square-of-a-constant
}
__device__ __forceinline__ float pow(float a, float b) { return powf(a, b); }
__device__ __forceinline__ Dual pow(Dual a, Dual b) {
    const float y = powf(a.x, b.x);
    // A constant power of 0 has no slope, nor has 0 to a power: not 0 * inf.
    const float by_a = a.d == 0.f || b.x == 0.f ? 0.f : a.d * b.x * powf(a.x, b.x - 1.f);
    return {y, by_a + (b.d == 0.f || (a.x == 0.f && b.x >= 0.f) ? 0.f : b.d * y * logf(a.x))};
}

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
