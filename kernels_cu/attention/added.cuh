// A bias or a mask of a head where it lies: elements of it one at a time, or those of an accumulator, read ahead.
#ifndef CUPYFLASH_ADDED_CUH
#define CUPYFLASH_ADDED_CUH
#include "attention/addends.cuh"
#include "attention/sequence.cuh"

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

        // The same of eight keys, which all exist or none.
        template <bool kWhole>
        __device__ BiasRun<Element> run(const Element *there, int i, int j) const {
            static_assert(kPairs);
            // @run-of-bias-that-exists
            if (!kWhole && (i >= queries || j >= keys)) return BiasRun<Element>::of(bias_of_0<Element>());
            return *reinterpret_cast<const BiasRun<Element> *>(there + j);
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
    static constexpr bool kFetches = kWidest<V> <= 128 || (V::kPairedBias && sizeof(Element) < 4);
    const Element *head;
    long long row, key;
    int seqlen_q, seqlen_k;

    template <class Params>
    __device__ static AddedArray of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        const ScoreStrides &stride = kMask ? p.mask_stride : p.bias_stride;
        // Packed, nothing is there beyond what the arrays have of each sequence, however long it says it is.
        // @bias-of-short-arrays
        const int queries = V::kPacked ? min(s.seqlen_q, p.max_seqlen_q) : s.seqlen_q;
        const int keys = V::kPacked ? min(s.seqlen_k, p.max_seqlen_k) : s.seqlen_k;
        // @bias-of-its-head
        return {static_cast<const Element *>(kMask ? p.mask : p.bias) + s.index * stride.batch + head * stride.head,
                stride.row, stride.key, queries, keys};
    }
    // kAlongKeys: this lane has neighbouring keys, from an even one on. Multiples of strides are computed where they are
    // used: a main loop would keep all of them in registers.
    template <bool kAlongKeys>
    __device__ From<kAlongKeys && V::kPairedBias> from(int query, int key0) const {
        return {head + query * row + key0 * key, ptx::opaque(row), ptx::opaque(key), seqlen_q - query, seqlen_k - key0};
    }
    // Of an accumulator of this warp that begins with a query and a key, read here: while tensor cores compute it.
    template <bool kRowsAreQueries, int kRows, int kCols, class Keys = KeysInOrder>
    __device__ auto fetch(int query, int key0) const {
        if constexpr (Keys::kNeighbours == 8) return fetched_runs<kRows, kCols, Keys>(query, key0);
        else if constexpr (!kFetches) return NotFetched{};
        else if constexpr (V::kBiasOfKeys) return fetched_keys<kRowsAreQueries, kRows, kCols>(key0);
        else return fetched<kRowsAreQueries, kRows, kCols>(query, key0);
    }

  private:
    template <int kRows, int kCols, class Keys>
    __device__ FetchedRuns<Element, kRows, kCols> fetched_runs(int query, int key0) const {
        static_assert(kFetches);
        const int lane = fresh_lane();
        const auto first = from<true>(query + lane / 4, key0 + Keys::of_lane(lane));
        FetchedRuns<Element, kRows, kCols> found;
        read<kRows, kCols, 32>(first, query, key0, [&](auto whole, const Element *at, int i, int j) {
            found.run[i / 8][j / 32] = first.template run<decltype(whole)::value>(at, i, j);
        });
        return found;
    }
    template <bool kRowsAreQueries, int kRows, int kCols>
    __device__ auto fetched(int query, int key0) const {
        const int lane = fresh_lane(), row0 = lane / 4, col0 = 2 * (lane % 4);
        const auto first =
            from<kRowsAreQueries>(query + (kRowsAreQueries ? row0 : col0), key0 + (kRowsAreQueries ? col0 : row0));
        FetchedBias<Element, kRowsAreQueries, kRows, kCols> found;
        constexpr int kQueries = kRowsAreQueries ? kRows : kCols, kKeys = kRowsAreQueries ? kCols : kRows;
        read<kQueries, kKeys, 8>(first, query, key0, [&](auto whole, const Element *at, int i, int j) {
            found.pair[(kRowsAreQueries ? i : j) / 8][(kRowsAreQueries ? j : i) / 8] =
                first.template pair<kRowsAreQueries, decltype(whole)::value>(at, i, j);
        });
        return found;
    }
    template <bool kRowsAreQueries, int kRows, int kCols>
    __device__ FetchedKeys<Element, kRowsAreQueries, kRows, kCols> fetched_keys(int key0) const {
        const int lane = fresh_lane(), first = key0 + (kRowsAreQueries ? 2 * (lane % 4) : lane / 4);
        const Element *const at = head + first;
        FetchedKeys<Element, kRowsAreQueries, kRows, kCols> found;
        constexpr int kKeys = kRowsAreQueries ? kCols : kRows;
        const int keys = seqlen_k - first;
        const auto each = [&](auto whole) {
            #pragma unroll
            for (int j = 0; j < kKeys; j += 8)
                #pragma unroll
                for (int e = 0; e < found.kOfEight; ++e) {
                    Element &x = found.x[j / 8][e];
                    if (decltype(whole)::value || j + e < keys) x = at[j + e];  // @keys-of-one-row
                    else x = bias_of_0<Element>();
                }
        };
        if (key0 + kKeys <= seqlen_k) each(Bool<true>{});  // @whole-row-of-bias
        else each(Bool<false>{});
        return found;
    }
    // f(whether all exist, where query i lies, i, j) for every 8th query and every kStep-th key of a tile, from a lane's first
    // ones on.
    template <int kQueries, int kKeys, int kStep, class From, class F>
    __device__ void read(const From &first, int query, int key0, F f) const {
        const auto each = [&](auto whole) {
            const Element *at = first.at;
            #pragma unroll
            for (int i = 0; i < kQueries; i += 8, at += 8 * first.row)  // @stride-of-fetched-queries
                #pragma unroll
                for (int j = 0; j < kKeys; j += kStep) f(whole, at, i, j);
        };
        if (query + kQueries <= seqlen_q && key0 + kKeys <= seqlen_k) each(Bool<true>{});  // @whole-tile-of-bias
        else each(Bool<false>{});
    }
};

#endif  // CUPYFLASH_ADDED_CUH
