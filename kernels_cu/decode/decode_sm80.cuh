// Attention over a cache (decode.cuh) with cp.async: sm_80 and every later architecture.
#ifndef CUPYFLASH_DECODE_SM80_CUH
#define CUPYFLASH_DECODE_SM80_CUH
#include "decode/decode.cuh"
#include "decode/load_async.cuh"

template <class V>
__device__ __forceinline__ void decode(const DecodeParams &p) {
    decode_keys<V, AsyncLoader<V>>(p);
}

#endif  // CUPYFLASH_DECODE_SM80_CUH
