// The scales of a slice of an 8-bit cache (stored.cuh), as a lane of StoredWarp needs them: of keys g and g + 8, g = lane / 4.
#ifndef CUPYFLASH_SCALES_CUH
#define CUPYFLASH_SCALES_CUH
#include "decode/rows.cuh"
#include "attention/tile_mask.cuh"
#include "decode/slices.cuh"

struct SliceScales { float k[2], v[2]; };

// That the loader brings along with the keys.
template <class V>
struct ScalesInRing {
    __device__ ScalesInRing(const DecodeParams &, const DecodeTile<V> &, int, int) {}

    // Of a unit that is in shared memory.
    __device__ SliceScales take(const DecodeSmem<V> &smem, ptx::u32 stage, int) const {
        float x[4];
        ptx::ld_shared_v4_f32(x, smem.scales(stage) + lane() / 4 * 16);
        return {{x[0], x[1]}, {x[2], x[3]}};
    }
};

// Read where they lie, one unit ahead of their use, and the page that they are of, two units ahead: eight neighbouring keys, or
// all of a slice, share one.
template <class V>
class ScalesOfPlaces {
    static constexpr int kBoxes = kSlice / V::kBoxRows,
                         kStep = DecodeSmem<V>::kMerge * kSlice;  // keys of a unit to the next
    static_assert(kBoxes <= 2);
    const DecodeParams &p;
    const DecodeTile<V> &tile;
    const int head;
    int place[kBoxes];  // of the unit behind the next
    SliceScales next{};

  public:
    // head: of K; key: of the first unit.
    __device__ ScalesOfPlaces(const DecodeParams &p, const DecodeTile<V> &tile, int head, int key)
        : p(p), tile(tile), head(head) {
        look_up(key);
        read();
        if (differ()) look_up(key + kStep);
    }
    // Of the unit from `key` on, the next one.
    __device__ SliceScales take(const DecodeSmem<V> &, ptx::u32, int key) {
        if constexpr (has_tile_mask<V>(0)) {     // which says what is next
            if (differ()) look_up(key), read();  // @scales-of-a-seen-unit
            return next;
        }
        const SliceScales found = next;
        if (differ()) {
            read();
            look_up(key + 2 * kStep);
        }
        return found;
    }

  private:
    // Whether the units of a tile have different ones.
    __device__ bool differ() const { return V::kPaged && p.scale_stride; }
    __device__ void look_up(int key) {
        #pragma unroll
        for (int i = 0; i < kBoxes; ++i) place[i] = place_of_key(p, tile, key + i * V::kBoxRows);
    }
    __device__ void read() {
        if (tile.cached.length == 0) return;  // there may be none
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = place[r % kBoxes] * p.scale_stride + head;  // @scale-of-its-place-in-time
            next.k[r] = p.k_scale[at], next.v[r] = p.v_scale[at];
        }
    }
};

#endif  // CUPYFLASH_SCALES_CUH
