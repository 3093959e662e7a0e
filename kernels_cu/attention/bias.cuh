// An additive bias of the scores, read where it lies: any shape that broadcasts to [batch, heads_q, seqlen_q, seqlen_k], by
// its strides, which are 0 where it is broadcast; of q's element type or, kWideBias, fp32. -inf hides a key: its score is -inf
// whatever q and k hold. A mask (kMask) is a bias of bytes, 0 where a key is visible and -inf elsewhere; it stands alone or, if
// kMaskedBias, beside one.
#ifndef CUPYFLASH_BIAS_CUH
#define CUPYFLASH_BIAS_CUH
#include "attention/sequence.cuh"
#include "tile/tile.cuh"

// What is added to scores: nothing, a bias or a mask, both, or whatever a user's mods make of them (modified.cuh).
enum AddedKind { kNothingAdded, kBiasOrMask, kBiasAndMask, kModified };
template <class V>
constexpr AddedKind added_kind() {
    if constexpr (!V::kBias) return kNothingAdded;
    else return V::kMods ? kModified : V::kMaskedBias ? kBiasAndMask : kBiasOrMask;
}

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
    __device__ float value(int i) const { return i ? T::hi(raw) : T::lo(raw); }
};
template <>
struct alignas(8) BiasPair<float> {
    float x[2];
    __device__ float value(int i) const { return x[i]; }
};
template <>
struct BiasPair<Shown> {
    ptx::u16 raw;
    __device__ float value(int i) const { return bias_if(raw >> 8 * i & 0xff); }
};
template <class T>
__device__ __forceinline__ float bias_value(const T &x) {
    return T::lo(x.raw);
}
__device__ __forceinline__ float bias_value(float x) { return x; }
__device__ __forceinline__ float bias_value(Shown x) { return bias_if(x.raw); }

// What is added to one score.
struct Addend {
    float bias;

    __device__ bool hides() const { return bias == -ptx::infinity(); }
    __device__ float biased(float s) const { return hides() ? bias : s + bias; }  // @bias-that-hides
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
    };
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
