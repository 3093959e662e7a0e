// One warp's part of a tile over a cache of fp32: kWarpRows packed rows of a head, and the units of its team: S, softmax, O
// (products_float.cuh, which says who has which scores).
#ifndef CUPYFLASH_WARP_FLOAT_CUH
#define CUPYFLASH_WARP_FLOAT_CUH
#include "decode/parts.cuh"
#include "decode/products_float.cuh"
#include "decode/row_places.cuh"
#include "decode/warp_of_tile.cuh"

template <class V>
struct FloatWarp : WarpOfTile<V> {
    using Of = WarpOfTile<V>;
    using Of::p, Of::smem, Of::score, Of::team, Of::row0, Of::rows, Of::length;
    using Smem = DecodeSmem<V>;
    using Products = FloatProducts<V>;
    static constexpr int kKeys = Products::kKeys, kOwn = Products::kOwn;
    static constexpr bool kNatural = Score<V>::kNatural;
    static_assert(V::kPair == 1);

    Products products;
    float m[kOwn], l[kOwn];  // maximum of a row's scores, and this lane's part of the sum of P
    RowPlaces<V, 2> places[kOwn];
    RowLimits<V> limits;  // of the lane's own rows

    __device__ int row_of(int r) const { return row0 + Products::first_row() + r; }
    // The place of the warp's head among the tile's.
    __device__ int head() const { return team % Smem::kGroups; }

    // Q has arrived.
    __device__ FloatWarp(const DecodeShares<V> &shares, const Smem &smem, const DecodeTile<V> &tile, int warp,
                         int /* first_key */)
        : Of(shares, smem, tile, warp), products(smem.q(head()), row0, smem.weights(team, row0)) {
        const Mask<V> mask = Of::mask();
        #pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            const int row = min(row_of(r), rows.count - 1);
            m[r] = -ptx::infinity(), l[r] = 0.f;
            limits.keep(r, mask, rows, row);
            places[r].keep([&] {
                // @slope-of-a-packed-row-float
                return Places<V>::of(p, rows.sequence, rows.head_q(head(), row)).from(rows.query(row), 0);
            });
        }
    }

    // The keys from `key` on of a unit that is in shared memory; `shown`: a block mask shows them to all rows.
    __device__ void unit(ptx::u32 stage, int key, bool shown) {
        if (key >= length || row0 >= rows.count) return;  // an empty sequence; rows that there are not
        if (Of::sees_whole(key)) slice<false>(stage, key, shown);
        else slice<true>(stage, key, shown);
    }

    // The end of the tile, before leave(): whole sums.
    __device__ void finish(int) {
        #pragma unroll
        for (int r = 0; r < kOwn; ++r) l[r] = over_groups(l[r], [](float a, float b) { return a + b; });
        products.finish();
    }
    // Its part of columns [col0, col0 + cols) in shared memory, at(team, row, column) of them.
    template <class At>
    __device__ void leave(int, int col0, int cols, At at) {
        #pragma unroll
        for (int r = 0; r < kOwn; ++r)
            if (row_of(r) < rows.count && lane() < 8 && Products::owns_scores())
                ptx::st_shared_v2_f32(smem.stats(team, row_of(r)), m[r], l[r]);
        products.for_each_own([&](int col, int r, const float (&x)[4]) {
            if (row0 + r < rows.count && col0 <= col && col < col0 + cols)
                ptx::st_shared_v4_b32(at(team, row0 + r, col - col0), bits_of(x));
        });
    }

  private:
    // A value of each group of eight lanes, reduced over the four of them.
    template <class Op>
    __device__ static float over_groups(float x, Op op) {
        x = op(x, ptx::shfl_xor(x, 8));
        return op(x, ptx::shfl_xor(x, 16));
    }

    // Keys [key0, key0 + 16). kEdge: some rows do not see some of them, or they do not exist.
    template <bool kEdge>
    __device__ void slice(ptx::u32 stage, int key0, bool shown) {
        typename RowPlaces<V, 2>::Ahead ahead[kOwn];
        int row[kOwn];
        const int lane_key = key0 + Products::first_key();
        #pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            row[r] = RowPlaces<V, 2>::again(rows, row_of(r));
            ahead[r] = places[r].ahead(rows, head(), row[r], lane_key, shown);
        }
        float S[kOwn][kKeys], top[kOwn];
        products.multiply_k(smem.k(stage, 0), S);
        bool grows = false;
        #pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            const KeyRange sees = limits.of(r, rows, row_of(r));
            const auto its = places[r].from(rows, head(), row[r], lane_key, ahead[r]);
            top[r] = -ptx::infinity();  // NaN counts for nothing
            #pragma unroll
            for (int n = 0; n < kKeys; ++n) {
                const int own_key = lane_key + Products::key(n);
                float &s = S[r][n];
                s = score.value_or_hidden(s, its.at(own_key, Products::key(n)));
                if constexpr (kEdge)
                    if (own_key >= sees.end || (V::kWindow && own_key < sees.first)) s = -ptx::infinity();
                top[r] = fmaxf(top[r], s);
            }
            top[r] = fmaxf(m[r], over_groups(top[r], [](float a, float b) { return fmaxf(a, b); }));
            grows = grows || top[r] > m[r];
        }
        ptx::bar_warp_sync();  // P of the slice before has been read
        if (ptx::vote_any(grows)) raise(top);
        #pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            const float base = finite_or_zero(m[r]), factor = score.log2_factor, scaled = base * factor;
            #pragma unroll
            for (int n = 0; n < kKeys; ++n) {
                const float s = S[r][n], P = ptx::ex2(kNatural ? (s - base) * factor : fmaf(s, factor, -scaled));
                l[r] += P;
                products.leave(Products::first_key() + Products::key(n), r, P);
            }
        }
        ptx::bar_warp_sync();  // @p-seen-by-the-warp-float
        products.multiply_v(smem.v(stage, 0), [&](int i) { return !kEdge || Of::sees(key0 + i); });
    }
    // The maxima become `top`, and O and l follow.
    __device__ void raise(const float (&top)[kOwn]) {
        #pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            const float by = ptx::ex2((m[r] - finite_or_zero(top[r])) * score.log2_factor);
            m[r] = top[r], l[r] *= by;
            if (lane() < 8) products.leave(0, r, by);
        }
        ptx::bar_warp_sync();  // @factors-seen-by-the-warp
        products.scale();
        ptx::bar_warp_sync();  // they have been read @factors-read
    }
};

#endif  // CUPYFLASH_WARP_FLOAT_CUH
