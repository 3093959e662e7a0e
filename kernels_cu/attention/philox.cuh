// Random numbers of a counter and a key: Philox-4x32 (Salmon et al. 2011) with 7 rounds, the fewest with which it passes BigCrush.
#ifndef CUPYFLASH_PHILOX_CUH
#define CUPYFLASH_PHILOX_CUH
#include "hw/ptx.cuh"

__device__ __forceinline__ ptx::U128 philox(ptx::U128 counter, ptx::u32 key0, ptx::u32 key1) {
    ptx::u32(&c)[4] = counter.x;
    #pragma unroll
    for (int round = 0; round < 7; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {  // @rounds-of-philox
        const ptx::u64 a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        c[0] = static_cast<ptx::u32>(b >> 32) ^ c[1] ^ key0, c[1] = static_cast<ptx::u32>(b);
        c[2] = static_cast<ptx::u32>(a >> 32) ^ c[3] ^ key1, c[3] = static_cast<ptx::u32>(a);
    }
    return counter;
}

#endif  // CUPYFLASH_PHILOX_CUH
