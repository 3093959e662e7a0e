// One warp's part of a tile over a cache of 16 bits: 16 packed rows of kPair heads, and the units of its team: S, softmax, O.
#ifndef CUPYFLASH_WARP_DECODE_CUH
#define CUPYFLASH_WARP_DECODE_CUH
#include "decode/fragments.cuh"
#include "decode/parts.cuh"
#include "decode/row_places.cuh"
#include "decode/warp_of_tile.cuh"
#include "attention/softmax.cuh"
#include "tile/gemm.cuh"

template <class V>
struct DecodeWarp : WarpOfTile<V> {
    using Of = WarpOfTile<V>;
    using Of::p, Of::smem, Of::score, Of::team, Of::row0, Of::rows, Of::length;
    using T = typename V::Element;
    using Smem = DecodeSmem<V>;
    static constexpr int D = Smem::D, kDimV = Smem::kDimV, kThreads = 32 * V::kWarps;
    static constexpr bool kQInRegisters = kWidest<V> <= 128;
    // Of a product, so that half as many of its steps wait for each other; beside a bias wide rows of O leave no registers for it.
    static constexpr bool kTwoSums = kDimV <= 128 || !V::kBias;

    struct Head {
        OnlineSoftmax<16, Score<V>::kNatural> softmax;
        AccTile<16, kDimV> O;
        FragA<T, 16, kQInRegisters ? D : 16> Q;
        RowPlaces<V, 2> places[2];  // of a lane's r-th row
        __device__ Head() : softmax(0.f) { O.zero(); }
    };
    Head head[V::kPair];
    RowLimits<V> limits;  // of a lane's rows

    __device__ static int first_key() { return 2 * (lane() % 4); }  // of a slice, that a lane has
    __device__ int row_of(int r) const { return row0 + lane() / 4 + 8 * r; }
    // The place of the i-th of the warp's heads among the tile's.
    __device__ int head_of(int i) const { return team % Smem::kGroups * V::kPair + i; }

    // Q has arrived.
    __device__ DecodeWarp(const DecodeShares<V> &shares, const Smem &smem, const DecodeTile<V> &tile, int warp,
                          int /* first_key */)
        : Of(shares, smem, tile, warp) {
        const Mask<V> mask = Of::mask();
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = min(row_of(r), rows.count - 1);
            limits.keep(r, mask, rows, row);
            #pragma unroll
            for (int i = 0; i < V::kPair; ++i)
                head[i].places[r].keep([&] {
                    // @slope-of-a-packed-row
                    return Places<V>::of(p, rows.sequence, rows.head_q(head_of(i), row)).from(rows.query(row), 0);
                });
        }
        #pragma unroll
        for (int i = 0; i < V::kPair; ++i) {
            head[i].softmax.factor = score.log2_factor;
            #pragma unroll
            for (int k = 0; kQInRegisters && k < D / 16; ++k)
                fragment_of_q(i, k, head[i].Q.x[kQInRegisters ? k : 0][0]);
        }
    }

    // The keys from `key` on of a unit that is in shared memory; `shown`: a block mask shows them to all rows.
    __device__ void unit(ptx::u32 stage, int key, bool shown) {
        if (key >= length || row0 >= rows.count) return;  // an empty sequence; rows that there are not
        const bool whole = Of::sees_whole(key);
        #pragma unroll
        for (int i = 0; i < V::kPair; ++i) {
            // What is shown to all rows costs no more than without a block mask.
            if (has_tile_mask<V>(0) && !shown) by_edge<false>(whole, i, stage, key);
            else by_edge<true>(whole, i, stage, key);
        }
    }

    // The end of the tile, before leave(): all of a row's sum of the i-th head in each of its lanes.
    __device__ void finish(int i) {
        #pragma unroll
        for (int r = 0; r < 2; ++r)
            head[i].softmax.l[r] = quad_reduce(head[i].softmax.l[r], [](float a, float b) { return a + b; });
    }
    // What the i-th head has of columns [col0, col0 + cols), in shared memory: at(team, row, column) of them.
    template <class At>
    __device__ void leave(int i, int col0, int cols, At at) const {
        const Head &h = head[i];
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row_of(r);
            if (row >= rows.count) continue;
            if (lane() % 4 == 0) ptx::st_shared_v2_f32(smem.stats(team, row), h.softmax.m[r], h.softmax.l[r]);
            #pragma unroll
            for (int j = 0; j < kDimV / 8; ++j)  // @columns-of-o-left
                if (8 * j >= col0 && 8 * j < col0 + cols)
                    ptx::st_shared_v2_f32(at(team, row, 8 * j + 2 * (lane() % 4) - col0), h.O.x[0][j][2 * r],
                                          h.O.x[0][j][2 * r + 1]);
        }
    }

  private:
    __device__ void fragment_of_q(int i, int k, ptx::u32 (&a)[4]) const {
        ptx::ldmatrix_x4(a, smem.q(head_of(i)).at(row0 + lane() % 16, 16 * k + lane() / 16 * 8));
    }

    template <bool kShown>
    __device__ void by_edge(bool whole, int i, ptx::u32 stage, int key) {
        if (whole) slice<false, kShown>(i, stage, key);
        else slice<true, kShown>(i, stage, key);
    }
    // Keys [key, key + 16) of one head. kEdge: some rows do not see some of them, or they do not exist.
    template <bool kEdge, bool kShown>
    __device__ void slice(int i, ptx::u32 stage, int key) {
        SliceFragments<V> fragments(smem.k(stage, i), smem.v(stage, i));
        Head &h = head[i];
        typename RowPlaces<V, 2>::Ahead ahead[2];
        int row[2];
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            row[r] = RowPlaces<V, 2>::again(rows, row_of(r));
            ahead[r] = h.places[r].ahead(rows, head_of(i), row[r], key + first_key(), kShown);
        }
        AccTile<16, kSlice> S, S_odd;
        S.zero(), S_odd.zero();
        #pragma unroll
        for (int k = 0; k < D / 16; ++k) {  // S = Q K^T
            ptx::u32 b[4];
            fragments.of_k(k, b);
            if constexpr (!kQInRegisters) fragment_of_q(i, k, h.Q.x[0][0]);
            const ptx::u32(&a)[4] = h.Q.x[kQInRegisters ? k : 0][0];
            auto &sum = kTwoSums && k % 2 ? S_odd.x[0] : S.x[0];
            T::mma(sum[0], a, b[0], b[1]);
            T::mma(sum[1], a, b[2], b[3]);
        }
        const int lane_key = key + first_key();
        const KeyRange sees[2] = {limits.of(0, rows, row_of(0)), limits.of(1, rows, row_of(1))};
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int own_key = lane_key + 8 * j + e % 2;
                float &s = S.x[0][j][e];
                if constexpr (kTwoSums) s += S_odd.x[0][j][e];
                const auto places = h.places[e / 2].from(rows, head_of(i), row[e / 2], lane_key, ahead[e / 2]);
                s = score.value_or_hidden(s, places.at(own_key, 8 * j + e % 2));
                if constexpr (kEdge)
                    if (own_key >= sees[e / 2].end || (V::kWindow && own_key < sees[e / 2].first)) s = -ptx::infinity();
            }
        }
        h.softmax.step(S, h.O);
        FragA<T, 16, kSlice> P;
        P.from(S);
        ptx::u32 seen[2] = {~0u, ~0u};  // of V's fragments: keys of the first and of the second half
        #pragma unroll
        for (int j = 0; kEdge && j < 2; ++j) {
            const int own_key = lane_key + 8 * j;
            seen[j] = (Of::sees(own_key) ? 0xffffu : 0) | (Of::sees(own_key + 1) ? 0xffff0000u : 0);
        }
        const auto hide = [&](ptx::u32(&x)[4]) {
            #pragma unroll
            for (int e = 0; kEdge && e < 4; ++e) x[e] &= seen[e % 2];  // 0 * NaN of what nobody sees
        };
        #pragma unroll
        for (int j = 0; j < kDimV / 16; ++j) {  // O += P V
            ptx::u32 b[4];
            fragments.of_v(j, b);
            hide(b);
            T::mma(h.O.x[0][2 * j], P.x[0][0], b[0], b[1]);
            T::mma(h.O.x[0][2 * j + 1], P.x[0][0], b[2], b[3]);
        }
    }
};

#endif  // CUPYFLASH_WARP_DECODE_CUH
