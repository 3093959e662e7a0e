// An additive bias of the scores, read where it lies: any shape that broadcasts to [batch, heads_q, seqlen_q, seqlen_k], by
// its strides, which are 0 where it is broadcast; of q's element type or, kWideBias, fp32. -inf hides a key: its score is -inf
// whatever q and k hold. A mask (kMask) is a bias of bytes, 0 where a key is visible and -inf elsewhere; it stands alone or, if
// kMaskedBias, beside one.
#ifndef CUPYFLASH_BIAS_CUH
#define CUPYFLASH_BIAS_CUH
#include "attention/sequence.cuh"
#include "tile/tile.cuh"

// What is added to scores: nothing, also where kBias is for a user's mods alone (modified.cuh); a bias or a mask; both.
enum AddedKind { kNothingAdded, kBiasOrMask, kBiasAndMask };
template <class V>
constexpr AddedKind added_kind() {
    if constexpr (!V::kBias) return kNothingAdded;
    else if constexpr (V::kMods && !V::kBiasBesideMods) return kNothingAdded;
    else return V::kMaskedBias ? kBiasAndMask : kBiasOrMask;
}

// That nothing has been read ahead.
struct NotFetched {};

// The bias of a head: of() it; from() a query and a key on. Without one nothing is left of all this.
template <class V, AddedKind kKind = added_kind<V>()>
struct Bias {
    struct At {
        __device__ float biased(float s) const { return s; }
        __device__ bool hides() const { return false; }
    };

    template <class Params>
    __device__ static Bias of(const Params &, const Sequence<V::kPacked> &, int /* head */) {
        return {};
    }
    template <bool kAlongKeys>
    __device__ Bias from(int /* query */, int /* key */) const {
        return {};
    }
    template <bool kRowsAreQueries, int kRows, int kCols>
    __device__ NotFetched fetch(int /* query */, int /* key */) const {
        return {};
    }
    __device__ At operator()(int /* queries */, int /* keys */) const { return {}; }
};

// Whether a key is visible.
struct Shown { unsigned char raw; };
__device__ __forceinline__ float bias_if(bool is_shown) {
    return is_shown ? 0.f : -ptx::infinity();  // @shown-or-hidden
}

// Two neighbouring elements, and their values.
template <class T>
struct BiasPair {
    ptx::u32 raw;
    __device__ static BiasPair of(T a, T b) { return {a.raw | static_cast<ptx::u32>(b.raw) << 16}; }
    __device__ float value(int i) const { return i ? T::hi(raw) : T::lo(raw); }
};
template <>
struct alignas(8) BiasPair<float> {
    float x[2];
    __device__ static BiasPair of(float a, float b) { return {{a, b}}; }
    __device__ float value(int i) const { return x[i]; }
};
template <>
struct BiasPair<Shown> {
    ptx::u16 raw;
    __device__ static BiasPair of(Shown a, Shown b) { return {static_cast<ptx::u16>(a.raw | b.raw << 8)}; }
    __device__ float value(int i) const { return bias_if(raw >> 8 * i & 0xff); }
};
template <class T>
__device__ __forceinline__ float bias_value(const T &x) {
    return T::lo(x.raw);
}
__device__ __forceinline__ float bias_value(float x) { return x; }
__device__ __forceinline__ float bias_value(Shown x) { return bias_if(x.raw); }
// One whose value is 0.
template <class T>
__device__ __forceinline__ T bias_of_0() {
    return {0};
}
template <>
__device__ __forceinline__ Shown bias_of_0<Shown>() {
    return {1};
}

// What is added to one score.
struct Addend {
    float bias;

    __device__ bool hides() const { return bias == -ptx::infinity(); }
    __device__ float biased(float s) const { return hides() ? bias : s + bias; }  // @bias-that-hides
};

// What is added to the elements that a lane holds of an accumulator, two neighbours of a row in one.
template <class Element, bool kRowsAreQueries, int kRows, int kCols>
struct FetchedBias {
    BiasPair<Element> pair[kRows / 8][kCols / 8];

    __device__ Addend operator()(int queries, int keys) const {
        const int row = kRowsAreQueries ? queries : keys, col = kRowsAreQueries ? keys : queries;
        return {pair[row / 8][col / 8].value(col % 2)};
    }
};

// The bias, or kMask the mask, of a head.
template <class V, bool kMask>
struct AddedArray {
    using Number = typename Either<V::kWideBias, float, typename V::Element>::Type;
    using Element = typename Either<kMask, Shown, Number>::Type;
    // From an element on. kPairs: two at a time, of which the first begins a pair. (The compiler reads it once.)
    template <bool kPairs>
    struct From {
        const Element *at;
        long long row, key;  // strides
        int queries, keys;   // how many there are from here on

        __device__ Addend operator()(int i, int j) const {
            if (i >= queries || (kPairs ? j & ~1 : j) >= keys) return {0.f};  // nothing is there @bias-that-exists
            // @strides-of-bias
            const Element *const x = at + i * row + (kPairs ? j & ~1 : V::kPairedBias ? j : j * key);
            if constexpr (kPairs) return {reinterpret_cast<const BiasPair<Element> *>(x)->value(j % 2)};
            else return {bias_value(*x)};
        }
        // Of query i, which lies there, key j and the next one; or, not kKeys, the same of the next query. kWhole: all exist.
        template <bool kKeys, bool kWhole>
        __device__ BiasPair<Element> pair(const Element *there, int i, int j) const {
            if constexpr (kPairs) {
                if (!kWhole && (i >= queries || j >= keys))  // @bias-that-exists-fetched
                    return BiasPair<Element>::of(bias_of_0<Element>(), bias_of_0<Element>());
                return *reinterpret_cast<const BiasPair<Element> *>(there + j);
            } else {
                const Element first = one<kWhole>(there, i, j);
                return BiasPair<Element>::of(first, kKeys ? one<kWhole>(there, i, j + 1)
                                                          : one<kWhole>(there + row, i + 1, j));  // @next-query-fetched
            }
        }

      private:
        template <bool kWhole>
        __device__ Element one(const Element *there, int i, int j) const {
            // @single-bias-that-exists-fetched
            if (!kWhole && (i >= queries || j >= keys)) return bias_of_0<Element>();
            return there[V::kPairedBias ? j : j * key];  // @stride-of-fetched-keys
        }
    };
    // Not where wide rows of O leave no registers for what takes more than one for two elements.
    static constexpr bool kFetches = V::kHeadDim <= 128 || (V::kPairedBias && sizeof(Element) < 4);
    const Element *head;
    long long row, key;
    int seqlen_q, seqlen_k;

    template <class Params>
    __device__ static AddedArray of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        const ScoreStrides &stride = kMask ? p.mask_stride : p.bias_stride;
        // @bias-of-its-head
        return {static_cast<const Element *>(kMask ? p.mask : p.bias) + s.index * stride.batch + head * stride.head,
                stride.row, stride.key, s.seqlen_q, s.seqlen_k};
    }
    // kAlongKeys: this lane has neighbouring keys, from an even one on. Multiples of strides are computed where they are
    // used: a main loop would keep all of them in registers.
    template <bool kAlongKeys>
    __device__ From<kAlongKeys && V::kPairedBias> from(int query, int key0) const {
        return {head + query * row + key0 * key, ptx::opaque(row), ptx::opaque(key), seqlen_q - query, seqlen_k - key0};
    }
    // Of an accumulator of this warp that begins with a query and a key, read here: while tensor cores compute it.
    template <bool kRowsAreQueries, int kRows, int kCols>
    __device__ auto fetch(int query, int key0) const {
        if constexpr (!kFetches) return NotFetched{};
        else return fetched<kRowsAreQueries, kRows, kCols>(query, key0);
    }

  private:
    template <bool kRowsAreQueries, int kRows, int kCols>
    __device__ auto fetched(int query, int key0) const {
        const int lane = fresh_lane(), row0 = lane / 4, col0 = 2 * (lane % 4);
        const auto first =
            from<kRowsAreQueries>(query + (kRowsAreQueries ? row0 : col0), key0 + (kRowsAreQueries ? col0 : row0));
        FetchedBias<Element, kRowsAreQueries, kRows, kCols> found;
        constexpr int kQueries = kRowsAreQueries ? kRows : kCols, kKeys = kRowsAreQueries ? kCols : kRows;
        const auto read = [&](auto whole) {
            const Element *at = first.at;
            #pragma unroll
            for (int i = 0; i < kQueries; i += 8, at += 8 * first.row)  // @stride-of-fetched-queries
                #pragma unroll
                for (int j = 0; j < kKeys; j += 8)
                    found.pair[(kRowsAreQueries ? i : j) / 8][(kRowsAreQueries ? j : i) / 8] =
                        first.template pair<kRowsAreQueries, decltype(whole)::value>(at, i, j);
        };
        if (query + kQueries <= seqlen_q && key0 + kKeys <= seqlen_k) read(Bool<true>{});  // @whole-tile-of-bias
        else read(Bool<false>{});
        return found;
    }
};

// One of them.
template <class V>
struct Bias<V, kBiasOrMask> : AddedArray<V, V::kMask> {
    using At = Addend;

    template <class Params>
    __device__ static Bias of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        return {AddedArray<V, V::kMask>::of(p, s, head)};
    }
};

// Both: what the mask hides is hidden, whatever the bias holds.
template <class V>
struct Bias<V, kBiasAndMask> {
    using Numbers = AddedArray<V, false>;
    using Mask = AddedArray<V, true>;
    using Element = typename Numbers::Element;
    using At = Addend;
    template <class FromNumbers, class FromMask>
    struct From {
        FromNumbers numbers;
        FromMask mask;

        __device__ Addend operator()(int i, int j) const {
            const Addend shown = mask(i, j);
            return shown.hides() ? shown : numbers(i, j);  // @mask-beside-a-bias
        }
    };
    Numbers numbers;
    Mask mask;

    template <bool kRowsAreQueries, int kRows, int kCols>
    __device__ auto fetch(int query, int key) const {
        if constexpr (!Numbers::kFetches) {
            return NotFetched{};
        } else {
            const auto of_numbers = numbers.template fetch<kRowsAreQueries, kRows, kCols>(query, key);
            const auto of_mask = mask.template fetch<kRowsAreQueries, kRows, kCols>(query, key);
            return From<decltype(numbers.template fetch<kRowsAreQueries, kRows, kCols>(0, 0)),
                        decltype(mask.template fetch<kRowsAreQueries, kRows, kCols>(0, 0))>{of_numbers, of_mask};
        }
    }
    template <class Params>
    __device__ static Bias of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        return {Numbers::of(p, s, head), Mask::of(p, s, head)};
    }
    template <bool kAlongKeys>
    __device__ auto from(int query, int key) const {
        const auto from_numbers = numbers.template from<kAlongKeys>(query, key);
        const auto from_mask = mask.template from<kAlongKeys>(query, key);
        return From<decltype(numbers.template from<kAlongKeys>(0, 0)), decltype(mask.template from<kAlongKeys>(0, 0))>{
            from_numbers, from_mask};
    }
};

#endif  // CUPYFLASH_BIAS_CUH
