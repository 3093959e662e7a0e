// Where the scores of a packed row lie, of whose keys a lane has those of a slice that are 0 to kNeighbours - 1 and 8 to 7 +
// kNeighbours from its first one on. What a bias or a mask has of them is read ahead of the product that they are added to:
// while it is computed nothing is kept of where they lie, for which wide rows of O leave no registers.
#ifndef CUPYFLASH_ROW_PLACES_CUH
#define CUPYFLASH_ROW_PLACES_CUH
#include "decode/rows.cuh"
#include "attention/places.cuh"

template <int kNeighbours>
struct RowAddends {
    float x[2 * kNeighbours];

    __device__ Addend operator()(int /* queries */, int keys) const { return {x[keys / 8 * kNeighbours + keys % 8]}; }
};

// keep() what a row says of its key 0; again() its number; from() a lane's first key of a slice on, with what was read ahead() of
// it; at() a key, so far behind that one.
template <class V, int kNeighbours, bool kReads = V::kBias>
struct RowPlaces {
    using Ahead = NotFetched;
    struct From {
        const RowPlaces &row;

        __device__ auto at(int key, int /* behind */) const { return row.first(0, key); }
    };
    decltype(Places<V>{}.from(0, 0)) first;  // key 0

    template <class First>
    __device__ void keep(First its_first) {
        first = its_first();
    }
    __device__ static int again(const PackedRows<V> &, int row) { return row; }
    __device__ Ahead ahead(const PackedRows<V> &, int /* head */, int /* row */, int /* key */,
                           bool /* shown */) const {
        return {};
    }
    __device__ From from(const PackedRows<V> &, int /* head */, int /* row */, int /* key */, Ahead) const {
        return {*this};
    }
};

// What is read ahead of a row's slice: its addends, where there are any; beside a block mask which of its keys are seen, too.
template <class V, class Addends, bool kAdded, bool kTiled = has_tile_mask<V>(0)>
struct AheadOf {
    using Type = typename Either<kAdded, Addends, NotFetched>::Type;
};
template <class V, class Addends, bool kAdded>
struct AheadOf<V, Addends, kAdded, true> {
    using Type = typename TiledBias<V>::template From<Addends, typename TileMask<V>::Seen>;
};

// Nothing is kept: what a row is follows from its number again.
template <class V, int kNeighbours>
struct RowPlaces<V, kNeighbours, true> {
    static constexpr bool kAdded = added_kind<V>() != kNothingAdded, kTiled = has_tile_mask<V>(0);
    using Addends = typename Either<kAdded, RowAddends<kNeighbours>, Bias<V, kNothingAdded>>::Type;
    using Ahead = typename AheadOf<V, Addends, kAdded>::Type;
    template <class First>
    struct From {
        First first;

        __device__ auto at(int /* key */, int behind) const { return first(0, behind); }
    };

    template <class First>
    __device__ void keep(First) {}
    __device__ static int again(const PackedRows<V> &rows, int row) { return ptx::opaque(min(row, rows.count - 1)); }
    // shown: a block mask shows all of the slice.
    __device__ Ahead ahead(const PackedRows<V> &rows, int head, int row, int key, bool shown) const {
        Ahead found;
        if constexpr (kAdded) {
            const auto elements = added(of_row(rows, head, row).bias).template from<false>(rows.query(row), key);
            #pragma unroll
            for (int i = 0; i < 2; ++i)
                #pragma unroll
                for (int j = 0; j < kNeighbours; ++j)
                    added(found).x[i * kNeighbours + j] = elements(0, 8 * i + j).bias;  // @addends-of-a-slice
        }
        if constexpr (kTiled) {
            found.tiles = {~0u};
            if (!shown)
                found.tiles = of_row(rows, head, row).bias.tiles.seen(rows.query(row), key);  // @seen-of-a-slice
        }
        return found;
    }
    __device__ auto from(const PackedRows<V> &rows, int head, int row, int key, const Ahead &found) const {
        const Places<V> places = of_row(rows, head, row);
        const int query = rows.query(row);
        if constexpr (kAdded || kTiled) {
            using First = typename Places<V>::template From<Ahead>;
            return From<First>{{places.mods.from(query, key), places.alibi.from(query, key), found}};
        } else {
            return From<decltype(places.from(query, key))>{places.from(query, key)};
        }
    }

  private:
    // Beside a block mask, what is added apart from it.
    template <class Of>
    __device__ static auto &added(Of &&of) {
        if constexpr (kTiled) return of.added;
        else return of;
    }
    __device__ static Places<V> of_row(const PackedRows<V> &rows, int head, int row) {
        return Places<V>::of(rows.p, rows.sequence, rows.head_q(head, row));  // @places-of-a-packed-row
    }
};

#endif  // CUPYFLASH_ROW_PLACES_CUH
