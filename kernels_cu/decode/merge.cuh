// The end of a tile in a block: what its teams have of each head, added up through shared memory.
#ifndef CUPYFLASH_MERGE_CUH
#define CUPYFLASH_MERGE_CUH
#include "decode/warp_decode.cuh"
#include "decode/warp_float.cuh"
#include "decode/warp_stored.cuh"

// As many columns at a time as fit; calls store(sum, head, row, col). after_use() is called once no warp needs Q any more; a
// barrier follows it.
template <class V, class Part, class AfterUse, class Store>
__device__ __forceinline__ void merge_teams(Part &part, AfterUse after_use, Store store) {
    using Smem = DecodeSmem<V>;
    constexpr int kDimV = Smem::kDimV, kMerge = Smem::kMerge, kGroups = Smem::kGroups;
    // Teams: with more of them O of 8 bits, or of fp32, would leave the registers.
    constexpr bool kAll = !kScaled<V> && sizeof(typename V::Element) == 2;
    constexpr int kAtOnce = kAll ? kMerge : kMerge % 4 == 0 ? 4 : kMerge % 3 == 0 ? 3 : kMerge;
    const int log_rows = part.p.shares.log_rows;
    const int log_cols = min(log2_of(next_power_of_two(kDimV)), log2_of(V::kColumns * Smem::kRows) - log_rows);
    const int cols = 1 << log_cols, pitch = cols + 8;
    const auto at = [&](int t, int row, int col) {
        return part.smem.scratch() + (((t << log_rows) + row) * pitch + col) * 4;
    };
    #pragma unroll
    for (int i = 0; i < V::kPair; ++i) {
        part.finish(i);
        #pragma unroll 1
        for (int col0 = 0; col0 < V::kHeadDimV; col0 += cols) {
            ptx::bar_sync();  // what was there before has been read @scratch-is-free
            if (i + col0 == 0) after_use();
            part.leave(i, col0, cols, at);
            ptx::bar_sync();  // @teams-have-left-theirs
            #pragma unroll 1
            for (int e = ptx::thread_index(); e < kGroups << (log_rows + log_cols - 2); e += 32 * V::kWarps) {
                const int col = (e << 2) & (cols - 1), padded_row = e >> (log_cols - 2);
                const int row = padded_row & ((1 << log_rows) - 1), group = padded_row >> log_rows;
                if (row >= part.rows.count || col0 + col >= V::kHeadDimV) continue;
                PartialSum result;
                #pragma unroll
                for (int t0 = 0; t0 < kMerge; t0 += kAtOnce) {
                    float m[kAtOnce], l[kAtOnce], o[kAtOnce][4];
                    #pragma unroll
                    for (int t = 0; t < kAtOnce; ++t) {
                        ptx::ld_shared_v2_f32(m[t], l[t], part.smem.stats(group + kGroups * (t0 + t), row));
                        ptx::ld_shared_v4_f32(o[t], at(group + kGroups * (t0 + t), row, col));
                    }
                    result.add(m, l, o, part.score.log2_factor);
                }
                store(result, group * V::kPair + i, row, col0 + col);
            }
        }
    }
}

#endif  // CUPYFLASH_MERGE_CUH
