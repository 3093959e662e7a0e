// An additive bias of the scores, read where it lies: any shape that broadcasts to [batch, heads_q, seqlen_q, seqlen_k], by
// its strides, which are 0 where it is broadcast; of q's element type or, kWideBias, fp32. Packed, it has max_seqlen_q queries
// and max_seqlen_k keys for each sequence, of which each has the first. -inf hides a key: its score is -inf whatever q and k
// hold. A mask (kMask) is a bias of bytes, 0 where a key is visible and -inf elsewhere; it stands alone or, if
// kMaskedBias, beside one.
#ifndef CUPYFLASH_BIAS_CUH
#define CUPYFLASH_BIAS_CUH
#include "attention/added.cuh"

// Whether a block mask is asked for one key at a time (tile_mask.cuh); only kernels over a cache have the constant.
template <class V>
constexpr auto has_tile_mask(int) -> decltype(V::kTileMask) {
    return V::kTileMask;
}
template <class V>
constexpr bool has_tile_mask(...) {
    return false;
}

// What is added to scores: nothing, also where kBias is for a user's mods (modified.cuh) or such a block mask
// alone; a bias or a mask; both.
enum AddedKind { kNothingAdded, kBiasOrMask, kBiasAndMask };
template <class V>
constexpr AddedKind added_kind() {
    if constexpr (!V::kBias) return kNothingAdded;
    else if constexpr ((V::kMods || has_tile_mask<V>(0)) && !V::kBiasBesideMods) return kNothingAdded;
    else return V::kMaskedBias ? kBiasAndMask : kBiasOrMask;
}

// The bias of a head: of() it; from() a query and a key on. Without one nothing is left of all this.
template <class V, AddedKind kKind = added_kind<V>()>
struct Bias {
    using At = NothingAdded;

    template <class Params>
    __device__ static Bias of(const Params &, const Sequence<V::kPacked> &, int /* head */) {
        return {};
    }
    template <bool kAlongKeys>
    __device__ Bias from(int /* query */, int /* key */) const {
        return {};
    }
    template <bool kRowsAreQueries, int kRows, int kCols, class Keys = KeysInOrder>
    __device__ NotFetched fetch(int /* query */, int /* key */) const {
        return {};
    }
    __device__ At operator()(int /* queries */, int /* keys */) const { return {}; }
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

    template <bool kRowsAreQueries, int kRows, int kCols, class Keys = KeysInOrder>
    __device__ auto fetch(int query, int key) const {
        static_assert(Keys::kNeighbours == KeysInOrder::kNeighbours);
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
