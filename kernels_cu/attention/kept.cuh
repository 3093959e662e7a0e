// Which elements of an accumulator a lane keeps, by dropout.
#ifndef CUPYFLASH_KEPT_CUH
#define CUPYFLASH_KEPT_CUH
#include "hw/ptx.cuh"
#include "tile/sizes.cuh"

// What a lane keeps of an accumulator; rows and columns are counted from its first one. Of each 16 rows and 16 columns there are
// four sums, of the pairs of neighbouring columns that the lane holds there.
//
// As they are ...
template <int kRows, int kCols>
struct KeptPairs {
    ptx::U128 sums[kRows / 16][kCols / 16];

    __device__ void take(int a, int k, const ptx::U128 &x) { sums[a][k] = x; }
    // 16 ones for each element of a pair that is kept.
    __device__ ptx::u32 mask(int a, int k, int i) const { return ptx::signs_of_halves(sums[a][k].x[i]); }
};
// ... and where registers are few, a bit for each element.
template <int kRows, int kCols>
struct KeptBits {
    ptx::u32 word[kRows / 16][ceil_div(kCols, 64)];

    __device__ void take(int a, int k, const ptx::U128 &x) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ptx::u32 two = (x.x[i] & 0x80008000u) >> (k % 4 * 4 + i);
            word[a][k / 4] = k % 4 == 0 && i == 0 ? two : word[a][k / 4] | two;
        }
        if (k % 4 == 3 || k == kCols / 16 - 1)  // from here on a word, not its sums
            word[a][k / 4] = static_cast<ptx::u32>(ptx::opaque(static_cast<int>(word[a][k / 4])));
    }
    __device__ ptx::u32 mask(int a, int k, int i) const {
        return ptx::signs_of_halves(word[a][k / 4] << (k % 4 * 4 + i));  // @bits-of-the-pair
    }
    __device__ bool operator()(int row, int col) const {
        const int pair = col % 64 / 16 * 4 + col % 16 / 8 * 2 + row % 16 / 8;
        return word[row / 16][col / 64] & 1u << ((col % 2 ? 31 : 15) - pair);
    }
};

#endif  // CUPYFLASH_KEPT_CUH
