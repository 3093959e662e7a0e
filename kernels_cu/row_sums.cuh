// Where a lane keeps its part of row sums: in registers, or, where there are none left, in 16 bytes of shared memory a thread.
#ifndef CUPYFLASH_ROW_SUMS_CUH
#define CUPYFLASH_ROW_SUMS_CUH
#include "gemm.cuh"

template <int kRows>
struct SumsInRegisters {
    static constexpr int kCount = kRows / 8;
    float x[kCount];

    __device__ void set(const float (&to)[kCount]) {
        #pragma unroll
        for (int r = 0; r < kCount; ++r) x[r] = to[r];
    }
    __device__ void get(float (&to)[kCount]) const {
        #pragma unroll
        for (int r = 0; r < kCount; ++r) to[r] = x[r];
    }
};
struct SumsInSharedMemory {
    static constexpr int kCount = 4;
    ptx::u32 base;

    __device__ void set(const float (&to)[4]) { ptx::st_shared_v4_b32(base + 16 * fresh_thread(), bits_of(to)); }
    __device__ void get(float (&to)[4]) const { ptx::ld_shared_v4_f32(to, base + 16 * fresh_thread()); }
};

#endif  // CUPYFLASH_ROW_SUMS_CUH
