// Q beside an 8-bit cache, in shared memory: as fp16, each row times a power of two that brings its largest element near the
// end of what fp16 holds (of fp16 itself: 1), and in each 16 columns the two and two neighbours in the order in which a lane has
// those of K (fragments_stored.cuh). Behind the columns of a row, where rows are padded, stands what takes the power back.
#ifndef CUPYFLASH_QUERIES_CUH
#define CUPYFLASH_QUERIES_CUH
#include "decode/slices.cuh"

template <class V>
struct StoredQueries {
    using T = typename V::Element;
    using Smem = DecodeSmem<V>;
    using Tile = typename Smem::TileQ;
    static constexpr int D = Smem::D, kRows = Smem::kRows;
    static constexpr bool kHasPowers = !kSame<T, Fp16>;
    static_assert(Tile::kRowBytes >= 2 * D + 16);

    // What has arrived of `count` rows of each head; those that there are not become 0. By all warps, between barriers.
    __device__ static void prepare(const Smem &smem, int count) {
        constexpr int kPasses = ceil_div(D, 128);
        #pragma unroll 1
        for (int r = warp(); r < V::kHeads * kRows; r += V::kWarps) {
            const Tile sQ = smem.q(r / kRows);
            const int row = r % kRows;
            float x[kPasses][4] = {}, largest = 0.f;
            #pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int col = 128 * i + 4 * lane();
                if (row >= count || col >= D) continue;
                float low, high;
                ptx::ld_shared_v2_f32(low, high, sQ.at(row, col));
                x[i][0] = T::lo(ptx::float_as_uint(low)), x[i][1] = T::hi(ptx::float_as_uint(low));
                x[i][2] = T::lo(ptx::float_as_uint(high)), x[i][3] = T::hi(ptx::float_as_uint(high));
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (fabsf(x[i][e]) < ptx::infinity()) largest = fmaxf(largest, fabsf(x[i][e]));
            }
            float by = 1.f;
            if constexpr (kHasPowers) {
                #pragma unroll
                for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, ptx::shfl_xor(largest, mask));
                const int exponent = max(static_cast<int>(ptx::float_as_uint(largest) >> 23), 127 + 14 - 126);
                by = largest == 0.f ? 1.f : power_of_two(14 + 127 - exponent);  // below 2^15
            }
            ptx::bar_warp_sync();  // the row has been read @row-of-q-read
            #pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int col = 128 * i + 4 * lane(), to = col / 16 * 16 + col % 16 / 2;
                if (col >= D) continue;
                ptx::st_shared_b32(sQ.at(row, to), Fp16::pack(x[i][0] * by, x[i][1] * by));
                ptx::st_shared_b32(sQ.at(row, to + 8), Fp16::pack(x[i][2] * by, x[i][3] * by));
            }
            if (lane() == 0) ptx::st_shared_b32(sQ.at(row, D), ptx::float_as_uint(1.f / by));
        }
    }
    // Of rows [row0, row0 + 8): columns [32 i, 32 i + 32), as two operands, of which the second may not exist.
    __device__ static void fragments(const Tile &sQ, int row0, int i, ptx::u32 (&b)[4]) {
        const int piece = 32 * i + 16 < D ? lane() / 8 : lane() / 8 % 2;
        ptx::ldmatrix_x4(b, sQ.at(row0 + lane() % 8, 32 * i + 8 * piece));
    }
    // What takes a row's power back.
    __device__ static float power(const Tile &sQ, int row) {
        return ptx::uint_as_float(ptx::ld_shared_b32(sQ.at(row, D)));
    }

  private:
    __device__ static float power_of_two(int n) { return ptx::uint_as_float(static_cast<ptx::u32>(n + 127) << 23); }
};

#endif  // CUPYFLASH_QUERIES_CUH
