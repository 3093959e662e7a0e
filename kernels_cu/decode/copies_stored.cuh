// A unit of an 8-bit cache by cp.async, for load_async.cuh: every lane finds where one key lies, once, those of the first half of
// a warp in K and those of the second in V; rows are then copied by as many lanes as they have pieces of 16 bytes. The scales
// come with them, those of keys g and g + 8 of K and of V side by side.
#ifndef CUPYFLASH_COPIES_STORED_CUH
#define CUPYFLASH_COPIES_STORED_CUH
#include "decode/rows.cuh"
#include "decode/slices.cuh"

template <class V>
struct StoredCopies {
    using Kv = Stored<V>;
    using Smem = DecodeSmem<V>;
    static constexpr int kTeamThreads = 32 * V::kTeam;
    static constexpr int kPieces = round_up(kWidest<V>, 16) / 16;  // 16 bytes each
    static constexpr int kLanesPerRow = next_power_of_two(kPieces);
    static constexpr int kRowsPerPass = kTeamThreads / kLanesPerRow, kPasses = ceil_div(kSlice, kRowsPerPass);
    static constexpr int kUnroll = kWidest<V> > 128 ? 2 : kPasses;  // more of wide rows would leave the registers
    static_assert(V::kPair == 1 && V::kScaleBytes == 4);
    const DecodeParams &p;
    ptx::u64 row = 0;  // the address of this lane's key of the next unit
    int place = 0;     // and its page, or its row of the cache

    __device__ static bool is_of_v() { return lane() >= kSlice; }
    // key: of the unit that comes next.
    __device__ void look_up(const DecodeTile<V> &tile, int key, int head) {
        key = min(key + lane() % kSlice, max(tile.cached.length - 1, 0));
        place = place_of_key(p, tile, key);
        const void *const from = is_of_v() ? p.v : p.k;
        const Strides &k = p.k_stride, &v = p.v_stride;
        row = reinterpret_cast<ptx::u64>(from) + place * (is_of_v() ? v.batch : k.batch) +
              row_in_place<V::kPaged>(p, key) * (is_of_v() ? v.row : k.row) + head * (is_of_v() ? v.head : k.head);
    }
    // That unit, of which the first `keys` keys exist.
    __device__ void copy(const Smem &smem, ptx::u32 stage, int head, int keys) const {
        const int thread = ptx::thread_index() % kTeamThreads, piece = thread % kLanesPerRow;
        #pragma unroll(kUnroll)
        for (int pass = 0; pass < kPasses; ++pass) {
            const int key = thread / kLanesPerRow + pass * kRowsPerPass;
            const bool k_exists = key < keys && 16 * piece < V::kHeadDim;
            const bool v_exists = key < keys && 16 * piece < V::kHeadDimV;
            const auto bring = [&](int source, const auto &tile, auto columns, bool exists) {
                const ptx::u64 from = row_of(source);
                if (key >= kSlice || piece >= ceil_div(columns.value, 16))
                    return;  // @pieces-of-the-narrower-row-stored
                const Kv *const src = reinterpret_cast<const Kv *>(from) + (exists ? 16 * piece : 0);
                const ptx::u32 dst = tile.at(key, piece / 8, piece % 8);
                if constexpr (V::kUnaligned)
                    ptx::st_shared_v4_b32(dst, load16(src, exists ? columns.value - 16 * piece : 0));
                else ptx::cp_async_16(dst, src, exists);
            };
            bring(key % kSlice, smem.k(stage, 0), Int<V::kHeadDim>(), k_exists);
            bring(key % kSlice + kSlice, smem.v(stage, 0), Int<V::kHeadDimV>(), v_exists);
        }
        if (thread >= 32) return;
        const int key = lane() % kSlice, to = key % 8 * 16 + is_of_v() * 8 + key / 8 * 4;
        const float *const from = is_of_v() ? p.v_scale : p.k_scale;
        ptx::cp_async_4(smem.scales(stage) + to, from + place * p.scale_stride + head,
                        key < keys);  // @scale-of-its-place
    }

  private:
    __device__ ptx::u64 row_of(int source) const {
        const ptx::u32 low = ptx::shfl_index(static_cast<int>(row), source);
        const ptx::u32 high = ptx::shfl_index(static_cast<int>(row >> 32), source);
        return low | static_cast<ptx::u64>(high) << 32;
    }
};

#endif  // CUPYFLASH_COPIES_STORED_CUH
