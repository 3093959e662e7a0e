// The bits of a block mask in shared memory, where a thread brings those of each mask tile (blocks.cuh) that is seen in part, before
// they are needed: read where they lie, they cost two loads behind one another (docs/performance.md).
#ifndef CUPYFLASH_MASK_COPIES_CUH
#define CUPYFLASH_MASK_COPIES_CUH
#include "attention/lists.cuh"
#include "hw/ptx_sm90.cuh"

// Those of kCount mask tiles, and behind them what kind each is.
template <int kCount>
struct MaskCopies {
    static constexpr int kTiles = kCount, kTileBytes = 2 * 4 * kMaskTile;
    static constexpr int kBytes = kTiles > 0 ? kTiles * kTileBytes + 16 : 0;
    static_assert(kTiles <= 4);
    ptx::u32 base;

    __device__ ptx::u32 bits(int tile, int row = 0) const { return base + tile * kTileBytes + 8 * row; }
    __device__ ptx::u32 kind(int tile) const { return base + kTiles * kTileBytes + 4 * tile; }

    // Brings the bits of a tile, a row of keys for each query (kByQueries) or one of queries for each key; `full` is told. Those
    // that no bulk copy can read, since they lie at no multiple of 16 bytes, are written one by one.
    template <bool kByQueries, class V>
    __device__ void bring(const BlockMask<V> &mask, int kind, int tile, ptx::u32 full) const {
        constexpr int kFirst = kByQueries ? 0 : kTileBytes / 4;
        // @bits-of-the-tile
        const int *const from = mask.bits + (kind - kFirstBits) * static_cast<long long>(kMaskTileWords) + kFirst;
        const bool has_bits = kind >= kFirstBits, copies = reinterpret_cast<unsigned long long>(mask.bits) % 16 == 0;
        ptx::st_shared_b32(this->kind(tile), static_cast<ptx::u32>(min(kind, static_cast<int>(kFirstBits))));
        #pragma unroll 1
        for (int i = 0; has_bits && !copies && i < kTileBytes / 4; ++i)
            ptx::st_shared_b32(bits(tile) + 4 * i, static_cast<ptx::u32>(from[i]));
        ptx::mbarrier_arrive_expect_tx(full, has_bits && copies ? kTileBytes : 0);
        if (has_bits && copies) ptx::cp_async_bulk_load(bits(tile), from, kTileBytes, full);
    }
    // The two words of a row.
    __device__ void read(int tile, int row, ptx::u32 (&word)[2]) const {
        const ptx::u32 kind = ptx::ld_shared_b32(this->kind(tile)), whole = kind == kFullTile ? ~0u : 0u;
        #pragma unroll
        for (int w = 0; w < 2; ++w) {
            const ptx::u32 found = ptx::ld_shared_b32(bits(tile, row) + 4 * w);
            word[w] = kind == kFirstBits ? found : whole;
        }
    }
};

// A stage of the forward: of a block of keys those tiles that each group of 64 queries sees. Blocks of fewer keys than a mask tile
// read bits where they lie (SeenBits), and so does a forward over a cache, whose producers bring pages.
template <class V, bool kAny = V::kBlockMask && !V::kPaged && V::kBlockN % kMaskTile == 0>
struct ForwardMask : MaskCopies<0> {};

template <class V>
struct ForwardMask<V, true> : MaskCopies<V::kBlockM / kMaskTile *(V::kBlockN / kMaskTile)> {
    static constexpr int kAlong = V::kBlockN / kMaskTile;

    // The kind of a tile as groups see it: hidden and whole ones have no bits.
    __device__ static int kind_of(const BlockMask<V> &mask, const ListedBlock &listed, int q0, int tile) {
        const int group = tile / kAlong, sight = listed.sight(group);
        if (sight != kInPart) return sight == kWhole ? kFullTile : kEmptyTile;
        const int along = tile % kAlong * kMaskTile;  // @kind-of-each-tile
        return mask.kind(q0 + group * kMaskTile, listed.block() * V::kBlockN + along);
    }
};

// Which elements of a warp's accumulator are seen, as SeenBits says it, of keys in any order (key_order.cuh); row0 counts within the
// group.
template <class V, int kRows, class Keys>
struct CopiedBits {
    static constexpr int kAlong = ForwardMask<V>::kAlong;
    ptx::u32 word[kRows / 8][2 * kAlong];

    __device__ CopiedBits(const ForwardMask<V> &copies, int group, int row0) {
        const int lane = fresh_lane();
        #pragma unroll
        for (int i = 0; i < kAlong; ++i)
            #pragma unroll
            for (int r = 0; r < kRows / 8; ++r) {
                ptx::u32 of_row[2];
                copies.read(group * kAlong + i, row0 + lane / 4 + 8 * r, of_row);  // @tile-of-the-group
                #pragma unroll
                for (int w = 0; w < 2; ++w)
                    word[r][2 * i + w] = of_row[w] >> Keys::of_lane(lane);  // @copied-bits-from-the-lane
            }
    }
    // Of those only what bounds show, too; query and key are the lane's first.
    template <class Bounds>
    __device__ void keep(const Bounds &mask, int query, int key) {
        #pragma unroll
        for (int r = 0; r < kRows / 8; ++r) {
            const int first = mask.first_key(query + 8 * r) - key, end = mask.end_key(query + 8 * r) - key;
            #pragma unroll
            for (int w = 0; w < 2 * kAlong; ++w)
                word[r][w] &= before(end - 32 * w) & ~before(first - 32 * w);  // @bits-within-bounds
        }
    }
    __device__ bool operator()(int row, int col) const { return word[row / 8][col / 32] & 1u << col % 32; }

  private:
    __device__ static ptx::u32 before(int n) { return n < 32 ? (1u << max(0, n)) - 1 : ~0u; }
};

#endif  // CUPYFLASH_MASK_COPIES_CUH
