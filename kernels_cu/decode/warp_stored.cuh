// One warp's part of a tile over an 8-bit cache: kWarpRows packed rows of a head, and the units of its team: S, softmax, O, with
// keys as the rows of the products and queries as columns, kTiles times 8 of them (products_stored.cuh). Lanes g = lane / 4,
// t = lane % 4 have keys g and g + 8 of queries 2 t and 2 t + 1; P^T becomes an operand by movmatrix.
#ifndef CUPYFLASH_WARP_STORED_CUH
#define CUPYFLASH_WARP_STORED_CUH
#include "decode/edges_stored.cuh"
#include "decode/parts.cuh"
#include "decode/products_stored.cuh"
#include "decode/row_places.cuh"
#include "decode/scales.cuh"
#include "decode/value_unit.cuh"
#include "decode/warp_of_tile.cuh"

template <class V, class Scales>
struct StoredWarp : WarpOfTile<V> {
    using Of = WarpOfTile<V>;
    using Of::p, Of::smem, Of::score, Of::team, Of::row0, Of::rows, Of::length;
    using Smem = DecodeSmem<V>;
    using Queries = StoredQueries<V>;
    static constexpr int kTiles = V::kWarpRows / 8;
    using Softmax = ColumnSoftmax<kTiles, Score<V>::kNatural>;
    using Columns = typename Softmax::Columns;
    using Scores = typename Softmax::Scores;
    // Whether scores are what K and Q make of them, so that the exponent's factor takes powers of Q along.
    static constexpr bool kPlain = !V::kSoftcap && !V::kScaleFirst && !V::kAlibi && !V::kBias;
    static constexpr bool kHasPowers = Queries::kHasPowers, kKeepsPowers = kHasPowers && kTiles <= 2;
    static_assert(V::kPair == 1 && 8 * kTiles == V::kWarpRows);

    Scales scales;
    StoredProducts<V, kTiles> products;
    Softmax softmax;
    ValueUnit unit_of_v;
    Columns kept;                       // what takes a query's power of Q back; kKeepsPowers
    RowPlaces<V, 1> places[kTiles][2];  // of a query

    __device__ int row_of(int n, int c) const { return row0 + 8 * n + 2 * (lane() % 4) + c; }
    // The place of the warp's head among the tile's.
    __device__ int head() const { return team % Smem::kGroups; }

    // Q has been prepared. key: of the team's first unit of the tile.
    __device__ StoredWarp(const DecodeShares<V> &shares, const Smem &smem, const DecodeTile<V> &tile, int warp, int key)
        : Of(shares, smem, tile, warp), scales(p, tile, rows.head_k + head(), key), products(smem.q(head()), row0) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = min(row_of(n, c), rows.count - 1);
                places[n][c].keep([&] {
                    // @slope-of-a-packed-row-stored
                    return Places<V>::of(p, rows.sequence, rows.head_q(head(), row)).from(rows.query(row), 0);
                });
                if constexpr (kKeepsPowers) kept[n][c] = Queries::power(products.sQ, row_of(n, c));
            }
    }

    // The keys from `key` on of a unit that is in shared memory; `shown`: a block mask shows them to all rows.
    __device__ void unit(ptx::u32 stage, int key, bool shown) {
        const SliceScales own = scales.take(smem, stage, key);
        // An empty sequence; rows that there are not.
        if (key >= length || (V::kTeam > 1 && row0 >= rows.count)) return;
        if (Of::sees_whole(key)) slice<false>(stage, key, own, shown);
        else slice<true>(stage, key, own, shown);
    }

    // The end of the tile, before leave(): O as it is, and all of a query's sum in each of its lanes.
    __device__ void finish(int) {
        softmax.finish();
        Columns by;
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) by[n][0] = by[n][1] = unit_of_v.of_o();
        products.scale(by);
    }
    // Its part of columns [col0, col0 + cols) in shared memory, at(team, row, column) of them.
    template <class At>
    __device__ void leave(int, int col0, int cols, At at) const {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = row_of(n, c);
                if (row >= rows.count) continue;
                if (lane() / 4 == 0)
                    ptx::st_shared_v2_f32(smem.stats(team, row), softmax.maximum(n, c, score.log2_factor),
                                          softmax.l[n][c]);
                products.for_each_two(n, c, [&](int col, float x, float y) {
                    if (col >= col0 && col < col0 + cols) ptx::st_shared_v2_f32(at(team, row, col - col0), x, y);
                });
            }
    }

  private:
    // Keys [key, key + 16). kEdge: some rows do not see some of them, or they do not exist.
    template <bool kEdge>
    __device__ void slice(ptx::u32 stage, int key, const SliceScales &own, bool shown) {
        typename RowPlaces<V, 1>::Ahead ahead[kTiles][2];
        int row[kTiles][2];
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                row[n][c] = RowPlaces<V, 1>::again(rows, row_of(n, c));
                ahead[n][c] = places[n][c].ahead(rows, head(), row[n][c], key + lane() / 4, shown);
            }
        Scores S;
        products.multiply_k(smem.k(stage, 0), S);
        Columns power, factor;
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                power[n][c] = kKeepsPowers ? kept[n][c] : kHasPowers ? Queries::power(products.sQ, row_of(n, c)) : 1.f;
                factor[n][c] = score.log2_factor * (kPlain ? power[n][c] : 1.f);
            }
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                float &s = S[n][e];
                s *= own.k[e / 2];
                if constexpr (kHasPowers && !kPlain) s *= power[n][e % 2];
                const int lane_key = key + lane() / 4, c = e % 2;
                const auto its = places[n][c].from(rows, head(), row[n][c], lane_key, ahead[n][c]);
                s = score.value_or_hidden(s, its.at(lane_key + e / 2 * 8, e / 2 * 8));
            }
        if constexpr (kEdge) hide_scores<V>(rows, row0, key, S);
        const float largest = ValueUnit::power(fmaxf(fabsf(own.v[0]), fabsf(own.v[1])));
        // @maxima-and-unit-by-one-vote
        if (ptx::vote_any(softmax.exceeded_by(S, factor) || largest > unit_of_v.unit)) rescale(S, factor, largest);
        softmax.exponentiate(S, factor);
        ptx::u32 P[kTiles][2];
        const float by = unit_of_v.of_scales(), weight[2] = {own.v[0] * by, own.v[1] * by};
        #pragma unroll
        for (int n = 0; n < kTiles; ++n)
            #pragma unroll
            for (int r = 0; r < 2; ++r)
                P[n][r] = ptx::movmatrix_trans(Fp16::pack(S[n][2 * r] * weight[r], S[n][2 * r + 1] * weight[r]));
        ptx::u32 seen[2] = {~0u, ~0u};  // of V's fragments: keys of the first and of the second half
        if constexpr (kEdge) see_values<V>(rows, key, seen);
        products.multiply_v(smem.v(stage, 0), P, [&](ptx::u32(&x)[4]) {
            #pragma unroll
            for (int e = 0; kEdge && e < 4; ++e) x[e] &= seen[e % 2];  // 0 * NaN of what nobody sees
        });
    }
    // Maxima follow S, the unit of V's scales `largest`, a power of two, and O both.
    __device__ void rescale(const Scores &S, const Columns &factor, float largest) {
        Columns by;
        softmax.raise(S, factor, by);
        const float of_unit = unit_of_v.follow(column_reduce(largest, [](float a, float b) { return fmaxf(a, b); }));
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) by[n][0] *= of_unit, by[n][1] *= of_unit;  // @unit-follows-the-scales
        products.scale(by);
    }
};

#endif  // CUPYFLASH_WARP_STORED_CUH
