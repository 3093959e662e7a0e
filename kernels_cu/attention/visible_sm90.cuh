// Which elements a lane of the Hopper backward sees, in an accumulator whose rows are the 64 keys of a warpgroup.
#ifndef CUPYFLASH_VISIBLE_SM90_CUH
#define CUPYFLASH_VISIBLE_SM90_CUH
#include "attention/mask_copies.cuh"
#include "attention/visits.cuh"

// Which queries of a tile see this lane's two keys: bit 2 j + b of a word stands for query 8 j + b, counted from the
// lane's first.
template <class V>
struct VisibleQueries {
    ptx::u32 word[2];
    VisibleQueries() = default;
    __device__ VisibleQueries(const Mask<GroupKeys<V>> &mask, int q0, int key0) {
        const int thread = fresh_thread() % 128, lane = thread % 32, query = q0 + 2 * (lane % 4);
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = key0 + thread / 32 * 16 + lane / 4 + 8 * r;  // @keys-of-the-lane
            word[r] = before(mask.end_query(key) - query) & ~before(mask.first_query(key) - query);
        }
    }
    // The same by a block mask: of a key's 64 bits, two of every eight.
    template <int kCount>
    __device__ VisibleQueries(const MaskCopies<kCount> &copies, int group) {
        const int thread = fresh_thread() % 128, lane = thread % 32;
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            ptx::u32 of_key[2];
            copies.read(group, thread / 32 * 16 + lane / 4 + 8 * r, of_key);  // @bits-of-the-key
            word[r] = 0;
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                ptx::u32 x = of_key[i] >> 2 * (lane % 4) & 0x03030303u;
                x = (x | x >> 6) & 0x000f000fu;
                word[r] |= ((x | x >> 12) & 0xffu) << 8 * i;  // @two-of-every-eight
            }
        }
    }
    __device__ static ptx::u32 before(int query) {
        const int count = max(0, query) / 8 * 2 + min(max(0, query) % 8, 2);  // @queries-of-the-lane
        return count < 32 ? (1u << count) - 1 : ~0u;
    }
    // Only those that `other` has, too.
    __device__ void keep(const VisibleQueries &other) {
        for (int r = 0; r < 2; ++r) word[r] &= other.word[r];
    }
    // Element e of the j-th column tile of an accumulator.
    __device__ bool operator()(int j, int e) const { return word[e / 2] & 1u << (2 * j + e % 2); }
};

#endif  // CUPYFLASH_VISIBLE_SM90_CUH
