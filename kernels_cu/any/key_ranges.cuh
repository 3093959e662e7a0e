// The keys of each sequence that count, as a range [start, end), from a padding mask: of the first `used` keys those that are no
// padding, which lie side by side, and of them those that the one query sees, at the place `first`, whose window is given. Where
// others lie between them `broken` is told, which may be in the host's memory. One block a sequence. Shared memory: three words
// a warp.
#ifndef CUPYFLASH_KEY_RANGES_CUH
#define CUPYFLASH_KEY_RANGES_CUH
#include "any/params_ranges.cuh"
#include "tile/tile.cuh"

// Of some keys: how many are no padding, how often those begin, and where first.
struct KeysFound {
    static constexpr int kNowhere = 0x7fffffff;
    int count = 0, begins = 0, first = kNowhere;

    __device__ void add(const KeysFound &other) {
        count += other.count, begins += other.begins, first = min(first, other.first);  // @keys-found-added
    }
    // With those of all lanes.
    __device__ void add_up() {
        #pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            const int other = lane() ^ mask;
            add({ptx::shfl_index(count, other), ptx::shfl_index(begins, other), ptx::shfl_index(first, other)});
        }
    }
};

// A thread's share of a row of the mask.
template <int kThreads>
__device__ __forceinline__ KeysFound keys_found(const unsigned char *shown, int keys) {
    constexpr int kAhead = 4;  // keys of a thread that are on their way
    KeysFound found;
    #pragma unroll 1
    for (int j0 = ptx::thread_index(); j0 < keys; j0 += kAhead * kThreads) {
        bool own[kAhead], before[kAhead];
        #pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int j = j0 + i * kThreads;
            own[i] = j < keys && shown[j] != 0;  // @keys-of-the-mask
            before[i] = 0 < j && j < keys && shown[j - 1] != 0;
        }
        #pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const bool begins = own[i] && !before[i];
            found.add({own[i], begins, begins ? j0 + i * kThreads : KeysFound::kNowhere});
        }
    }
    return found;
}

// Those of all warps, for the first one.
template <int kWarps>
__device__ __forceinline__ KeysFound found_by_all(KeysFound own) {
    const ptx::u32 words = ptx::dynamic_smem();
    own.add_up();
    if (lane() == 0) {
        const int facts[3] = {own.count, own.begins, own.first};
        #pragma unroll
        for (int i = 0; i < 3; ++i) ptx::st_shared_b32(words + 4 * (3 * warp() + i), facts[i]);
    }
    ptx::bar_sync();  // @found-by-all-warps
    KeysFound found;
    if (warp() == 0 && lane() < kWarps) {
        const ptx::u32 at = words + 12 * lane();
        found.count = ptx::ld_shared_b32(at), found.begins = ptx::ld_shared_b32(at + 4);
        found.first = ptx::ld_shared_b32(at + 8);
    }
    found.add_up();
    return found;
}

template <class V>
__device__ __forceinline__ void key_ranges(const KeyRangeParams &p) {
    static_assert(V::kSmemBytes == 12 * V::kWarps && V::kWarps <= 32);
    const int sequence = ptx::block_index();
    KeysFound found{p.keys, 1, 0};
    if (p.shown) {
        const auto *const shown =
            static_cast<const unsigned char *>(p.shown) + sequence * p.shown_stride;  // @row-of-the-mask
        found = found_by_all<V::kWarps>(keys_found<32 * V::kWarps>(shown, p.keys));
    }
    if (ptx::thread_index() > 0) return;
    if (found.begins > 1) ptx::st_release(p.broken, 1);  // @keys-between-others
    const long long place = p.first_at ? *p.first_at : p.first;
    const long long start = found.begins ? found.first : 0,
                    end = min(start + found.count, static_cast<long long>(p.used));
    // @keys-in-the-window
    const long long seen_start = max(min(start, end), place - p.left), seen_end = min(end, place + p.right + 1);
    p.ranges[2 * sequence] = static_cast<int>(min(seen_start, seen_end));
    p.ranges[2 * sequence + 1] = static_cast<int>(seen_end);
}

#endif  // CUPYFLASH_KEY_RANGES_CUH
