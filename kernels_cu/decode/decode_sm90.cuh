// Attention over a cache (decode.cuh) with TMA: Hopper.
#ifndef CUPYFLASH_DECODE_SM90_CUH
#define CUPYFLASH_DECODE_SM90_CUH
#include "decode/decode.cuh"
#include "decode/load_tma.cuh"

template <class V>
__device__ __forceinline__ void decode(const DecodeSm90Params &p) {
    decode_keys<V, TmaLoader<V>>(p);
}

#endif  // CUPYFLASH_DECODE_SM90_CUH
