// Queries and keys as a user's mods have them (mods.cuh), and what `cupyflash/mods/places.py` makes of their sums.
#ifndef CUPYFLASH_MOD_PLACES_CUH
#define CUPYFLASH_MOD_PLACES_CUH
#include "hw/ptx.cuh"

namespace mods {

// A query, a key, or a sum of such: `step` is known to the compiler, `from` is the same for all scores of a lane. So what is
// made of `from` is made once, and a score costs one addition or comparison.
struct Place {
    int from, step;

    __device__ Place(int from, int step = 0) : from(from), step(step) {}
    __device__ int whole() const { return from + step; }
};
__device__ __forceinline__ Place operator-(Place a) { return {-a.from, -a.step}; }
__device__ __forceinline__ Place operator+(Place a, Place b) { return {a.from + b.from, a.step + b.step}; }
__device__ __forceinline__ Place operator-(Place a, Place b) { return {a.from - b.from, a.step - b.step}; }
__device__ __forceinline__ bool operator<(Place a, Place b) { return a.from - b.from < b.step - a.step; }
__device__ __forceinline__ bool operator<=(Place a, Place b) {
    return a.from - b.from <= b.step - a.step;  // @places-in-order
}
__device__ __forceinline__ bool operator>(Place a, Place b) { return b < a; }
__device__ __forceinline__ bool operator>=(Place a, Place b) { return b <= a; }
__device__ __forceinline__ bool operator==(Place a, Place b) {
    return a.from - b.from == b.step - a.step;  // @places-alike
}
__device__ __forceinline__ bool operator!=(Place a, Place b) { return !(a == b); }
// Exact where fp32 holds it.
__device__ __forceinline__ float real(Place a) {
    return static_cast<float>(a.from) + static_cast<float>(a.step);  // @place-as-a-number
}

// The same times a number that is at most 1. Where both parts cancel, the error of a rounded product is left, up to 2^-16: not
// for what jumps at 0 (`cupyflash/mods/places.py`).
__device__ __forceinline__ float times(float a, Place b) {
    return fmaf(a, static_cast<float>(b.step), a * static_cast<float>(b.from));  // @times-a-place
}

}  // namespace mods

#endif  // CUPYFLASH_MOD_PLACES_CUH
