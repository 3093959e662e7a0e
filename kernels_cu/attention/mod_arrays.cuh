// Arrays that a user's mods read (mods.cuh): their elements as numbers that mods compute with.
#ifndef CUPYFLASH_MOD_ARRAYS_CUH
#define CUPYFLASH_MOD_ARRAYS_CUH
#include "attention/params.cuh"
#include "tile/element.cuh"

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

#endif  // CUPYFLASH_MOD_ARRAYS_CUH
