// The fp32 sums of what bwd_dmods.cuh computes: zeros before, and behind it (kStores) the gradients, of the types of the arrays.
// A block takes kBlockM elements of each array.
#ifndef CUPYFLASH_BWD_DMODS_SUMS_CUH
#define CUPYFLASH_BWD_DMODS_SUMS_CUH
#include "attention/mods.cuh"

template <class V>
__device__ __forceinline__ void bwd_dmods_sums(const BwdParams &p) {
    static_assert(V::kSmemBytes == 0);
    const typename V::Mods mods(p);
    mods.each_learned(p, [](const auto &array, float *sums, void *gradient) {
        const long long first = static_cast<long long>(V::kBlockM) * ptx::block_index();
        for (long long i = first + ptx::thread_index(); i < first + V::kBlockM && i < array.count();
             i += 32 * V::kWarps)
            if constexpr (V::kStores) array.store(gradient, i, sums[i]);
            else sums[i] = 0.f;  // @dmods-cleared
    });
}

#endif  // CUPYFLASH_BWD_DMODS_SUMS_CUH
