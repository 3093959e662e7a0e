// Dropout of P behind the softmax: which elements are dropped is a function of (seed, sequence, head of q, query, key) alone,
// so that every pass, tile shape and family drops the same ones, and nothing is stored.
//
//     Z_ij = 1 where (i, j) is kept, else 0;   f = 1 / (1 - p);   lse knows nothing of both
//     O = f (Z * P) V,   dV = (Z * f P)^T dO,   dS = f P * (Z * (dO V^T) - delta / f).
// The backward has f P and delta / f from row_stats.
//
// One call of Philox (philox.cuh) serves 8 elements with 15 bits each: (i, j) is dropped if its number is less than p * 2^15,
// rounded. These are what a lane holds of 16 queries and 16 keys in an accumulator whose rows are queries, queries i and i + 8, keys j, j + 1, j + 8, j + 9:
//     key       seed + offset * 2^64 / golden ratio
//     counter   key / 16, query / 16 * 32 + lane, head, sequence       lane = 4 (query % 8) + key % 8 / 2
//     number    word 2 (key / 8 % 2) + query / 8 % 2, the lower 15 bits of its half key % 2.
// So two neighbouring keys have a word, as in an operand of the next product: one addition of (1 - p) 2^15 to each half tells, by
// its bit 15, which of both are kept. Where rows are keys, two lanes that hold neighbouring keys make a call each and exchange halves.
#ifndef CUPYFLASH_DROPOUT_CUH
#define CUPYFLASH_DROPOUT_CUH
#include "attention/kept.cuh"
#include "attention/philox.cuh"
#include "attention/places.cuh"
#include "tile/gemm.cuh"

// Of a head of q; here there is none.
template <class V, bool kDropout = V::kDropout>
struct Dropout {
    static constexpr bool kAny = false;
    struct All {
        __device__ bool operator()(int, int) const { return true; }
    };

    template <class Params>
    __device__ static Dropout of(const Params &, int /* sequence */, int /* head */) {
        return {};
    }
    template <bool kRowsAreQueries, int kRows, int kCols>
    __device__ All kept(int /* query */, int /* key */) const {
        return {};
    }
    template <class Tile, class Kept>
    __device__ static void drop(Tile &, const Kept &) {}
    __device__ bool keeps(int /* query */, int /* key */) const { return true; }
    __device__ static float of_kept(bool, float x) { return x; }
    template <class Params>
    __device__ static float factor(const Params &) {
        return 1.f;
    }
    template <class Params, class Acc>
    __device__ static void scale(const Params &, Acc &) {}
    __device__ static int warp_row() { return 0; }
};

template <class V>
struct Dropout<V, true> {
    static constexpr bool kAny = true;
    ptx::u32 added;  // to two numbers, of which each then has its bit 15 where it is kept
    ptx::u32 key[2], sequence, head;

    // The seed is read where this stands: a main loop need not keep it.
    template <class Params>
    __device__ static Dropout of(const Params &p, int sequence, int head) {
        const auto *words = reinterpret_cast<const ptx::u32 *>(ptx::opaque(reinterpret_cast<ptx::i64>(p.dropout_seed)));
        const auto of_words = [&](int i) { return words[i] | static_cast<ptx::u64>(words[i + 1]) << 32; };
        const ptx::u64 offset = p.dropout == 2 ? of_words(2) : 0;  // @offset-of-the-seed
        const ptx::u64 seed = of_words(0) + offset * 0x9E3779B97F4A7C15ull;
        return {static_cast<ptx::u32>(p.dropout_added),
                {static_cast<ptx::u32>(seed), static_cast<ptx::u32>(seed >> 32)},
                static_cast<ptx::u32>(sequence),  // @dropout-of-its-sequence
                static_cast<ptx::u32>(head)};     // @dropout-of-its-head
    }
    // Of an accumulator that begins with a query and a key, multiples of 16; by all lanes of a warp.
    template <bool kRowsAreQueries, int kRows, int kCols, template <int, int> class Kept = KeptBits>
    __device__ Kept<kRows, kCols> kept(int query, int key) const {
        Kept<kRows, kCols> kept;
        Dropout of_warp = *this;  // whose keys are alike in all lanes: those of the rounds are worked out once a warp
        for (ptx::u32 &x : of_warp.key) x = static_cast<ptx::u32>(ptx::shfl_index(static_cast<int>(x), 0));
        #pragma unroll
        for (int a = 0; a < kRows / 16; ++a) {
            #pragma unroll
            for (int k = 0; k < kCols / 16; ++k) {
                auto x = kRowsAreQueries ? of_warp.of_queries(query + 16 * a, key + 16 * k)
                                         : of_warp.of_keys(query + 16 * k, key + 16 * a);
                #pragma unroll
                for (ptx::u32 &pair : x.x) pair = (pair & 0x7fff7fffu) + added;  // @numbers-of-neighbours
                kept.take(a, k, x);
            }
        }
        return kept;
    }
    // Elements that are dropped become 0: of an accumulator, or once it is rounded, two at a time.
    template <int kRows, int kCols, class Kept>
    __device__ static void drop(AccTile<kRows, kCols> &acc, const Kept &kept) {
        acc.for_each([&](int row, int col, float &x) { x = of_kept(kept(row, col), x); });
    }
    template <class T, int kRows, int kCols, class Kept>
    __device__ static void drop(FragA<T, kRows, kCols> &P, const Kept &kept) {
        #pragma unroll
        for (int k = 0; k < kCols / 16; ++k)
            #pragma unroll
            for (int a = 0; a < kRows / 16; ++a)
                #pragma unroll
                for (int i = 0; i < 4; ++i) mask_pair(P.x[k][a][i], kept.mask(a, k, i));  // @pairs-dropped
    }
    // Of one element: whether it is kept.
    __device__ bool keeps(int query, int key) const {
        const ptx::U128 r = numbers(query, key, 4 * (query % 8) + key % 8 / 2);
        const int i = 2 * (key / 8 % 2) + query / 8 % 2;
        const ptx::u32 low = i % 2 ? r.x[1] : r.x[0], high = i % 2 ? r.x[3] : r.x[2], w = i / 2 ? high : low;
        return ((key % 2 ? w >> 16 : w) & 0x7fffu) + (added & 0xffffu) >= 0x8000u;
    }
    __device__ static float of_kept(bool kept, float x) { return kept ? x : 0.f; }  // @zero-where-dropped
    // What O lacks at its end.
    template <class Params>
    __device__ static float factor(const Params &p) {
        return p.dropout_inverse;
    }
    template <class Params, class Acc>
    __device__ static void scale(const Params &p, Acc &O) {
        O.scale(factor(p));  // @o-of-what-is-kept
    }

    // Of a warpgroup's warp.
    __device__ static int warp_row() { return fresh_thread() / 32 % 4 * 16; }

  private:
    __device__ ptx::U128 numbers(int query, int key_index, ptx::u32 lane) const {
        const ptx::u32 tile = static_cast<ptx::u32>(query) / 16 * 32 + lane;
        return philox({{static_cast<ptx::u32>(key_index) / 16, tile, head, sequence}}, key[0], key[1]);
    }
    // Of 16 queries and 16 keys what this lane holds: word 2 (col / 8) + row / 8, its half col % 2. Where rows are queries ...
    __device__ ptx::U128 of_queries(int query, int key) const { return numbers(query, key, fresh_lane()); }
    // ... and where they are keys. Lane 4 g + t holds keys g and g + 8, queries 2 t and 2 t + 1 (+ 8). Of two neighbouring keys
    // the lane of the even one makes the call for the even query, the other one that for the odd query; each gets the halves
    // of its own key.
    __device__ ptx::U128 of_keys(int query, int key) const {
        const ptx::u32 lane = fresh_lane();
        const bool odd = lane / 4 % 2;
        const auto turned = [&](ptx::u32 w) { return odd ? w << 16 | w >> 16 : w; };
        ptx::U128 mine = numbers(query, key, 4 * (2 * (lane % 4) + odd) + lane / 8), found;
        #pragma unroll
        for (int i = 0; i < 4; ++i) mine.x[i] = turned(mine.x[i]);  // low: its own key's, high: the other's
        ptx::u32 theirs[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const ptx::u32 pair = mine.x[2 * i] >> 16 | (mine.x[2 * i + 1] & 0xffff0000u);
            theirs[i] = ptx::shfl_index(static_cast<int>(pair), lane ^ 4);  // @halves-exchanged
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) {  // of keys + 8 (i / 2), queries + 8 (i % 2)
            const ptx::u32 high = i % 2 ? theirs[i / 2] & 0xffff0000u : theirs[i / 2] << 16;
            found.x[2 * (i % 2) + i / 2] = turned((mine.x[i] & 0xffffu) | high);
        }
        return found;
    }
};

// Places of a head that know what dropout asks, too: which sequence and head. Without dropout they are Places, and nothing else.
template <class V, class Params, bool kDropout = V::kDropout>
struct DroppingPlaces {
    using Type = Places<V>;
    __device__ static Type of(const Params &p, const Sequence<V::kPacked> &s, int head) { return Type::of(p, s, head); }
};
template <class V, class Params>
struct DroppingPlaces<V, Params, true> {
    struct Type : Places<V> {
        const Params &p;
        int sequence, head;
    };
    __device__ static Type of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        return {Places<V>::of(p, s, head), p, s.index, head};
    }
};

// Which elements of P are kept, of an accumulator whose rows are queries.
template <class V, int kRows, int kCols, template <int, int> class Kept, class AnyPlaces>
__device__ __forceinline__ auto kept_of(const AnyPlaces &places, int query, int key) {
    if constexpr (V::kDropout)
        return Dropout<V>::of(places.p, places.sequence, places.head)
            .template kept<true, kRows, kCols, Kept>(query, key);
    else return typename Dropout<V>::All{};
}

#endif  // CUPYFLASH_DROPOUT_CUH
