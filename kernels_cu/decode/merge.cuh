// The end of a tile in a block: what its teams have of each head, added up through shared memory.
#ifndef CUPYFLASH_MERGE_CUH
#define CUPYFLASH_MERGE_CUH
#include "decode/warp_decode.cuh"

// As many columns at a time as fit; calls store(sum, head, row, col). after_use() is called once no warp needs Q any more; a
// barrier follows it.
template <class V, class AfterUse, class Store>
__device__ __forceinline__ void merge_teams(DecodeWarp<V> &part, AfterUse after_use, Store store) {
    using Smem = DecodeSmem<V>;
    constexpr int D = Smem::D, kMerge = Smem::kMerge, kGroups = Smem::kGroups;
    const int log_rows = part.p.shares.log_rows;
    const int log_cols = min(log2_of(next_power_of_two(D)), log2_of(V::kColumns * Smem::kRows) - log_rows);
    const int cols = 1 << log_cols, pitch = cols + 8;
    const auto at = [&](int t, int row, int col) {
        return part.smem.scratch() + (((t << log_rows) + row) * pitch + col) * 4;
    };
    #pragma unroll
    for (int i = 0; i < V::kPair; ++i) {
        auto &h = part.head[i];
        if constexpr (kScaled<V>) h.finish(h.O);
        #pragma unroll
        for (int r = 0; r < 2; ++r)
            h.softmax.l[r] = quad_reduce(h.softmax.l[r], [](float a, float b) { return a + b; });
        #pragma unroll 1
        for (int col0 = 0; col0 < V::kHeadDim; col0 += cols) {
            ptx::bar_sync();  // what was there before has been read @scratch-is-free
            if (i + col0 == 0) after_use();
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = part.row_of(r);
                if (row >= part.rows.count) continue;
                if (lane() % 4 == 0)
                    ptx::st_shared_v2_f32(part.smem.stats(part.team, row), h.softmax.m[r], h.softmax.l[r]);
                #pragma unroll
                for (int j = 0; j < D / 8; ++j) {
                    const auto two = columns_of<V>(h.O, r, j);
                    const int first = kScaled<V> ? two.first : 8 * j;
                    if (first >= col0 && first < col0 + cols)
                        ptx::st_shared_v2_f32(at(part.team, row, two.first - col0), two.x[0], two.x[1]);
                }
            }
            ptx::bar_sync();  // @teams-have-left-theirs
            #pragma unroll 1
            for (int e = ptx::thread_index(); e < kGroups << (log_rows + log_cols - 2); e += 32 * V::kWarps) {
                const int col = (e << 2) & (cols - 1), padded_row = e >> (log_cols - 2);
                const int row = padded_row & ((1 << log_rows) - 1), group = padded_row >> log_rows;
                if (row >= part.rows.count || col0 + col >= V::kHeadDim) continue;
                float m[kMerge], l[kMerge], o[kMerge][4];
                #pragma unroll
                for (int t = 0; t < kMerge; ++t) {
                    ptx::ld_shared_v2_f32(m[t], l[t], part.smem.stats(group + kGroups * t, row));
                    ptx::ld_shared_v4_f32(o[t], at(group + kGroups * t, row, col));
                }
                PartialSum result;
                result.add(m, l, o, h.softmax.factor);
                store(result, group * V::kPair + i, row, col0 + col);
            }
        }
    }
}

#endif  // CUPYFLASH_MERGE_CUH
