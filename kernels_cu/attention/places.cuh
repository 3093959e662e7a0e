// Where scores lie, as far as a feature asks: of which sequence and head of q, which query, which key. A lane counts from its
// own first element; what is added to that for each other one is known to the compiler, and without a feature that asks
// nothing is left of all this.
//
// ALiBi asks (Press et al. 2022): its bias is -slope * |i + seqlen_k - seqlen_q - j| for query i and key j. A bias that is
// given asks where to read (bias.cuh).
#ifndef CUPYFLASH_PLACES_CUH
#define CUPYFLASH_PLACES_CUH
#include "attention/modified.cuh"
#include "attention/tile_mask.cuh"

template <class V>
struct Score;

// ALiBi of a head, in the unit of scores.
template <class V, bool kAlibi = V::kAlibi>
struct Alibi {
    struct At {
        __device__ float biased(float s) const { return s; }
    };

    template <class Params>
    __device__ static Alibi of(const Params &, const Sequence<V::kPacked> &, int /* head */) {
        return {};
    }
    __device__ Alibi from(int /* query */, int /* key */) const { return {}; }
    __device__ At operator()(int /* queries */, int /* keys */) const { return {}; }
};

template <class V>
struct Alibi<V, true> {
    struct At {
        float slope;     // -slope, in the unit of scores
        float distance;  // its magnitude is that of the key from the query's own position

        __device__ float biased(float s) const { return fmaf(slope, fabsf(distance), s); }  // @alibi-of-the-distance
    };
    int diagonal;  // seqlen_k - seqlen_q
    At first;

    template <class Params>
    __device__ static Alibi of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        const Problem &problem = p.problem;
        const int row = p.alibi == 2 ? s.index : 0;  // @slopes-of-its-sequence
        // Rows behind the last sequence of packed ones have none. @slopes-that-exist
        const float slope = s.index < problem.batch ? p.alibi_slopes[row * problem.heads_q + head] : 0.f;
        return {s.seqlen_k - s.seqlen_q, {-slope * ptx::rcp(Score<V>(problem).unit), 0.f}};
    }
    __device__ Alibi from(int query, int key) const {
        return {diagonal, {first.slope, static_cast<float>(query + diagonal - key)}};  // @distance-from-the-diagonal
    }
    __device__ At operator()(int queries, int keys) const {
        return {first.slope, first.distance + static_cast<float>(queries - keys)};
    }
};

// Places of a head: of() it; from() a query and a key on. The (i, j)-th of them is i queries and j keys further on.
template <class V, bool kAny = V::kAlibi || V::kBias>
struct Places {
    using At = NothingAdded;

    template <class Params>
    __device__ static Places of(const Params &, const Sequence<V::kPacked> &, int /* head */) {
        return {};
    }
    __device__ Places from(int /* query */, int /* key */) const { return {}; }
    // From this lane's first element on, in an accumulator that begins with a query and a key; rows are queries, or keys.
    template <bool kRowsAreQueries>
    __device__ Places from_lane(int /* query */, int /* key */) const {
        return {};
    }
    // The same, of which something has been fetched. Keys: which of them columns are (key_order.cuh).
    template <bool kRowsAreQueries, class Keys = KeysInOrder>
    __device__ Places from_lane(int /* query */, int /* key */, NotFetched) const {
        return {};
    }
    // In an accumulator of a warpgroup.
    template <bool kRowsAreQueries>
    __device__ Places from_warp(int /* query */, int /* key */, NotFetched) const {
        return {};
    }
    // What is read of it ahead, while it is computed.
    template <bool kRowsAreQueries, int kRows, int kCols, class Keys = KeysInOrder>
    __device__ NotFetched fetch(int /* query */, int /* key */) const {
        return {};
    }
    template <bool kRowsAreQueries, int kCols>
    __device__ NotFetched fetch_of_warp(int /* query */, int /* key */) const {
        return {};
    }
    __device__ At operator()(int /* queries */, int /* keys */) const { return {}; }
};

template <class V>
struct Places<V, true> {
    using Added = typename Either<has_tile_mask<V>(0), TiledBias<V>, Bias<V>>::Type;
    struct At {
        typename Modified<V>::At mods;
        typename Alibi<V>::At alibi;
        typename Added::At bias;

        __device__ float biased(float s) const {
            if constexpr (V::kMods && added_kind<V>() != kNothingAdded)
                if (mods.hides()) return -ptx::infinity();       // whatever is added @hidden-by-mods-beside-a-bias
            return bias.biased(alibi.biased(mods.modified(s)));  // @alibi-behind-mods
        }
        // The same, where a NaN that a bias hides may stay. (To test a byte of a mask costs no more than to add it.)
        __device__ float added(float s) const {
            if constexpr (V::kMods || V::kMask || V::kMaskedBias) return biased(s);
            else return bias.added(alibi.biased(s));
        }
        __device__ bool hides() const { return mods.hides() || bias.hides(); }  // @hidden-by-either
        __device__ float derivative(float s) const { return mods.derivative(s); }
    };
    template <class BiasFrom>
    struct From {
        Modified<V> mods;
        Alibi<V> alibi;
        BiasFrom bias;

        __device__ At operator()(int queries, int keys) const {
            return {mods(queries, keys), alibi(queries, keys), bias(queries, keys)};
        }
    };
    Modified<V> mods;
    Alibi<V> alibi;
    Added bias;

    template <class Params>
    __device__ static Places of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        return {Modified<V>::of(p, s, head), Alibi<V>::of(p, s, head), Added::of(p, s, head)};
    }
    template <bool kAlongKeys = false>
    __device__ auto from(int query, int key) const {
        const auto bias_from = bias.template from<kAlongKeys>(query, key);
        return From<decltype(bias.template from<kAlongKeys>(0, 0))>{mods.from(query, key), alibi.from(query, key),
                                                                    bias_from};
    }
    template <bool kRowsAreQueries>
    __device__ auto from_lane(int query, int key) const {
        const int lane = fresh_lane(), row = lane / 4, col = KeysInOrder::of_lane(lane);
        return from<kRowsAreQueries>(query + (kRowsAreQueries ? row : col), key + (kRowsAreQueries ? col : row));
    }
    template <bool kRowsAreQueries, class Keys = KeysInOrder, class Fetched>
    __device__ auto from_lane(int query, int key, const Fetched &fetched) const {
        const int lane = fresh_lane(), row = lane / 4, col = Keys::of_lane(lane);
        query += kRowsAreQueries ? row : col, key += kRowsAreQueries ? col : row;
        return From<Fetched>{mods.from(query, key), alibi.from(query, key), fetched};
    }
    template <bool kRowsAreQueries, class Keys = KeysInOrder>
    __device__ auto from_lane(int query, int key, NotFetched) const {
        static_assert(Keys::kNeighbours == KeysInOrder::kNeighbours);
        return from_lane<kRowsAreQueries>(query, key);
    }
    template <bool kRowsAreQueries, class Fetched>
    __device__ auto from_warp(int query, int key, const Fetched &fetched) const {
        const int row = fresh_thread() / 32 % 4 * 16;
        return from_lane<kRowsAreQueries>(query + (kRowsAreQueries ? row : 0), key + (kRowsAreQueries ? 0 : row),
                                          fetched);
    }
    template <bool kRowsAreQueries, int kRows, int kCols, class Keys = KeysInOrder>
    __device__ auto fetch(int query, int key) const {
        return bias.template fetch<kRowsAreQueries, kRows, kCols, Keys>(query, key);
    }
    template <bool kRowsAreQueries, int kCols>
    __device__ auto fetch_of_warp(int query, int key) const {
        const int row = fresh_thread() / 32 % 4 * 16;
        return fetch<kRowsAreQueries, 16, kCols>(query + (kRowsAreQueries ? row : 0),
                                                 key + (kRowsAreQueries ? 0 : row));
    }
};

#endif  // CUPYFLASH_PLACES_CUH
